"""Collectives in backward, of gradients that are weighted only later: what is sent and received is what it would be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from tests.emulator import place
from tests.needs import has
from tests.support.collectives import NOT_EVERY_GLOO
from tests.support.party import listening
from tests.support.workers import Workers
from torch_join._collectives.backwards import issue_weighted
from torch_join._collectives.tap import CollectiveTap

FACTORS = (2.0, 3.0)


def empty(length: int = 4) -> Tensor:
    return torch.full((length,), torch.nan, dtype=torch.float64, device=place())


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def all_reduce_async(x: Tensor) -> Tensor:
    work: Any = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def reduce(x: Tensor) -> Tensor | None:
    dist.reduce(x, 0)
    return x if dist.get_rank() == 0 else None


def reduce_scatter(x: Tensor) -> Tensor:
    dist.reduce_scatter(out := empty(2), list(x.split(2)))
    return out


def reduce_scatter_single(x: Tensor) -> Tensor:
    dist.reduce_scatter_tensor(out := empty(2), x)
    return out


def all_gather(x: Tensor) -> Tensor:
    dist.all_gather(out := [empty(), empty()], x)
    return torch.cat(out)


def all_gather_single(x: Tensor) -> Tensor:
    dist.all_gather_into_tensor(out := empty(8), x)
    return out


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 1)
    return x


def scatter(x: Tensor) -> Tensor:
    dist.scatter(out := empty(2), list(x.split(2)) if dist.get_rank() == 0 else None, 0)
    return out


def gather(x: Tensor) -> Tensor | None:
    out = [empty(), empty()] if dist.get_rank() == 0 else None
    dist.gather(x, out, 0)
    return None if out is None else torch.cat(out)


def all_to_all(x: Tensor) -> Tensor:
    dist.all_to_all(out := [empty(2), empty(2)], list(x.split(2)))
    return torch.cat(out)


def all_to_all_single(x: Tensor) -> Tensor:
    dist.all_to_all_single(out := empty(), x)
    return out


def functional_sum(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 0


def functional_gather(x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0


def functional_scatter(x: Tensor) -> Tensor:
    return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0


def counts(x: Tensor) -> Tensor:
    """Whole numbers are no gradients."""
    numbers = torch.full((2,), dist.get_rank() + 1, device=place())
    dist.all_reduce(numbers)
    return numbers.double()


ALL_OPERATIONS: tuple[Callable[[Tensor], Tensor | None], ...] = (
    all_reduce,
    all_reduce_async,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    all_gather,
    all_gather_single,
    broadcast,
    scatter,
    gather,
    all_to_all,
    all_to_all_single,
    functional_sum,
    functional_gather,
    functional_scatter,
    counts,
)
OPERATIONS = [each for each in ALL_OPERATIONS if (lacks := NOT_EVERY_GLOO.get(each.__name__)) is None or has(lacks)]


class Weights:
    """Tells a tap that gradients are multiplied by a factor later."""

    in_pieces = True
    weighting = "weighting='samples'"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def before_collective(self, group: list[int], ddps: bool) -> None:
        """Nothing is to be told."""

    def weighs(self, group: list[int]) -> bool:
        """All of them are."""
        return True

    def before_differentiable(self, group: list[int]) -> None:
        """Nothing is to be told."""

    def before_exchange(self, operation: str, group: list[int]) -> None:
        """Nothing is to be told."""


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Any], found: list[Any]) -> Tensor:
        ctx.run, ctx.found = run, found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.found.append(ctx.run(gradient.clone()))
        return gradient, None, None


def both_ways(rank: int) -> list[tuple[str, Any, Any]]:
    """What each operation gives with gradients weighted later, and weighted before it."""
    found: list[tuple[str, Any, Any]] = []
    x = torch.arange(1.0, 5.0, dtype=torch.float64) * (rank + 1)
    for operation in OPERATIONS:
        results: list[Any] = []
        with listening(CollectiveTap(lambda _: None, lambda _: False, Weights(FACTORS[rank]))):
            leaf = torch.ones(4, dtype=torch.float64, requires_grad=True)
            (InBackward.apply(leaf, operation, results) * x).sum().backward()  # type: ignore[no-untyped-call]
        before = operation(x * FACTORS[rank])
        (later,) = results
        weight = 1.0 if operation is counts else FACTORS[rank]
        found.append((operation.__name__, None if later is None else later * weight, before))
    return found


def test_what_a_collective_in_backward_receives_is_as_if_it_had_been_weighted_before(workers: Workers) -> None:
    for found in workers.run(2, both_ways):
        assert [name for name, *_ in found] == [operation.__name__ for operation in OPERATIONS]
        for name, later, before in found:
            assert (later is None) == (before is None), name
            assert later is None or torch.allclose(later, before, rtol=1e-14, atol=0), name


def test_a_tensor_that_is_sent_elsewhere_is_left_as_it_was() -> None:
    sent, received = torch.ones(3), torch.zeros(3)

    def issue(output: Tensor, given: Tensor) -> Any:
        output.copy_(given)
        raise _Issued

    with pytest.raises(_Issued):
        issue_weighted(issue, {"output_tensor": received, "input_tensor": sent}, 2.0)
    assert sent.tolist() == [1.0] * 3
    assert received.tolist() == [2.0] * 3


class _Issued(Exception):  # noqa: N818  no error
    pass
