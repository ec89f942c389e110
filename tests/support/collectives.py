"""Every collective of the table as user code, with the result that it must have while some ranks have joined."""

import functools
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.emulator import place
from tests.needs import has
from torch_join._collectives.call import OBJECT_OPERATIONS
from torch_join._collectives.neutral import ENTRIES

INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
# What torch called these before 2.13.
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Results = list[tuple[Any, Any]]  # what came out, what should have


@dataclass
class Case:
    """One collective to issue; the reference is computed from what every rank would contribute."""

    rank: int
    ranks: list[int]  # of the group
    active: list[int]  # of the group
    group: Any
    dtype: torch.dtype = torch.float32
    reduction: str = "SUM"
    async_op: bool = False

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.reduction)

    @property
    def root(self) -> int:
        return self.active[-1]

    def value(self, rank: int, shift: int = 0) -> Tensor:
        signed = [-3 - rank, 2 + rank, -1, 1 + shift, -2 - shift]
        if self.dtype == torch.bool:
            return torch.tensor([(v + rank) % 2 == 0 for v in signed])
        return torch.tensor([abs(v) for v in signed] if self.dtype == torch.uint8 else signed).to(self.dtype)

    def gathered(self, shift: int = 0) -> list[Tensor]:
        """Every rank's value, zeros for those that have joined."""
        zeros = torch.zeros_like(self.value(0))
        return [self.value(r, shift) if r in self.active else zeros for r in self.ranks]

    def reduced(self, shift: int = 0) -> Tensor:
        values = [self.value(r, shift) for r in self.active]
        if self.reduction == "AVG":
            return functools.reduce(operator.add, values) / len(values)
        return functools.reduce(_BY_REDUCTION[self.reduction], values)

    @property
    def average(self) -> str:
        """The name of `ReduceOp.AVG`, or of a sum where the backend has no mean."""
        return "AVG" if averages() else "SUM"

    def averaged(self) -> Tensor:
        return self.reduced() / len(self.active) if averages() else self.reduced()

    def scattered(self) -> tuple[list[Tensor], Tensor]:
        """What this rank sends to each, and what it should get."""
        of = [self.value(self.rank, shift) for shift in range(len(self.ranks))]
        return of, self.reduced(self.ranks.index(self.rank))

    def blanks(self) -> list[Tensor]:
        return [torch.full_like(v, 1) for v in self.gathered()]

    def wait(self, work: Any) -> None:
        assert (work is not None) == self.async_op
        if work is not None:
            work.wait()


