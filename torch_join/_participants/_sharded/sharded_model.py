"""A sharded model in a user's loop.

Each gather and reduction of its units is announced (`following.py`). At the start of a backward, the lowest active rank
also announces what has happened to the gradients since the last one, since FSDP adds to existing gradients. Clipping,
which changes gradients locally, has its own participant. All ranks raise if a change was not announced.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from torch_join._base.errors import JoinError
from torch_join._base.membership import MeetingPoint
from torch_join._compat import ddp as _compat
from torch_join._compat import fsdp as _compat_sharded
from torch_join._control.codec import foreign
from torch_join._handover.mirror import Known, is_known, known
from torch_join._participants._gradients.evidence import Gradients, Runs, runs_of, states_of
from torch_join._participants._gradients.other_verdicts import OtherVerdicts
from torch_join._participants._sharded.following import FollowingParticipant
from torch_join._participants.hook import Hook
from torch_join._participants.participant import Driver, LoopModel
from torch_join._shadow._sharded.unit import Unit
from torch_join._shadow.synced_norms import sync_norms

# What has happened to the gradients; the units' places, and the gradients accumulated in each unit; which parameters
# are trained, and which modules are in training mode.
Closing = tuple[Runs, list[tuple[int, int]], list[list[bool]], list[bool], list[bool]]


class ShardedModelParticipant(FollowingParticipant, LoopModel):
    """A model with parts that `fully_shard` or `FullyShardedDataParallel` has sharded."""

    kinds: ClassVar[dict[str, Any]] = {**FollowingParticipant.kinds, "gradients": tuple[bool, Runs], "states": Runs}
    closing: ClassVar[Any] = Closing

    is_model = True
    gradients: Gradients  # the shards' gradients, from `enter` on
    _known: Sequence[Known] = ()  # the gradients that were unsynced after the last backward

    def __init__(self, driver: Driver, index: int, model: nn.Module) -> None:
        super().__init__(driver, index, model)
        self._forwarded_in = 0  # the loop of the last forward
        self._others = OtherVerdicts(driver, index, shards=True)
        self._scales: list[Callable[[], None]] = []
        self.before_reductions: list[Callable[[], None]] = []  # functions that make announcements before reductions

    def enter(self) -> None:
        super().enter()
        root = _compat_sharded.roots(self.model)[0]
        hook = root.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True, prepend=True)
        self._undo += [hook.remove, self._stop_scaling, self.contents.forget]
        found = [(index, holder) for index, unit in enumerate(self.units) for holder in unit.holders]
        holders = [holder for _, holder in found]
        # FSDP1 writes zeros into a flat gradient, again and again, if a part of it is frozen.
        is_flat = any(not isinstance(holder, Tensor) for holder in holders)
        self.gradients = Gradients(holders, self.driver.clears, views=is_flat, units=[index for index, _ in found])
        left = any(holder.grad is not None for holder in holders)
        self._is_flat = is_flat
        self.accumulates = left or any(gradient is not None for _, gradient in self._unsynced)
        self.remember()
        if self.members.meets_late:
            self._scale()

    # ------------------------------------------------------------ what the loop knows

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model]

    def begin_loop(self) -> None:
        self.gradients.begin_loop()

    def remember(self) -> None:
        # Each rank has another shard, so only the rank itself can use a norm.
        self.gradients.remember(accumulates=True)
        # If gradients are flat, they include the unsynced ones.
        self._known = [known(g) for _, g in self._unsynced] if self.accumulates and not self._is_flat else []

    @property
    def _unsynced(self) -> list[tuple[Unit, Tensor | None]]:
        """The gradients that this rank has accumulated without a sync, with their units."""
        return [(unit, gradient) for unit in self.units for gradient in unit.unsynced]

    @property
    def holds_unsynced(self) -> bool:  # type: ignore[override]
        return any(gradient is not None for _, gradient in self._unsynced)

    def _raise_if_unsynced_changed(self) -> None:
        found = self._unsynced if self._known else []
        for (unit, gradient), before in zip(found, self._known, strict=True):
            if before is not None and not is_known(gradient, before):
                raise JoinError(
                    f"An accumulated, not yet synced gradient of {unit.name or 'the root module'} was cleared or"
                    f" modified by hand after ranks {list(self.members.joined_names)} finished. They hold a share of"
                    " it and cannot repeat that change. Clear gradients after a backward that syncs, or sync in each"
                    " backward."
                )

    @property
    def at_top(self) -> bool:
        """Whether the ranks meet before a step's code; if not, only active ranks have run a part of it by then."""
        return self.driver.meets_at is MeetingPoint.TOP

    def enter_tail(self) -> None:
        if self.at_top:
            self.remember()
        if self.at_top or not self.contents.known:
            self.contents.remember()
        else:
            self.contents.check(self.members.joined_names)
        if not self._scales:
            self._scale()

    def leave_tail(self) -> None:
        super().leave_tail()
        self.contents.forget()
        if not self.members.meets_late:
            self._stop_scaling()

    # ------------------------------------------------------------ on an active rank

    def _before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        members, driver = self.members, self.driver
        if members.serves:
            return
        driver.before_forward(lambda: members.count_forward(args, kwargs))
        self.forwards += 1
        self._forwarded_in = driver.loop_number

    def before_backward(self) -> None:
        if (task := _compat.backward_in_progress()) == self._task or self.members.serves:
            return
        self._task = task
        self.driver.before_backward(self.index, self._forwarded_in)
        in_tail = self.tail_log.meet()
        syncs = any(unit.synchronizes for unit in self.units)
        self.driver.before_sharded_backward(syncs)
        if in_tail or self.driver.meets_at is MeetingPoint.FORWARD:
            self.remember_after_backward()
        if in_tail:
            self._raise_if_unsynced_changed()
            self.contents.check_hooks(self.members.joined_names)
            self.announce("gradients", (syncs, self._others.found(self.gradients, syncs)), hold=True)
            for announce in self.before_reductions:
                announce()
        self.accumulates = not syncs
        self.synced += syncs

    def check(self) -> Runs:
        """Return what has happened to the gradients, for joined ranks that are about to change theirs.

        Raises:
            JoinError: User code has changed gradients or parameters in a way that joined ranks cannot know.
        """
        self.contents.check(self.members.joined_names)
        self._raise_if_bypassed()
        states = self.gradients.states()
        self.gradients.raise_if_changed(states, self.members)
        return runs_of(states)

    def _raise_if_bypassed(self) -> None:
        for unit in self.units:
            if unit.is_bypassed:
                raise JoinError(
                    f"A gradient of {unit.name or 'the root module'} was modified by hand: another tensor or None"
                    f" replaced FullyShardedDataParallel's gradient after ranks {list(self.members.joined_names)}"
                    " finished. They cannot repeat that change. Leave all in place, or clear all with zero_grad()."
                )

    def before_all_ranks(self) -> None:
        # A state dict depends on whether there are gradients: torch steps an optimizer that has never stepped.
        self.announce("states", self.check())

    def after_all_ranks(self) -> None:
        if self.members.announces:
            self.contents.remember()

    def _scale(self) -> None:
        self._scales = [unit.scale(lambda: self._factor) for unit in self.units]

    def _stop_scaling(self) -> None:
        while self._scales:
            self._scales.pop()()

    @property
    def _factor(self) -> float:
        if self.members.serves or self.members.weighting == "world":  # called for each gradient
            return 1.0
        return self.members.loss_factor

    # ------------------------------------------------------------ on a joined rank

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "states":
            self.take(payload)
            return
        if kind != "gradients":
            super().mirror(kind, payload)
            return
        self.driver.note_backward(self.index)
        syncs, runs = payload
        self.accumulates = not syncs
        self._others.follow(self.gradients, runs, syncs, accumulates=True)

    def take(self, runs: Runs) -> None:
        """Repeat on a joined rank what active ranks have done to their gradients, when no backward comes next."""
        self._raise_if_unsynced()
        self.gradients.follow(states_of(runs, len(self.gradients.parameters)), accumulates=True, ask=None)

    def _raise_if_unsynced(self) -> None:
        for unit in () if self.accumulates else self.units:
            if any(gradient is not None for gradient in unit.unsynced):
                raise JoinError(
                    "This rank finished while holding an accumulated, not yet synced gradient of"
                    f" {unit.name or 'the root module'}, and the last backward that synced did not reach that module"
                    " on any active rank, so FSDP would lose this rank's share. Use the same modules in all"
                    " micro-batches of an accumulation window, or end the window with the loop."
                )

    # ------------------------------------------------------------ at the end

    def closing_message(self) -> Closing:
        self.contents.check(self.members.joined_names)
        trains = [parameter.requires_grad for parameter in self.model.parameters()]
        modes = [module.training for module in self.model.modules()]
        self._raise_if_unsynced_changed()
        unsynced = [[gradient is not None for gradient in unit.unsynced] for unit in self.units]
        return runs_of(self.gradients.states()), self.places, unsynced, trains, modes

    def close(self, message: Closing, source: int) -> None:
        runs, places, unsynced, trains, modes = message
        states = states_of(runs, len(self.gradients.parameters))
        if self.members.rank != source and not self.members.last_joiner:
            self._raise_if_unsynced()
            self.gradients.raise_if_lost(states)
            self.gradients.follow(states, accumulates=True, ask=None)
        if self.members.rank != source:
            self.places = places
            if [*map(len, unsynced)] != [len(unit.unsynced) for unit in self.units]:
                raise foreign("what a sharded model has accumulated", "it is of other units")
            for unit, held in zip(self.units, unsynced, strict=True):
                unit.hold(held)
        self.reach_joined_state()
        self._others.reset()
        sync_norms(self.model, source, self.members.group)
        # Code on the active ranks has set these; it has not run here.
        for parameter, trained in zip(self.model.parameters(), trains, strict=True):
            if parameter.requires_grad != trained:  # after an evaluation, whole parameters may be inference tensors
                parameter.requires_grad_(trained)
        for module, mode in zip(self.model.modules(), modes, strict=True):
            module.training = mode
        self.forwards = self.synced = 0
        self.remember()
