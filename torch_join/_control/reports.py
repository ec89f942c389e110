"""What ranks say in a channel, and what errors say of those who wait in it in vain."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_join._base.errors import JoinTimeoutError
from torch_join._base.synced_steps import Synced
from torch_join._control.codec import closed


@dataclass(frozen=True)
class BarrierResult:
    """What all ranks together said in one barrier.

    Attributes:
        total: The sum of every rank's `count`, rounded once.
        notices: What the ranks that had something to say sent, by rank.
    """

    total: float
    notices: dict[int, dict[str, Any]] = field(default_factory=dict)


@closed("status")
class Status(NamedTuple):
    """What a rank says of itself when a failure is looked into.

    Attributes:
        models: Its forwards and synced backwards, by model.
        word: What it has announced in the tail, as all active ranks must: a checksum, how much, the last.
        loader: Where its loader is in a collective: at which step, and of which ranks.
        asked: How often all ranks' places in their loaders were asked for, as far as it knows.
        step: The step of the loop, if it is in one.
        leader: The lowest rank that has batches, as far as it knows: the one that writes the log.
        synced: In which steps of the loop it has synced gradients.
    """

    models: list[list[int]]
    word: tuple[int, int, str] | None = None
    loader: tuple[int, list[int]] | None = None
    asked: int = 0
    step: int | None = None
    leader: int = 0
    synced: Synced = ([], -1)


class Health(NamedTuple):
    """Who is there.

    Attributes:
        answers: By rank, whether it waits on this channel, and what its `status` says.
        silent: Who has not answered, less those that are asked through such a one.
    """

    answers: dict[int, tuple[bool, Status | None]]
    silent: list[int]


def waited_in_vain(waited: str, who: str) -> JoinTimeoutError:
    """Return the error of a rank whose channel's timeout is over.

    Args:
        waited: Who has waited for whom, and for how long.
        who: Who of these does what.
    """
    return JoinTimeoutError(
        f"{waited} to say whether they have a next batch, or what comes next: {who}. Usual causes: a loader that takes"
        " longer than `timeout` (raise it); a `break` at different steps (may_break=True); a batch that one rank skips"
        " by `continue` (join.batches(good(loader))); a joint operation at steps that each rank counts by itself (give"
        " Join the counter). py-spy dump shows where the ranks are."
    )
