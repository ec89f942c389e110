"""The smallest training there is: a linear layer under Adam, done by ranks, and by one process for all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Places = list[tuple[int, int]]  # ranks, and which of their batches


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def batches_of(rank: int, lengths: Sequence[int]) -> list[Tensor]:
    return [batch(rank, step) for step in range(lengths[rank])]


def steps_of(lengths: Sequence[int], last: int | None = None) -> list[Places]:
    """The places of the batches of each step, up to one of that number."""
    return [[(r, step) for r, length in enumerate(lengths) if step < length] for step in range(max(lengths))][:last]


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


class Training:
    """A model, perhaps in a wrapper, and its optimizer."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda net: net, lr: Any = 0.1) -> None:
        self.net = network()
        self.model = wrap(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)

    def step(self, *batches: Tensor, share: float = 1.0) -> None:
        """Step on some batches, each of which counts for a share."""
        step_on((loss(self.model, x) * share for x in batches), self.optimizer)

    @property
    def given(self) -> list[Any]:
        return [self.model, self.optimizer]

    @property
    def weight(self) -> list[float]:
        weight: Any = self.net.weight
        return (weight.full_tensor() if isinstance(weight, DTensor) else weight).flatten().tolist()  # type: ignore[no-any-return]


def step_on(losses: Iterable[Tensor], *optimizers: torch.optim.Optimizer, clip: float = 0.0) -> None:
    """Step on the sum of some losses, as one process does on the losses of all ranks, each times its weight.

    With `clip` the gradients of each optimizer are clipped to this norm.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    for each in losses:
        each.backward()
    for optimizer in optimizers:
        if clip:
            nn.utils.clip_grad_norm_((p for group in optimizer.param_groups for p in group["params"]), clip)
        optimizer.step()


def alone(ranks: int, steps: Iterable[Places]) -> list[float]:
    """Train in one process on all ranks' batches; return the weight."""
    training = Training()
    for places in steps:
        training.step(*(batch(*place) for place in places), share=1 / ranks)
    return training.weight


def train_alone(
    optimizer: torch.optim.Optimizer,
    lengths: Sequence[int],
    loss: Callable[[int, int], Tensor | None],
    window: int = 1,
    set_to_none: bool = True,
) -> list[Tensor]:
    """Step in one process as ranks do with so many batches, after each window of them; return the parameters.

    Each rank's `loss(rank, step)` counts the same; a batch that is left out has none.
    """
    for step, places in enumerate(steps_of(lengths)):
        if step % window == 0:
            optimizer.zero_grad(set_to_none)
        for place in places:
            if (found := loss(*place)) is not None:
                (found / len(lengths)).backward()
        if step % window == window - 1:
            optimizer.step()
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]
