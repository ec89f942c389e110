"""Forms in which a collective is called, and what the backend has."""

import functools
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from tests.emulator import place
from tests.needs import has
from tests.support.collectives import FLOATS, Case, Results, averages


def supported(name: str, reduction: str, dtype: torch.dtype) -> bool:
    """Whether gloo has it, or on a device NCCL."""
    if reduction != "SUM" and name.startswith("reduce_scatter_single") and place().type == "cpu":
        return has("gloo's reduce_scatter_tensor by another operation than a sum") and _supported(reduction, dtype)
    return _supported(reduction, dtype)


def _supported(reduction: str, dtype: torch.dtype) -> bool:
    if reduction == "AVG":
        return dtype in FLOATS and averages()
    return not reduction.startswith("B") or (dtype not in FLOATS and place().type == "cpu")


def _functional(case: Case) -> Results:
    mine, group = case.value(case.rank), case.group or dist.group.WORLD
    sent, received = case.scattered()
    whole, gathered = torch.cat(sent), torch.cat(case.gathered())
    source = case.ranks.index(case.root)
    return [
        (functional.all_reduce(mine, "sum", group), case.reduced()),
        (functional.all_reduce(mine, case.average.lower(), group), case.averaged()),
        (functional.all_gather_tensor(mine, 0, group), gathered),
        (functional.reduce_scatter_tensor(whole, "sum", 0, group), received),
        (functional.broadcast(mine, source, group), case.value(case.root)),
        (
            functional.all_to_all_single(whole, None, None, group),
            torch.cat(case.gathered(shift=case.ranks.index(case.rank))),
        ),
        (functional.all_reduce_coalesced([mine, mine], "sum", group), [case.reduced()] * 2),
        (functional.all_gather_into_tensor_coalesced([mine, mine], group), [gathered] * 2),
        (functional.reduce_scatter_tensor_coalesced([whole] * 2, "sum", [0, 0], group), [received] * 2),
        (differentiable.all_reduce(mine.clone().requires_grad_(), group=group), case.reduced()),
    ]


def _compiled(backend: str, case: Case) -> Results:
    def step(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=case.group)
        return functional.all_reduce(tensor * 2, "max", case.group or dist.group.WORLD)

    step = torch.compile(step, backend=backend)
    return [(step(case.value(case.rank)), case.reduced() * 2), (step(case.value(case.rank)), case.reduced() * 2)]


def _grad_modes(case: Case) -> Results:
    results = []
    least, mean = functools.reduce(torch.minimum, map(case.value, case.active)), case.averaged()
    average = getattr(dist.ReduceOp, case.average)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inside, outside, averaged = (case.value(case.rank) for _ in range(3))
            dist.all_reduce(inside, dist.ReduceOp.MIN, case.group)
            dist.all_reduce(averaged, average, case.group)
        dist.all_reduce(outside, dist.ReduceOp.MIN, case.group)
        results += [(inside, least), (averaged, mean), (outside, least)]
    with torch.no_grad():
        leaf = case.value(case.rank).requires_grad_()
        dist.all_reduce(leaf, average, case.group)
    return [*results, (leaf.detach(), mean)]


def _several_under_way(case: Case) -> Results:
    tensors = [case.value(case.rank, shift) for shift in range(4)]
    work = [dist.all_reduce(t, group=case.group, async_op=True) for t in tensors]
    objects = [None] * len(case.ranks)
    dist.all_gather_object(objects, case.rank, case.group)
    for one in reversed(work):
        one.wait()
    assert [o for o in objects if o is not None] == case.active
    return [(tensor, case.reduced(shift)) for shift, tensor in enumerate(tensors)]


def _sparse(case: Case) -> Results:
    sparse = torch.diag(case.value(case.rank)).to_sparse()
    hybrid = torch.diag(case.value(case.rank)).to_sparse(1)
    dist.all_reduce(sparse, group=case.group)
    dist.all_reduce(hybrid, group=case.group)
    return [(sparse.to_dense(), torch.diag(case.reduced())), (hybrid.to_dense(), torch.diag(case.reduced()))]


def _other_kinds(case: Case) -> Results:
    complex_ = torch.complex(case.value(case.rank), case.value(case.rank))
    dist.all_reduce(complex_, getattr(dist.ReduceOp, case.average), case.group)
    scalar, empty = case.value(case.rank)[0].clone(), torch.empty(0, 3)
    dist.all_reduce(scalar, group=case.group)
    dist.all_reduce(empty, group=case.group)
    mean = case.averaged()
    return [(complex_, torch.complex(mean, mean)), (scalar, case.reduced()[0])]


def _deprecated(case: Case) -> Results:
    tensors = [case.value(case.rank, shift) for shift in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(tensors, group=case.group)
        output = torch.empty(5 * len(case.ranks))
        dist.all_gather_into_tensor(output, tensors[0], group=case.group)
    gathered = [case.reduced() if r in case.active else torch.zeros(5) for r in case.ranks]
    return [*((t, case.reduced(shift)) for shift, t in enumerate(tensors)), (output, torch.cat(gathered))]


FORMS = {
    "functional": (_functional, 10),
    "compiled for eager": (functools.partial(_compiled, "eager"), 4),
    "compiled for aot_eager": (functools.partial(_compiled, "aot_eager"), 4),
    "grad modes": (_grad_modes, 7),
    "several under way": (_several_under_way, 5),
    "sparse": (_sparse, 2),
    "other kinds": (_other_kinds, 3),
    "deprecated": (_deprecated, 2),
}
