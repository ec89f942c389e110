"""The interface between a joinable and its loop."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from torch_join._base.attributes import replace, setting
from torch_join._base.membership import MeetingPoint, Membership
from torch_join._compat import ddp as _compat
from torch_join._control import codec as _codec
from torch_join._control.channel import Channel
from torch_join._handover import objects as _objects
from torch_join._participants.clears import Clears
from torch_join._participants.hook import Hook


class Announcer(Protocol):
    """Announces a participant's next action to the joined ranks: the `TailLog` of a loop, or a `HookDriver`.

    Attributes:
        channel: Carries small messages between the ranks.
        participants: All participants, in the same order on all ranks.
    """

    channel: Channel
    participants: "list[Participant]"

    @property
    def in_pieces(self) -> bool:
        """Whether backwards are announced piece by piece, because they may issue collectives other than DDP's."""

    def meet(self) -> bool:
        """Hold the deferred meeting, if any; a participant calls this before it acts.

        Returns:
            Whether to announce: this rank is active, and another one has joined and does not act the same by itself.
        """

    @property
    def announces(self) -> bool:
        """The last result of `meet`."""

    def is_quiet(self) -> bool:
        """Meet; return whether this rank's actions need no announcement, and no tap listens to it."""

    def announce(self, index: int, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Announce the next action to the joined ranks, if there are any.

        Args:
            index: The participant that acts, -1 for none.
            kind: The kind of action.
            payload: Further data that joined ranks need.
            hold: Whether to send this announcement together with the next one.
        """

    def announce_alone(self, index: int, kind: str, payload: Any, hold: bool = False) -> None:
        """Announce the next action to the joined ranks if it has no collective.

        If a batch is a window of `windows`, active ranks may take this action different numbers of times. Then only the
        lowest rank announces it, with its next announcement.
        """

    def own_collectives(self) -> AbstractContextManager[None]:
        """Wrap collectives that joined ranks know of without the tap."""

    def run_hook(self, main_hook: Callable[[], None]) -> None:
        """Run a main hook, whose collectives must match those that the active ranks announce."""


class Driver(Protocol):
    """A participant's view of its loop.

    There are three drivers: `LoopDriver` for users' loops, `StepDriver` for loops that a framework runs in lockstep,
    and `HookDriver` for torch's own `Join`.

    Attributes:
        members: Which ranks are active, and this rank's role, as of the last meeting.
        tail_log: Receives announcements.
        step_number: The current step, counted from the start of the loop.
        loop_number: The number of the current loop over `batches`, from 1; 0 outside of a loop.
        joined_mid_step: Whether this rank ran out of batches after a forward whose backward may still follow.
    """

    joined_mid_step: bool = False
    members: Membership
    tail_log: Announcer
    step_number: int = 0

    @property
    def loop_number(self) -> int:
        return 0

    @property
    def clears(self) -> Sequence[Clears]:
        """The watches on `zero_grad` of optimizers and models, which show how user code clears gradients."""
        return ()

    @property
    def meets_at(self) -> MeetingPoint:
        """Where in a step the ranks meet; with `FORWARD`, another rank may be at a meeting at any time."""

    @property
    def sees_steps(self) -> bool:
        """Whether a model, or a custom joinable, shows where a step starts."""

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> bool:
        """Come to a meeting, if the ranks have not met before this forward.

        Args:
            count: Returns the count of the forward's arguments, for a step whose batch the driver does not see.
            waits: Whether this forward depends on which ranks are active.

        Returns:
            Whether the active ranks are known now; if not, this rank has arrived, and meets the others later.
        """

    def note_backward(self, model: int) -> None:
        """Note that this joined rank follows a backward of this participant's model."""
        return

    def note_accumulation(self, model: int) -> None:
        """Note that one of this rank's backwards adds to a model's gradients."""
        return

    def before_backward(self, model: int, loop: int = 0) -> None:
        """Raise for the backward of a batch from an uneven loop that has ended on all ranks.

        Args:
            model: The index of the model's participant.
            loop: The `loop_number` of the forward, if it is known.

        Raises:
            JoinError: The backward belongs to such a loop.
        """
        return

    def before_buffers(self, group: Any) -> None:
        """Check, in a step that is the last one of some ranks, that other ranks broadcast buffers as this rank does.

        Raises:
            JoinError: They do not, and this is this rank's last step.
        """
        return

    def before_sharded_backward(self, syncs: bool) -> None:
        """Check, in a step that is the last one of some ranks, that all ranks, or none, reduce gradients.

        Raises:
            JoinError: Only some ranks do, and this is this rank's last step.
        """
        return

    def before_notice(self, participant: "Participant") -> None:
        """Meet the other ranks, if they have not met yet, when a custom joinable calls `notify_join_context`."""
        return


class LoopModel:
    """A model's participant, as a user's loop sees it.

    Attributes:
        index: The participant's index.
        forwards: The number of this rank's own forwards since the last tail.
        synced: How many of these forwards have a backward that averages gradients.
        accumulates: Whether the last backward did not sync, on some rank.
        holds_unsynced: Whether gradients accumulated without a sync exist outside the parameters' `grad`.
        deferred: The number of forwards that this rank announces only when their backward starts.
    """

    index: int
    forwards = synced = deferred = 0
    accumulates = holds_unsynced = False
    _task = -1  # the id of the backward that has reached this model
    _remembers = -1  # the id of the last backward after which gradients are noted

    @property
    def forwards_alone(self) -> bool:
        """Whether the model's forwards issue no collective."""
        return False

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward that averages should still follow the last forward, as far as this rank knows."""
        return False

    def check_backward_ended(self) -> None:
        """Raise if an exception has ended this rank's last backward in the middle of averaging.

        Raises:
            JoinError: User code has caught such an exception.
        """

    @property
    def in_backward(self) -> bool:
        """Whether the current backward has reached this model."""
        return self._task == _compat.backward_in_progress()

    @property
    def will_accumulate(self) -> bool:
        """Whether the current backward adds to this model's gradients, and so weights them."""
        return False

    def is_unsynced(self, tensor: Tensor) -> bool:
        """Whether a tensor is a gradient of this model that no sync has averaged yet, or holds all such gradients."""
        return False

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model and the modules that it wraps; each has a `zero_grad`."""
        raise NotImplementedError

    def check_can_train(self, has_batch: Callable[[], bool]) -> None:
        """Raise if this rank has a batch but cannot run the model itself."""

    def begin_loop(self) -> None:
        """Start a loop over `batches`."""

    def remember(self) -> None:
        """Note the current gradients, while all ranks still agree; from now on user code may clear them."""

    def remember_after_backward(self) -> None:
        """Note the gradients at the end of the current backward."""
        if (task := _compat.backward_in_progress()) != self._remembers:
            self._remembers = task
            # Queue it twice, to run after the wrapper's own callback, which may not be queued yet.
            _compat.after_backward(lambda: _compat.after_backward(self.remember))

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` has nothing left to do."""
        return True

    def prepare(self) -> None:
        """Do, at the top of a step on every rank, work that would later wait for all ranks."""

    def changed_buffers(self) -> list[Tensor]:
        """Return the buffers that this rank has changed since its last forward, if that forward noted them."""
        return []

    def before_handover(self) -> None:
        """Ensure that the lowest active rank has the model's newest state; every rank calls this."""


class Participant:
    """An object passed to `Join`, on this rank.

    In the tail, a participant on an active rank announces each action that involves other ranks. On a joined rank,
    `mirror` repeats the action with neutral values.

    Args:
        driver: The driver of its loop, or of its steps.
        index: Its index among the driver's participants.

    Attributes:
        kinds: The kinds that it may announce, with the types of their payloads: `Any` if it checks them itself.
        closing: The type of its closing message.
        is_model: Whether it belongs to a model, and is a `LoopModel`.
        in_pieces: Whether backwards must be announced piece by piece if they have other collectives.
        model_parallel_groups: The groups of global ranks that compute each batch together.
        is_inside: Whether this rank runs an announced call.
    """

    kinds: ClassVar[dict[str, Any]] = {}
    closing: ClassVar[Any] = None
    is_model: ClassVar[bool] = False
    in_pieces: ClassVar[bool] = False
    model_parallel_groups: Sequence[Sequence[int]] = ()
    is_inside = False

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self.members, self.tail_log = driver.members, driver.tail_log
        self.index = index
        self._undo: list[Callable[[], None]] = []

    @property
    def owned(self) -> Sequence[str]:
        """The names of parameters that are trained but differ between ranks, such as a rank's expert."""
        return ()

    def enter(self) -> None:
        """Install hooks, and add the removal of each to `_undo`."""

    def exit(self) -> None:
        """Remove all hooks."""
        while self._undo:
            self._undo.pop()()

    def override(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace an object's method by `call`, which gets the method as its first argument, until `exit`."""
        own = getattr(owner, name)
        self._undo.append(replace(owner, **{name: Hook(partial(call, own), copied=own)}))

    def is_quiet(self) -> bool:
        """Whether this rank's calls need no announcement; may hold a deferred meeting."""
        return self.members.serves or self.is_inside or not self.tail_log.meet()

    def inside(self, run: Callable[[], Any]) -> Any:
        """Run a call that joined ranks make too, so its collectives and inner calls need no announcement."""
        with setting(self, is_inside=True), self.tail_log.own_collectives():
            return run()

    def announce_calls(
        self,
        owner: Any,
        name: str,
        kind: str,
        payload: Callable[..., Any] = lambda *_: None,
        hold: bool = False,
        repeats: Callable[..., bool] = lambda *_, **__: True,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Announce the calls of an object's method, which joined ranks repeat in `mirror`.

        Args:
            owner: The object.
            name: The method.
            kind: The kind of action.
            payload: Makes the payload from a call's arguments.
            hold: Whether to send the announcement with the next one, as the call may not communicate before.
            repeats: Returns whether joined ranks make a call with these arguments too; called before the ranks meet.
            after: Called after an announced call.
        """

        def call(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not repeats(*args, **kwargs) or self.is_quiet():
                return own(*args, **kwargs)
            self.announce(kind, payload(*args, **kwargs), hold)
            result = self.inside(partial(own, *args, **kwargs))
            after()
            return result

        self.override(owner, name, call)

    def announce(self, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Announce the next action to the joined ranks, if there are any; see `Announcer.announce`."""
        self.tail_log.announce(self.index, kind, payload, hold)

    def announce_open(self, kind: str, payload: Any) -> None:
        """Announce a payload that may hold users' objects; if it does, a broadcast to all ranks follows the record.

        Do not call this in a backward. The payloads of all active ranks must have the same types.
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
        """Answer an announcement on a joined rank; see `mirror`.

        Raises:
            JoinError: No active rank can have sent this announcement.
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
        """Receive the source's closing message; see `close`.

        Raises:
            JoinError: No active rank can have sent this message.
        """
        try:
            _codec.check(message, self.closing)
        except _codec.Malformed as problem:
            raise _codec.foreign(f"closing message of {type(self).__name__}", problem) from None
        return self.close(message, source)

    def mirror(self, kind: str, payload: Any) -> None:
        """Repeat an announced action on a joined rank, with neutral values."""
        raise NotImplementedError

    def before_collective(self, ddps: bool) -> None:
        """Prepare, on an active rank in the tail, for a collective in backward, by DDP (`ddps`) or by other code.

        Raises:
            UnsupportedError: Joined ranks cannot take part in this collective.
        """

    def before_all_ranks(self) -> None:
        """Announce to joined ranks, in the tail, the state that they need before an action of all ranks."""

    def after_all_ranks(self) -> None:
        """Note that all ranks, including joined ones, have taken the same action on the participants."""

    def enter_tail(self) -> None:
        """Act on the start of a tail: some rank has joined, and this rank is active."""

    def leave_tail(self) -> None:
        """Act on the end of a tail: all ranks have joined."""

    def closing_message(self) -> Any:
        """Return the data that `close` needs, on the rank whose state is handed over."""

    def close(self, message: Any, source: int) -> Callable[[], None] | None:
        """Act, on every rank, on the source's `closing_message`; the tail is over.

        Returns:
            A function for work in which ranks wait for each other, called while other messages are on their way.
        """

    def after_all(self, is_last_joiner: bool) -> None:
        """Act on the end of the context."""
