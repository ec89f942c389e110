"""`save_state` and `load_state` in the tail, also with the main process joined."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate as accelerate_package
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from accelerate_join import Accelerator, join_uneven_inputs
from tests.emulator import DEVICE, place
from tests.support.front_ends import accelerate
from tests.support.front_ends.accelerate import Script, accelerator_of, dataset, expected_of, plain
from tests.support.run import Run
from tests.support.workers import Workers

Seen = list[list[list[int]]]


def is_safe() -> bool:
    """Whether safetensors, which is Accelerate's choice, knows this device: it reads nothing onto an emulated one."""
    return place().type != DEVICE


class Count:
    """Something of the user's own with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Session(accelerate.Session):
    """An accelerator and what it has prepared, with a count of steps."""

    def prepare(self) -> None:
        super().prepare()
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

    def step(self, batch: Any, step: int = 0) -> None:
        super().step(batch, step)
        self.count.count += 1

    @property
    def all(self) -> Any:
        parameters = [p.tolist() for p in self.net.parameters()]
        optimizer, scheduler = plain(self.optimizer.state_dict()), plain(self.scheduler.state_dict())
        return parameters, optimizer, scheduler, self.accelerator.step, self.count.count


def save_each_step(rank: int, script: Script, folder: str, automatic: bool, on_main: bool = False) -> tuple[Seen, Any]:
    config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=20) if automatic else None
    with accelerator_of(rank, gradient_accumulation_steps=script.accumulate, project_config=config) as accelerator:
        session = Session(accelerator, script, rank)
        seen: Seen = [[]]
        with accelerator.join_uneven_inputs():
            for step, batch in enumerate(session.loader):
                seen[0].append(batch[0].tolist())
                session.step(batch)
                if accelerator.is_main_process or not on_main:
                    path = Path(folder) / str(step) if on_main else f"{folder}/{step}"
                    accelerator.save_state(output_dir=None if automatic else path, safe_serialization=is_safe())
        return seen, session.all


def restore(rank: int, script: Script, path: str) -> Any:
    with accelerator_of(rank, gradient_accumulation_steps=script.accumulate) as accelerator:
        session = Session(accelerator, script, rank)
        accelerator.load_state(path)
        return session.all


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        Script(lengths=(2, 5), scheduler="step"),
        Script(lengths=(5, 2), scheduler="step", optimizer="sgd", accumulate=2),
        Script(lengths=(0, 4, 3), scheduler="step", accumulate=2),
    ],
    ids=lambda script: str(script.lengths),
)
def test_a_checkpoint_of_the_tail(workers: Workers, script: Script, automatic: bool, tmp_path: Path) -> None:
    check_checkpoints(workers, script, tmp_path, automatic)


@pytest.mark.parametrize("lengths", [(5, 2), (4, 4, 3), (3, 5, 2)], ids=str)  # the main process goes on, and joins too
def test_a_checkpoint_that_the_main_process_alone_saves(
    workers: Workers, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    check_checkpoints(workers, Script(lengths=lengths, scheduler="step"), tmp_path, on_main=True)
    # A rank that has joined has added what is its own; one that is active and did not save has not, as ever.
    assert (tmp_path / str(lengths[0] - 2) / f"random_states_{len(lengths) - 1}.pkl").exists() == (len(lengths) == 2)


def check_checkpoints(
    workers: Workers, script: Script, tmp_path: Path, automatic: bool = False, on_main: bool = False
) -> None:
    results = workers.run(script.world_size, save_each_step, script, str(tmp_path), automatic, on_main)
    seen = [mine for mine, _ in results]
    assert all(state == results[0][1] for _, state in results)
    for step in range(script.lengths[0] if on_main else max(script.lengths)):
        path = tmp_path / "checkpoints" / f"checkpoint_{step}" if automatic else tmp_path / str(step)
        states = workers.run(script.world_size, restore, script, str(path))
        # A rank whose own part is not there does not know how many batches it had accumulated.
        assert all(state[:3] == states[0][:3] and (on_main or state == states[0]) for state in states)
        parameters, optimizer, scheduler, accelerator_step, count = states[0]
        whole = script.accumulate == 1 or (step + 1) % script.accumulate == 0 or step + 1 == max(script.lengths)
        until = step + 1 if whole else step + 1 - (step + 1) % script.accumulate
        expected = expected_of(script, _cut(seen, until))
        for mine, theirs in zip(parameters, expected.parameters, strict=True):
            assert (torch.tensor(mine, dtype=torch.float64) - theirs).abs().max() < 1e-10
        moments = [v for state in expected.optimizer.values() for v in state.values() if isinstance(v, Tensor)]
        found = [value for state in optimizer["state"].values() for value in state.values() if value is not None]
        assert len(moments) == len(found)
        for mine, theirs in zip(found, moments, strict=True):
            assert (torch.tensor(mine, dtype=torch.float64) - theirs).abs().max() < 1e-10
        assert scheduler["last_epoch"] == expected.training.schedulers[0].last_epoch
        assert count == step + 1
        assert accelerator_step == (0 if step + 1 == max(script.lengths) else step + 1)


def _cut(seen: list[Seen], steps: int) -> list[Seen]:
    return [[mine[0][:steps]] for mine in seen]


def load_back(rank: int, script: Script, folder: str, at: int) -> tuple[Seen, Any]:
    """Save after the first step; go back to it after step `at`, and go on."""
    with accelerator_of(rank) as accelerator:
        session = Session(accelerator, script, rank)
        seen: Seen = [[]]
        with accelerator.join_uneven_inputs():
            for step, batch in enumerate(session.loader):
                if step == 0 or step > at:
                    seen[0].append(batch[0].tolist())
                session.step(batch)
                if step == 0:
                    accelerator.save_state(folder, safe_serialization=is_safe())
                if step == at:
                    accelerator.load_state(folder)
        return seen, session.all


@pytest.mark.parametrize("lengths", [(2, 6), (6, 2), (1, 6, 4)])
def test_going_back_in_the_tail(workers: Workers, lengths: tuple[int, ...], tmp_path: Path) -> None:
    script = Script(lengths=lengths, scheduler="step")
    results = workers.run(len(lengths), load_back, script, str(tmp_path), 3)
    assert all(state == results[0][1] for _, state in results)
    expected = expected_of(script, [seen for seen, _ in results])
    for mine, theirs in zip(results[0][1][0], expected.parameters, strict=True):
        assert (torch.tensor(mine, dtype=torch.float64) - theirs).abs().max() < 1e-10


class Stream(IterableDataset[Tensor]):
    """Has no state, so that what a place has behind it is read again."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(64))


