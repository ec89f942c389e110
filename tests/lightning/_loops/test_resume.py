"""Training resumed from inside an epoch: the batches that were left, and the same bits at the end."""

import dataclasses
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.covering import others_long
from tests.lightning.reading import (
    Reader,
    Reading,
    Sample,
    Samples,
    SavesEverywhere,
    build,
    fit_from,
    fit_whole,
    whole_and_resumed,
)
from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit, assert_same_bits, result_of
from tests.support.run import difference
from tests.support.workers import Workers
from torch_join import JoinError, UnsupportedError
from torch_join._schedule.stateful import begin_anew

CASES = [
    Reading(Fit((2, 4), epochs=2, optimizer=optimizer, scheduler="step", iterable=iterable), early)
    for iterable, optimizer in ((False, "adam"), (True, "sgd"))
    for early in (False, True)
]
CASES += [
    Reading(Fit((4, 2), epochs=2, optimizer="sgd", scheduler="step", weighting="samples", ragged=True)),
    Reading(Fit((4, 2), epochs=2, scheduler="epoch", iterable=True, weighting="samples", ragged=True)),
    Reading(Fit((3, 0, 4), epochs=2, optimizer="sgd", scheduler="step"), early=True),
    Reading(Fit((0, 4, 1), epochs=2, scheduler="step", iterable=True)),
    Reading(Fit((2, 6), epochs=2, iterable=True), mode="max_size_cycle"),
    Reading(Fit((6, 2), epochs=2, iterable=True), mode="max_size"),
    Reading(Fit((6, 2), epochs=2), mode="max_size"),
    Reading(Fit((6, 4), epochs=2, iterable=True), gaps=True),
    Reading(Fit((6, 4), epochs=2, optimizer="sgd"), gaps=True, early=True),
    Reading(Fit((6, 2), epochs=2), stateful=False, mode="max_size_cycle"),
    Reading(Fit((6, 4), epochs=2), stateful=False, gaps=True),
    Reading(Fit((2, 4), epochs=2), validates=True),
    Reading(Fit((4, 2), epochs=2, iterable=True), validates=True),
    Reading(Fit((1, 7), epochs=2, rebalance=True, scheduler="step")),
    Reading(Fit((6, 2), epochs=2, rebalance=True, weighting="samples", ragged=True), early=True, stateful=False),
    Reading(Fit((9, 1), epochs=2, rebalance=True, optimizer="sgd"), mode="max_size_cycle"),
]


@pytest.mark.parametrize("number", others_long(range(len(CASES)), *range(0, len(CASES), 2)))
def test_what_was_left(workers: Workers, tmp_path: Path, number: int) -> None:
    run = CASES[number]
    last = run.case.length(0) - 1 - run.gaps
    places = {"before-0-0": (0, 0), "after-0-0": (0, 1), "before-0-2": (0, 2), "after-0-2": (0, 3)}
    places |= {f"after-0-{last}": (1, 0), f"end-0-{last}": (1, 0), "after-1-1": (1, 2)}
    if run.validates:
        places = {"validated-0-1": (0, 2), "validated-0-3": (1, 0), "validated-1-1": (1, 2)}
    results = workers.run(run.case.world_size, whole_and_resumed, run, str(tmp_path), list(places))
    for number, (name, place) in enumerate(places.items(), start=1):
        for rank, of_rank in enumerate(results):
            (whole, everything), (resumed, seen) = of_rank[0], of_rank[number]
            assert seen == [it for it in everything if it[:2] >= place], (name, rank)
            assert_same_bits([whole, resumed])
            if not (run.gaps or run.case.rebalance):
                assert len(everything) == 2 * run.case.lengths_in(0)[rank]
        assert_same_bits([of_rank[number][0] for of_rank in results])


