"""Rebalanced training resumed from every hook of every step: each batch once in an epoch, the same bits at the end."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from tests.covering import others_long
from tests.lightning._loops.test_resume import Reader, Reading, Samples, build
from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit, Result, assert_same_bits, result_of
from tests.support.inside import gifts_of_one_step, planned_rows, seen_plans
from tests.support.run import difference, flatten
from tests.support.workers import Workers
from torch_join import UnsupportedError

# In the order in which they come in a step. Whatever is saved before the optimizer's step, the step is made again.
REPEATED = (
    "on_train_batch_start",
    "optimizer_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
Seen = list[tuple[int, ...]]  # the epoch, the step and the batch of each step with one


class Numbered(Samples):
    """The number of a batch says whose it is."""

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        return None if found is None else (*found[:2], 100 * self.rank + index)


@dataclasses.dataclass(frozen=True)
class Mixed(Fit):
    """Only the rank with the fewest batches has a stream."""

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        lengths = self.lengths_in(epoch)
        said = [None if rank == self.stream and length > 1 else length for rank, length in enumerate(lengths)]
        return planned_rows(lengths, said)

    @property
    def stream(self) -> int:
        return min(range(self.world_size), key=lambda rank: self.lengths_in(0)[rank])


class Resuming(Reader):
    """Reads numbered batches, and saves in its own hook."""

    saving: "Saving | None" = None

    def loader(self, data: Samples) -> DataLoader[Any]:
        if isinstance(data.case, Mixed):
            self.case = dataclasses.replace(data.case, iterable=data.rank == data.case.stream)
        return super().loader(Numbered(data.case, data.rank, data.gaps))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.saving is not None:
            self.saving.save("optimizer_step", self.trainer)
        super().optimizer_step(*args, **kwargs)


class Saving(pl.Callback):
    """Saves in every hook, from where training goes on as if nothing had been; notes from which step."""

    def __init__(self, folder: str, case: Fit) -> None:
        self.folder, self.case = folder, case
        self.places: dict[str, tuple[int, int]] = {}

    def save(self, hook: str, trainer: pl.Trainer) -> None:
        epoch, step = trainer.current_epoch, max(trainer.fit_loop.batch_idx, 0)
        last = self.case.length(epoch) - 1
        place = {
            "on_train_epoch_start": (epoch, 0),
            **dict.fromkeys(
                ("on_train_batch_end", "on_validation_end"), (epoch, step + 1) if step < last else (epoch + 1, 0)
            ),
            "on_train_epoch_end": (epoch + 1, 0),
        }.get(hook, (epoch, step))
        if place[1] % self.case.accumulate:
            return  # gradients are not saved
        if hook == "on_train_epoch_start" and epoch > 0:
            return  # Lightning takes the counters for those of an epoch that is over, with one process too
        name = f"{hook}-{epoch}-{step}"
        trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")
        self.places[name] = place


def saving_in(hook: str) -> Callable[..., None]:
    def save(self: Saving, trainer: pl.Trainer, *_: Any) -> None:
        self.save(hook, trainer)

    return save


for hook in (*REPEATED, "on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
    setattr(Saving, hook, saving_in(hook))


def fit_saving(run: Reading, folder: str) -> tuple[Result, Seen, dict[str, tuple[int, int]]]:
    module, saving = Resuming(run), Saving(folder, run.case)
    module.saving = saving
    trainer = build(run, callbacks=[saving])
    trainer.fit(module)
    return result_of(trainer, module), module.seen, saving.places


def fit_from(run: Reading, path: str) -> tuple[Result, Seen]:
    module = Resuming(run)
    trainer = build(run)
    trainer.fit(module, ckpt_path=path, **ANY_CHECKPOINT)
    return result_of(trainer, module), module.seen


def whole_and_resumed(rank: int, run: Reading, folder: str) -> tuple[Result, Seen, dict[str, tuple[Any, Result, Seen]]]:
    whole, everything, places = fit_saving(run, folder)
    found = {name: (place, *fit_from(run, f"{folder}/{name}.ckpt")) for name, place in places.items()}
    return whole, everything, found


def batches_of(run: Reading, seen: Seen, epoch: int) -> list[int]:
    return sorted(number for its_epoch, _, *numbers in seen for number in numbers if its_epoch == epoch)


def assert_close(one: Result, other: Result, where: object) -> None:
    """Where DDP has arranged its buckets anew, three ranks' gradients are added up in another order."""
    assert difference(one.parameters, other.parameters) < 1e-12, where
    if flatten(one.optimizer):
        assert difference(flatten(one.optimizer), flatten(other.optimizer)) < 1e-12, where
    assert (one.lr, one.global_step, one.epoch) == (other.lr, other.global_step, other.epoch), where


