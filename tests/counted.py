"""Batches of tokens of which some count, and one process whose loss is the mean over all ranks' tokens.

A batch's own loss is the mean over its tokens: NaN, with gradients that are NaN, where none counts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.small import step_on

TOLERANCE = 1e-10
Batch = dict[str, Tensor]
Window = list[Batch]


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        lengths: The number of batches, by rank.
        window: How many batches a step has.
        fractions: Whether a token may count in part.
        empty: The rank and index of batches of which no token counts.
        epochs: How many there are.
        rebalance: Whether batches go to other ranks.
    """

    lengths: tuple[int, ...]
    window: int = 1
    fractions: bool = False
    empty: tuple[tuple[int, int], ...] = ()
    epochs: int = 2
    rebalance: bool = False

    def batch(self, rank: int, index: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * rank + index)
        size = 2 + (3 * rank + index) % 5
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        weight = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
        weight = weight if self.fractions else (weight > 0.5).double()
        return {"x": x, "weight": torch.zeros_like(weight) if (rank, index) in self.empty else weight}

    def batches(self, rank: int) -> list[Batch]:
        return [self.batch(rank, index) for index in range(self.lengths[rank])]

    def steps(self) -> list[dict[int, Window]]:
        """By step, each rank's window, of those that have one."""
        iterators = [iter(self.batches(rank)) for rank in range(len(self.lengths))]
        found: list[dict[int, Window]] = []
        while here := {rank: w for rank, it in enumerate(iterators) if (w := list(islice(it, self.window)))}:
            found.append(here)
        return found


def count(batch: Any) -> float:
    """Return what a batch, or a window of them, counts: as a tensor's item, and as a whole number where it is one."""
    if isinstance(batch, list):
        return sum(map(count, batch))
    return float(batch["weight"].sum())


def as_tensor(batch: Any) -> Any:
    """Return the same as a tensor."""
    return batch["weight"].sum()


def total_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return (batch["weight"] * model(batch["x"]).squeeze(1).sub(1).square()).sum()


def mean_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return total_loss(model, batch) / batch["weight"].sum()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)  # moves by gradients of zero, too


def alone(case: Case, steps: Sequence[dict[int, Window]] | None = None) -> list[Tensor]:
    """Train one process on all ranks' batches."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for _ in range(case.epochs):
        for row in case.steps() if steps is None else steps:
            batches = [batch for window in row.values() for batch in window]
            counted = sum(map(count, batches)) or 1.0
            step_on((total_loss(model, batch) / counted for batch in batches), optimizer)
    return [p.detach() for p in model.parameters()]


def check(case: Case, ranks: Sequence[list[Tensor]], steps: Sequence[dict[int, Window]] | None = None) -> None:
    """Compare what the ranks have with each other, to the bit, and with one process."""
    for mine in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(mine, ranks[0], strict=True))
    for mine, theirs in zip(ranks[0], alone(case, steps), strict=True):
        assert float((mine - theirs).abs().max()) < TOLERANCE


# What a function may return that is no count, by the words of the error.
WRONG: dict[str, Any] = {"-1": -1, "nan": float("nan"), "inf": float("inf"), "None": None, "3": "3"}


def wrong_at(rank: int, index: int, returned: str) -> Callable[[Any], Any]:
    """Return a count that returns something else, or raises, for one rank's batch of this index."""
    calls = iter(range(1000))

    def broken(batch: Any) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == rank and next(calls) == index:
            if returned in ("ZeroDivisionError", "StopIteration"):
                raise {"ZeroDivisionError": ZeroDivisionError, "StopIteration": StopIteration}[returned]("told")
            return WRONG[returned]
        return count(batch)

    return broken
