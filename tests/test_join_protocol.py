"""The semantics that PyTorch's own tests of its Join assert, as tests of ours."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from tests.workers import Workers
from torch_join import EarlyTerminationError, Join, JoinTypeError

LOG: list[str] = []


class AllReducer(Joinable):
    """All-reduces a one each step, in `times` pieces."""

    def __init__(self, name: str = "a", times: int = 1, group: Any = None) -> None:
        super().__init__()
        self.name, self.times, self.group = name, times, group or dist.group.WORLD
        self.options: dict[str, Any] = {}
        self.last: list[bool] = []
        self.hooks = 0

    def __call__(self) -> float:
        TorchJoin.notify_join_context(self)
        total = 0.0
        for _ in range(self.times):
            one = torch.ones(1)
            dist.all_reduce(one, group=self.group)
            total = float(one)
        return total

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.options = kwargs
        return AllReducerHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class AllReducerHook(JoinHook):
    def __init__(self, reducer: AllReducer) -> None:
        self.reducer = reducer

    def main_hook(self) -> None:
        self.reducer.hooks += 1
        LOG.append(self.reducer.name)
        for _ in range(self.reducer.times):
            dist.all_reduce(torch.zeros(1), group=self.reducer.group)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.reducer.last.append(is_last_joiner)


def add_up(
    rank: int, lengths: list[int], reducers: int, loop: str
) -> tuple[list[float], list[int], list[Any], list[str]]:
    LOG.clear()
    things = [AllReducer(name, times=1 + i) for i, name in enumerate("abc"[:reducers])]
    totals = [0.0] * reducers
    with Join(things, heartbeat=loop == "heartbeat", option=3) as join:
        for _ in range(lengths[rank]) if loop == "plain" else join.batches(list(range(lengths[rank]))):
            for i, thing in enumerate(things):
                totals[i] += thing()
    assert all(thing.options == {"option": 3} for thing in things)
    return totals, [thing.hooks for thing in things], [thing.last for thing in things], list(LOG)


@pytest.mark.parametrize("loop", ["plain", "sized", "heartbeat"])
@pytest.mark.parametrize("reducers", [1, 3])
@pytest.mark.parametrize("lengths", [[2, 5], [5, 0, 3], [3, 3]])
def test_totals_count_the_active_ranks(workers: Workers, lengths: list[int], reducers: int, loop: str) -> None:
    longest = max(lengths)
    for rank, (totals, hooks, last, log) in enumerate(workers.run(len(lengths), add_up, lengths, reducers, loop)):
        expected = sum(sum(step < length for length in lengths) for step in range(lengths[rank]))
        assert totals == [float(expected)] * reducers
        assert hooks == [longest - lengths[rank]] * reducers
        assert last == [[lengths[rank] == longest]] * reducers
        assert "".join(log) == "abc"[:reducers] * (longest - lengths[rank])


def throw(rank: int, lengths: list[int], loop: str) -> tuple[str, int]:
    thing, steps = AllReducer(), 0
    try:
        with Join([thing], throw_on_early_termination=True) as join:
            for _ in range(lengths[rank]) if loop == "plain" else join.batches(list(range(lengths[rank]))):
                thing()
                steps += 1
    except EarlyTerminationError as error:
        return str(error), steps
    return "", steps


@pytest.mark.parametrize("loop", ["plain", "sized"])
def test_throw_on_early_termination(workers: Workers, loop: str) -> None:
    for rank, (text, steps) in enumerate(workers.run(3, throw, [2, 4, 2], loop)):
        assert steps == 2
        if rank == 1:
            assert text == "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        else:
            assert text == f"Rank {rank} exhausted all inputs."
    assert workers.run(2, throw, [3, 3], loop) == [("", 3)] * 2


def disabled(rank: int) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    before = state_of(model)
    thing = AllReducer()
    with Join([model, thing], enable=False) as join:
        inside = state_of(model) == before
        total = sum(thing() for _ in join.batches([1, 2, 3]))
    return [inside, total, thing.last]


def test_enable_false_behaves_as_if_absent(workers: Workers) -> None:
    assert workers.run(2, disabled) == [[True, 6.0, []]] * 2


def state_of(model: DistributedDataParallel) -> list[Any]:
    return [
        dict(model._forward_pre_hooks),
        dict(model.module._forward_pre_hooks),
        model._join_config,
        model.module,
        set(vars(model)),
    ]


def leave_nothing(rank: int, fails: bool) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer, thing = torch.optim.SGD(model.parameters(), lr=0.1), AllReducer()
    before, filters = (state_of(model), thing._join_config, set(vars(optimizer))), list(warnings.filters)
    try:
        with Join([model, optimizer, thing]) as join:
            for step in join.batches(list(range(2 + rank))):
                model(torch.ones(1, 1)).sum().backward()
                thing()
                optimizer.step()
                if fails and step == 1:
                    raise KeyError("mine")
    except KeyError:
        pass
    after = (state_of(model), thing._join_config, set(vars(optimizer)))
    one = torch.ones(1)
    dist.all_reduce(one)
    return [before == after, filters == list(warnings.filters), float(one), model._join_config.enable]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(workers: Workers, fails: bool) -> None:
    assert workers.run(2, leave_nothing, fails) == [[True, True, 2.0, False]] * 2


def refuse(rank: int) -> list[str]:
    texts = []
    group = dist.new_group([0, 1])
    for things in ([], [AllReducer(), AllReducer(group=group)], [nn.Linear(1, 1), 3]):
        with pytest.raises((ValueError, JoinTypeError)) as error:
            Join(things)
        texts.append(str(error.value))
    return texts


def test_bad_lists_are_refused(workers: Workers) -> None:
    for empty, groups, kind in workers.run(2, refuse):
        assert empty == "The join context manager requires at least one joinable"
        assert groups == "Using join context manager with multiple process groups"
        assert "not int" in kind


def collect(rank: int, lengths: list[int]) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(1, 1).double())
    seen: list[Any] = []
    with Join([model]) as join:
        for step in join.batches(list(range(lengths[rank]))):
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            total = torch.tensor([float(rank + step)])
            dist.all_reduce(total)
            most = torch.tensor([rank], dtype=torch.int64)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            objects: list[Any] = [None] * len(lengths)
            dist.all_gather_object(objects, {"rank": rank})
            dist.barrier()
            seen.append((float(total), int(most), [o for o in objects if o is not None], join.active_ranks))
    return seen


@pytest.mark.parametrize("lengths", [[1, 3], [3, 0, 2]])
def test_collectives_in_the_step_are_mirrored(workers: Workers, lengths: list[int]) -> None:
    for rank, seen in enumerate(workers.run(len(lengths), collect, lengths)):
        assert len(seen) == lengths[rank]
        for step, (total, most, objects, active) in enumerate(seen):
            ranks = [r for r, length in enumerate(lengths) if step < length]
            assert active == tuple(ranks)
            assert total == sum(r + step for r in ranks)
            assert most == max(ranks)
            assert objects == [{"rank": r} for r in ranks]


def evaluate_after(rank: int, lengths: list[int]) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(1, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = []
    with Join([model, optimizer]) as join:
        for _ in range(2):
            for _ in join.batches(list(range(lengths[rank]))):
                optimizer.zero_grad()
                model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
                optimizer.step()
            with torch.no_grad():
                for _ in join.batches(list(range(lengths[-1 - rank]))):
                    model(torch.ones(1, 1, dtype=torch.float64))
            total = torch.ones(1)
            dist.all_reduce(total)
            counted.append(float(total))
    return [counted, [p.tolist() for p in model.parameters()]]


def test_loops_and_collectives_between_them_fit_in_one_context(workers: Workers) -> None:
    first, second = workers.run(2, evaluate_after, [1, 4])
    assert first == second
    assert first[0] == [2.0, 2.0]
