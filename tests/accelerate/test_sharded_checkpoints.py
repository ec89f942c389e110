"""`save_state`, `load_state`, `save_model` and `get_state_dict` of sharded models in the tail.

Left out on CPUs, for what torch has of its own there: a full state dict of `FullyShardedDataParallel` that is moved to
the CPU, which is how Accelerate asks for it, ends the process (segmentation fault).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.front_ends.accelerate_sharded import (
    Session,
    Sharded,
    Trained,
    check,
    difference,
    expected_of,
    possible,
    sharding_accelerator,
)
from tests.support.run import TOLERANCE
from tests.support.workers import Workers

CRASHES = pytest.mark.skip(reason="torch crashes on a full state dict of FSDP 1 that is offloaded from the CPU")
KINDS = [
    pytest.param(2, "SHARDED_STATE_DICT", id="2 sharded"),
    pytest.param(2, "FULL_STATE_DICT", id="2 full"),
    pytest.param(1, "SHARDED_STATE_DICT", id="1 sharded"),
    pytest.param(1, "FULL_STATE_DICT", id="1 full", marks=CRASHES),
]
LENGTHS = [(2, 5), (5, 2), (0, 4, 3)]


def save_each_step(rank: int, script: Sharded, folder: str) -> Trained:
    with sharding_accelerator(rank, script) as accelerator:
        session = Session(accelerator, script, rank)
        seen: list[list[int]] = []
        with accelerator.join_uneven_inputs(weighting=script.weighting):
            for step, batch in enumerate(session.loader):
                seen.append(batch[0].tolist())
                session.step(batch)
                accelerator.save_state(f"{folder}/{step}")
        return replace(session.state(), seen=[seen])


def restore(rank: int, script: Sharded, folder: str, steps: range) -> list[Trained]:
    found = []
    with sharding_accelerator(rank, script) as accelerator:
        session = Session(accelerator, script, rank)
        session.state()  # Accelerate loads moments of version 1 into those that there are only
        for step in steps:
            accelerator.load_state(f"{folder}/{step}")
            found.append(session.state())
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("version", "kind"), KINDS)
def test_a_checkpoint_of_the_tail(
    workers: Workers, version: int, kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """Also in the midst of a window of accumulation, whose gradients must outlive it.

    Not from before the first step of the optimizer: torch writes no state of it then, and asks for one to load.
    """
    script = Sharded(
        lengths=lengths,
        epochs=1,
        accumulate=2,
        scheduler="step",
        version=version,
        plugin={"state_dict_type": kind},
    )
    longest = max(lengths)
    trained: list[Trained] = workers.run(len(lengths), save_each_step, possible(script), str(tmp_path))
    check(script, trained)
    seen = [mine.seen for mine in trained]
    found: list[list[Trained]] = workers.run(len(lengths), restore, script, str(tmp_path), range(1, longest))
    for step in range(1, longest):
        states = [mine[step - 1] for mine in found]
        until = step + 1 if step + 1 == longest else step + 1 - (step + 1) % 2
        for state in states:
            assert difference(state.weights, states[0].weights) == 0
            assert state.same == states[0].same
        weights, moments = expected_of(script, [[mine[0][:until]] for mine in seen])
        assert difference(states[0].weights, weights) < TOLERANCE
        assert not moments or difference(states[0].moments, moments) < TOLERANCE
        groups, scheduler, accelerator_step, *_ = states[0].same
        assert groups[0]["lr"] == pytest.approx(scheduler["_last_lr"][0], abs=0)
        assert accelerator_step == (0 if step + 1 == longest else step + 1)


@pytest.mark.parametrize(("version", "kind"), KINDS[:2])
def test_a_checkpoint_after_a_step_that_was_skipped(workers: Workers, version: int, kind: str, tmp_path: Path) -> None:
    """The optimizer has no state then, and torch gives it one where there are no gradients: on all ranks or on none."""
    script = Sharded(
        lengths=(0, 5),
        iterable=True,
        epochs=1,
        scaler=8.0,
        optimizer="nesterov",  # torch takes a decay of weights for a gradient, where it makes the state
        version=version,
        plugin={"state_dict_type": kind},
    )
    check(script, workers.run(2, save_each_step, possible(script), str(tmp_path)))


def load_back(rank: int, script: Sharded, folder: str, at: int) -> Trained:
    """Save after the first step; go back to it after step `at`, and go on."""
    with sharding_accelerator(rank, script) as accelerator:
        session = Session(accelerator, script, rank)
        seen: list[list[int]] = []
        with accelerator.join_uneven_inputs():
            for step, batch in enumerate(session.loader):
                if step == 0 or step > at:
                    seen.append(batch[0].tolist())
                session.step(batch)
                if step == 0:
                    accelerator.save_state(folder)
                if step == at:
                    accelerator.load_state(folder)
        return replace(session.state(), seen=[seen])


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(2, 6), (6, 2)], ids=str)
@pytest.mark.parametrize(("version", "kind"), KINDS)
def test_going_back_in_the_tail(
    workers: Workers, version: int, kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    script = Sharded(lengths=lengths, scheduler="step", version=version, plugin={"state_dict_type": kind}, epochs=1)
    check(script, workers.run(2, load_back, possible(script), str(tmp_path), 3))


def take_weights(rank: int, script: Sharded, name: str, folder: str) -> tuple[dict[str, Tensor], Trained]:
    """Take the weights after each step, by a method of the accelerator; return the last ones."""
    with sharding_accelerator(rank, script) as accelerator:
        session = Session(accelerator, script, rank)
        seen: list[list[int]] = []
        weights: Any = {}
        with accelerator.join_uneven_inputs():
            for batch in session.loader:
                seen.append(batch[0].tolist())
                session.step(batch)
                if name == "get_state_dict":
                    weights = accelerator.get_state_dict(session.model)
                else:
                    accelerator.save_model(session.model, folder)
        weights = {name: value.clone() for name, value in weights.items()}
        return weights, replace(session.state(), seen=[seen])


@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 3, 4)], ids=str)
@pytest.mark.parametrize("version", [2, pytest.param(1, marks=CRASHES)])
def test_a_model_is_saved_in_the_tail(workers: Workers, version: int, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """By the main process, which has all weights, whether it has joined or not."""
    script = Sharded(lengths=lengths, version=version, epochs=1)
    results = workers.run(len(lengths), take_weights, possible(script), "save_model", str(tmp_path))
    check(script, [trained for _, trained in results])
    assert difference(load_file(tmp_path / "model.safetensors"), results[0][1].weights) == 0


@pytest.mark.parametrize("version", [2, pytest.param(1, marks=CRASHES)])
def test_a_state_dict_in_the_tail(workers: Workers, version: int) -> None:
    script = Sharded(lengths=(5, 2), version=version, epochs=1)
    results = workers.run(2, take_weights, possible(script), "get_state_dict", "")
    check(script, [trained for _, trained in results])
    assert difference(results[0][0], results[0][1].weights) == 0


def test_a_state_dict_that_nobody_would_get(workers: Workers) -> None:
    outcomes = workers.outcomes(2, take_weights, possible(Sharded(lengths=(2, 5), epochs=1)), "get_state_dict", "")
    text = "rank 0), which has finished. Call save_model or save_state"
    assert all(text in outcome.error for outcome in outcomes), outcomes


def take_another(rank: int, script: Sharded) -> None:
    with sharding_accelerator(rank, script) as accelerator:
        session = Session(accelerator, script, rank)
        with accelerator.join_uneven_inputs():
            for batch in session.loader:
                session.step(batch)
                accelerator.get_state_dict(torch.nn.ModuleList([session.model]))


def test_a_model_that_was_not_prepared(workers: Workers) -> None:
    outcomes = workers.outcomes(2, take_another, possible(Sharded(lengths=(5, 2), epochs=1)))
    assert all("ModuleList that accelerator.prepare did not return" in o.error for o in outcomes), outcomes
