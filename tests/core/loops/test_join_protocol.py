"""The semantics that PyTorch's own tests of its Join assert, as tests of ours."""

import gc
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.inside import entered_joins, installed_tap
from tests.support.joinables import LOG, MINE, AllReducer, MineError, state_of
from tests.support.workers import Workers, connect
from torch_join import EarlyTerminationError, Join, JoinError, JoinTypeError
from torch_join._compat import ddp as _compat
from torch_join._compat import operators as _compat_c10d


def add_up(
    rank: int, lengths: list[int], reducers: int, loop: str
) -> tuple[list[float], list[int], list[Any], list[str]]:
    LOG.clear()
    things = [AllReducer(name, times=1 + i) for i, name in enumerate("abc"[:reducers])]
    totals = [0.0] * reducers
    with Join(things, may_break=loop == "heartbeat", option=3) as join:
        for _ in range(lengths[rank]) if loop == "plain" else join.batches(list(range(lengths[rank]))):
            for i, thing in enumerate(things):
                totals[i] += thing()
    assert all(thing.options == {"option": 3} for thing in things)
    return totals, [thing.hooks for thing in things], [thing.last for thing in things], list(LOG)


@pytest.mark.covering(2)
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


def in_turns(rank: int, lengths: list[int], loop: str) -> tuple[str, list[dict[str, Any]], list[list[bool]]]:
    """Notify in another order than that of the list, one of them twice a step and one in every other step."""
    LOG.clear()
    a, b, c, silent = things = [AllReducer(name, times=1 + i) for i, name in enumerate("abcs")]
    options = {"option": 3, "divide_by_initial_world_size": False, "other": "x"}
    with Join(things, may_break=loop == "heartbeat", **options) as join:
        for step in range(lengths[rank]) if loop == "plain" else join.batches(list(range(lengths[rank]))):
            for thing in (a, c, b, c) if step % 2 else (a, c):
                thing()
    assert silent.hooks == 0
    return "".join(LOG), [thing.options for thing in things], [thing.last for thing in things]


@pytest.mark.parametrize("loop", ["plain", "sized", "heartbeat"])
@pytest.mark.parametrize("lengths", [[2, 5], [3, 0, 3]])
def test_main_hooks_follow_the_order_of_the_steps(workers: Workers, lengths: list[int], loop: str) -> None:
    longest = max(lengths)
    for rank, (log, options, last) in enumerate(workers.run(len(lengths), in_turns, lengths, loop)):
        assert log == "".join("acbc" if step % 2 else "ac" for step in range(lengths[rank], longest))
        assert options == [{"option": 3, "divide_by_initial_world_size": False, "other": "x"}] * 4
        assert last == [[lengths[rank] == longest]] * 4


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


def in_the_process() -> list[Any]:
    """What a `Join` could leave behind anywhere else."""
    return [
        any(map(_compat_c10d.has_kernel, _compat_c10d.operators())),
        installed_tap() is None,
        len(entered_joins),
        dict(optimizer_hooks()),
        list(warnings.filters),
        sys.modules.keys() & {"torch.distributed.fsdp"},
        threading.active_count(),
    ]


def optimizer_hooks() -> dict[int, Any]:
    handle = register_optimizer_step_post_hook(lambda *_: None)
    handle.remove()
    return handle.hooks_dict_ref() or {}


WHERE = ["nowhere", "active", "joined", "everywhere", "hook", "after"]


