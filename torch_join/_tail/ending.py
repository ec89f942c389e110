"""How a loop ends: all ranks get the state of the last one, and are compared."""

from typing import Any

from torch_join._control.channel import Channel
from torch_join._handover.audit import Audit, Often
from torch_join._handover.compat import is_sharded
from torch_join._handover.departure import Departure, Word, check
from torch_join._handover.handover import hand_over
from torch_join._tail.standing import Standing
from torch_join.joinables import ModelPart, Part, innermost_optimizer
from torch_join.joinables.state import stateful


class Ending(Standing):
    """The handover at the end of a tail."""

    _audit: Audit
    _channel: Channel
    _objects: list[Any]
    _parts: list[Part]
    _left: Departure | None = None  # how this rank left its loop by `break`
    _last_joiner: bool

    def _begin_audit(self, often: Often, hands_over_ignored: bool | None) -> None:
        self._audit = Audit(stateful(self._objects), often, hands_over_ignored)

    def _hand_over(self, words: list[Any]) -> None:
        # What a joined rank says does not count: it has synced what it accumulated as a shadow.
        has_synced = self._has_synced or self.rank != self._leader
        for part, its_words in zip(self._parts, words, strict=True):
            part.receive_last(its_words, self._leader)
        self._audit.end(self._channel, self._take_states(), has_synced)
        self._restore_flags()

    def hand_over_states(self) -> frozenset[int]:
        """Give all ranks the leader's state of everything that has one; every rank calls this.

        Returns:
            The `id` of each parameter that has stayed as it was on each rank.

        Raises:
            JoinError: A rank has changed something between its `break` and this, which others have yet to come to.
        """
        local = self._take_states()
        self._restore_flags()
        return local

    def _take_states(self) -> frozenset[int]:
        left = self._left
        sharded = not self._last_joiner and any(is_sharded(innermost_optimizer(thing)) for thing in self._objects)
        word = left is not None, [] if left is None else left.changed(), left is not None and sharded
        check(self._channel.gather(word, of=Word), self.rank)
        local = self._audit.local(self._channel)
        if left is not None:
            left.before_handover()
        if states := stateful(self._objects):
            hand_over(states, self._leader, self._channel, self.group, local)
        return local

    def _restore_flags(self) -> None:
        """Set again what flags this rank has set after a `break`: only then may ranks differ."""
        if self._left is not None:
            self._left.after_handover()

    @property
    def _replicated(self) -> list[Any]:
        """What a rank may not change between a `break` and the next meeting: all that is handed over."""
        return stateful(self._objects)

    @property
    def _at_top(self) -> bool:
        """Whether this rank is at the top of a step, before any code of the user's."""
        return False

    @property
    def _untouched(self) -> bool:
        """Whether this rank's own code has changed nothing that was given since it left its loop, if it has."""
        return self._left is None or self._left.changed() == []

    @property
    def _has_synced(self) -> bool:
        """Whether gradients have been averaged since the last tail, and none been accumulated since."""
        return all(part.synced and not part._accumulates for part in self._models())

    def _end_even(self) -> None:
        """All ranks have joined at once, or have done nothing since."""

    def _models(self) -> list[ModelPart]:
        return [part for part in self._parts if isinstance(part, ModelPart)]