# Whatever is saved before the optimizer's step, the step is made again. In the order in which they come in a step.
REPEATED = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
HOOKS = (*REPEATED, "on_before_optimizer_step", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end")


class SavesIn(pl.Callback):
    """Saves in every hook, from where training goes on as if nothing had been; notes from which step."""

    def __init__(self, folder: str, case: Fit) -> None:
        self.folder, self.case = folder, case
        self.places: dict[str, tuple[int, int]] = {}
        for hook in HOOKS:
            setattr(self, hook, partial(self.save, hook))

    def save(self, hook: str, trainer: pl.Trainer, *_: Any) -> None:
        epoch, step = trainer.current_epoch, max(trainer.fit_loop.batch_idx, 0)
        follows = (epoch, step + 1) if step + 1 < self.case.length(epoch) else (epoch + 1, 0)
        ends = {"on_train_epoch_start": (epoch, 0), "on_train_batch_end": follows, "on_train_epoch_end": (epoch + 1, 0)}
        place = ends.get(hook, (epoch, step))
        if place[1] % self.case.accumulate:
            return  # gradients are not saved
        if hook == "on_train_epoch_start" and epoch > 0:
            return  # Lightning takes the counters for those of an epoch that is over, with one process too
        name = f"{hook}-{epoch}-{step}"
        trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")
        self.places[name] = place


def saved_in_hooks(rank: int, run: Reading, folder: str) -> Any:
    module, saves = Reader(run), SavesIn(folder, run.case)
    trainer = build(run, callbacks=[saves])
    trainer.fit(module)
    found = {name: (place, *fit_from(run, f"{folder}/{name}.ckpt")) for name, place in saves.places.items()}
    return result_of(trainer, module), module.seen, found


@pytest.mark.parametrize(
    "run",
    [
        Reading(Fit((0, 4), epochs=2, scheduler="step")),
        Reading(Fit((3, 0, 1), epochs=2, optimizer="sgd", iterable=True), mode="max_size"),
        Reading(Fit((1, 6), epochs=2, accumulate=2, rebalance=True, scheduler="step")),
        Reading(Fit((4, 0, 2), epochs=1, rebalance=True, iterable=True, weighting="samples", ragged=True)),
    ],
    ids=lambda run: str(run.case),
)
def test_each_hook_may_save(workers: Workers, tmp_path: Path, run: Reading) -> None:
    results = workers.run(run.case.world_size, saved_in_hooks, run, str(tmp_path), deadline=300.0)
    assert len(results[0][2]) >= len(HOOKS)
    for name in results[0][2]:
        for whole, everything, found in results:
            place, resumed, seen = found[name]
            assert seen == [it for it in everything if it[:2] >= place], name
            # Where DDP has arranged its buckets anew, three ranks' gradients are added up in another order.
            assert difference(whole.parameters, resumed.parameters) < 1e-12, name
            assert (whole.lr, whole.global_step, whole.epoch) == (resumed.lr, resumed.global_step, resumed.epoch), name
        assert_same_bits([found[name][1] for _, _, found in results])


def fit_after_the_end(rank: int, run: Reading, longer: Reading, path: str) -> tuple[Any, Any]:
    fit_whole(rank, run, path)
    return fit_from(longer, f"{path}/fitted.ckpt"), fit_whole(rank, longer, f"{path}/longer")


@pytest.mark.parametrize("iterable", [False, True])
def test_a_checkpoint_that_is_saved_after_the_fit(workers: Workers, tmp_path: Path, iterable: bool) -> None:
    run, longer = (Reading(Fit((2, 1), epochs=epochs, iterable=iterable)) for epochs in (1, 2))
    for (resumed, seen), (whole, everything) in workers.run(2, fit_after_the_end, run, longer, str(tmp_path)):
        assert seen == [it for it in everything if it[0] == 1]
        assert_same_bits([whole, resumed])


def fit_warning(rank: int, run: Reading, path: str) -> tuple[list[tuple[int, ...]], int, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, seen = fit_from(run, path)
    return seen, result.global_step, "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize("world", [(4,), (2, 4), (4, 0)])
@pytest.mark.parametrize("iterable", [False, True])
def test_loaders_without_a_state(workers: Workers, tmp_path: Path, world: tuple[int, ...], iterable: bool) -> None:
    run = Reading(Fit(world, epochs=2, iterable=iterable), stateful=False)
    whole = workers.run(len(world), fit_whole, run, str(tmp_path))
    for step in (1, 3):
        path = f"{tmp_path}/after-0-{step - 1}.ckpt"
        results = workers.run(len(world), fit_warning, run, path)
        for length, (seen, steps, warned), (_, everything) in zip(world, results, whole, strict=True):
            if len(world) > 1:
                assert seen == [it for it in everything if it[:2] >= (0, step)]
                assert "not resumable" not in warned
                assert "dataloaders restart" not in warned
                continue
            # They begin anew, in one process: it has as many batches as it had left, or all of them without a length.
            left = length if iterable else max(length - step, 0)
            assert [index for epoch, index, _ in seen if epoch == 0] == list(range(step, step + left))
            assert steps == (step + 8 if iterable else 8)
            assert ("your dataloader is not resumable" in warned) == (not iterable)
        if len(world) == 1:
            (alone,) = workers.run(1, fit_warning, dataclasses.replace(run, strategy="ddp"), path)
            assert results[0][:2] == alone[:2]
            assert ("not resumable" in alone[2]) == (not iterable)


def test_a_place_that_nobody_can_have_again_warns(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((6, 4), epochs=2), stateful=False, mode="max_size_cycle", seeded=False)
    workers.run(2, fit_whole, run, str(tmp_path))
    results = workers.run(2, fit_warning, run, f"{tmp_path}/after-0-3.ckpt")
    assert "the position of train dataloaders is unknown (DataLoader: The order of the second pass" in results[0][2]
    assert "Pass `DataLoader(..., generator=torch.Generator())`" in results[0][2]
    assert [steps for _, steps, _ in results] == [12, 12]


def resuming_fails(rank: int, run: Reading, path: str) -> str:
    with pytest.raises(JoinError) as error:
        fit_from(run, path)
    return str(error.value)


class Unplaced(IterableDataset[Sample | None]):
    """A stream that does not know its place: torchdata reads it again up to there."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample | None]:
        yield from map(self.samples.__getitem__, range(len(self.samples)))


class ReadsAgain(Reader):
    def loader(self, data: Samples) -> DataLoader[Any]:
        return StatefulDataLoader(Unplaced(data), batch_size=None)


def fit_reading_again(rank: int, case: Fit, folder: str, path: str | None) -> str:
    trainer = build(Reading(case), callbacks=[SavesEverywhere(folder)] if path is None else [])
    try:
        trainer.fit(ReadsAgain(Reading(case)), ckpt_path=path)
    except JoinError as error:
        return str(error)
    return ""


def test_a_stream_that_has_become_shorter_than_what_was_trained_of_it(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, fit_reading_again, Fit((4, 6), epochs=1), str(tmp_path), None) == ["", ""]
    path = f"{tmp_path}/after-0-2.ckpt"
    for message in workers.run(2, fit_reading_again, Fit((1, 6), epochs=1), str(tmp_path), path):
        assert "ended before the position at which" in message


class EpochStream(IterableDataset[Sample]):
    """Applies the state that it was given to every iterator of that epoch, as Hugging Face's does (datasets 5.2)."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.epoch, self.index = samples, 0, 0
        self.given: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        resumes = self.given is not None and self.given["epoch"] == self.epoch
        self.index = self.given["index"] if resumes and self.given else 0
        while self.index < len(self.samples):
            self.index += 1
            yield self.samples[self.index - 1]  # type: ignore[misc]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = dict(state)


class Forgets(Reader):
    """Does not call `set_epoch`."""

    def loader(self, data: Samples) -> DataLoader[Any]:
        return StatefulDataLoader(EpochStream(data), batch_size=None)


def resume_forgetting(rank: int, run: Reading, folder: str, names: list[str]) -> list[Any]:
    found: list[Any] = []
    for name in ("", *names):
        module = Forgets(run)
        trainer = build(run, callbacks=[] if name else [SavesEverywhere(folder)])
        try:
            trainer.fit(module, ckpt_path=f"{folder}/{name}.ckpt" if name else None, **ANY_CHECKPOINT)
            found.append(module.seen)
        except UnsupportedError as error:
            found.append(str(error))
    return found


def test_a_stream_that_would_repeat_what_it_was_resumed_with_raises(workers: Workers, tmp_path: Path) -> None:
    names = ["after-0-2", "end-1-5", "after-2-2"]
    run = Reading(Fit((4, 6), epochs=3))
    for whole, message, *resumed in workers.run(2, resume_forgetting, run, str(tmp_path), names):
        assert "The EpochStream of a train dataloader was resumed in the middle of an epoch" in message
        assert "Call the dataset's `set_epoch(epoch)` before each epoch (in Lightning, in" in message
        # Where no epoch follows one that is resumed, nothing is repeated.
        assert resumed == [[it for it in whole if it[0] == 2], [it for it in whole if it[:2] >= (2, 3)]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_the_state_of_a_stream_in_a_worker_ends_with_its_epoch() -> None:
    stream = EpochStream(Samples(Fit((2,)), 0))
    begin_anew([StatefulDataLoader(stream, batch_size=None, num_workers=1)], [0])
    for options in ({}, {"num_workers": 1, "persistent_workers": True}):
        with pytest.raises(UnsupportedError, match="EpochStream"):
            begin_anew([StatefulDataLoader(stream, batch_size=None, **options)], [0])


def test_another_world(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, fit_whole, Reading(Fit((2, 3), epochs=2)), str(tmp_path))
    run = Reading(Fit((3, 1, 2), epochs=2))
    for message in workers.run(3, resuming_fails, run, f"{tmp_path}/after-0-1.ckpt"):
        assert "written in the middle of a loop by 2 ranks, and there are 3 now" in message
    for name in ("after-0-2", "end-0-2"):
        results = workers.run(3, fit_warning, run, f"{tmp_path}/{name}.ckpt")
        assert [[epoch for epoch, *_ in seen] for seen, _, _ in results] == [[1] * 3, [1], [1] * 2]
        assert "the states of its dataloaders are ignored" in results[0][2]


def test_checkpoints_of_plain_ddp_and_for_it(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((4, 4), epochs=2))
    plain = dataclasses.replace(run, strategy="ddp")
    workers.run(2, fit_whole, plain, str(tmp_path))
    results = workers.run(2, fit_warning, run, f"{tmp_path}/after-0-1.ckpt")
    assert "saves only rank 0's dataloaders" in results[0][2]
    expected = workers.run(2, fit_warning, plain, f"{tmp_path}/after-0-1.ckpt")
    assert [seen[:2] for seen, *_ in results] == [seen[:2] for seen, *_ in expected]
    assert [steps for _, steps, _ in results] == [8, 8]

    alone = Reading(Fit((4,), epochs=2))
    ((_, everything),) = workers.run(1, fit_whole, alone, f"{tmp_path}/alone")
    ((seen, *_),) = workers.run(
        1, fit_warning, dataclasses.replace(alone, strategy="ddp"), f"{tmp_path}/alone/after-0-1.ckpt"
    )
    assert [it for it in seen if it[0] == 0] == everything[2:4]


class SavesInTheStep(Reader):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx in (0, 2):
            self.trainer.save_checkpoint(f"{self.folder}/step-{batch_idx}.ckpt")
        return super().training_step(batch, batch_idx)


def fit_saving_in_the_step(rank: int, run: Reading, folder: str) -> Any:
    module = SavesInTheStep(run)
    module.folder = folder
    with pytest.raises(JoinError) as error:
        build(run).fit(module)
    return module.seen, str(error.value), fit_from(run, f"{folder}/step-0.ckpt")


def test_saving_inside_of_a_step(workers: Workers, tmp_path: Path) -> None:
    run = Reading(Fit((2, 3), epochs=1))
    for seen, message, (_, again) in workers.run(2, fit_saving_in_the_step, run, str(tmp_path)):
        assert "was saved inside a step for which only rank 1 of 2 ranks have a batch" in message
        assert again[:2] == seen
