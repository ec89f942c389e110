"""What `Join` refuses, what it does in a world of one or of none, and several of it at once."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from tests.support.joinables import AllReducer
from tests.support.workers import Workers
from torch_join import Join, JoinableOptimizer, JoinableState, JoinError, JoinTypeError, UnsupportedError

KINDS: dict[str, Callable[[], Any]] = {
    "DataParallel": lambda: nn.DataParallel(nn.Linear(4, 4)),
    "held DDP": lambda: nn.ModuleList([DistributedDataParallel(nn.Linear(4, 4))]),
    "engine": lambda: Engine(nn.Linear(4, 4)),
    "its optimizer alone": lambda: type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.x"})(),
    "its inner model": lambda: partitioned(),
    "compiled DDP": lambda: torch.compile(DistributedDataParallel(nn.Linear(4, 4)), backend="eager"),
}


class Engine(nn.Sequential):
    """As DeepSpeed's."""

    def zero_optimization_stage(self) -> int:
        return 2


def partitioned() -> nn.Module:
    """As the model in an engine of stage 3."""
    net = nn.Linear(4, 4)
    net.weight.ds_id = 0  # type: ignore[assignment]
    return net


def refuse(rank: int, kind: str) -> str:
    thing = KINDS[kind]()
    Join([thing], enable=False)
    with pytest.raises(UnsupportedError) as error:
        Join([DistributedDataParallel(nn.Linear(1, 1)), thing])
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("DataParallel", "DataParallel uses the devices of a single process .*Use DistributedDataParallel"),
        ("engine", "Engine is sharded by ZeRO stage 2, .* pass the engine to Join"),
        ("its optimizer alone", "DeepSpeedZeroOptimizer is sharded by deepspeed"),
        ("its inner model", "Linear is sharded by ZeRO stage 3"),
        ("held DDP", "ModuleList holds a DistributedDataParallel .*Pass the DDP model itself"),
        ("compiled DDP", "OptimizedModule holds a DistributedDataParallel"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused_on_all_ranks(workers: Workers, kind: str, says: str) -> None:
    assert all(re.search(says, text) for text in workers.run(2, refuse, kind))


def test_fsdp_is_not_imported() -> None:
    code = (
        "import sys, torch, torch_join\n"
        "with torch_join.Join([torch.nn.Linear(1, 1)]): pass\n"
        "print([m for m in ('torch.distributed.fsdp', 'torch.distributed.tensor') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def averages(rank: int) -> list[Any]:
    """A module that is no DDP model is handed over and nothing else: its own average, for example."""
    model = DistributedDataParallel(nn.Linear(1, 1).double())
    ema = torch.optim.swa_utils.AveragedModel(model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Join([model, optimizer, ema]) as join:
        for _ in join.batches(range(2 + 2 * rank)):
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.step()
            ema.update_parameters(model.module)
    return [int(ema.n_averaged), [p.tolist() for p in ema.parameters()]]


def test_other_modules_are_handed_over(workers: Workers) -> None:
    first, second = workers.run(2, averages)
    assert first == second
    assert first[0] == 4


# ---------------------------------------------------------------- a world of one, or of none


def pieces(model: nn.Module) -> tuple[list[Any], Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)], optimizer


def run(model: Any, enable: bool, loop: str, extra: Any = ()) -> list[Any]:
    things, optimizer = pieces(model)
    seen: list[Any] = []
    listed = [*([model] if isinstance(model, DistributedDataParallel) else []), *things, *extra]
    join = Join(listed, enable=enable, throw_on_early_termination=True, may_break=loop == "heartbeat")
    with join as entered:
        assert entered is join
        for batch in [1.0, 2.0, 3.0] if loop == "plain" else join.batches([1.0, 2.0, 3.0]):
            optimizer.zero_grad()
            model(torch.full((1, 1), batch)).sum().backward()
            things[0].step()
            things[1].step()
            seen.append((join.joined, join.active_ranks, join.step))
    return [seen, join.step, join.joined, [p.tolist() for p in model.parameters()]]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1, 1)


@pytest.mark.parametrize("loop", ["sized", "heartbeat", "plain"])
@pytest.mark.parametrize("enable", [True, False])
def test_without_a_process_group(enable: bool, loop: str) -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="at least one joinable"):
        Join([], enable=enable)
    seen, steps, joined, _ = run(linear(), enable, loop)
    assert not joined
    assert [s[:2] for s in seen] == [(False, (0,))] * 3
    if loop != "plain":
        assert [s[2] for s in seen] == [0, 1, 2]
        assert steps == 3


