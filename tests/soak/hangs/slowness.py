"""What takes its time, and is right: ranks that are busy, and collectives for which others wait."""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from tests.soak.hangs.script import BadSampleError, Script

CALLS = 2100  # more collectives than torch's flight recorder keeps


def busy(seconds: float, how: str) -> None:
    """Do something for so long."""
    end = time.monotonic() + seconds
    junk: list[object] = []
    while (left := end - time.monotonic()) > 0:
        if how == "sleep":
            time.sleep(left)
        elif how == "held":  # no other thread of this process runs meanwhile
            sum(range(int(40e6 * min(left, 20.0))))
        elif how == "python":
            sum(number * number for number in range(1000))
        elif how == "garbage":
            for _ in range(20000):
                pair: list[object] = []
                pair.append(pair)
                junk.append(pair)
            junk = junk[-1_000_000:]
            gc.collect()
        elif how == "compile":
            compile("x = " + "+".join(["1"] * 2000), "generated", "exec")
        elif how == "matmul":
            torch.randn(300, 300) @ torch.randn(300, 300)


def is_busy(it: Script) -> None:
    busy(it.case.seconds, it.case.how)


def busy_at_its_batch(it: Script) -> None:
    if it.hits:
        is_busy(it)


def busy_in_a_hook(it: Script) -> None:
    def in_hook(gradient: Tensor) -> None:
        is_busy(it)

    if it.hits:
        it.loss_tensor.register_hook(in_hook)


def busy_outside(it: Script) -> None:
    if it.rank == it.case.who:
        is_busy(it)


# ------------------------------------------------- what ranks do together, for which one is late


def _is_late(it: Script) -> None:
    if it.rank == it.case.who:
        is_busy(it)


def _check(found: list[Any], it: Script) -> None:
    """Compare what was gathered: of a rank that has no batch a zero."""
    has = [it.step < length for length in it.case.lengths] if it.in_loop else [True] * it.world_size
    assert found == [rank * active for rank, active in enumerate(has)]


def unequal_all_to_all(it: Script) -> None:
    _is_late(it)
    sends = [1 + (it.rank + other) % 3 for other in range(it.world_size)]
    found = torch.empty(sum(sends))
    dist.all_to_all_single(found, torch.full((sum(sends),), float(it.rank)), sends, sends)
    assert found.tolist() == [float(other) for other, number in enumerate(sends) for _ in range(number)]


def lists(it: Script) -> None:
    _is_late(it)
    found = [torch.empty(2) for _ in range(it.world_size)]
    dist.all_to_all(found, [torch.full((2,), float(it.rank)) for _ in found])  # of unequal ones gloo knows nothing
    _check([one[0].item() for one in found], it)


def gathers(it: Script) -> None:
    _is_late(it)
    root = it.case.who
    found = [torch.empty(2) for _ in range(it.world_size)] if it.rank == root else None
    dist.gather(torch.full((2,), float(it.rank)), found, dst=root)
    if found is not None:
        _check([one[0].item() for one in found], it)


def scatters(it: Script) -> None:
    _is_late(it)
    parts = [torch.full((2,), float(rank)) for rank in range(it.world_size)] if it.rank == it.case.who else None
    found = torch.empty(2)
    dist.scatter(found, parts, src=it.case.who)
    assert found[0].item() == it.rank


def broadcasts_objects(it: Script) -> None:
    _is_late(it)
    found = [it.rank]
    dist.broadcast_object_list(found, src=it.case.who)
    assert found == [it.case.who]


def gathers_objects(it: Script) -> None:
    _is_late(it)
    found: list[object] = [None] * it.world_size
    dist.all_gather_object(found, {"rank": it.rank, "much": "x" * 1000 * it.rank})
    _check([each["rank"] if each else 0 for each in found], it)  # type: ignore[index]


def sends(it: Script) -> None:
    """One rank is late to send to another; the rest go on."""
    who, other = it.case.who, (it.case.who + 1) % it.world_size
    if it.rank == who:
        is_busy(it)
        dist.send(torch.ones(2), other)
    elif it.rank == other:
        dist.recv(torch.empty(2), who)


def sends_before(it: Script) -> None:
    """Several messages between two ranks, so that the numbers of their calls are others; then one is late."""
    who, other = it.case.who, (it.case.who + 1) % it.world_size
    for number in range(7):
        if it.rank == who:
            dist.send(torch.full((2,), float(number)), other)
        elif it.rank == other:
            dist.recv(torch.empty(2), who)
    _is_late(it)


def sends_and_waits(it: Script) -> None:
    """One is sent early, and waited for late."""
    who, other = it.case.who, (it.case.who + 1) % it.world_size
    if it.rank == who:
        work = dist.isend(torch.ones(200_000), other)
        is_busy(it)
        work.wait()  # type: ignore[union-attr]
    elif it.rank == other:
        work = dist.irecv(torch.empty(200_000), who)
        work.wait()  # type: ignore[union-attr]