def in_parts(rank: int, kind: str, in_context: bool, folder: str) -> tuple[list[Any], list[Any]]:
    """Go through an epoch, and through one by objects made anew after each second batch, and at the end."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=kind == "dispatched")
    data: Any = range(64) if kind == "own folder" else Stream()
    folder += f"/{rank}" if kind == "own folder" else ""
    found: list[list[Any]] = [[], [], []]
    for number, stop, loads in [(0, 99, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1), (1, 99, 1), (2, 99, 1)]:
        with accelerator_of(rank, Accelerator, dataloader_config=config) as accelerator:
            loader = accelerator.prepare(DataLoader(data, 4))
            if loads:
                accelerator.load_state(folder)
            for step, batch in enumerate(accelerator.join_batches(loader) if in_context else loader):
                found[number].append(batch.tolist())
                if step == stop:
                    accelerator.save_state(folder)
                    break
            if number == 1 and stop == 99:
                accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    return found[0] * 2, found[1] + found[2]


@pytest.mark.skipif(
    "adjust_state_dict_for_prefetch" not in vars(DataLoaderShard),
    reason="Accelerate's own loaders begin again a batch too early for each other process",
)
@pytest.mark.parametrize(("kind", "in_context"), [("dispatched", False), ("sharded", True), ("own folder", False)])
def test_an_epoch_is_resumed_again_and_again(workers: Workers, kind: str, in_context: bool, tmp_path: Path) -> None:
    for whole, resumed in workers.run(2, in_parts, kind, in_context, str(tmp_path)):
        assert len(whole) == 16
        assert resumed == whole


def resume_own(rank: int, lengths: tuple[int, ...], folder: str, kind: Any, saves: str, loads: str) -> list[int]:
    """Save at the second step, on all ranks or the main one; or load before the context, or in it."""
    with accelerator_of(rank, kind) as accelerator:
        batches = [[index] for index in range(lengths[rank])]
        loader: Any = DataLoaderShard(dataset(len(batches)), batch_sampler=batches, use_stateful_dataloader=True)
        if saves != "unregistered":
            loader._is_accelerate_prepared = True  # what `register_for_checkpointing` has it be
            loader = accelerator.prepare(loader)
        model, seen = accelerator.prepare(Run().build()), list[int]()
        if loads == "before":
            accelerator.load_state(folder)
        with join_uneven_inputs(accelerator):
            if loads == "within":
                accelerator.load_state(folder)
            for step, (numbers, x, _) in enumerate(loader):
                seen += numbers.tolist()
                model(x).sum().backward()
                model.zero_grad()
                if step == 1 and saves and (saves != "main" or rank == 0):
                    accelerator.save_state(folder, safe_serialization=is_safe())
        return seen


def test_accelerates_own_class_gives_each_rank_its_place_in_the_context(workers: Workers, tmp_path: Path) -> None:
    lengths, plain_kind = (4, 1, 3), accelerate_package.Accelerator
    everything = workers.run(3, resume_own, lengths, str(tmp_path), plain_kind, "all", "")
    left = workers.run(3, resume_own, lengths, str(tmp_path), plain_kind, "", "within")
    assert left == [seen[2:] for seen in everything]
    for outcome in workers.outcomes(3, resume_own, lengths, str(tmp_path), plain_kind, "", "before"):
        assert "load_state was called before join_uneven_inputs," in outcome.error


def test_a_place_that_is_not_there(workers: Workers, tmp_path: Path) -> None:
    lengths = (4, 5, 3)
    workers.run(3, resume_own, lengths, str(tmp_path), Accelerator, "main", "")
    for outcome in workers.outcomes(3, resume_own, lengths, str(tmp_path), Accelerator, "", "before"):
        assert "has no loader position for rank 1, 2" in outcome.error


def test_a_loader_whose_place_would_be_left_out(workers: Workers, tmp_path: Path) -> None:
    for outcome in workers.outcomes(2, resume_own, (4, 3), str(tmp_path), Accelerator, "unregistered", ""):
        assert "save_state was called in a loop over a stateful DataLoaderShard that was not prepared" in outcome.error
