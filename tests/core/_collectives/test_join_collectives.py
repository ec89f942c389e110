"""Every collective of the table in a real loop: a model is trained, and some ranks have joined."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import zero_redundancy_optimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import local_map
from torch.nn.parallel import DistributedDataParallel

from tests.core._collectives.forms import supported
from tests.core._collectives.plays import WORLDS, plays, train
from tests.emulator import place
from tests.support.collectives import DTYPES, REDUCING, WITHOUT_TENSORS, averages, operations
from tests.support.inside import REFUSALS
from tests.support.modes import Mode
from tests.support.workers import Workers
from torch_join import Join, UnsupportedError
from torch_join._collectives.neutral import REDUCTIONS


@pytest.mark.parametrize("lengths", WORLDS, ids=str)
def test_every_collective_beside_a_model(workers: Workers, lengths: tuple[int, ...]) -> None:
    found = workers.run(len(lengths), train, lengths, True)
    plain = workers.run(len(lengths), train, lengths, False)
    assert [state for _, state in found] == [state for _, state in plain]
    assert all(state == found[0][1] for _, state in found)
    for (count, _), length in zip(found, lengths, strict=True):
        least = 300 if workers.device == "cpu" and averages() else 150  # NCCL and an older gloo have fewer
        assert count > least if length > min(lengths) else count == 0


def under_a_default_device(rank: int, lengths: tuple[int, ...]) -> int:
    """Train where every function of torch's passes through a mode."""
    torch.set_default_device(place())
    try:
        return train(rank, lengths, True)[0]
    finally:
        torch.set_default_device(None)


def test_so_it_is_under_a_default_device(workers: Workers) -> None:
    lengths = (3, 0, 2)
    for length, count in zip(lengths, workers.run(len(lengths), under_a_default_device, lengths), strict=True):
        assert count > 100 if length > min(lengths) else count == 0


def test_the_plays_are_all_there_is() -> None:
    for world_size in (2, 3):
        mine = list(plays(world_size))
        kinds = {(p.label.split()[0], p.options.get("async_op"), p.default) for p in mine if p.options}
        assert kinds == set(itertools.product(operations(), (True, False), (True, False)))
        kinds = {(p.label.split()[0], p.options["reduction"], p.options["dtype"]) for p in mine if p.options}
        for name in set(operations()) - set(WITHOUT_TENSORS):
            for reduction in [r.op for r in REDUCTIONS] if name in REDUCING else ["SUM"]:
                for dtype in DTYPES:
                    assert ((name, reduction, dtype) in kinds) == supported(name, reduction, dtype)
        assert {(p.mode, p.default) for p in mine} == set(itertools.product(range(3), (True, False)))


# ---------------------------------------------------------------- what cannot be mirrored


def issue_refused(group: Any) -> dict[str, list[Callable[[], Any]]]:
    """What this rank issues while rank 0 has joined, by the refusal that it is to get."""
    one = torch.ones(2)
    peer = [dist.P2POp(dist.isend, one, 0, group), dist.P2POp(dist.irecv, one, 0, group)]
    uneven = [torch.ones(2), torch.ones(3)]
    factor = dist._make_nccl_premul_sum(2.0)
    integers, average = torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG
    point_to_point, joined_root, unequal, integer_average, premul_sum, *others = (refusal.what for refusal in REFUSALS)
    fsdp, dtensor, zero, model_averaging, checkpoint = others
    return {
        point_to_point: [
            lambda: dist.send(one, 0, group),
            lambda: dist.recv(one, 0, group),
            lambda: dist.recv(one, group=group),
            lambda: dist.isend(one, 0, group),
            lambda: dist.irecv(one, 0, group),
            lambda: dist.batch_isend_irecv(peer),
            lambda: dist.send_object_list([1], 0, group),
            lambda: dist.recv_object_list([1], 0, group),
        ],
        joined_root: [
            lambda: dist.broadcast(one, 0, group),
            lambda: dist.scatter(one, None, 0, group),
            lambda: dist.broadcast_object_list([1], 0, group),
            lambda: dist.scatter_object_list([None], None, 0, group),
            lambda: functional.broadcast(one, 0, group or dist.group.WORLD),
        ],
        unequal: [
            lambda: dist.all_to_all(uneven, uneven, group),
            lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5), [2, 3], [2, 3], group),
            lambda: dist.all_to_all_single(torch.ones(6), torch.ones(4), [3, 3], [2, 2], group),
            lambda: dist.all_to_all_single(torch.ones(6), torch.ones(4), [3, 3], None, group),
            lambda: functional.permute_tensor(one, [1, 0], group or dist.group.WORLD),
        ],
        integer_average: [
            lambda: dist.all_reduce(integers, average, group),
            lambda: dist.reduce(integers, 1, average, group),
            lambda: dist.reduce_scatter(integers, [integers, integers], average, group),
        ],
        premul_sum: [lambda: dist.all_reduce(one, factor, group)],
        fsdp: [lambda: issue_from("fsdp", one, group)],
        dtensor: [lambda: issue_from("tensor", one, group)],
        zero: [lambda: issue_from("x", one, group, "deepspeed.runtime.zero.x")],
        model_averaging: [lambda: average_parameters(iter([nn.Parameter(one)]), group)],
        checkpoint: [
            lambda: dcp.save({"one": one}, checkpoint_id="nowhere", process_group=group),
            lambda: zero_redundancy_optimizer._broadcast_object(1, 1, group=group),
        ],
    }


