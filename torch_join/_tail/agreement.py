"""Whether the active ranks do the same things in the tail, in the same order."""

from collections import deque
from typing import Any
from zlib import crc32

from torch_join._base.errors import JoinError
from torch_join._control import codec as _codec
from torch_join._control.channel import Channel
from torch_join._handover.objects import Apart
from torch_join._tail.records import Announcement

# Of these the payload too.
_COMPARED = ("forward", "collective", "log", "gather", "reduce", "reshard", "module", "gradient")
_WORD = tuple[int, int, str]
_EVERY = 8  # steps; but each of the first ones, where a mistake of the program shows


class Agreement:
    """One active rank's announcements of a tail, as a number that all active ranks must have in common.

    Joined ranks follow the lowest active rank alone. What another one does differently would be
    paired with something else by the backend, which hangs, or goes wrong in silence. So in each of a tail's
    first steps, and in every eighth after these, the active ranks add up their checksums, and the lowest one looks at
    the sum.

    Where one leaves, all compare what they have announced so far with the lowest rank's word, before anything else:
    they would look for each other's words, or the log's next record, in different places.

    Args:
        channel: The channel between the ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.begin()

    def begin(self) -> None:
        """Begin a tail."""
        # A checksum, how many, and the last one: its kind, and its payload if that is compared. Other threads read it.
        self._noted: tuple[int, int, str, Any] = 0, 0, "", None
        self._active: tuple[int, ...] = ()
        self._due: deque[tuple[str, int]] = deque()  # what is to be compared, as the lowest active rank
        self._tail = f"said/{self._channel.records}"

    @property
    def word(self) -> tuple[int, int, str]:
        """What all active ranks must have in common: a checksum, the number of announcements, the last."""
        checksum, count, kind, compared = self._noted
        return checksum, count, kind if compared is None else f"{kind} {compared}"

    def note(self, said: Announcement, leads: bool, in_window: bool = False) -> _codec.Encoded:
        """Add an announcement; return it as the rank that `leads` sends it."""
        index, kind, payload = said
        # Other payloads hold what only the first rank needs to know, or may know.
        compared = payload if kind in _COMPARED or isinstance(payload, Apart) else None
        if kind == "forward" and in_window:  # a first one syncs, in its way, in a window of one batch only
            compared = payload[0], *payload[3:]
        encoded = _codec.encode((index, kind, compared))
        checksum, count, *_ = self._noted
        self._noted = crc32(encoded, checksum), count + 1, kind, compared
        return encoded if compared is payload or not leads else _codec.encode(said)

    def compare(self, rank: int, active: tuple[int, ...]) -> None:
        """Compare what was announced before the last step, at the begin of a new one; waits for nobody.

        Raises:
            JoinError: The active ranks have announced different things.
        """
        if len(active) < 2:
            return
        if active != self._active:
            self._name = f"{self._tail}/{len(active)}"
            self._active, self._steps = active, 0
            self._due.clear()
        step, self._steps = self._steps, self._steps + 1
        if step > _EVERY and step % _EVERY:
            return
        key = f"{self._name}/{step}"
        self._channel.contribute(key, self._noted[0], active)
        if rank != active[0]:
            return
        # The others may be behind, where a step has no sync: what they have not said yet is due later.
        while self._due and (total := self._channel.contributed(self._due[0][0], active)) is not None:
            if total != len(active) * self._due.popleft()[1]:
                raise self._disagreement()
        self._due.append((key, self._noted[0]))

    def note_change(self, rank: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """Compare what all have announced up to the last step of those who leave; every active rank calls this.

        Args:
            rank: This rank.
            before: The active ranks in that step.
            after: Those in the next one; if there are none, all compare.

        Raises:
            JoinError: This rank and the lowest active one have announced different things.
        """
        lowest = min(after or before)
        among = f"{self._tail}/last/{len(after)}", before
        words = dict(zip(sorted(before), self._channel.gather(self.word, of=_WORD, among=among), strict=True))
        if rank != lowest and words[lowest][:2] != self.word[:2]:
            raise self._disagreement()

    def _disagreement(self) -> JoinError:
        answers = self._channel.health().answers
        names = self._channel.global_ranks
        words = {names[rank]: status.word for rank, (_, status) in answers.items() if status and status.word}
        return JoinError(
            "The active ranks do different things in the tail of a loop, which pairs their collectives wrongly:"
            f" {_places(words)}. All ranks must run the same forwards, backwards and collectives in a step;"
            " Accelerate's save_state too, with sharded models, save_on_each_node or automatic_checkpoint_naming."
        )


def explain(statuses: dict[int, Any]) -> JoinError | None:
    """Say what a broken collective comes from, as far as the ranks' own words tell.

    Args:
        statuses: By name, of the ranks that have answered, each a `Status`, or `None`.
    """
    models = {rank: status.models for rank, status in statuses.items() if status}
    for mine in models.values():
        for theirs in models.values():
            # Not a matter of who is ahead: with no more forwards, more was synced.
            if any(a[0] <= b[0] and a[1] > b[1] for a, b in zip(mine, theirs, strict=False)):
                synced = {rank: [synced for _, synced in counts] for rank, counts in models.items()}
                return JoinError(explain_counts(synced))
    words = {rank: status.word for rank, status in statuses.items() if status and status.word}
    if len({tuple(word) for word in words.values()}) < 2:
        return None
    return JoinError(
        f"A collective failed while the active ranks were in different places of the tail: {_places(words)}. Usual"
        " causes: a collective that only some ranks issue, a `break` at different steps (which needs may_break=True),"
        " or a rank that takes longer than the process group's timeout."
    )


def _places(words: dict[int, tuple[int, int, str]]) -> str:
    return "; ".join(
        f"rank {rank} had announced {count}, the last: {last or 'nothing'}" for rank, (_, count, last) in words.items()
    )


def explain_counts(synced: dict[int, list[int]]) -> str:
    """Say that ranks sync at different steps, given their synced backwards by model."""
    counts = ", ".join(f"rank {rank}: {' and '.join(map(str, by_model))}" for rank, by_model in sorted(synced.items()))
    return (
        f"The ranks have run different numbers of synced backwards ({counts}), by model. A usual cause is to sync on a"
        " rank's own last batch (`if i + 1 == len(loader)`), which ranks reach at different steps: sync at steps that"
        " are the same on all ranks."
    )
