"""What else Trainer has: generation, resuming by other rules; and ranks that are killed."""

import tempfile
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from accelerate_join.transformers import JoinTrainerMixin
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers
from tests.transformers.words import WORDS, count_labels, options_of, text, tokenizer

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
