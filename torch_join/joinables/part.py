"""What `Join` knows of the things it is given."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.algorithms.join import Joinable

from torch_join._base import compat as _compat
from torch_join._control import codec as _codec
from torch_join._handover import objects as _objects

if TYPE_CHECKING:
    from torch_join.join import Join


class Part:
    """One of the things given to `Join`, on this rank.

    On an active rank it announces, in the tail, what it is about to do with others; on a joined rank
    `answer` does the same with nothing.

    Attributes:
        kinds: What it may announce, and of which type the payload is: `Any` for what it checks itself.
        words: Of which type its last words are.
    """

    kinds: ClassVar[dict[str, Any]] = {}
    words: ClassVar[Any] = None

    def __init__(self, join: "Join", index: int) -> None:
        self.join = join
        self.index = index
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> None:
        """Install what lets this rank notice; each piece adds its removal to `_undo`."""

    def exit(self) -> None:
        """Remove all that was installed."""
        while self._undo:
            self._undo.pop()()

    def configure(self, joinable: Joinable, config: Any = None) -> None:
        """Set what torch's `Join.notify_join_context` reads of `joinable`; afterwards it is disabled.

        It is also disabled where it was not before: torch's Join leaves it enabled when it ends, and a
        model's every later forward would then wait for all ranks.
        """
        before = _compat.join_config(joinable)
        after = _compat.disabled_join_config() if before.enable else before
        _compat.set_join_config(joinable, config or after)
        self._undo.append(lambda: _compat.set_join_config(joinable, after))

    def announce(self, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Tell the joined ranks what comes next, if there are any; see `Server.announce`."""
        self.join.announce(self.index, kind, payload, hold)

    def announce_open(self, kind: str, payload: Any) -> None:
        """Announce what may hold objects of users' kinds: if it does, it comes after the record, to all ranks.

        Not in a backward. All active ranks must have something of the same types.
        """
        if not self.join.in_tail:
            return
        if _codec.is_closed(payload):
            self.announce(kind, payload)
            return
        leads = self.join.rank == self.join.leader
        packed = _objects.pack(payload, f"What {type(self).__name__} announces ({kind})") if leads else None
        self.announce(kind, _objects.Apart())
        with self.join.own_collectives():
            _objects.broadcast(packed, self.join.leader, self.join.group)

    def receive(self, kind: str, payload: Any) -> None:
        """Answer, on a joined rank, what was announced; see `answer`.

        Raises:
            JoinError: No active rank can have announced it.
        """
        if isinstance(payload, _objects.Apart):
            payload = _objects.broadcast(None, self.join.leader, self.join.group)
        else:
            try:
                _codec.check(kind, str)
                _codec.check(payload, self.kinds[kind])
            except (_codec.Malformed, KeyError) as problem:
                raise _codec.foreign(f"a record of {type(self).__name__}", problem) from None
        self.answer(kind, payload)

    def receive_last(self, words: Any, source: int) -> None:
        """Take the source's last words; see `close`.

        Raises:
            JoinError: No active rank can have said them.
        """
        try:
            _codec.check(words, self.words)
        except _codec.Malformed as problem:
            raise _codec.foreign(f"last words of {type(self).__name__}", problem) from None
        self.close(words, source)

    def answer(self, kind: str, payload: Any) -> None:
        """Do, on a joined rank, the counterpart of what was announced."""
        raise NotImplementedError

    def has_met(self, kind: str) -> bool:
        """Whether all ranks must have come to what was announced before this rank could finish its answer to it."""
        return False

    def enter_tail(self) -> None:
        """Some rank has joined, and this one is active."""

    def leave_tail(self) -> None:
        """All ranks have joined."""

    def last_words(self) -> Any:
        """Return, on the rank whose state all others take, what `close` needs to know."""

    def close(self, words: Any, source: int) -> None:
        """Take, on every rank, what the source's `last_words` say; the tail is over."""

    def after_all(self, is_last_joiner: bool) -> None:
        """The context ends."""