def sends_both_ways(it: Script) -> None:
    who, other = it.case.who, (it.case.who + 1) % it.world_size
    if it.rank not in (who, other):
        return
    _is_late(it)
    peer = other if it.rank == who else who
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.empty(2), peer)]
    )
    for work in works:
        work.wait()


def makes_group(it: Script) -> None:
    pair = sorted({it.case.who, (it.case.who + 1) % it.world_size})
    it.tools["pair"], it.tools["group"] = pair, dist.new_group(pair)


def sums_in_group(it: Script) -> None:
    if it.rank in it.tools["pair"]:
        _is_late(it)
        dist.all_reduce(torch.ones(2), group=it.tools["group"])


def sums_more_in_group(it: Script) -> None:
    """A group has had more collectives than others; then a member is late."""
    if it.rank in it.tools["pair"]:
        for _ in range(9):
            dist.all_reduce(torch.ones(2), group=it.tools["group"])
        _is_late(it)


def begins_sum(it: Script) -> None:
    it.tools["sum"] = torch.ones(2)
    it.tools["work"] = dist.all_reduce(it.tools["sum"], async_op=True)


def ends_sum(it: Script) -> None:
    """Wait for a sum that began before; one is late."""
    if "work" in it.tools:
        _is_late(it)
        it.tools.pop("work").wait()
        assert it.tools["sum"][0].item() == it.world_size


def swallows(it: Script) -> None:
    with suppress(BadSampleError):
        _is_late(it)
        raise BadSampleError("bad sample")


def sums_often(it: Script) -> None:
    one = torch.ones(1)
    for _ in range(CALLS):
        dist.all_reduce(one)
    _is_late(it)


def sums_late(it: Script) -> None:
    _is_late(it)
    dist.all_reduce(torch.ones(1))


def waits_late(it: Script) -> None:
    _is_late(it)
    dist.barrier()


def reduces(it: Script) -> None:
    _is_late(it)
    dist.reduce(torch.ones(2), it.case.who)


def gathers_whole(it: Script) -> None:
    _is_late(it)
    found = torch.empty(2 * it.world_size)
    dist._all_gather_base(found, torch.full((2,), float(it.rank)))  # type: ignore[attr-defined]
    _check(found[::2].tolist(), it)


def gathers_lists(it: Script) -> None:
    _is_late(it)
    found = [torch.empty(2) for _ in range(it.world_size)]
    dist.all_gather(found, torch.full((2,), float(it.rank)))
    _check([one[0].item() for one in found], it)


def scatters_sums(it: Script) -> None:
    _is_late(it)
    dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(it.world_size)])


def sums_functionally(it: Script) -> None:
    _is_late(it)
    functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))


Action = Callable[[Script], None]
# What all ranks call: in one place of a step, or before or after the loop; and what they call before.
EXTRAS: dict[str, tuple[Action, Action | None]] = {
    **{each.__name__: (each, None) for each in (unequal_all_to_all, lists, gathers, scatters, sums_late)},
    **{each.__name__: (each, None) for each in (broadcasts_objects, gathers_objects, swallows, sums_often)},
    **{each.__name__: (each, None) for each in (waits_late, reduces, gathers_whole, gathers_lists)},
    **{each.__name__: (each, None) for each in (scatters_sums, sums_functionally)},
    **{each.__name__: (each, None) for each in (sends, sends_before, sends_and_waits, sends_both_ways)},
    "sums_in_group": (sums_in_group, makes_group),
    "sums_more_in_group": (sums_more_in_group, makes_group),
    "ends_sum": (ends_sum, None),
}
# Those of which a rank without a batch can be one.
MIRRORED = (
    "lists",
    "gathers",
    "scatters",
    "sums_late",
    "broadcasts_objects",
    "gathers_objects",
    "waits_late",
    "reduces",
)
MIRRORED += ("gathers_whole", "gathers_lists", "scatters_sums", "sums_functionally")
OUTSIDE = ("outside", "before", "after", "ended")


def slow_down(it: Script) -> None:
    """Have a script do what its case says."""
    case = it.case
    for name in case.what:
        action, first = EXTRAS[name]
        if first is not None:
            it.add("outside", first)
        if name == "ends_sum":
            if case.where in OUTSIDE:
                it.add("outside", begins_sum)
            else:
                it.add("end", _at_step(begins_sum, case.at))
                action = _at_step(action, case.at + 1)
                it.add(case.where, action)
                continue
        it.add(case.where, action if case.where in OUTSIDE else _at_step(action, case.at))
    if case.what:
        return
    if case.where == "hook":
        it.add("between", busy_in_a_hook)
    elif case.where == "loader":
        it.add("loader", is_busy)
    else:
        it.add(case.where, busy_outside if case.where in OUTSIDE else busy_at_its_batch)


def _at_step(action: Action, step: int) -> Action:
    def at_step(it: Script) -> None:
        if (it.epoch, it.step) == (0, step):
            action(it)

    return at_step
