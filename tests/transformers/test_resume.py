"""A training of Trainer's that goes on in other processes, or another number; see tests/support/other_ranks.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

import tests.support.front_ends.transformers  # noqa: F401  without it, version 4 does not resume on CPUs
from accelerate_join.transformers import JoinTrainer
from tests.covering import others_long
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.many import seeds
from tests.support.other_ranks import (
    EPOCHS,
    Chain,
    Collate,
    Samples,
    check,
    check_in_new_processes,
    data_of,
    drawn,
    loss,
    network,
    own,
    own_loader,
)
from tests.support.workers import WorkerError, Workers
from torch_join import UnsupportedError

newer = pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 counts epochs by this job's")
NAMES = ("values", "number")  # of what a batch has


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, values: Tensor, number: Tensor) -> dict[str, Tensor]:
        return {"loss": loss(self.inner, values)}


class Saving(TrainerCallback):
    """Knows where a job is, and saves where it is stopped."""

    def __init__(self, chain: Chain, job: int, folder: str, first: int) -> None:
        self.chain, self.job, self.folder, self.first = chain, job, folder, first
        self.step = 0
        self.epochs: list[float] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epoch, self.step = int(round(state.epoch or 0, 9)), 0
        if self.chain.lengths:  # of a stream the trainer counts one
            self.epoch = state.global_step // (max(self.chain.lengths) // self.chain.window)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(state.epoch)
        if (self.epoch, self.step) == self.chain.stop(self.job, self.first):
            control.should_save = True
            Path(self.folder, str(self.job)).write_text(f"{state.global_step} {self.epoch}")
        self.step += 1


class Noting(JoinTrainer):
    """Notes what it has trained on, by epoch and step."""

    where: Saving
    seen: list[tuple[int, int, list[int]]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        epoch, step, numbers = self.where.epoch, self.where.step, inputs["number"].tolist()
        if self.seen and self.seen[-1][:2] == (epoch, step):  # a micro-batch of the same window
            numbers = self.seen.pop()[2] + numbers
        self.seen.append((epoch, step, numbers))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        if "loader" not in self.where.chain.kind:
            return super().get_train_dataloader()
        return own_loader(self.where.chain, self.args.process_index, names=NAMES)


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool, **other: Any) -> Any:
    is_stream = "stream" in chain.kind
    with accelerator_of(rank):
        np.random.seed(rank)
        before, first = map(int, Path(folder, str(job - 1)).read_text().split() if resumes else (0, 0))
        net, where = Net(), Saving(chain, job, folder, first)
        steps = EPOCHS * max(chain.lengths) // chain.window if is_stream else -1
        options: dict[str, Any] = {
            "num_train_epochs": EPOCHS,
            "max_steps": chain.count if chain.kind == "steps" else steps,
            "per_device_train_batch_size": chain.size,
            "gradient_accumulation_steps": chain.window,
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "remove_unused_columns": False,
            "accelerator_config": {"use_seedable_sampler": chain.seedable},
        }
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = Noting(
            net,
            TrainingArguments(f"{folder}/out {job}", **{**options, **other}),
            train_dataset=data_of(chain.kind, chain.numbers(rank) if chain.lengths else range(chain.count)),
            data_collator=Collate(Samples(chain.count), NAMES),
            optimizers=(optimizer, scheduler),
            callbacks=[where],
            rebalance=chain.rebalances[job],
            own_shards=bool(chain.lengths),
            **chain.options,
        )
        trainer.where, trainer.seen = where, []
        trainer.train(resume_from_checkpoint=f"{folder}/out {job - 1}/checkpoint-{before}" if resumes else None)
        assert other or where.epochs == sorted(where.epochs)
        assert trainer.state.global_step == trainer.state.max_steps == before + len(where.epochs)
        if chain.kind != "steps" and not is_stream and not other:
            assert trainer.state.epoch == EPOCHS
        return trainer.seen, [p.detach().clone() for p in net.inner.parameters()]


CHAINS = {
    "what Trainer deals out": Chain((3, 2, 4), (2, 1), 61, options={"weighting": "samples"}, later=(1, 0)),
    "in the tail": Chain((2, 3), (5,), 23),
    "by torch's generator": Chain((2, 3, 3), (2, 0), 41, seedable=False, later=(1, 0)),
    "rebalanced": Chain((3, 2, 3), (2, 1), 50, rebalances=(True, True, True)),
}


@newer
@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


# Kinds of data of each rank's own, or of loaders over it, and what Trainer deals out to all.
KINDS = ("map", "stream", "shuffled stream", "hf stream", "loader", "drawn loader", "unpadded")
PLACES = {
    "from the first batches on": [(0, 0), (0, 2), (1, 6), (0, 0)],
    "at the end of epochs": [(0, 8), (1, 0), (0, 3), (0, 3)],
    "windows": [(0, 0), (0, 0), (1, 2), (1, 1)],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("lengths", [(0, 3, 9), (9, 0, 3), (3, 9, 0)], ids=str)
@pytest.mark.parametrize("kind", others_long(KINDS, "map", "loader", "stream", "shuffled stream", "unpadded"))
def test_the_same_ranks_go_on_as_if_nothing_had_been(
    workers: Workers, kind: str, lengths: tuple[int, ...], places: str, seedable: bool, tmp_path: Path
) -> None:
    window = 3 if places == "windows" else 1
    chain = own(kind, lengths, PLACES[places], seedable=seedable, window=window)
    if kind == "unpadded":
        chain = replace(chain, lengths=(), count=54 if window > 1 else 51)
    check(workers, chain, tmp_path, train)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_they_go_on_in_new_processes(workers: Workers, kind: str, tmp_path: Path) -> None:
    check_in_new_processes(workers, own(kind, (0, 4, 9), [(1, 2)]), tmp_path, train)


@newer
@pytest.mark.parametrize(("worlds", "steps"), [((4, 2), 61), ((2, 4), 40)])
def test_a_number_of_steps_stays(workers: Workers, worlds: tuple[int, int], steps: int, tmp_path: Path) -> None:
    """As many as were asked for, over as many epochs as that takes."""
    chain = Chain(worlds, (1,), steps, "steps", later=(1,))
    workers.run(worlds[0], train, chain, 0, str(tmp_path), False)
    workers.run(worlds[1], train, chain, 1, str(tmp_path), True)


@newer
@pytest.mark.parametrize(
    ("worlds", "lengths", "message"),
    [((2, 3), (4, 4, 4), "samples are known only if"), ((2, 1), (), "can change the number of ranks only if")],
)
def test_what_is_refused(
    workers: Workers, worlds: tuple[int, int], lengths: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    chain = Chain(worlds, (1,), 23, lengths=lengths)
    with pytest.raises(WorkerError, match=message):
        for job in (0, 1):
            workers.run(worlds[job], train, chain, job, str(tmp_path), job > 0)


def resume_with_more(rank: int, folder: str) -> None:
    """Save within the first epoch, and at its end; go on with more data in each rank's shard."""
    chain, more = own("map", (4, 9), [(0, 2), (0, 5)]), replace(own("map", (5, 10), [(0, 0)] * 2), stops=())
    for job in (0, 1):
        train(rank, chain, job, folder, job > 0)
        dist.barrier()
    if transformers.__version__ >= "5":
        seen, _ = train(rank, more, 2, folder, True)  # from an epoch's end
        assert sum(bool(numbers) for *_, numbers in seen) == 2 * more.lengths[rank]  # the other two, whole
    else:
        with pytest.raises(UnsupportedError, match="assumes that all of them had this job's number"):
            train(rank, more, 2, folder, True)
    train(rank, more, 1, folder, True, ignore_data_skip=True)
    train(rank, more, 1, folder, True)