def _wrap(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(a, b).to(a.dtype)


_BY_REDUCTION = {
    "SUM": _wrap(torch.add),
    "PRODUCT": _wrap(torch.mul),
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def all_reduce(case: Case) -> Results:
    tensor = case.value(case.rank)
    case.wait(dist.all_reduce(tensor, case.op, case.group, async_op=case.async_op))
    return [(tensor, case.reduced())]


def all_reduce_coalesced(case: Case) -> Results:
    tensors = [case.value(case.rank, shift) for shift in (0, 1)]
    work = _manage(case, [functools.partial(dist.all_reduce, t, case.op, case.group) for t in tensors])
    case.wait(work)
    return [(tensor, case.reduced(shift)) for shift, tensor in enumerate(tensors)]


def reduce(case: Case) -> Results:
    results = []
    for root in case.ranks:  # one of them has joined
        tensor = case.value(case.rank)
        case.wait(dist.reduce(tensor, root, case.op, case.group, async_op=case.async_op))
        if root == case.rank:
            results.append((tensor, case.reduced()))
        elif case.reduction == "AVG" and case.active != case.ranks:
            results.append((tensor, case.value(case.rank)))  # scaled in a copy
    return results


def reduce_scatter(case: Case) -> Results:
    tensors, expected = case.scattered()
    kept = [t.clone() for t in tensors]
    output = torch.empty_like(expected)
    case.wait(dist.reduce_scatter(output, tensors, case.op, case.group, async_op=case.async_op))
    return [(output, expected), (tensors, kept)]


def reduce_scatter_single(case: Case) -> Results:
    tensors, expected = case.scattered()
    output, whole = torch.empty_like(expected), torch.cat(tensors)
    case.wait(reduce_scatter_into(output, whole, case.op, case.group, async_op=case.async_op))
    return [(output, expected), (whole, torch.cat(tensors))]


def reduce_scatter_single_coalesced(case: Case) -> Results:
    tensors, expected = case.scattered()
    outputs = [torch.empty_like(expected) for _ in range(2)]
    whole = torch.cat(tensors)
    issue = [functools.partial(reduce_scatter_into, o, whole, case.op, case.group) for o in outputs]
    case.wait(_manage(case, issue))
    return [(output, expected) for output in outputs]


def all_gather(case: Case) -> Results:
    outputs = case.blanks()
    case.wait(dist.all_gather(outputs, case.value(case.rank), case.group, async_op=case.async_op))
    return [(outputs, case.gathered())]


def all_gather_coalesced(case: Case) -> Results:
    outputs = [[torch.empty_like(v), torch.empty_like(v)] for v in case.gathered()]
    tensors = [case.value(case.rank, shift) for shift in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        case.wait(dist.all_gather_coalesced(outputs, tensors, case.group, async_op=case.async_op))
    return [([pair[shift] for pair in outputs], case.gathered(shift)) for shift in (0, 1)]


def all_gather_single(case: Case) -> Results:
    expected = torch.cat(case.gathered())
    output = torch.empty_like(expected)
    case.wait(all_gather_into(output, case.value(case.rank), case.group, async_op=case.async_op))
    return [(output, expected)]


def all_gather_single_coalesced(case: Case) -> Results:
    expected = [torch.cat(case.gathered(shift)) for shift in (0, 1)]
    outputs = [torch.empty_like(e) for e in expected]
    issue = [
        functools.partial(all_gather_into, o, case.value(case.rank, shift), case.group)
        for shift, o in enumerate(outputs)
    ]
    case.wait(_manage(case, issue))
    return [(outputs, expected)]


def gather(case: Case) -> Results:
    results: Results = []
    for root in case.ranks:
        outputs = case.blanks() if root == case.rank else None
        case.wait(dist.gather(case.value(case.rank), outputs, root, case.group, async_op=case.async_op))
        if outputs:
            results.append((outputs, case.gathered()))
    return results


def scatter(case: Case) -> Results:
    sent = [case.value(r) for r in case.ranks] if case.rank == case.root else None
    output = torch.empty_like(case.value(0))
    case.wait(dist.scatter(output, sent, case.root, case.group, async_op=case.async_op))
    return [(output, case.value(case.rank))]


def broadcast(case: Case) -> Results:
    tensor = case.value(case.rank)
    case.wait(dist.broadcast(tensor, case.root, case.group, async_op=case.async_op))
    return [(tensor, case.value(case.root))]


def all_to_all(case: Case) -> Results:
    expected = case.gathered(shift=case.ranks.index(case.rank))
    outputs = case.blanks()
    case.wait(dist.all_to_all(outputs, case.scattered()[0], case.group, async_op=case.async_op))
    return [(outputs, expected)]


def all_to_all_single(case: Case) -> Results:
    expected = torch.cat(case.gathered(shift=case.ranks.index(case.rank)))
    results = []
    for splits in (None, [5] * len(case.ranks)):
        output = torch.empty_like(expected)
        tensor = torch.cat(case.scattered()[0])
        case.wait(dist.all_to_all_single(output, tensor, splits, splits, case.group, async_op=case.async_op))
        results.append((output, expected))
    return results


def barrier(case: Case) -> Results:
    case.wait(dist.barrier(case.group, async_op=case.async_op))
    return []


def monitored_barrier(case: Case) -> Results:
    dist.monitored_barrier(case.group, wait_all_ranks=case.async_op)
    return []


def all_gather_object(case: Case) -> Results:
    objects = [0] * len(case.ranks)
    dist.all_gather_object(objects, {"rank": case.rank, "padding": "x" * case.rank}, case.group)
    return [(objects, [{"rank": r, "padding": "x" * r} if r in case.active else None for r in case.ranks])]


def gather_object(case: Case) -> Results:
    results: Results = []
    for root in case.ranks:
        objects = [0] * len(case.ranks) if root == case.rank else None
        dist.gather_object("x" * case.rank, objects, root, case.group)
        if objects is not None:
            results.append((objects, ["x" * r if r in case.active else None for r in case.ranks]))
    return results


def broadcast_object_list(case: Case) -> Results:
    objects = [case.rank, "x" * case.rank, None]
    dist.broadcast_object_list(objects, case.root, case.group)
    return [(objects, [case.root, "x" * case.root, None])]


def scatter_object_list(case: Case) -> Results:
    out = [None]
    dist.scatter_object_list(out, ["x" * r for r in case.ranks], case.root, case.group)
    return [(out, ["x" * case.rank])]


def _manage(case: Case, issue: list[Callable[[], Any]]) -> Any:
    with distributed_c10d._coalescing_manager(case.group, async_ops=case.async_op) as manager:
        for one in issue:
            one()
    return manager if case.async_op else None


BY_OPERATION = {name: globals()[name] for name in ENTRIES}
NOT_EVERY_GLOO = {"reduce_scatter": "gloo's reduce_scatter", "all_to_all": "gloo's all_to_all"}
ONLY_GLOO = ("all_gather_coalesced", "monitored_barrier")
WITHOUT_TENSORS = ("barrier", "monitored_barrier", *OBJECT_OPERATIONS)
REDUCING = [name for name, entry in ENTRIES.items() if entry.contribution == ENTRIES["all_reduce"].contribution]


def operations() -> dict[str, Callable[[Case], Results]]:
    """Those that the backend of this process's device has."""
    if place().type != "cpu":
        return {name: run for name, run in BY_OPERATION.items() if name not in ONLY_GLOO}
    return {name: run for name, run in BY_OPERATION.items() if name not in NOT_EVERY_GLOO or has(NOT_EVERY_GLOO[name])}


def averages() -> bool:
    """Whether that backend has `ReduceOp.AVG`."""
    return place().type != "cpu" or has("gloo's ReduceOp.AVG")


def check(label: str, results: Results) -> None:
    for got, expected in results:
        if _is_tensors(got):
            tolerances = {} if "AVG" in label else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(got, expected, msg=lambda text: f"{label}: {text}", **tolerances)
        else:
            assert got == expected, label


def _is_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))