CASES = {
    "sized": Reading(Fit((1, 5), optimizer="sgd", scheduler="step")),
    "sized-first": Reading(Fit((6, 1), scheduler="epoch", weighting="samples", ragged=True)),
    "sized-early": Reading(Fit((0, 5), scheduler="step"), early=True),
    "sized-three": Reading(Fit((0, 7, 1), weighting="active", scheduler="step")),
    "stream": Reading(Fit((1, 5), iterable=True, scheduler="step")),
    "stream-three": Reading(Fit((6, 0, 2), optimizer="sgd", iterable=True, weighting="samples", ragged=True)),
    "stream-one": Reading(Fit((0, 0, 5), iterable=True)),
    "window": Reading(Fit((1, 8), accumulate=2, scheduler="step")),
    "window-stream": Reading(Fit((7, 0, 2), accumulate=2, optimizer="sgd", iterable=True)),
    "cycled": Reading(Fit((2, 6)), mode="max_size_cycle"),
    "side-by-side": Reading(Fit((2, 6), iterable=True), mode="max_size"),
    "mixed": Reading(Mixed((2, 4), optimizer="sgd", scheduler="step")),
    "mixed-last": Reading(Mixed((7, 3), optimizer="sgd")),
    "mixed-three": Reading(Mixed((6, 2, 3), optimizer="sgd")),
    "validates": Reading(Fit((1, 5)), validates=True),
    "validates-stream": Reading(Fit((5, 0, 2), iterable=True), validates=True),
}


SOME = ("stream-three", "window")


