"""What ranks tell each other between steps is heard when it is needed: nobody waits where all have a batch."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.needs import needs
from tests.support.front_ends.lightning import Fit, Module, assert_exact, assert_same_bits, fit
from tests.support.run import Batch, difference, reference
from tests.support.workers import Workers

PATIENT = {"timeout": timedelta(seconds=20)}


def wait_for(path: Path) -> None:
    end = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < end, "the other rank has not come to its next forward"
        time.sleep(0.001)


class GoesAhead(Module):
    """Rank 1 ends each step but the last few when rank 0 is in the next one's forward."""

    folder: Path
    steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 0:
            (self.folder / f"{self.trainer.current_epoch} {batch_idx}").touch()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx + 1 < self.steps:
            wait_for(self.folder / f"{self.trainer.current_epoch} {batch_idx + 1}")


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Fit((5, 5)), 5),
        (Fit((5, 5), iterable=True), 5),
        (Fit((5, 5), iterable=True, weighting="samples", ragged=True), 5),
        (Fit((4, 7), iterable=True, weighting="active"), 4),  # where the first one joins they wait
        (Fit((7, 4, 7), weighting="samples", ragged=True), 4),
        (Fit((6, 6), model="norm", ddp={"broadcast_buffers": False}, epochs=1), 6),
        (Fit((6, 6), model="norm", epochs=1), 0),  # a forward broadcasts buffers: they wait
    ],
)
def test_a_rank_goes_on_where_all_have_a_batch(workers: Workers, tmp_path: Path, case: Fit, steps: int) -> None:
    results = workers.run(case.world_size, fit, case, GoesAhead, {"folder": tmp_path, "steps": steps})
    assert_exact(case, results) if case.model != "norm" else assert_same_bits(results)


# ---------------------------------------------------------------- what is asked for


class Asking(Module):
    ranks: tuple[int, ...]
    step: int
    takes_back = -1

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.trainer.global_step == self.step and self.trainer.global_rank in self.ranks:
            self.trainer.should_stop = True
        elif self.trainer.global_step > self.step and self.trainer.global_rank == self.takes_back:
            self.trainer.should_stop = False


@pytest.mark.parametrize(
    ("ranks", "step", "stops_at", "overrides", "takes_back"),
    [
        ((0, 1, 2), 2, 2, {}, -1),
        ((1,), 2, 3, {}, -1),
        ((0, 2), 2, 3, {}, -1),
        ((1,), 2, 4, {}, 1),  # the others, who have taken it over, ask it once more
        ((1,), 5, 6, {}, -1),  # the first of the epoch's last two steps
        ((1,), 6, 6, {}, -1),  # its last one
        ((0,), 2, 6, {"min_epochs": 1}, -1),  # before which all go on asking
        ((0, 1, 2), 2, 4, {"min_steps": 4, "min_epochs": 0}, 0),  # the others hold on to it
        ((1,), 1, 5, {"min_steps": 5, "min_epochs": 0}, 2),
        ((2,), 12, 12, {}, -1),
    ],
)
def test_should_stop_where_all_have_a_batch(
    workers: Workers, ranks: tuple[int, ...], step: int, stops_at: int, overrides: dict[str, Any], takes_back: int
) -> None:
    case = Fit((6, 6, 6), epochs=2)
    results = workers.run(3, fit, case, Asking, {"ranks": ranks, "step": step, "takes_back": takes_back}, overrides)
    assert_same_bits(results)
    assert [result.global_step for result in results] == [stops_at] * 3
    expected = reference(case)
    state = expected.history[stops_at]
    names = [name for name, _ in expected.net.named_parameters()]
    assert difference(results[0].parameters, [state[name] for name in names]) < 1e-10
    assert ("`trainer.should_stop` was set on" in results[0].warned) == (len(ranks) < 3)


class Validating(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        time.sleep(0.02 * (1 + self.trainer.global_rank))
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", super().training_step(batch, batch_idx).detach(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.noted.append((self.trainer.global_step, float(self.net.last.weight.sum())))


@pytest.mark.covering(2)
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    "interval", [3, pytest.param({"seconds": 0.15}, marks=needs("a val_check_interval in seconds")), 1.0]
)
@pytest.mark.parametrize("lengths", [(14, 14, 14), (3, 14)])
def test_all_validate_at_the_same_steps(workers: Workers, lengths: Any, interval: Any, iterable: bool) -> None:
    case, options = Fit(lengths, epochs=2, iterable=iterable), {"val_check_interval": interval}
    results = workers.run(len(lengths), fit, case, Validating, {}, {**options, "num_sanity_val_steps": 0})
    assert all(result.noted == results[0].noted for result in results)
    steps = [step for step, _ in results[0].noted]
    if interval == 3:
        assert steps == [3, 6, 9, 12, 17, 20, 23, 26]
    elif interval == 1.0:
        assert steps == [14, 28]
    else:  # a step takes 0.06 s
        assert sum(step % 14 > 0 for step in steps) >= 4


# ---------------------------------------------------------------- whoever looks earlier


class Looking(Module):
    """Looks, on one rank, whether the batch is the last one; where it does, it waits for what the others say."""

    place: str

    def look(self, place: str) -> None:
        if place == self.place and self.trainer.global_rank == 1:
            self.noted.append(self.trainer.is_last_batch)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.look("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("on_before_zero_grad")

    def on_after_backward(self) -> None:
        self.look("on_after_backward")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.look("on_train_batch_end")

    def on_train_end(self) -> None:
        assert self.trainer.is_last_batch


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["training_step", "on_before_zero_grad", "on_after_backward", "on_train_batch_end"])
@pytest.mark.parametrize(
    "case", [Fit((4, 4), iterable=True), Fit((4, 4)), Fit((5, 5), iterable=True, accumulate=2), Fit((2, 5))]
)
def test_is_last_batch_is_right_wherever_one_rank_looks(workers: Workers, case: Fit, place: str) -> None:
    results = workers.run(2, fit, case, Looking, {"place": place})
    assert_exact(case, results)
    steps = max(case.lengths)
    if case.accumulate == 1 or place != "on_before_zero_grad":
        assert results[1].noted == ([False] * (steps - 1) + [True]) * case.epochs


class LeavingAfterALook(Module):
    """All look before rank 0 leaves the epoch, whose last step this becomes for the other."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        assert not self.trainer.is_last_batch
        return -1 if batch_idx == 3 and self.trainer.global_rank == 0 else None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.noted.append(self.trainer.is_last_batch)
        return super().training_step(batch, batch_idx)


def test_is_last_batch_after_others_have_left(workers: Workers) -> None:
    results = workers.run(2, fit, Fit((6, 4), epochs=1, iterable=True), LeavingAfterALook)
    assert [result.noted for result in results] == [[False] * 3, [False] * 3 + [True]]
