"""Collectives in hooks that run only where there is a batch, and DDP's own error while some rank has joined."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.front_ends.lightning import Fit, Module, assert_exact, build_trainer, fit, result_of
from tests.support.run import Batch, difference
from tests.support.workers import Workers

PATIENT = {"timeout": timedelta(seconds=20)}
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "convert_input")


def total(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


class CountsSamples(Module):
    """Counts the samples of all ranks in one of the hooks that transfer a batch, in training and in validation."""

    def __init__(self, case: Fit, hook: str) -> None:
        super().__init__(case)
        self.hook, self.counts = hook, []  # type: ignore[var-annotated]
        self.heard: list[float] = []

    def count(self, hook: str, batch: Batch) -> None:
        if hook == self.hook:
            gathered = self.all_gather(torch.tensor(float(len(batch[0]))))
            self.counts.append((total(len(batch[0])), float(gathered.sum())))

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.count("on_before_batch_transfer", batch)
        return batch

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        self.count("transfer_batch_to_device", batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.count("on_after_batch_transfer", batch)
        return batch

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # All ranks run this one: those without a batch with another.
        self.heard.append(total(1.0))
        assert batch[0].shape[1] == 4

    def val_dataloader(self) -> Any:
        rows = self.case.batches(1 - self.trainer.global_rank, 0)
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, *_: Any) -> None:
        pass


class Counts(Precision):
    """Its input hook is no hook of the module's."""

    module: CountsSamples

    def convert_input(self, data: Batch) -> Batch:
        self.module.count("convert_input", data)
        return data


class InCallbacks(Callback):
    """Collectives in those hooks of validation batches that run where there is a batch."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.sums.append(total(1.0))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.sums.append(total(1.0))


def fit_counting(rank: int, case: Fit, hook: str) -> Any:
    module, callback = CountsSamples(case, hook), InCallbacks()
    plugin = Counts()
    plugin.module = module
    trainer = build_trainer(case, callbacks=[callback], plugins=[plugin], num_sanity_val_steps=0)
    trainer.fit(module)
    return result_of(trainer, module), module.counts, module.heard, callback.sums


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("lengths", [(2, 5), (0, 3)])
def test_a_collective_where_a_batch_is_transferred(workers: Workers, hook: str, lengths: tuple[int, int]) -> None:
    case = Fit(lengths, epochs=2, ragged=True, ddp=PATIENT)
    results = workers.run(2, fit_counting, case, hook)
    assert_exact(case, [result for result, *_ in results])
    data = [case.batches(rank, 0) for rank in range(2)]

    def counted(rank: int, shards: list[list[Batch]]) -> list[tuple[float, float]]:
        sums = [sum(len(shard[i][0]) for shard in shards if i < len(shard)) for i in range(len(shards[rank]))]
        return [(float(n), float(n)) for n in sums]

    for rank, (_, counts, heard, sums) in enumerate(results):
        assert counts == (counted(rank, data) + counted(rank, data[::-1])) * 2
        assert heard == [2.0] * 2 * max(lengths)
        mine = len(data[1 - rank])
        assert sums == [2.0 if i < 2 * min(lengths) else 1.0 for i in range(2 * mine)] * 2


# ---------------------------------------------------------------- parameters without a gradient


class LeavesOut(Module):
    """Has a layer that gets no gradient at some steps."""

    steps: tuple[int, ...] = ()

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.net.extra = nn.Linear(4, 3).double()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx not in self.steps:
            loss = loss + self.net.extra(batch[0]).pow(2).mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.covering(1)
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ((0, 3), (0, 1, 2)),  # DDP's first iteration, with a rank that has joined
        ((2, 5), (3,)),
        ((5, 2), (4,)),  # the last step, after which no forward follows
        ((1, 4, 4), (2,)),
        ((3, 3), (1,)),
    ],
)
def test_ddps_error_comes_on_all_ranks_at_once(
    workers: Workers, lengths: tuple[int, ...], steps: tuple[int, ...], manual: bool
) -> None:
    given = {"steps": steps, "automatic_optimization": not manual}
    outcomes = workers.outcomes(len(lengths), fit, Fit(lengths, epochs=1, ddp=PATIENT), LeavesOut, given, timeout=25.0)
    for outcome, length in zip(outcomes, lengths, strict=True):
        assert "has parameters that were not used in producing the loss" in outcome.error, outcome.trace
        assert "strategy='ddp_join_find_unused_parameters_true'" in outcome.error, outcome.trace
        assert ("PeerFailedError" in outcome.error) == (length < max(lengths)), outcome.error
        assert outcome.seconds < 12, outcome.error


class OnOneRank(LeavesOut):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.steps = (1,) if self.trainer.global_rank == 0 else ()
        return super().training_step(batch, batch_idx)


def test_a_parameter_that_one_rank_leaves_out_of_an_even_step(workers: Workers) -> None:
    case = Fit((3, 3), epochs=1, ddp=PATIENT)
    culprit, other = workers.outcomes(2, fit, case, OnOneRank, timeout=25.0)
    assert culprit.error.startswith("RuntimeError: It looks like your LightningModule has parameters"), culprit.error
    assert "PeerFailedError" in other.error, other.trace
    assert max(culprit.seconds, other.seconds) < 12


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_buckets_are_agreed_on_where_the_first_step_is_in_the_tail(workers: Workers, manual: bool) -> None:
    given = {"automatic_optimization": not manual}
    first, second = workers.run(2, fit, Fit((0, 3), epochs=2), LeavesOut, given)
    assert difference(first.parameters, second.parameters) == 0