def world(rank: int, enable: bool, loop: str) -> list[Any]:
    return run(DistributedDataParallel(linear()), enable, loop, [AllReducer()])


@pytest.mark.parametrize("loop", ["sized", "heartbeat", "plain"])
def test_a_world_of_one(workers: Workers, loop: str) -> None:
    (on,), (off,) = workers.run(1, world, True, loop), workers.run(1, world, False, loop)
    assert on[3] == off[3] == run(linear(), False, loop)[3]
    assert [s[:2] for s in on[0]] == [s[:2] for s in off[0]] == [(False, (0,))] * 3
    if loop != "plain":
        assert on[:3] == off[:3]


@pytest.mark.parametrize("loop", ["sized", "plain"])
def test_a_disabled_join_of_two(workers: Workers, loop: str) -> None:
    first, second = workers.run(2, world, False, loop)
    assert first == second
    assert [s[:2] for s in first[0]] == [(False, (0, 1))] * 3


# ---------------------------------------------------------------- several


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(1, 1)).sum()
    loss.backward()
    return loss


def again(rank: int, loop: str) -> list[Any]:
    model = DistributedDataParallel(linear())
    thing = AllReducer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    join, steps = Join([model, optimizer, thing]), []
    for lengths in ((2, 4), (3, 3), (5, 1)):
        with join:
            steps.append(join.step)
            for _ in range(lengths[rank]) if loop == "plain" else join.batches(range(lengths[rank])):
                optimizer.zero_grad()
                step(model)
                thing()
                optimizer.step()
        steps.append(join.step)
    return [steps, thing.last, [p.tolist() for p in model.parameters()], optimizer.state_dict()["state"][0]["step"]]


@pytest.mark.parametrize("loop", ["sized", "plain"])
def test_a_join_can_be_entered_again(workers: Workers, loop: str) -> None:
    first, second = workers.run(2, again, loop)
    assert (first[0], second[0]) == ([0, 2, 0, 3, 0, 5], [0, 4, 0, 3, 0, 1])
    assert (first[1], second[1]) == ([False, True, True], [True, True, False])
    assert first[2:] == second[2:]
    assert float(first[3]) == 12


def nested(rank: int, how: str) -> str:
    model, other = DistributedDataParallel(linear()), DistributedDataParallel(linear())
    outer, count = Join([model]), 0
    try:
        with outer as join:
            if how == "itself":
                outer.__enter__()
            if how == "shared":
                Join([other, model]).__enter__()
            if how == "after":
                with Join([other]) as inner:
                    for _ in inner.batches(range(3 - rank)):
                        step(other)
                        count += 1
            for _ in range(4 if how == "plain" else 0):
                step(model)
                count += 1
            if how == "plain":
                with Join([other], may_break=True) as inner:
                    for _ in inner.batches(range(3 - rank)):
                        step(other)
                        count += 1
            for _ in join.batches(range(2 + rank)):
                step(model)
                count += 1
                if how == "inside" and join.step == 1:
                    Join([other]).__enter__()
                if how == "disabled":
                    with Join([other], enable=False):
                        pass
    except JoinError as error:
        return str(error)
    with Join([model, other]):  # nothing is left behind
        pass
    return str(count)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("itself", "This Join is already active"),
        ("shared", "DistributedDataParallel was passed to two nested Joins"),
        ("inside", "entered inside another Join's loop"),
    ],
)
def test_joins_that_would_wait_for_each_other_are_refused(workers: Workers, how: str, says: str) -> None:
    assert all(says in text for text in workers.run(2, nested, how))


def test_joins_next_to_each_other_are_fine(workers: Workers) -> None:
    assert workers.run(2, nested, "after") == ["5", "5"]
    assert workers.run(2, nested, "plain") == ["9", "9"]
    assert workers.run(2, nested, "disabled") == ["2", "3"]


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(JoinTypeError, match="not object"):
        Join([object()])


def take_part_in_a_group(rank: int) -> list[int] | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    given = [JoinableOptimizer(optimizer, group), JoinableState(StepLR(optimizer, 1))]
    with Join(given) as join:
        return [len(join.active_ranks) for _ in join.batches([0] * rank)]


def test_a_group_that_a_joinable_was_given(workers: Workers) -> None:
    assert workers.run(3, take_part_in_a_group) == [None, [2], [2, 1]]
