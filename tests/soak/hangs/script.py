"""One rank's part of a drawn program: its model, its batches, and what it does in the places of a step."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.small import batch, train_alone

EPOCHS = 2


class BadSampleError(Exception):
    """What a program raises, and catches."""


@dataclass(frozen=True)
class Case:
    """A program, and what some rank does in it.

    Attributes:
        seed: What it was drawn from.
        front_end: A name in `programs.FRONT_ENDS`.
        what: Names of what is done, in `slips.SLIPS` or `slowness.EXTRAS`, or of a way out of a step.
        who, at: A rank, and which of its batches of the first epoch.
        stream: Whether nobody knows the lengths.
        buffers: Whether the model has some.
        options: Of `Join`.
        where, how, seconds: Of a rank that is busy: in which place, with what, and for how long.
        context: Whether a loop of Accelerate's stands in a `with`.
    """

    seed: int
    front_end: str
    what: tuple[str, ...]
    lengths: tuple[int, ...]
    who: int
    at: int
    stream: bool = False
    buffers: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    how: str = ""
    seconds: float = 0.0
    context: bool = False

    @property
    def world_size(self) -> int:
        return len(self.lengths)

    @property
    def in_tail(self) -> bool:
        return self.at >= min(self.lengths)


def build(buffers: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4) if buffers else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4, bias=False), norm, nn.Linear(4, 1)).double()


def expected(case: Case) -> list[Tensor]:
    """Train in one process; return the parameters."""
    net = build(case.buffers)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(EPOCHS):
        train_alone(optimizer, case.lengths, lambda rank, step: net(batch(rank, step)).square().mean())
    return [p.detach() for p in net.parameters()]


class _Stream(IterableDataset[Any]):
    def __init__(self, script: "Script") -> None:
        self.script = script

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.script.case.lengths[self.script.rank]):
            self.script.reads(index)
            yield (batch(self.script.rank, index),)


class _Rows(Dataset[Any]):
    def __init__(self, script: "Script", wrap: Callable[[Tensor], Any]) -> None:
        self.script, self.wrap = script, wrap

    def __len__(self) -> int:
        return 2 * self.script.case.lengths[self.script.rank]

    def __getitem__(self, index: int) -> Any:
        if index % 2 == 0:
            self.script.reads(index // 2)
        return self.wrap(batch(self.script.rank, index // 2)[index % 2])


class Script:
    """What a program asks for on its rank.

    Attributes:
        epoch, step, place: Where its loop is; before the first step -1.
        model: What the program trains, in its wrapper.
        tools: What else a front end has, by name.
        actions: What is done in the places of a step, by the place's name.
        slip: What the rank does instead of a step's end, at its batch: `"continue"`, or another way out.
    """

    def __init__(self, rank: int, case: Case) -> None:
        self.rank, self.case, self.world_size = rank, case, case.world_size
        self.net = build(case.buffers)
        self.epoch = self.step = self.passes = -1
        self.model: Any = None
        self.loss_tensor: Any = None
        self.tools: dict[str, Any] = {}
        self.actions: dict[str, list[Callable[[Script], None]]] = {}
        self.slip = self.place = ""
        self.random = random.Random(case.seed)  # the same on all ranks

    def add(self, place: str, action: Callable[["Script"], None]) -> None:
        self.actions.setdefault(place, []).append(action)

    def epochs(self) -> Iterator[int]:
        for epoch in range(EPOCHS - (self.slip == "epoch less" and self.rank == self.case.who)):
            self.begin_epoch(epoch)
            yield epoch

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.step = epoch, -1

    @property
    def in_loop(self) -> bool:
        """Whether what is done now is part of a step."""
        return self.place in ("begin", "between", "optimizer", "end")

    def does(self, place: str) -> None:
        self.place = place
        for action in self.actions.get(place, ()):
            action(self)

    def loss(self, out: Tensor) -> Tensor:
        self.loss_tensor = out.square().mean()
        return self.loss_tensor  # type: ignore[no-any-return]

    @property
    def hits(self) -> bool:
        """Whether this is the batch."""
        return self.rank == self.case.who and (self.epoch, self.step) == (0, self.case.at)

    def slips(self, how: str) -> bool:
        return how == self.slip and self.hits

    def reads(self, index: int) -> None:
        """Do what is done where a batch is read, in the first epoch."""
        if index == 0:
            self.passes += 1
        if self.passes == 0 and index == self.case.at and self.rank == self.case.who:
            self.does("loader")

    def rows(self, wrap: Callable[[Tensor], Any]) -> Dataset[Any]:
        """Return this rank's rows, two to a batch."""
        return _Rows(self, wrap)

    def loader(self) -> Any:
        """Return a loader of batches `(x,)`: a stream, or one whose number of batches is certain."""
        if self.case.stream:
            return DataLoader(_Stream(self), batch_size=None)
        return DataLoader(self.rows(lambda row: (row,)), 2)
