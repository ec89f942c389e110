"""The common part of the public joinables: our `Join` unwraps them, torch's own `Join` runs their hooks.

torch's protocol is one all-reduce per step, which counts the active ranks: the first joinable of an active rank adds a
one, a joined rank adds a zero. Then a joined rank runs each main hook once. Here the first joinable belongs to this
package. Right after the count, unless all ranks are active, the ranks exchange which are (and how many samples).

In the tail each announcement is a *word*, an all-reduce of one number, and a record on the channel. A main hook waits
for words until its participant is done for the step. If no more come (a forward without a backward, no optimizer step
under accumulation), the next step starts with the word "no more". A rank that leaves its loop instead sends no word:
torch's `__exit__` starts with the count, and joined ranks take its zero for the word. So a word looks like torch's
count, and the rank sends another word later to make up for the count.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook

from torch_join._base.devices import use_device
from torch_join._base.errors import JoinError, JoinValueError, UnsupportedError, name_ranks
from torch_join._base.membership import MeetingPoint, Membership, Role
from torch_join._base.weighting import Weighting, check_sees_batches, resolve_weighting
from torch_join._control.failures import telling_failures
from torch_join._control.rendezvous import open_channel
from torch_join._handover.handover import hand_over
from torch_join._participants.arguments import refuse_misspelt
from torch_join._participants.kinds import holds_shards
from torch_join._participants.participant import Driver, Participant

_NO_MORE, _LEAVING, _MORE = -1, 0, 1


class HookDriver(Driver):
    """The driver that the joinables of this package share in one torch `Join`.

    Args:
        group: The process group.
        first: The first joinable of the `Join`, if it belongs to this package.
        weighting: How the gradients of the active ranks are combined.
    """

    def __init__(self, group: Any, first: "WrappingJoinable | None", weighting: Weighting) -> None:
        self.members = Membership(group, weighting)
        self.participants: list[Participant] = []
        self.joinables: list[WrappingJoinable] = []
        self.started = self._finished = False
        self._owners: list[WrappingJoinable] = []  # by participant, its joinable
        self._first = first
        if first is not None:
            use_device(first.join_device, group)
        self.channel = open_channel(group)
        self._undone: set[int] = set()  # the participants that may still announce in this step

    def add(self, joinable: "WrappingJoinable") -> None:
        """Add the next joinable, and install its hooks."""
        self.joinables.append(joinable)
        participant = joinable.make_participant(self, len(self.participants))
        if participant is not None:
            if self._first is None:
                raise joinable.misplaced("pass a JoinableModel first")
            self.participants.append(participant)
            self._owners.append(joinable)
            participant.enter()

    def close(self) -> None:
        """Remove all hooks and close the channel; may be called again."""
        for each in reversed(self.participants):
            each.exit()
        self.channel.close()

    # ------------------------------------------------------------ for the participants

    # Participants also ask for features that only this package's Join has.
    meets_at = MeetingPoint.FORWARD
    in_pieces = False

    @property
    def tail_log(self) -> "HookDriver":  # type: ignore[override]
        """This object, which also receives the participants' announcements."""
        return self

    @property
    def sees_steps(self) -> bool:
        """Whether there is a model, which is then the first participant."""
        return bool(self.participants) and self.participants[0].is_model

    def meet(self) -> bool:
        """Return whether this rank is active and another one has joined; ranks meet at the step's first forward."""
        return self.members.announces

    @property
    def announces(self) -> bool:
        return self.members.announces

    def is_quiet(self) -> bool:
        """Return whether this rank's actions need no announcement."""
        return not self.members.announces

    def run_hook(self, main_hook: Callable[[], None]) -> None:
        """Run the hook; torch itself runs the hooks of other packages' joinables."""
        main_hook()

    def own_collectives(self) -> AbstractContextManager[None]:
        """Do nothing: no tap listens to collectives here."""
        return nullcontext()

    def before_forward(self, count: Callable[[], float], waits: bool = True) -> bool:
        """Start a step; all ranks have met when this returns."""
        self.started = True
        with telling_failures(self.channel):
            if self.members.announces and self._undone:
                self._sum(_NO_MORE)
            work: Any = TorchJoin.notify_join_context(self._first)  # type: ignore[arg-type]
            # A joined rank learns from the same sum that it has to meet the others.
            if work.get_future().wait()[0].item() < self.members.world_size or self.members.count is not None:
                self._meet(True, int(count()) if self.members.count is not None else 0)
            if self.members.joined_ranks and not self.members.announces:
                self.members.take_role(Role.TAIL)
                for each in self.participants:
                    each.enter_tail()
        return True

    def announce(self, index: int, kind: str, payload: Any = None, hold: bool = False) -> None:
        """Announce the next action to the joined ranks, if any, at once."""
        if not self.members.announces:
            return
        if not self._undone:
            raise self._refuse(index, kind)
        self._sum(_MORE)
        done = self._owners[index].is_done(kind, payload)
        self.channel.append((index, kind, payload, done), leads=self.members.leads)
        if done:
            self._undone.discard(index)

    def announce_alone(self, index: int, kind: str, payload: Any, hold: bool = False) -> None:
        """Announce as usual, since in torch's `Join` all active ranks act in the same way."""
        self.announce(index, kind, payload)

    # ------------------------------------------------------------ what the hooks call

    def serve(self, joinable: "WrappingJoinable") -> None:
        """Answer, on a joined rank, the active ranks' announcements until they are done with this joinable."""
        self.started = True
        if joinable not in self._owners:
            return
        index = self._owners.index(joinable)
        with telling_failures(self.channel):
            if index == 0:
                self._leave_tail()
                self._meet(False)
            self.members.take_role(Role.SERVING)
            try:
                while index in self._undone:
                    if self._sum(_LEAVING) <= 0:
                        self._undone.clear()
                        break
                    participant, kind, payload, done = self.channel.follow(of=tuple[int, str, Any, bool])
                    self.participants[participant].receive(kind, payload)
                    if done:
                        self._undone.discard(participant)
            finally:
                self.members.take_role(Role.EVEN)

    def finish(self, is_last_joiner: bool) -> None:
        """Give every rank the state of the last joiner, once, when all ranks have joined."""
        if self._finished:
            return
        self.started = self._finished = True
        try:
            with telling_failures(self.channel):
                self._leave_tail()
                messages = [each.closing_message() for each in self.participants] if is_last_joiner else None
                answers = self.channel.gather(messages, of=list[Any] | None)
                self.members.follow_leader(next(rank for rank, message in enumerate(answers) if message is not None))
                if None in answers:
                    for each, message in zip(self.participants, answers[self.members.leader] or [], strict=True):
                        if (end := each.receive_closing(message, self.members.leader)) is not None:
                            end()
                    states = [joinable.wrapped for joinable in self.joinables if joinable.is_replicated]
                    hand_over(states, self.members.leader, self.channel, self.members.group)
                self.channel.close(meets=True)
        finally:
            self.close()

    # ------------------------------------------------------------ who is active

    def _meet(self, active: bool, samples: int = 0) -> None:
        """Find out which ranks are active at this step."""
        answers = self.channel.gather((active, samples), of=tuple[bool, int])
        self.members.change(tuple(rank for rank, (is_active, _) in enumerate(answers) if is_active))
        self.members.counted, self.members.total = samples, sum(count for _, count in answers)
        self._undone = set(range(len(self.participants)))

    def _refuse(self, index: int, kind: str) -> JoinError:
        error = JoinError(
            f"torch's Join cannot handle what {self._owners[index]} does in this step ({kind}) after"
            f" {name_ranks(self.members.joined_names)} finished: a step must be a forward of the first model, then at"
            " most one backward and one optimizer step. Use torch_join.Join, which has no such limit."
        )
        self._sum(_MORE)  # the joined ranks take this word for the count, and get the error when they meet
        # Not earlier: a rank that waits for a record would leave, and ranks that wait for it here would not learn why.
        self.channel.fail(f"JoinError: {error}")
        return error

    def _leave_tail(self) -> None:
        """Leave the tail after this rank has joined; if a word was due, make up for the count that replaced it."""
        if not self.members.announces:
            return
        self.members.take_role(Role.EVEN)
        for each in self.participants:
            each.leave_tail()
        if self._undone:
            self._sum(_LEAVING)

    def _sum(self, value: int) -> int:
        total = torch.zeros(1, device=self._first.join_device) + value  # type: ignore[union-attr]
        dist.all_reduce(total, group=self.members.group)
        return int(total.item())


