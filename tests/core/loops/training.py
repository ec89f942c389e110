"""A model under DDP and Adam, and what one process makes of it."""

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.plain import Loop
from tests.support.run import difference, reference


class Training:
    """A model under DDP and Adam, whose forward takes its input by keyword."""

    def __init__(self, lengths: tuple[int, ...], rank: int) -> None:
        self.models = Loop(lengths).build()
        self.ddp = DistributedDataParallel(self.models)
        self.optimizer = torch.optim.Adam(self.models.parameters(), lr=0.05)
        self.batches = Loop(lengths).batches(rank, 0)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        (self.ddp(x=batch[0]) - batch[1]).pow(2).mean().backward()
        self.optimizer.step()

    @property
    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.models.parameters()]


def check_exact(found: list[list[Tensor]], lengths: tuple[int, ...], weighting: str = "world") -> None:
    expected = reference(Loop(lengths, epochs=1, weighting=weighting))
    for parameters in found:
        assert all(torch.equal(a, b) for a, b in zip(parameters, found[0], strict=True))
    # `reference` clears before a step, as this training does.
    assert difference(found[0], expected.parameters) < 1e-10
