"""A training of Trainer's that goes on with another number of ranks; see tests/support/other_ranks.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

import tests.support.front_ends.transformers  # noqa: F401  without it, version 4 does not resume on CPUs
from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.many import seeds
from tests.support.other_ranks import EPOCHS, Chain, Samples, check, drawn, loss, network
from tests.support.workers import WorkerError, Workers

pytestmark = pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 counts epochs by this job's")


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"values": self.samples[index][0], "number": index}


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


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    with accelerator_of(rank):
        before, first = map(int, Path(folder, str(job - 1)).read_text().split() if resumes else (0, 0))
        net, where = Net(), Saving(chain, job, folder, first)
        args = TrainingArguments(
            f"{folder}/out {job}",
            num_train_epochs=EPOCHS,
            max_steps=chain.count if chain.kind == "steps" else -1,
            per_device_train_batch_size=chain.size,
            gradient_accumulation_steps=chain.window,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
            accelerator_config={"use_seedable_sampler": chain.seedable},
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = Noting(
            net,
            args,
            train_dataset=Rows(chain.count),
            optimizers=(optimizer, scheduler),
            callbacks=[where],
            rebalance=chain.rebalances[job],
            own_shards=chain.kind == "own",
            **chain.options,
        )
        trainer.where, trainer.seen = where, []
        trainer.train(resume_from_checkpoint=f"{folder}/out {job - 1}/checkpoint-{before}" if resumes else None)
        assert where.epochs == sorted(where.epochs)
        assert trainer.state.global_step == trainer.state.max_steps == before + len(where.epochs)
        if chain.kind != "steps":
            assert trainer.state.epoch == EPOCHS
        return trainer.seen, [p.detach().clone() for p in net.inner.parameters()]


CHAINS = {
    "what Trainer deals out": Chain((3, 2, 4), (2, 1), 61, options={"weighting": "samples"}, later=(1, 0)),
    "in the tail": Chain((2, 3), (5,), 23),
    "by torch's generator": Chain((2, 3, 3), (2, 0), 41, seedable=False, later=(1, 0)),
    "rebalanced": Chain((3, 2, 3), (2, 1), 50, rebalances=(True, True, True)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


@pytest.mark.parametrize(("worlds", "steps"), [((4, 2), 61), ((2, 4), 40)])
def test_a_number_of_steps_stays(workers: Workers, worlds: tuple[int, int], steps: int, tmp_path: Path) -> None:
    """As many as were asked for, over as many epochs as that takes."""
    chain = Chain(worlds, (1,), steps, "steps", later=(1,))
    workers.run(worlds[0], train, chain, 0, str(tmp_path), False)
    workers.run(worlds[1], train, chain, 1, str(tmp_path), True)


@pytest.mark.parametrize(
    ("worlds", "kind", "message"),
    [((2, 3), "own", "What is left is known where"), ((2, 1), "unpadded", "goes on from two ranks or more")],
)
def test_what_is_refused(workers: Workers, worlds: tuple[int, int], kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=message):
        for job in (0, 1):
            workers.run(worlds[job], train, Chain(worlds, (1,), 23, kind), job, str(tmp_path), job > 0)


def resume_without_data(rank: int, folder: str) -> list[int]:
    """Go on once without a place in the data, which then is of no epoch that the trainer counts."""
    found = []
    with accelerator_of(rank):
        for job, (stops, options) in enumerate([(7, {}), (7, {"ignore_data_skip": True}), (0, {})]):
            args = TrainingArguments(
                f"{folder}/{job}", num_train_epochs=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
                save_strategy="steps" if stops else "no", save_steps=stops or 1, disable_tqdm=True,
                remove_unused_columns=False, **options,
            )  # fmt: skip
            trainer = JoinTrainer(Net(), args, train_dataset=Rows(20))
            before = {0: None, 1: f"{folder}/0/checkpoint-7", 2: f"{folder}/1/checkpoint-14"}[job]
            trainer.train(resume_from_checkpoint=before)
            found.append(trainer.state.global_step)
    return found


def test_the_same_number_of_ranks_counts_as_trainer_does(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, resume_without_data, str(tmp_path)) == [[15, 15, 15]] * 2


@seeds(range(0), 100)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, drawn(seed, ["unpadded"], fewest=2, sizes=3), tmp_path, train)