@pytest.mark.parametrize("name", others_long(CASES, *SOME))
def test_what_was_left(workers: Workers, tmp_path: Path, name: str) -> None:
    run = dataclasses.replace(CASES[name], case=dataclasses.replace(CASES[name].case, epochs=2, rebalance=True))
    case = run.case
    results = workers.run(case.world_size, whole_and_resumed, run, str(tmp_path), deadline=300.0)
    assert_same_bits([whole for whole, _, _ in results])
    every = [100 * rank + index for rank, length in enumerate(case.lengths_in(0)) for index in range(length)]
    for epoch in range(2):
        assert sorted(batch for _, seen, _ in results for batch in batches_of(run, seen, epoch)) == every or run.mode
        rows = [
            {rank for rank, (_, seen, _) in enumerate(results) if (epoch, step) in {it[:2] for it in seen}}
            for step in range(case.length(epoch))
        ]
        assert rows == [row.keys() for row in case.rows(epoch)]
    names = results[0][2].keys()
    assert len(names) >= 2 * (1 + (1 + len(REPEATED)) * (case.length(0) // case.accumulate))
    for name in names:
        for whole, everything, found in results:
            place, resumed, seen = found[name]
            assert seen == [it for it in everything if it[:2] >= place], name
            assert_close(whole, resumed, name)
            if case.world_size == 2:  # a stream's end may be known from the begin on
                assert_same_bits([whole, dataclasses.replace(resumed, batches=whole.batches)])
        assert_same_bits([found[name][1] for _, _, found in results])


# ---------------------------------------------------------------- loaders without a state


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", others_long([(2, 6), (0, 5), (6, 0, 1), (3, 3)], (6, 0, 1)))
@pytest.mark.parametrize("iterable", [False, True])
def test_loaders_without_a_state(workers: Workers, tmp_path: Path, lengths: tuple[int, ...], iterable: bool) -> None:
    case = Fit(lengths, epochs=2, iterable=iterable, rebalance=True)
    results = workers.run(len(lengths), whole_and_resumed, Reading(case, stateful=False), str(tmp_path), deadline=300.0)
    for name, (place, *_) in results[0][2].items():
        for whole, everything, found in results:
            left = [it for it in everything if it[:2] >= place]
            if iterable and place[0]:  # its order follows from a number of passes of its own
                assert [it[:2] for it in found[name][2]] == [it[:2] for it in left], name
            else:
                assert found[name][2] == left, name
                assert_close(whole, found[name][1], name)
        assert_same_bits([found[name][1] for _, _, found in results])


class WithGaps(Numbered):
    """Some batches of rank 0 are `None`."""

    def __getitem__(self, index: int) -> Any:
        return None if self.rank == 0 and index in (3, 4) else super().__getitem__(index)


class InOrder(Resuming):
    def loader(self, data: Samples) -> DataLoader[Any]:
        return DataLoader(WithGaps(data.case, data.rank), batch_size=None)


def plans_of(rank: int, run: Reading, folder: str) -> tuple[list[int], dict[str, list[int]]]:
    """Return how many steps each plan was made with: in the whole fit, and in those that are resumed."""

    def fit(path: str | None = None) -> list[int]:
        module = InOrder(run)
        with seen_plans() as plans:
            callbacks = [] if path else [SavesSteps(folder)]
            build(run, callbacks=callbacks).fit(module, ckpt_path=path, **ANY_CHECKPOINT)
        assert all(number // 100 == rank for *_, number in module.seen)
        return plans

    whole = fit()
    return whole, {path.stem: fit(str(path)) for path in sorted(Path(folder).glob("*.ckpt"))}


def test_an_epoch_that_began_even_goes_on_without_a_plan(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((7, 7, 7), epochs=1, rebalance=True), stateful=False)
    for whole, resumed in workers.run(3, plans_of, run, str(tmp_path)):
        assert whole == []
        assert {*map(str, range(7))} == resumed.keys()
        assert not any(resumed[str(step)] for step in range(6))


# ---------------------------------------------------------------- other numbers of steps than lengths tell


@dataclasses.dataclass(frozen=True)
class FewGifts(Fit):
    """A rank gives one batch in a step, so that an epoch has more steps than batches divided by ranks."""

    rebalance: bool = True

    def rows(self, epoch: int) -> list[dict[int, tuple[int, int]]]:
        lengths = self.lengths_in(epoch)
        said = [length if length < 2 else None for length in lengths] if self.iterable else None
        return planned_rows(lengths, said, max_sent_per_step=[1] * len(lengths))


def whole_and_resumed_with_few_gifts(rank: int, run: Reading, folder: str) -> Any:
    with gifts_of_one_step(1):
        return whole_and_resumed(rank, run, folder)


@pytest.mark.parametrize("iterable", others_long([False, True], True))
def test_more_steps_than_batches_divided_by_ranks(workers: Workers, tmp_path: Path, iterable: bool) -> None:
    run = Reading(FewGifts((0, 0, 9), epochs=1, iterable=iterable))
    results = workers.run(3, whole_and_resumed_with_few_gifts, run, str(tmp_path), deadline=300.0)
    assert {step for _, step, _ in results[2][1]} == set(range(5))
    for whole, everything, found in results:
        for name, (place, resumed, seen) in found.items():
            assert seen == [it for it in everything if it[:2] >= place], name
            assert_close(whole, resumed, name)


class Leaving(Resuming):
    """Rank 0 leaves at its second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.trainer.global_rank, batch_idx) == (0, 1) else None


def leave_and_resume(rank: int, run: Reading, folder: str) -> list[Seen]:
    seen = []
    for path in (None, *(f"{folder}/{step}.ckpt" for step in range(6))):
        module, saving = Leaving(run), SavesSteps(folder)
        build(run, callbacks=[saving] if path is None else []).fit(module, ckpt_path=path, **ANY_CHECKPOINT)
        seen.append(module.seen)
    return seen


class SavesSteps(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.fit_loop.batch_idx}.ckpt")


@pytest.mark.parametrize("iterable", [False, True])
def test_a_rank_that_has_left_stays_away(workers: Workers, tmp_path: Path, iterable: bool) -> None:
    run = Reading(Fit((5, 8), epochs=1, iterable=iterable, rebalance=True))
    for whole, *resumed in workers.run(2, leave_and_resume, run, str(tmp_path)):
        for step, seen in enumerate(resumed[1:], start=1):
            assert seen == [it for it in whole if it[1] > step], step


# ---------------------------------------------------------------- with rebalancing, and without


def resume_otherwise(rank: int, run: Reading, folder: str) -> tuple[Seen, dict[str, Any]]:
    other = dataclasses.replace(run, case=dataclasses.replace(run.case, rebalance=not run.case.rebalance))
    module = Resuming(run)
    build(run, callbacks=[SavesSteps(folder)]).fit(module)
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        try:
            found[path.stem] = fit_from(other, str(path))[1]
        except UnsupportedError as error:
            found[path.stem] = str(error)
    return module.seen, found


@pytest.mark.parametrize("stateful", [False, True])
def test_a_checkpoint_of_a_fit_without(workers: Workers, tmp_path: Path, stateful: bool) -> None:
    run = Reading(Fit((1, 7), epochs=1), stateful=stateful)
    results = workers.run(2, resume_otherwise, run, str(tmp_path))
    for step in range(7):
        rest = [it for _, found in results for it in found[str(step)]]
        assert sorted({at for _, at, _ in rest}) == list(range(step + 1, step + 1 + (7 - step) // 2))
        assert len(rest) == 6 - step
        if stateful:
            assert {it[2] for it in rest} == {it[2] for seen, _ in results for it in seen if it[1] > step}


@pytest.mark.parametrize("stateful", [False, True])
def test_a_checkpoint_for_a_fit_without(workers: Workers, tmp_path: Path, stateful: bool) -> None:
    run = Reading(Fit((1, 7), epochs=1, rebalance=True), stateful=stateful)
    for _, found in workers.run(2, resume_otherwise, run, str(tmp_path), timeout=5.0):
        assert all("with rebalanced batches" in found[str(step)] for step in range(3))
        assert found["3"] == []


# ---------------------------------------------------------------- the plan alone


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_resumed_epoch_has_the_rows_that_were_left(world_size: int) -> None:
    """Also where nobody knows how many batches there are: what is read ahead tells the same then."""

    def said(lengths: list[int]) -> list[int | None]:
        return [length if length < 2 else None for length in lengths]  # which two are read of when an epoch begins

    some = (0, 1, 2, 3, 5, 9) if world_size < 4 else (0, 1, 4) if world_size < 6 else (0, 5)
    for lengths, streams in itertools.product(itertools.product(some, repeat=world_size), (False, True)):
        rows = planned_rows(lengths, said([*lengths]) if streams else None)
        left = [*lengths]
        for step, row in enumerate(rows):
            rest = planned_rows(left, said(left) if streams else None)
            assert [{rank: owner for rank, (owner, _) in each.items()} for each in rest] == [
                {rank: owner for rank, (owner, _) in each.items()} for each in rows[step:]
            ], (lengths, streams, step)
            for owner, _ in row.values():
                left[owner] -= 1