def test_more_data_amid_an_epoch_is_refused_with_a_remedy(workers: Workers, tmp_path: Path) -> None:
    for outcome in workers.outcomes(2, resume_with_more, str(tmp_path)):
        assert "The state was written in a loop over a different loader" in outcome.error
        assert "Or resume from a checkpoint written at the end of an epoch" in outcome.error


def resume_without_data(rank: int, folder: str) -> list[int]:
    """Go on once without a place in the data, which then is of no epoch that the trainer counts."""
    steps = []
    for job, options in enumerate([{}, {"ignore_data_skip": True}, {}]):
        Path(folder, str(job)).write_text(f"{7 * job + 7} 0")
        chain = Chain((2, 2, 2), (), 20)
        seen, _ = train(rank, chain, job, folder, job > 0, save_strategy="steps", save_steps=7, **options)
        steps.append(len(seen))
        dist.barrier()
    return steps


@newer
def test_the_same_number_of_ranks_counts_as_trainer_does(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, resume_without_data, str(tmp_path)) == [[15, 15 - 7, 15 - 14]] * 2


@newer
@seeds(range(0), 200)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    chain = drawn(seed, ["unpadded"], fewest=2, sizes=3, owned=("map", "loader", "drawn loader"))
    check(workers, chain, tmp_path, train)
