"""What joined ranks cannot take part in raises on the active ranks, before it runs."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import zero_redundancy_optimizer

from tests.support.inside import REFUSALS
from tests.support.party import listening
from tests.support.workers import Workers
from torch_join import UnsupportedError
from torch_join._collectives.tap import Call, CollectiveTap


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


def _refused(rank: int) -> tuple[dict[str, list[str]], int, Tensor]:
    observed: list[Call] = []
    messages: dict[str, list[str]] = {}
    tap = CollectiveTap(observed.append, lambda r: r == 0)
    named = dist.new_group([0, 1])
    if rank == 1:
        for group in (None, named):
            for what, calls in issue_refused(group).items():
                for call in calls:
                    try:
                        with listening(tap):
                            call()
                    except UnsupportedError as error:
                        messages.setdefault(what, []).append(str(error))
    # If one of them had been issued, this would meet it.
    tensor = torch.full((2,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=named)
    return messages, len(observed), tensor


def test_what_cannot_be_mirrored_raises_before_it_runs(workers: Workers) -> None:
    _, (messages, observed, tensor) = workers.run(2, _refused, store="tcp")
    assert observed == 0
    assert tensor.tolist() == [6.0, 6.0]
    assert set(messages) == {refusal.what for refusal in REFUSALS}
    for refusal in REFUSALS:
        for message in messages[refusal.what]:
            assert re.search(
                f"ranks \\[0\\] have joined.*{re.escape(refusal.why)}. Use {re.escape(refusal.instead)}", message
            )
    names = [message.split()[0] for message in messages[REFUSALS[0].what]]
    assert names[:8] == [
        "send",
        "recv",
        "recv",
        "isend",
        "irecv",
        "batch_isend_irecv",
        "send_object_list",
        "recv_object_list",
    ]
    assert {len(m) for m in messages.values()} == {16, 10, 6, 4, 2}
    assert any(m.startswith("broadcast_object_list ") for m in messages[REFUSALS[1].what])