def issue_from(folder: str, tensor: Tensor, group: Any, module: str = "x") -> None:
    """Issue a collective from where FSDP, `DTensor` or DeepSpeed does; `tests/core/sharded` has real ones."""
    scope = {"dist": dist, "tensor": tensor, "group": group, "__name__": module}
    exec(compile("dist.all_reduce(tensor, group=group)", os.path.join(dist.__path__[0], folder, "x.py"), "exec"), scope)


def refused(rank: int) -> tuple[dict[str, list[str]], list[float], list[Any]]:
    """Rank 0 joins, rank 1 tries everything that it must not, and training goes on."""
    named = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    messages: dict[str, list[str]] = {}
    sums = []
    with Join([model, optimizer]) as join:
        for _ in join.batches(list(range(1 + 2 * rank))):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2, dtype=torch.float64)).sum()
            for group in (None, named) if join.active_ranks == (1,) else ():
                for what, calls in issue_refused(group).items():
                    for call in calls:
                        with pytest.raises(UnsupportedError) as error:
                            call()
                        messages.setdefault(what, []).append(str(error.value))
            loss.backward()
            optimizer.step()
            one = torch.ones(1)
            dist.all_reduce(one)
            sums.append(float(one))
    return messages, sums, [p.tolist() for p in model.parameters()]


def test_what_cannot_be_mirrored_raises_and_mispairs_nothing(workers: Workers) -> None:
    (none, _, joined), (messages, sums, active) = workers.run(2, refused, store="tcp")
    assert not none
    assert sums == [2.0, 1.0, 1.0]
    assert joined == active
    assert set(messages) == {refusal.what for refusal in REFUSALS}
    # In two steps, each time in two groups.
    assert {len(found) for found in messages.values()} == {4 * number for number in (8, 5, 3, 2, 1)}
    names = ["send", "recv", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"]
    assert [message.split()[0] for message in messages[REFUSALS[0].what]] == 4 * names
    assert any(message.startswith("broadcast_object_list ") for message in messages[REFUSALS[1].what])
    for refusal in REFUSALS:
        text = f"ranks \\[0\\] have finished.*{re.escape(refusal.why)}. Use {re.escape(refusal.instead)}"
        assert all(re.search(text, message) for message in messages[refusal.what])


def sharded_forward(rank: int, kind: str, mode: Callable[[], Any]) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = DistributedDataParallel(nn.Linear(2, 2))
    # The outermost one keeps its parameters after the forward, others gather them in each.
    other: Any
    if kind == "FSDP":
        cpu = place()
        other = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=cpu), nn.Linear(2, 2))
        other = FullyShardedDataParallel(other, device_id=cpu)
    else:
        other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        mesh = init_device_mesh(place().type, (2,))
        for module in (other[0], other):
            fully_shard(module, mesh=mesh)
    texts = []
    with Join([model]) as join:
        for _ in join.batches(list(range(1 + 2 * rank))):
            model(torch.ones(1, 2)).sum().backward()
            try:
                with torch.no_grad(), mode():
                    other(torch.ones(1, 2))
            except UnsupportedError as error:
                texts.append(str(error))
                break
    return texts


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Mode])
@pytest.mark.parametrize("kind", ["FSDP", "fully_shard"])
def test_a_sharded_model_that_was_not_given_raises_in_the_tail(workers: Workers, kind: str, mode: Any) -> None:
    joined, active = workers.run(2, sharded_forward, kind, mode)
    assert joined == []
    assert len(active) == 1
    assert "it needs the parameter shards of finished ranks" in active[0]


def sum_in_a_local_map(rank: int, lengths: tuple[int, ...]) -> list[float]:
    mesh = init_device_mesh(place().type, (len(lengths),))

    def summed(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    mapped = local_map(summed, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh)
    ddp, found = DistributedDataParallel(nn.Linear(1, 1)), []
    with Join([ddp]) as join:
        for _ in join.batches(range(lengths[rank])):
            ddp(torch.ones(1, 1)).sum().backward()
            found.append(mapped(DTensor.from_local(torch.ones(1), mesh, [Shard(0)])).to_local().item())
    return found


def test_what_is_mapped_over_a_dtensors_parts_is_the_programs_own(workers: Workers) -> None:
    """A `DTensor` calls it, and brings nothing together itself."""
    assert workers.run(2, sum_in_a_local_map, (1, 3)) == [[2.0], [2.0, 1.0, 1.0]]


def gather_in_a_mode(rank: int, lengths: tuple[int, ...]) -> list[list[Any]]:
    ddp, found = DistributedDataParallel(nn.Linear(1, 1)), []
    with Join([ddp], timeout=timedelta(seconds=20)) as join:
        for step in join.batches(range(lengths[rank])):
            ddp(torch.ones(1, 1)).sum().backward()
            objects: list[Any] = [None] * len(lengths)
            with Mode():
                dist.all_gather_object(objects, f"{step} of {rank}")
            found.append(objects)
    return found


def test_objects_that_are_gathered_in_a_mode_are_objects(workers: Workers) -> None:
    first, second = workers.run(2, gather_in_a_mode, (1, 3))
    assert first == second[:1] == [["0 of 0", "0 of 1"]]
    assert second[1:] == [[None, "1 of 1"], [None, "2 of 1"]]