def leave_nothing(rank: int, where: str, loop: str) -> list[Any]:
    """Rank 0 joins after two steps, rank 1 after four; an exception passes, or none."""
    warnings.simplefilter("ignore", ResourceWarning)  # a filter of the user's
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    scheduler, thing = torch.optim.lr_scheduler.StepLR(optimizer, 1), AllReducer(breaks=where == "hook" and rank == 0)
    things: list[Any] = [model, optimizer, scheduler, thing]
    gc.collect()  # the links of a process group that has been destroyed
    connect()  # what this starts, ends with the process group
    before = [state_of(model), thing._join_config, optimizer._join_config, in_the_process()]
    raised: Any = None
    try:
        with Join(things, may_break=loop == "heartbeat") as join:
            for step in range(2 + 2 * rank) if loop == "plain" else join.batches(list(range(2 + 2 * rank))):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                thing()
                optimizer.step()
                scheduler.step()
                if (where, step, rank) == ("active", 2, 1) or (where, step) == ("everywhere", 1):
                    raise MINE
                if (where, step, rank) == ("joined", 1, 0):  # it would have joined
                    raise MINE
            if where == "after" and rank == 1:
                raise MINE
    except (MineError, JoinError) as error:
        raised = error
    after = [state_of(model), thing._join_config, optimizer._join_config, in_the_process()]
    disabled = not any(one._join_config.enable for one in (model, optimizer, thing))
    text = "" if raised is None else f"{type(raised).__name__}: {raised}"
    same = raised is MINE and raised.args == ("mine", 3) and raised.__cause__ is None
    if raised is not None:  # collectives are broken: end together without
        store: Any = dist.PrefixStore("end", _compat.group_store(dist.group.WORLD))
        store.set(str(rank), "")
        store.wait(["0", "1"], timedelta(seconds=20))
        dist.destroy_process_group()
    handles = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return [[i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y], disabled, same, handles, text]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("where", "loop"),
    [
        (where, loop)
        for where in WHERE
        for loop in ("plain", "sized", "heartbeat")
        if where != "hook" or loop == "sized"
    ],
)
def test_nothing_is_left_behind_and_an_exception_passes_unchanged(workers: Workers, where: str, loop: str) -> None:
    # The timeout is how long a collective waits for a rank that raised.
    results = workers.run(2, leave_nothing, where, loop, timeout=2.0)
    for left, disabled, _, handles, _ in results:
        assert left == []
        assert disabled
        assert handles == 0
    same, texts = [r[2] for r in results], [r[4] for r in results]
    if where == "nowhere":
        assert texts == ["", ""]
    elif where == "everywhere":
        assert same == [True, True]
    else:
        raises = 1 if where in ("active", "after") else 0
        assert same[raises]
        peer = "PeerFailedError: Rank {0} failed, so rank {1} cannot continue. Rank {0}: MineError: ('mine', 3)"
        if where != "after" or loop == "plain":
            assert texts[1 - raises] == peer.format(raises, 1 - raises)


def after_torch(rank: int, how: str) -> list[Any]:
    """torch's Join leaves its configuration enabled."""
    torch.manual_seed(0)
    model, thing = DistributedDataParallel(nn.Linear(1, 1).double()), AllReducer()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with TorchJoin([model, optimizer, thing], enable=how != "disabled"):
        pass
    enabled = [one._join_config.enable for one in (model, optimizer, thing)]
    total = 0.0
    try:
        with Join([model, optimizer, thing], weighting="active") as join:
            inside = [one._join_config.enable for one in (model, optimizer, thing)]
            for _ in join.batches(list(range(2 + 2 * rank))):
                optimizer.zero_grad()
                model(torch.full((1, 1), 2.0, dtype=torch.float64)).sum().backward()
                total += thing()
                optimizer.step()
            if how == "raises":
                raise MINE
    except MineError:
        pass
    outside = [one._join_config.enable for one in (model, optimizer, thing)]
    if rank == 0:  # under an enabled configuration it would wait for the other
        model(torch.ones(1, 1, dtype=torch.float64))
    return [enabled, inside, outside, total, [p.item() for p in model.parameters()]]


@pytest.mark.parametrize("how", ["enabled", "disabled", "raises"])
def test_after_torchs_join_nothing_is_enabled(workers: Workers, how: str) -> None:
    off = [False] * 3
    first, second = workers.run(2, after_torch, how)
    assert first[:3] == second[:3] == [[how != "disabled"] * 3, off, off]
    assert (first[3], second[3]) == (4.0, 6.0)
    assert first[4] == second[4]


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
        assert empty.startswith("The join context manager requires at least one joinable: pass")
        assert groups == "Using join context manager with multiple process groups"
        assert "not int" in kind
