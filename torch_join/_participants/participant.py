"""What a joinable knows of the loop that it takes part in, and what that knows of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from torch_join._base.membership import MeetingPoint, Membership
from torch_join._compat import ddp as _compat
from torch_join._control import codec as _codec
from torch_join._control.channel import Channel
from torch_join._handover import objects as _objects
from torch_join._participants.clears import Clears


class Announcer(Protocol):
    """Where a part tells the joined ranks what it is about to do: the `TailLog` of a loop, or a `HookDriver`.

    Attributes:
        channel: Carries small messages between the ranks.
        participants: All parts, in an order that is the same on all ranks.
    """

    channel: Channel
    participants: "list[Participant]"

    @property
    def in_pieces(self) -> bool:
        """Whether backwards are announced piece by piece, since collectives other than DDP's may come in them."""

    def meet(self) -> bool:
        """Wait until it is known who is active, if that was put off; a part calls this when it is about to act.

        Returns:
            Whether this rank is active and another one has joined, and does not do the same of its own accord.
        """

    @property
    def announces(self) -> bool:
        """What `meet` returned last."""

    def is_quiet(self) -> bool:
        """Meet; return whether there is nobody to tell of what this rank does, and nothing that listens to it."""

    def announce(self, index: int, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Tell the joined ranks, if there are any, what comes next.

        Args:
            index: The part that does it, -1 for none.
            kind: What it does.
            payload: What else they need to know.
            hold: Whether to tell them together with the next announcement.
        """

    def announce_alone(self, index: int, kind: str, payload: Any, hold: bool = False) -> None:
        """Tell the joined ranks what comes next, and has no collective.

        Where a batch is a window of `windows`, the other active ranks may do the same more or less often: then the
        lowest one tells, with its next announcement.
        """

    def own_collectives(self) -> AbstractContextManager[None]:
        """Put around collectives that joined ranks know of without the tap."""

    def run_hook(self, main_hook: Callable[[], None]) -> None:
        """Run a main hook; each collective that it issues stands for one that the active ranks announce."""


class Driver(Protocol):
    """What a part asks of the loop that it takes part in.

    There are three: `LoopDriver` for loops of the user's, `StepDriver` for loops that a framework runs in lockstep, and
    `HookDriver`, for torch's own `Join`.

    Attributes:
        members: Who is active, and this rank's role; as of the last meeting.
        tail_log: Where announcements go.
        step_number: The current step, counted from the loop's begin.
        loop_number: Of the current loop over `batches`, counted from 1; 0 outside of one.
        joined_amid: Whether this rank ran out of batches between a forward and a backward that may yet follow it.
    """

    joined_amid: bool = False
    members: Membership
    tail_log: Announcer
    step_number: int = 0

    @property
    def loop_number(self) -> int:
        return 0

    @property
    def clears(self) -> Sequence[Clears]:
        """The calls of the `zero_grad` of given optimizers and models, which tell what becomes of gradients."""
        return ()

    @property
    def meets_at(self) -> MeetingPoint:
        """Where the ranks meet in a step; at `FORWARD`, another one may be at a meeting at any time."""

    @property
    def sees_steps(self) -> bool:
        """Whether there is a model, or a custom joinable, that shows where a step begins."""

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> bool:
        """Come to a meeting, if the ranks have not met before this forward.

        Args:
            count: Returns what the forward's arguments count, for a step of which nobody sees the batch.
            waits: Whether it is important, for what this forward does, who is active.

        Returns:
            Whether that is known now; else this rank has arrived, and meets the others later.
        """

    def note_backward(self, model: int) -> None:
        """Note that a backward of this part's is followed."""
        return

    def note_accumulation(self, model: int) -> None:
        """Note that a backward of this rank's own adds to a model's gradients."""
        return

    def before_backward(self, model: int, loop: int = 0) -> None:
        """Raise for the backward of a batch whose loop has ended on all ranks, some of which ran out before others.

        Args:
            model: The index of the model's part.
            loop: The `loop_number` of the forward, if it is known.

        Raises:
            JoinError: It is one.
        """
        return

    def before_buffers(self, group: Any) -> None:
        """Raise, in a step that is the last one of some ranks, if others do not broadcast buffers as this rank does.

        Raises:
            JoinError: So it is, on a rank whose last step it is.
        """
        return

    def before_sharded_backward(self, syncs: bool) -> None:
        """Raise, in a step that is the last one of some ranks, if those and others do not both reduce gradients.

        Raises:
            JoinError: So it is, on a rank whose last step it is.
        """
        return

    def before_notice(self, participant: "Participant") -> None:
        """Meet the other ranks, if they have not met before this notice of a custom joinable."""
        return


class LoopModel:
    """What a loop of the user's knows of the part of a model.

    Attributes:
        index: Of this part.
        forwards: The forwards of this rank's own, since the last tail.
        synced: How many of these a backward that averages gradients follows.
        holds_unsynced: Whether there are gradients, accumulated without a sync, that are none of the parameters'.
        deferred: The forwards that joined ranks hear of, if there are any, when their backward begins.
    """

    index: int
    forwards = synced = deferred = 0
    holds_unsynced = False
    _task = -1  # the backward that has come to this model
    _remembers = -1  # the last one that is remembered at its end

    @property
    def accumulates(self) -> bool:
        """Whether the last backward did not sync, on some rank."""
        return False

    @property
    def forwards_alone(self) -> bool:
        """Whether its forwards have no collective."""
        return False

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward that averages is still to follow the last forward, as far as this rank can tell."""
        return False

    def check_backward_ended(self) -> None:
        """Raise if an exception has ended this rank's last backward in the midst of an average.

        Raises:
            JoinError: So it has, and somebody has caught the exception.
        """

    @property
    def in_backward(self) -> bool:
        """Whether the backward that is under way has come to this model."""
        return self._task == _compat.backward_in_progress()

    @property
    def will_accumulate(self) -> bool:
        """Whether the backward that is under way adds to this model's gradients, and these are weighted then."""
        return False

    def is_unsynced(self, tensor: Tensor) -> bool:
        """Whether a tensor is a gradient of this model that no sync has averaged yet, or all of these in one."""
        return False

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model, and what it wraps: each has a `zero_grad`."""
        raise NotImplementedError

    def check_can_train(self, has_batch: Callable[[], bool]) -> None:
        """Raise if this rank cannot run the model itself, and is to do so."""

    def begin_loop(self) -> None:
        """A loop over `batches` begins."""

    def remember(self) -> None:
        """Note, where all ranks have done the same so far, what there is: it may be cleared from here on."""

    def remember_after_backward(self) -> None:
        """Note it when the backward that is under way has ended."""
        if (task := _compat.backward_in_progress()) != self._remembers:
            self._remembers = task
            # After the wrapper's own callback, which may yet have to be queued.
            _compat.after_backward(lambda: _compat.after_backward(self.remember))

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has nothing to do any more."""
        return True

    def prepare(self) -> None:
        """Do, at the top of a step on every rank, what would wait for all of them later."""

    def changed_buffers(self) -> list[Tensor]:
        """Return the buffers that this rank has changed since its last forward, if these were noted there."""
        return []

    def before_handover(self) -> None:
        """See to it that the lowest active rank has the model's newest state; every rank calls this."""


class Participant:
    """One of the things given to `Join`, on this rank.

    On an active rank it announces, in the tail, what it is about to do with others; on a joined rank
    `mirror` does the same with nothing.

    Args:
        driver: The loop, or the steps, that it takes part in.
        index: Its place among the parts there.

    Attributes:
        kinds: What it may announce, and of which type the payload is: `Any` for what it checks itself.
        closing: Of which type its closing message is.
        is_model: Whether it is a model's, and a `LoopModel`.
        in_pieces: Whether backwards must be announced piece by piece where other collectives come in them.
        model_parallel_groups: The global ranks, by team, that compute each batch together.
    """

    kinds: ClassVar[dict[str, Any]] = {}
    closing: ClassVar[Any] = None
    is_model: ClassVar[bool] = False
    in_pieces: ClassVar[bool] = False
    model_parallel_groups: Sequence[Sequence[int]] = ()

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self.members, self.tail_log = driver.members, driver.tail_log
        self.index = index
        self._undo: list[Callable[[], None]] = []

    @property
    def owned(self) -> Sequence[str]:
        """The names of what it trains and does not keep alike on all ranks: a rank may own a part, as an expert."""
        return ()

    def enter(self) -> None:
        """Install what lets this rank notice; each piece adds its removal to `_undo`."""

    def exit(self) -> None:
        """Remove all that was installed."""
        while self._undo:
            self._undo.pop()()

    def announce(self, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Tell the joined ranks what comes next, if there are any; see `Announcer.announce`."""
        self.tail_log.announce(self.index, kind, payload, hold)

    def announce_open(self, kind: str, payload: Any) -> None:
        """Announce what may hold objects of users' kinds: if it does, it comes after the record, to all ranks.

        Not in a backward. All active ranks must have something of the same types.
        """
        if not self.tail_log.meet():
            return
        if _codec.is_closed(payload):
            self.announce(kind, payload)
            return
        leads = self.members.rank == self.members.leader
        packed = _objects.pack(payload, f"What {type(self).__name__} announces ({kind})") if leads else None
        self.announce(kind, _objects.Apart())
        with self.tail_log.own_collectives():
            _objects.broadcast(packed, self.members.leader, self.members.group)

    def receive(self, kind: str, payload: Any) -> None:
        """Answer, on a joined rank, what was announced; see `mirror`.

        Raises:
            JoinError: No active rank can have announced it.
        """
        if isinstance(payload, _objects.Apart):
            payload = _objects.broadcast(None, self.members.leader, self.members.group)
        else:
            try:
                _codec.check(kind, str)
                _codec.check(payload, self.kinds[kind])
            except (_codec.Malformed, KeyError) as problem:
                raise _codec.foreign(f"a record of {type(self).__name__}", problem) from None
        self.mirror(kind, payload)

    def receive_closing(self, message: Any, source: int) -> Callable[[], None] | None:
        """Take the source's closing message; see `close`.

        Raises:
            JoinError: No active rank can have sent it.
        """
        try:
            _codec.check(message, self.closing)
        except _codec.Malformed as problem:
            raise _codec.foreign(f"closing message of {type(self).__name__}", problem) from None
        return self.close(message, source)

    def mirror(self, kind: str, payload: Any) -> None:
        """Do, on a joined rank, the counterpart of what was announced."""
        raise NotImplementedError

    def before_collective(self, ddps: bool) -> None:
        """Hear, on an active rank in the tail, of a collective in backward: of DDP's, or of another one.

        Raises:
            UnsupportedError: Joined ranks cannot take part in it there.
        """

    def before_all_ranks(self) -> None:
        """Tell joined ranks, in the tail, what they lack of this rank's state: all are about to do something alike."""

    def after_all_ranks(self) -> None:
        """All ranks, also those that have joined, have done something alike to what takes part."""

    def enter_tail(self) -> None:
        """Some rank has joined, and this one is active."""

    def leave_tail(self) -> None:
        """All ranks have joined."""

    def closing_message(self) -> Any:
        """Return, on the rank whose state all others take, what `close` needs to know."""

    def close(self, message: Any, source: int) -> Callable[[], None] | None:
        """Take, on every rank, what the source's `closing_message` say; the tail is over.

        Returns:
            What is to be done yet, where ranks wait for each other for it; other messages are on their way meanwhile.
        """

    def after_all(self, is_last_joiner: bool) -> None:
        """The context ends."""
