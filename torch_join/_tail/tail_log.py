"""The active ranks' announcements in the tail of a loop, and how a joined rank follows them."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import count
from operator import attrgetter
from typing import Any, cast

from torch_join._base.errors import JoinDriftWarning, JoinError
from torch_join._base.membership import Membership, Role
from torch_join._base.synced_steps import Synced, SyncedSteps, explain_mixed
from torch_join._collectives.backwards import Backwards
from torch_join._collectives.neutral import mirror
from torch_join._collectives.parting import Parting
from torch_join._collectives.subgroups import Subgroups
from torch_join._collectives.tap import Call, CollectiveTap
from torch_join._control import codec as _codec
from torch_join._control.channel import Channel
from torch_join._control.failures import telling_failures
from torch_join._control.reports import Status
from torch_join._participants.participant import Announcer, LoopModel, Participant
from torch_join._participants.unregistered import notice_metric
from torch_join._tail.agreement import Agreement, Announcement, explain, explain_counts

END, DONE, COLLECTIVE, TAIL = "end", "done", "collective", "tail"

_ASIDE = "aside/{}/{}"  # the number of the log's next record, and the index of the aside announcement before it
_RECORD = tuple[list[Announcement], tuple[int, ...]]  # the announcements and the active ranks
_KINDS = {
    COLLECTIVE: Call,
    TAIL: list[int],  # the synced backwards of each model
    DONE: tuple[bool, bool, list[Any]],  # a lockstep step: whether it has a backward, and a loss; the front end's data
    # Closing messages, the rank whose state is handed over, whether backwards run in pieces, whether no step was run.
    END: tuple[list[Any], int, bool, bool],
}
_NOTHING: Callable[..., None] = lambda *_: None  # noqa: E731


class TailLog(Announcer):
    """The tail of a loop, on active and on joined ranks.

    Args:
        members: Which ranks are active.
        meet: Waits until this rank knows which ranks are active; called if `has_to_meet`.
        check_backward: Called with each collective in backward, see `Backwards.before_collective`.
        before_collective: See `CollectiveTap`.

    Attributes:
        parting: The current step, if it is the last one of some ranks but not of all.
        participants: The receivers of announcements, by index.
        tap: Listens to an active rank's collectives.
        backwards: Follows collectives in backward.
        follows_asides: Whether a joined rank looks for announcements made aside, see `announce_aside`.
        on_all: How deep this rank is in `on_all_ranks`.
        has_to_meet: Whether a meeting is deferred, or this rank has to finish a loop that it left.
        synced: By model (its participant's index), the steps of the loop in which this rank has synced gradients.
        asked: The number of exchanges of all ranks' places in their loaders that this rank knows of.
        raised: The error that `telling` has reported.
    """

    def __init__(
        self,
        members: Membership,
        meet: Callable[[], None] = _NOTHING,
        check_backward: Callable[[list[int], bool], None] = _NOTHING,
        before_collective: Callable[[str, list[int], bool], None] = _NOTHING,
    ) -> None:
        self.members = members
        channel = Channel()
        self.parting = Parting(members, channel)
        self._before_collective = before_collective
        self.participants: list[Participant] = []
        self._meet = meet
        self.loader: Callable[[], tuple[int, list[int]] | None] = lambda: None  # see `Status`
        self.step: Callable[[], int | None] = lambda: None
        self.synced: dict[int, SyncedSteps] = {}
        self.backwards = Backwards(self, members, check_backward)
        self.follows_asides = False
        self.asked = 0
        self.open(channel)
        self.reset()

    def reset(self) -> None:
        """Reset to the state before the first step."""
        self._unwritten: list[_codec.Encoded] = []  # announcements not yet written
        self._is_due = False  # whether all active ranks make some of these announcements
        self.in_window = False  # whether the step's batch is a window of micro-batches
        self._unanswered: deque[Announcement] = deque()  # announcements read but not yet answered
        self._asides = 0  # the number of aside announcements read since the log's last record
        self.on_all = 0
        self.has_to_meet = False
        self.raised: BaseException | None = None  # in `telling`
        self.is_silent = False  # whether nothing has been announced since the tail started
        self._counts = False  # whether `agreement` compares this rank's announcements with other active ranks'
        self.backwards.reset()
        self.tap = self._new_tap()

    def open(self, channel: Channel) -> None:
        """Use another channel."""
        self.channel = channel
        self._subgroups = Subgroups(channel, self.members.global_ranks, self.members.rank)
        self.agreement = Agreement(channel)
        # A weak reference, so that a thread of the channel does not keep this object, and through it the group, alive.
        status = weakref.WeakMethod(self._status)
        channel.status = lambda: (method := status()) and method()
        channel.explain = explain

    def close(self) -> None:
        """Remove all hooks, and all references to and from this object that would keep the group alive."""
        self.raised = None
        self.tap.remove()
        while self.participants:
            self.participants.pop().exit()
        self._meet = self.backwards.check = self._before_collective = _NOTHING
        self.loader = self.step = lambda: None
        self.tap = CollectiveTap(_NOTHING, None)

    def _new_tap(self) -> CollectiveTap:
        return CollectiveTap(self._announce_collective, self._has_joined, self.backwards, self._before_collective)

    def models(self) -> list[LoopModel]:
        """Return the participants that are models."""
        return [cast(LoopModel, each) for each in self.participants if each.is_model]

    def synced_steps(self) -> list[Synced]:
        """Return, by model, the `SyncedSteps` of the last loop."""
        return [*map(attrgetter("gaps", "last"), self.synced.values())]

    def warn_if_mixed(self, synced: Sequence[list[Synced]]) -> None:
        """Warn if ranks synced in different steps of the last loop; given each rank's `synced_steps`."""
        if self.members.rank or synced.count(synced[0]) == len(synced):
            return
        if mixed := explain_mixed(dict(enumerate(synced)), self.members.global_ranks):
            JoinDriftWarning.warn(
                f"Ranks skipped different batches.{mixed} Skip a batch on all ranks, or filter the loader."
            )

    def check_backwards_ended(self) -> None:
        """See `LoopModel.check_backward_ended`; called when this rank has no batch, before it waits for other ranks."""
        for model in self.models():
            model.check_backward_ended()

    def remember_gradients(self) -> None:
        """Note the current gradients, unless a tail has started."""
        if not self.members.announces:
            for model in self.models():
                model.remember()

    @property
    def in_pieces(self) -> bool:
        return self.backwards.in_pieces

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report errors raised inside it to the other ranks, and raise an earlier error again.

        If user code swallows an error, the next meeting raises it again, since the other ranks will not come to it.
        """
        if self.raised is not None:
            raise self.raised
        try:
            with telling_failures(self.channel):
                yield
        except BaseException as error:
            self.raised = error if self.members.world_size > 1 else None
            raise

    # ------------------------------------------------------------ on an active rank

    def meet(self) -> bool:
        if self.has_to_meet:
            self._meet()
        return self.members.announces and not self.on_all

    @property
    def announces(self) -> bool:
        return self.members.announces and not self.on_all

    def is_quiet(self) -> bool:
        return not (self.meet() or self.tap.installed)

    def announce(self, index: int, kind: str, payload: Any = None, hold: bool = False) -> None:
        self.is_silent = False
        if self.meet():
            self._unwritten.append(self.agreement.note((index, kind, payload), self.members.leads, self.in_window))
            self._is_due = True
            if not hold:
                self.flush()

    def announce_alone(self, index: int, kind: str, payload: Any, hold: bool = False) -> None:
        self.is_silent = False
        if not self.in_window:
            self.announce(index, kind, payload, hold)
        elif self.meet() and self.members.leads:
            self._unwritten.append(_codec.encode((index, kind, payload)))

    def announce_aside(self, index: int, kind: str, payload: Any) -> None:
        """Announce to joined ranks an action that only the lowest active rank may take.

        The announcement has no number in the log, because all active ranks count the log's records together.
        """
        if self.meet() and self.members.leads:
            keys = (_ASIDE.format(self.channel.records, place) for place in count())
            key = next(key for key in keys if not self.channel.posted(key))
            self.channel.post(key, ([(index, kind, payload)], self.members.active))

    def flush(self) -> None:
        """Write the pending announcements to the log."""
        if self._is_due:
            if self._subgroups.groups:
                self._subgroups.mark(self.members.active)
            self.channel.append(_record(self._unwritten, self.members.active), leads=self.members.leads)
            self._unwritten, self._is_due = [], False

    def own_collectives(self) -> AbstractContextManager[None]:
        return self.tap.ignoring()

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Wrap a part of a step that joined ranks also run, on their own and without an announcement."""
        self.on_all += 1
        try:
            with self.tap.ignoring():
                yield
        finally:
            self.on_all -= 1

    @contextmanager
    def together(self, announce: Callable[[], None] = _NOTHING) -> Iterator[None]:
        """Wrap changes that all ranks make to participants; an active rank's `announce` starts joined ranks."""
        if self.meet():
            for each in self.participants:
                each.before_all_ranks()
            announce()
        with self.on_all_ranks():
            yield
        for each in self.participants:
            each.after_all_ranks()

    @contextmanager
    def listening(self, tap: CollectiveTap) -> Iterator[None]:
        """Use another tap inside."""
        self.tap.remove()
        self.tap = tap
        tap.install()
        try:
            yield
        finally:
            tap.remove()
            self.tap = self._new_tap()

    def change(self, active: tuple[int, ...]) -> None:
        """Continue with these active ranks."""
        members = self.members
        if active != members.active:
            self._is_due = self._is_due or members.announces  # also write what only the lowest rank has announced
            self.flush()  # before another rank becomes the lowest active one, which writes the log
            if not members.joined and members.uneven and set(active) < set(members.active):
                self.agreement.note_change(members.rank, members.active, active)
        members.change(active)

    def begin_tail(self) -> None:
        """Start a tail on an active rank; all active ranks call this."""
        self.members.take_role(Role.TAIL)
        self._counts = True
        self._subgroups.find(self.members.before)
        self.agreement.begin()
        self.announce(-1, TAIL, [each.synced - each.deferred for each in self.models()])
        self.is_silent = True
        for each in self.participants:
            each.enter_tail()
        self.tap.install()

    def end_tail(self, silent: bool = False) -> list[Any]:
        """Announce the end of the tail, on the last active ranks; return the closing messages.

        Args:
            silent: Whether no rank has run a step in the tail.
        """
        messages = [each.closing_message() for each in self.participants]
        self._subgroups.mark(self.members.before)
        end = -1, END, (messages, self.members.leader, self.in_pieces, silent)
        self.channel.append(([end], ()), leads=self.members.leads)
        self.leave_tail()
        return messages

    def leave_tail(self) -> None:
        """Stop announcing on this rank."""
        if self.members.announces:
            self.members.take_role(Role.EVEN)
            self._counts = False
            self.tap.remove()
            for each in self.participants:
                each.leave_tail()

    # ------------------------------------------------------------ on a joined rank

    def join(self) -> None:
        """Leave the active ranks; they note the log position from which this rank follows."""
        self.leave_tail()
        self.tap.remove()
        self._subgroups.find(self.members.before)
        self._subgroups.mark(self.members.before)

    def follow(self, until: str) -> Any:
        """Follow the active ranks' announcements, with neutral values, up to an `until` record; return its payload.

        Raises:
            JoinError: The log has a record that no active rank can have written.
        """
        self.members.take_role(Role.SERVING)
        try:
            while True:
                index, kind, payload = self._next()
                if index < 0 and _is_record(kind, payload, until):
                    return payload
                self._answer(index, kind, payload)
        finally:
            self.members.take_role(Role.EVEN)

    def follow_to(self, index: int, kind: str) -> None:
        """Follow announcements, from the middle of a record, up to the one of this participant and kind.

        Raises:
            JoinError: The log has a record that no active rank can have written.
        """
        while (announcement := self._next())[:2] != (index, kind):
            self._answer(*announcement)

    def _next(self) -> Announcement:
        """Wait for the next announcement."""
        while not self._unanswered:
            number, self._asides = self.channel.records, 0
            meanwhile = partial(self._take_asides, number) if self.follows_asides else None
            announcements, active = self._subgroups.follow(_RECORD, meanwhile)
            self._check_record(announcements, active)
            self._unanswered.extend(announcements)
            if active:
                self.change(active)
        return self._unanswered.popleft()

    def _take_asides(self, number: int) -> None:
        """Answer the aside announcements that precede record `number` of the log."""
        while self.channel.posted(key := _ASIDE.format(number, self._asides)):
            self._asides += 1
            announcements, active = self.channel.read(key, of=_RECORD)
            if self.members.rank in active:
                continue  # this rank took that action itself before it joined
            self._check_record(announcements, active)
            for announcement in announcements:
                self._answer(*announcement)

    def _check_record(self, record: Sequence[Announcement], active: tuple[int, ...]) -> None:
        """Check the contents of a record: the announcements, and the ranks that made them.

        Raises:
            JoinError: No active rank can have written this record.
        """
        known = all(-1 <= index < len(self.participants) for index, _, _ in record)
        if not (known and set(active) <= set(self.members.active)):
            raise _codec.foreign("a record of the tail", f"{_codec.brief(record)} of ranks {_codec.brief(active)}")

    def _answer(self, index: int, kind: str, payload: Any) -> None:
        if index >= 0:
            self.participants[index].receive(kind, payload)
        elif kind == COLLECTIVE:
            mirror(payload)
        elif kind == TAIL:
            if (own_synced := [each.synced for each in self.models()]) != payload:
                me, leader = self.members.named((self.members.rank, self.members.leader))
                answers = self.channel.health().answers
                synced = {rank: status.synced for rank, (_, status) in answers.items() if status}
                mixed = explain_mixed(synced, self.members.global_ranks)
                raise JoinError(explain_counts({me: own_synced, leader: payload}) + mixed)
        else:
            raise _codec.foreign("a record of the tail", f"one of the kind {kind!r}, which has no place here")

    def run_hook(self, main_hook: Callable[[], None]) -> None:
        with self.listening(CollectiveTap(self._expect_collective, None)):
            main_hook()

    def _expect_collective(self, call: Call) -> None:
        if self._subgroups.holds(call):
            kind, payload = COLLECTIVE, self._subgroups.expect(call.group, self.members.active)
            if payload is None:
                return
        else:
            _, kind, payload = self._next()
        if kind != COLLECTIVE or payload.operation != call.operation:
            found = payload.operation if kind == COLLECTIVE else kind
            raise JoinError(
                f"A main hook on rank {self.members.name} issued {call.operation}, but the active ranks announced"
                f" {found}. Issue the collectives of the joinable's step in its main hook, in the same order."
            )

    # ------------------------------------------------------------ collectives, and checks

    def begin_step(self, active: tuple[int, ...]) -> None:
        """Move, in lockstep, to a step in which these ranks are active; every rank calls this."""
        members = self.members
        before = members.active
        # A rank that becomes active again has not received the other ranks' announcements since it joined.
        if len(active) < members.world_size and (not members.uneven or not set(active) <= set(before)):
            before = tuple(range(members.world_size))  # as if all were active: the last record's ranks no longer matter
            self._subgroups.find(before)
            self.agreement.begin()
        if members.rank in before and members.rank not in active:
            self._subgroups.mark(before)
        self.change(active)
        # This also covers the backward after a step, where a collective that only one rank issues fails.
        self._counts = members.uneven and not members.joined

    def _announce_collective(self, call: Call) -> None:
        notice_metric(call.operation)
        if self._subgroups.holds(call):
            self._subgroups.announce(call, self.members.active)
        else:
            self.announce(-1, COLLECTIVE, call)

    def _has_joined(self, rank: int) -> bool:
        self.meet()
        return self.members.has_joined(rank)

    def _status(self) -> Status:
        digest = self.agreement.digest if self._counts else None
        models = [[each.forwards, each.synced] for each in self.models()]
        leader = min(self.members.active, default=0)
        return Status(models, digest, self.loader(), self.asked, self.step(), leader, tuple(self.synced_steps()))


def _record(announcements: Iterable[_codec.Encoded], active: tuple[int, ...]) -> _codec.Encoded:
    """Return the record of the active ranks' announcements."""
    return _codec.in_pair(announcements, _ranks(active))


@lru_cache(maxsize=8)
def _ranks(active: tuple[int, ...]) -> _codec.Encoded:
    return _codec.encode(active)


def _is_record(kind: str, payload: Any, expected: str) -> bool:
    """Whether an announcement without a participant is of this kind.

    Raises:
        JoinError: Its kind is unknown, or its payload is malformed.
    """
    try:
        _codec.check(payload, _KINDS[kind])
    except (_codec.Malformed, KeyError) as problem:
        raise _codec.foreign("a record of the tail", problem) from None
    return kind == expected
