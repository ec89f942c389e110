"""The results of a channel's barriers and health checks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_join._base.synced_steps import Synced
from torch_join._control.codec import closed


@dataclass(frozen=True)
class BarrierResult:
    """The result of one barrier, from all ranks.

    Attributes:
        total: The sum of every rank's `count`, rounded once.
        notices: The notices, by the ranks that sent one.
    """

    total: float
    notices: dict[int, dict[str, Any]] = field(default_factory=dict)


@closed("status")
class Status(NamedTuple):
    """A rank's description of itself, for finding the cause of a failure.

    Attributes:
        models: By model, the numbers of its forwards and synced backwards.
        word: Its announcements in the tail, equal on all active ranks: a checksum, their number, the last one.
        loader: If its loader is in a collective: the step, and the collective's ranks.
        asked: The number of exchanges of all ranks' places in their loaders that it knows of.
        step: The step of the loop, if it is in one.
        leader: The lowest active rank that it knows of, which writes the log.
        synced: The steps of the loop in which it has synced the gradients of each model.
    """

    models: list[list[int]]
    digest: tuple[int, int, str] | None = None
    loader: tuple[int, list[int]] | None = None
    asked: int = 0
    step: int | None = None
    leader: int = 0
    synced: tuple[Synced, ...] = ()


class Health(NamedTuple):
    """Which ranks are alive.

    Attributes:
        answers: By rank, whether it is waiting on this channel, and its `Status`.
        silent: The ranks that have not answered, except those that can be reached only through such a rank.
    """

    answers: dict[int, tuple[bool, Status | None]]
    silent: list[int]