# The drivers of a torch `Join` that is being built.
_building: weakref.WeakSet[HookDriver] = weakref.WeakSet()


class WrappingJoinable(Joinable):
    """A `Joinable` for another object, usable in torch's `Join` and in ours.

    It installs hooks when a torch `Join` with `enable=True` is created. It removes them at the end of the context, or
    with the `Join` object (after an exception, when torch calls no hook), at the latest when the joinable is passed to
    another `Join`.

    Attributes:
        is_replicated: Whether its state is handed over.
        has_group: Whether the user passed a process group; if not, it uses the group of the other joinables.
    """

    is_replicated = True

    def __init__(self, wrapped: Any, group: Any, device: torch.device) -> None:
        self.wrapped = wrapped
        self._group, self.has_group = group, group is not None
        self._device = device
        self._hook: weakref.ref[_Hook] | None = None
        self._driver: HookDriver | None = None
        self._weighting: Weighting = "world"
        super().__init__()

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that count the active ranks."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self._group or dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that torch's `Join` runs; it reads `divide_by_initial_world_size` and `weighting`.

        Raises:
            UnsupportedError: The wrapped object is sharded; or the weighting counts batches, which hooks do not see.
        """
        if holds_shards(self.wrapped):
            raise UnsupportedError(
                f"{type(self.wrapped).__name__} holds shards of a model, which a finished rank must keep updating,"
                " but torch's own Join does not support that. Pass the model and its optimizer to torch_join.Join."
            )
        for name in kwargs:
            refuse_misspelt(name)
        self._weighting = resolve_weighting(kwargs.get("weighting"), kwargs.get("divide_by_initial_world_size"))
        check_sees_batches(self._weighting)
        hook = _Hook(self)
        self._hook = weakref.ref(hook)
        return hook

    # torch's `Join` sets this when it is created, after it has called `join_hook`.
    @property
    def _join_config(self) -> Any:
        return self._config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        """Install the hooks that observe a step, while torch's `Join` is being created."""
        self._config = config
        enable, is_first = config.enable, config.enable and config.is_first_joinable
        built = (d for d in _building if d.members.group == self.join_process_group and not d.started)
        driver = None if is_first or not enable else next(built, None)
        if self._driver is not None and self._driver is not driver:
            self._driver.close()  # left by a Join that an exception has ended
        self._driver = None
        hook = self._hook() if enable and self._hook is not None else None
        if hook is None:
            return
        if driver is not None and self in driver.joinables:
            raise JoinValueError(f"{self} was passed to Join twice.")
        if is_first and not self.leads():
            raise self.misplaced("pass a JoinableModel (or another object that announces each step) before it")
        if driver is None:
            driver = HookDriver(self.join_process_group, self if is_first else None, self._weighting)
        if is_first:
            _building.clear()
            _building.add(driver)
        self._driver = hook.driver = driver
        weakref.finalize(hook, driver.close).atexit = False
        driver.add(self)

    def misplaced(self, rule: str) -> JoinValueError:
        """Return the error for a list in the wrong order."""
        return JoinValueError(
            f"{self} is at the wrong place in the list: {rule}. torch's Join runs the hooks of a step in list order"
            " and counts the active ranks in the first hook. Or use torch_join.Join, which takes any order."
        )

    def make_participant(self, driver: Driver, index: int) -> Participant | None:
        """Return the participant for each step, if there is one."""
        return None

    def leads(self) -> bool:
        """Whether this joinable starts a step, so that it may be the first one in the list for torch's `Join`."""
        return False

    def is_done(self, kind: str, payload: Any) -> bool:
        """Whether this announcement is the joinable's last one in a step."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.wrapped).__name__})"


class _Hook(JoinHook):
    """The hook for torch's `Join`; it lives as long as that object."""

    def __init__(self, joinable: WrappingJoinable) -> None:
        self._joinable = joinable
        self.driver: HookDriver | None = None

    def main_hook(self) -> None:
        cast(HookDriver, self.driver).serve(self._joinable)

    def post_hook(self, is_last_joiner: bool) -> None:
        cast(HookDriver, self.driver).finish(is_last_joiner)


def unwrap(thing: Any) -> Any:
    """Return the object inside a joinable of this package; return any other object unchanged."""
    return thing.wrapped if isinstance(thing, WrappingJoinable) else thing
