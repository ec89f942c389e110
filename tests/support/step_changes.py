"""What a user's step changes besides gradients, in a loop that a framework drives, and what one process makes of it."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.support.small import step_on, steps_of

EPOCHS = 2
RATE = 0.1


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


class Student(nn.Module):
    """A network, its teacher, and a buffer that a step sets.

    Args:
        *hows: What `change` does.
        optimizer: Of the optimizer; SGD has momentum.
    """

    centre: Tensor

    def __init__(self, *hows: str, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hows, self.steps_by = hows, optimizer
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("centre", torch.zeros((), dtype=torch.float64))

    def optimizer(self) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if self.steps_by == "SGD" else {}
        made: torch.optim.Optimizer = getattr(torch.optim, self.steps_by)(self.net.parameters(), lr=RATE, **options)
        return made

    @torch.no_grad()
    def change(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        weight, bias, group = self.net[2].weight, self.net[0].bias, optimizer.param_groups[0]
        if "teacher" in self.hows:
            for theirs, mine in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                theirs.lerp_(mine, 0.3)
        if "projected" in self.hows:
            weight.copy_(nn.functional.normalize(weight, dim=1))
        if "clamped" in self.hows:
            bias.data.clamp_(-0.2, 0.2)
        if "decay" in self.hows:
            group["weight_decay"] = 0.3 / (1 + step)
        if "rate" in self.hows:
            group["lr"] = RATE / (1 + step)
        if "state" in self.hows and step % 3 == 2:
            optimizer.state.clear()
        if "halved" in self.hows and (kept := optimizer.state.get(weight)):
            for value in kept.values():
                if isinstance(value, Tensor) and value.ndim:
                    value.mul_(0.5)
        if "centre" in self.hows:
            self.centre += 1 / (1 + step)
        if "reset" in self.hows and step % 4 == 3:
            self.teacher.load_state_dict(self.net.state_dict())

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - 1 + 0.5 * self.teacher(x) + self.centre).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.state_dict().values()]


def alone(how: str, lengths: Sequence[int]) -> list[list[Tensor]]:
    """Return the state after each step of one process."""
    student, found = Student(how), list[list[Tensor]]()
    optimizer = student.optimizer()
    for taken, places in enumerate(EPOCHS * steps_of(lengths)):
        student.change(optimizer, taken)
        step_on((student.loss(rows(*place)) / len(lengths) for place in places), optimizer)
        found.append(student.state())
    return found
