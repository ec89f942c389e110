"""Checks that the active ranks do the same things in the tail, in the same order."""

from collections import deque
from typing import Any
from zlib import crc32

from torch_join._base.errors import JoinError
from torch_join._control import codec as _codec
from torch_join._control.channel import Channel
from torch_join._handover.objects import Apart

Announcement = tuple[int, str, Any]  # the participant's index (-1: none), the kind, and the payload
# For these kinds the payloads are compared too.
_COMPARED = ("forward", "collective", "log", "gather", "reduce", "reshard", "module", "gradient")
_DIGEST = tuple[int, int, str]
_EVERY = 8  # steps between two checks; the first 8 are all checked, because a mistake in the program shows there


class Agreement:
    """A checksum of one active rank's announcements in a tail, which must be equal on all active ranks.

    Joined ranks follow the lowest active rank only. If another active rank did something else, the backend would pair
    the wrong collectives: a hang, or silently wrong numbers. In the first steps of a tail, and then in every eighth
    step, the active ranks sum their checksums and the lowest one checks the sum.

    When a rank leaves, all active ranks first compare their announcements so far with the lowest rank's. Otherwise
    ranks that disagree would use different keys for the next checksums and for the log's next record.

    Args:
        channel: The channel between the ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.begin()

    def begin(self) -> None:
        """Start a tail."""
        # Checksum and count; the last announcement's kind, and its payload if compared. Other threads read this tuple.
        self._noted: tuple[int, int, str, Any] = 0, 0, "", None
        self._active: tuple[int, ...] = ()
        self._due: deque[tuple[str, int]] = deque()  # the comparisons to make, on the lowest active rank
        self._tail = f"said/{self._channel.records}"

    @property
    def digest(self) -> tuple[int, int, str]:
        """The checksum, the number of announcements and the last one: equal on all active ranks."""
        checksum, count, kind, compared = self._noted
        return checksum, count, kind if compared is None else f"{kind} {compared}"

    def note(self, announcement: Announcement, leads: bool, in_window: bool = False) -> _codec.Encoded:
        """Add an announcement; return it encoded for sending, with its whole payload if this rank `leads`."""
        index, kind, payload = announcement
        # Other payloads hold details that only the lowest rank needs, and that may differ between ranks.
        compared = payload if kind in _COMPARED or isinstance(payload, Apart) else None
        if kind == "forward" and in_window:  # ranks differ in whether the first forward syncs: a window may be 1 batch
            compared = payload[0], *payload[3:]
        encoded = _codec.encode((index, kind, compared))
        checksum, count, *_ = self._noted
        self._noted = crc32(encoded, checksum), count + 1, kind, compared
        return encoded if compared is payload or not leads else _codec.encode(announcement)

    def compare(self, rank: int, active: tuple[int, ...]) -> None:
        """Compare the announcements so far, at the start of a step; does not wait for other ranks.

        Raises:
            JoinError: The active ranks' announcements differ.
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
        # Without a sync in a step, other ranks may be behind: checksums that they have not sent yet are checked later.
        while self._due and (total := self._channel.contributed(self._due[0][0], active)) is not None:
            if total != len(active) * self._due.popleft()[1]:
                raise self._disagreement()
        self._due.append((key, self._noted[0]))

    def note_change(self, rank: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """Compare all announcements when ranks leave, up to their last step; every active rank calls this.

        Args:
            rank: This rank.
            before: The ranks that were active in that step.
            after: The ranks that are active in the next step; if there are none, `before` replaces them.

        Raises:
            JoinError: This rank's announcements differ from those of the lowest active rank.
        """
        lowest = min(after or before)
        among = f"{self._tail}/last/{len(after)}", before
        digests = dict(zip(sorted(before), self._channel.gather(self.digest, of=_DIGEST, among=among), strict=True))
        if rank != lowest and digests[lowest][:2] != self.digest[:2]:
            raise self._disagreement()

    def _disagreement(self) -> JoinError:
        answers = self._channel.health().answers
        names = self._channel.global_ranks
        digests = {names[rank]: status.digest for rank, (_, status) in answers.items() if status and status.digest}
        return JoinError(
            "The active ranks ran different operations in the tail of a loop, so their collectives do not match:"
            f" {_places(digests)}. Run the same forwards, backwards and collectives on all ranks, and Accelerate's"
            " save_state too (with sharded models, save_on_each_node or automatic_checkpoint_naming)."
        )


def explain(statuses: dict[int, Any]) -> JoinError | None:
    """Return the error that explains a failed collective; `None` if the ranks' statuses do not show the cause.

    Args:
        statuses: By rank name, the `Status` of each rank that answered, or `None`.
    """
    models = {rank: status.models for rank, status in statuses.items() if status}
    for one in models.values():
        for other in models.values():
            # A rank that is merely ahead has run more forwards too; this one has only synced more.
            if any(a[0] <= b[0] and a[1] > b[1] for a, b in zip(one, other, strict=False)):
                synced = {rank: [synced for _, synced in counts] for rank, counts in models.items()}
                return JoinError(explain_counts(synced))
    digests = {rank: status.digest for rank, status in statuses.items() if status and status.digest}
    if len({tuple(digest) for digest in digests.values()}) < 2:
        return None
    return JoinError(
        "A collective failed while the active ranks were at different operations in the tail of a loop:"
        f" {_places(digests)}. Usual causes: a collective that only some ranks issue, a `break` at different steps"
        " (which needs may_break=True), or a rank that takes longer than the process group's timeout."
    )


def _places(digests: dict[int, tuple[int, int, str]]) -> str:
    return "; ".join(
        f"rank {rank} had announced {count} operations, the last of them {last or 'nothing'}"
        for rank, (_, count, last) in digests.items()
    )


def explain_counts(synced: dict[int, list[int]]) -> str:
    """Return the error text for ranks that sync at different steps, from each rank's synced backwards by model."""
    counts = ", ".join(f"rank {rank}: {' and '.join(map(str, by_model))}" for rank, by_model in sorted(synced.items()))
    return (
        f"The ranks ran different numbers of synced backwards, by model ({counts}). Usually each rank syncs at its"
        " own last batch (`if i + 1 == len(loader)`). Sync in the same steps on all ranks."
    )
