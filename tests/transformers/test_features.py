"""What else Trainer has: generation, resuming by other rules; and ranks that are killed."""

import os
import signal
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.trainer as hf
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from accelerate_join.transformers import JoinTrainer, JoinTrainerMixin
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.transformers import (
    EpochCounter,
    Fit,
    Net,
    Recording,
    arguments_of,
    data_of,
    unions,
)
from tests.support.front_ends.transformers import outcome as outcome_of
from tests.support.run import TOLERANCE
from tests.support.workers import Workers, connect
from tests.transformers.test_trainers import WORDS, count_labels, options_of, text, tokenizer

# ---------------------------------------------------------------- generation


def sequences(prediction: Any) -> dict[str, float]:
    """Return what tells whether each sample is there once, with what was generated from it, in whatever order."""
    found = sorted(
        (*(int(t) for t in guess if t not in (-100, 0)), 99, *(int(t) for t in label if t not in (-100, 0)))
        for guess, label in zip(prediction.predictions, prediction.label_ids, strict=True)
    )
    return {
        "rows": float(len(found)),
        "digest": float(sum(place * hash(row) % 9973 for place, row in enumerate(found))),
    }


def translator(base: Any, folder: str, rows: list[int], evaluated: list[int], **options: Any) -> Any:
    torch.manual_seed(2)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": len(WORDS)}
    model = T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that sequences are of different lengths
    model.accepts_loss_kwargs = False
    words = tokenizer()
    data = [
        [{"input_ids": words(text(n))["input_ids"], "labels": words(text(n + 50))["input_ids"]} for n in numbers]
        for numbers in (rows, evaluated)
    ]
    common = {"predict_with_generate": True, "generation_max_length": 8, "num_train_epochs": 1}
    args = options_of(folder, Seq2SeqTrainingArguments, **common, **options)
    collator = DataCollatorForSeq2Seq(words)
    named = {"train_dataset": data[0], "eval_dataset": data[1], "data_collator": collator, "compute_metrics": sequences}
    return base(model, args, processing_class=words, **named)


class Translator(JoinTrainerMixin, Seq2SeqTrainer):
    own_shards = True
    weighting = staticmethod(count_labels)


def generate(rank: int, lengths: tuple[int, ...], evaluated: tuple[int, ...]) -> tuple[list[Any], list[torch.Tensor]]:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        numbers = [
            [first + 1000 * rank + n for n in range(of[rank])] for first, of in ((0, lengths), (5000, evaluated))
        ]
        trainer = translator(Translator, folder, *numbers, eval_strategy="steps", eval_steps=1)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "eval_digest" in log]
        return [[log["eval_rows"], log["eval_digest"]] for log in logs], [
            p.detach() for p in trainer.model.parameters()
        ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "evaluated"), [((2, 7), (3, 7)), ((0, 5), (0, 5)), ((7, 2), (7, 2)), ((7, 2), (0, 3))]
)
def test_generation_in_the_tail(workers: Workers, lengths: tuple[int, ...], evaluated: tuple[int, ...]) -> None:
    found = workers.run(2, generate, lengths, evaluated)
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == -(-max(lengths) // 2)
    with accelerator_of(0), tempfile.TemporaryDirectory() as folder:
        numbers = [5000 + 1000 * rank + n for rank, length in enumerate(evaluated) for n in range(length)]
        trainer = translator(Seq2SeqTrainer, folder, [1], numbers)
        with torch.no_grad():
            for mine, theirs in zip(trainer.model.parameters(), found[0][1], strict=True):
                mine.copy_(theirs)
        metrics = trainer.evaluate()
    assert found[0][0][-1] == [metrics["eval_rows"], metrics["eval_digest"]]


# ---------------------------------------------------------------- resuming


def resume(rank: int, fit: Fit, saving: dict[str, Any], resuming: dict[str, Any], step: int) -> Any:
    with accelerator_of(rank), tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        (folder,) = shared
        found = []
        for place, options in (
            (folder, {"save_strategy": "steps", "save_steps": 1, **saving}),
            (own + "/again", resuming),
        ):
            Recording.seen = seen = list[Any]()
            args = arguments_of(fit, place, **options)
            data = {"train_dataset": data_of(fit, rank), "own_shards": True, "callbacks": [EpochCounter(seen)]}
            trainer = Recording(Net(fit.counts), args, **data)  # type: ignore[arg-type]
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}" if found else None)
            found.append(outcome_of(trainer, seen))
            dist.barrier()
        return found


class Epochs:
    """A loader of the unions, of which the first batches may be skipped."""

    dataset = range(8)

    def __init__(self, epochs: Any, epoch: int = 0, first: int = 0) -> None:
        self.epochs, self.epoch, self.first = epochs, epoch, first

    def __len__(self) -> int:
        return len(self.epochs[0])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(self.epochs[self.epoch][self.first :])


@pytest.mark.long
@pytest.mark.parametrize(("saving", "resuming"), [({}, {"ignore_data_skip": True}), ({"save_only_model": True}, {})])
@pytest.mark.parametrize(("lengths", "step"), [((2, 5), 3), ((0, 4), 2), ((5, 2), 3)])
def test_resuming_as_one_process_does(
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    step: int,
    saving: dict[str, Any],
    resuming: dict[str, Any],
) -> None:
    fit = Fit(lengths)
    found = workers.run(2, resume, fit, saving, resuming, step)
    epochs = unions(fit, [first for first, _ in found])
    monkeypatch.setattr(hf, "skip_first_batches", lambda loader, n: Epochs(loader.epochs, loader.epoch, n))

    class OnUnions(Trainer):
        def get_train_dataloader(self) -> Any:
            return Epochs(epochs)

    with accelerator_of(0), tempfile.TemporaryDirectory() as folder:
        OnUnions(Net(True), arguments_of(fit, folder, save_strategy="steps", save_steps=1, **saving)).train()
        again = OnUnions(Net(True), arguments_of(fit, folder + "/again", **resuming))
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
        expected = outcome_of(again)
    for _, second in found:
        assert second.steps == expected.steps
        for mine, theirs in zip(second.parameters, expected.parameters, strict=True):
            assert (mine - theirs).abs().max() < TOLERANCE


# ---------------------------------------------------------------- a rank that is killed


class Dying(JoinTrainer):
    victim: tuple[int, str, int]

    def at(self, where: str) -> None:
        if (self.args.process_index, where, self.state.global_step) == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.at("forward")
        return super().compute_loss(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        return optimizer


def be_killed(rank: int, lengths: tuple[int, ...], victim: tuple[int, str, int]) -> None:
    connect()
    fit = Fit(lengths)
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        trainer = Dying(Net(True), arguments_of(fit, folder), train_dataset=data_of(fit, rank), own_shards=True)
        trainer.victim = victim
        trainer.train()


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "victim"),
    [
        ((2, 6, 6), (2, "forward", 1)),
        ((2, 6, 6), (2, "forward", 3)),
        ((2, 6, 6), (0, "optimizer", 3)),
        ((2, 6, 6), (1, "optimizer", 3)),
        ((6, 2, 0), (0, "forward", 4)),
    ],
)
def test_a_killed_rank_is_named_by_all(
    workers: Workers, lengths: tuple[int, ...], victim: tuple[int, str, int]
) -> None:
    outcomes = workers.outcomes(3, be_killed, lengths, victim, timeout=300.0)  # nobody waits for the group's timeout
    for rank, outcome in enumerate(outcomes):
        if rank != victim[0]:
            assert f"PeerFailedError: Rank {victim[0]} failed" in outcome.error
            assert "its process is gone" in outcome.error
