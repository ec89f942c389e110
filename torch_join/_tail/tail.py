"""A tail, from the first rank that joins to the last one, whose state all ranks get; and the checks at both ends."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_join._base.devices import on_device
from torch_join._base.errors import JoinDriftWarning, JoinValueError, UnsupportedError, check_all_go_on
from torch_join._base.hyperparameters import Recorded, Steps
from torch_join._base.weighting import name_of
from torch_join._compat.optimizer_state import is_sharded
from torch_join._handover.audit import Audit
from torch_join._handover.buffers import UnsyncedBuffers
from torch_join._handover.early_exit import EarlyExit
from torch_join._handover.forgotten import Forgotten
from torch_join._handover.handover import hand_over
from torch_join._participants.clears import innermost_optimizer
from torch_join._participants.ddp_model import ModelParticipant
from torch_join._participants.hook import Hook
from torch_join._participants.kinds import is_sharded_model, stateful, unsynced_models
from torch_join._participants.options import Options
from torch_join._participants.unregistered import missing_model
from torch_join._tail.tail_log import END, TailLog


class StaleReads:
    """Watches the `state_dict` calls of the models and optimizers passed to `Join`.

    It warns if a state was read after a rank's last batch, but before it received the other ranks' later changes. A
    rank that leaves a loop by `break`, or that keeps the loop's iterator, does not wait for the other ranks. A
    checkpoint that it writes there has the state of this rank's last step. The warning comes when all ranks have met,
    since only then does this rank know whether others continued.

    Args:
        objects: Everything passed to `Join`.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._read: str | None = None
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Start to watch; does nothing if already started."""
        if self._undo:
            return
        inner = [thing.module for thing in self._objects if isinstance(getattr(thing, "module", None), nn.Module)]
        for thing in [*self._objects, *inner]:
            if isinstance(thing, (nn.Module, Optimizer)):
                with suppress(AttributeError):  # a wrapper may not have run the `__init__` of its base
                    self._undo.append(thing.register_state_dict_pre_hook(Hook(self._note)).remove)

    def _note(self, thing: Any, *_: Any) -> None:
        self._read = self._read or type(thing).__name__

    def stop(self) -> None:
        """Stop watching, but remember all reads so far."""
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """Stop watching, and forget all reads."""
        self.stop()
        self._read = None

    def warn(self, rank: int) -> None:
        """Warn about any read, and forget it; called if other ranks have continued without this one."""
        if self._read is not None:
            JoinDriftWarning.warn(
                f"Rank {rank} read the state of {self._read} after its last batch from join.batches but before the"
                " other ranks had finished, so a checkpoint of that state would be outdated. Read the state after a"
                " `for` over join.batches, or after the `with`. (Ignore this if you want that step's state.)"
            )
        self.forget()


class Tail:
    """The tails of this rank's loops, one after the other.

    Args:
        objects: Everything passed to `Join`.
        options: The user's options: what to compare and what to hand over.

    Attributes:
        tail_log: The ranks' log.
        early_exit: How this rank left its loop by `break`, if it did.
        reads: Watches for states that user code reads before this rank has received the other ranks' state.
        changes_freely: The object that a rank may change between a `break` and the next meeting.
        handovers: The number of handovers so far.
        refusal: The error that explains why this rank, whose user code has ended, can no longer serve.
    """

    handovers = 0
    refusal: BaseException | None = None

    def __init__(self, objects: Sequence[Any], options: Options) -> None:
        self._objects = objects
        self._options = options
        self.reads = StaleReads(objects)
        self.tail_log: TailLog
        self.changes_freely: object = None

    # Created only in a tail, so that an even loop does not pay for them.
    @cached_property
    def _buffers(self) -> UnsyncedBuffers:
        return UnsyncedBuffers(unsynced_models(self._objects), self._options.hand_over_buffers)

    @cached_property
    def _audit(self) -> Audit:
        objects, chosen = self._objects, self._options
        shards = [thing for thing in objects if is_sharded_model(thing)]
        left_out = Forgotten(objects)
        return Audit(stateful(objects), chosen.audit, chosen.hand_over_ignored, left_out, self._buffers, shards)

    def reset(self) -> None:
        """Reset to the state before the first loop."""
        self.early_exit: EarlyExit | None = None
        self._recorded_at = -1  # the step of the current loop before which `record_at_top` has recorded the state
        self._began_at = -1  # the first step of the tail
        self.tail_log.members.last_joiner = True

    def leave_early(self, watches: bool) -> None:
        """Note the state when this rank leaves its loop; `watches` if there may be a handover later."""
        self.early_exit = EarlyExit(self._objects, self._watched if watches else None)
        self.reads.watch()

    def watch_unasked(self, is_empty: bool) -> EarlyExit:
        """Note the state before a loop that user code may never ask for a batch; `is_empty` if the loop has none."""
        self.reads.watch()
        return EarlyExit(self._objects, self._watched if is_empty else None)

    def note(self, at_last: bool = True) -> None:
        """Note this rank's state before its last step, or when a loop starts; other ranks may have more steps."""
        self._audit.note(at_last)

    @torch.inference_mode(False)
    def record_at_top(self, step: int) -> None:
        """Record the state at the top of a step in which another rank should have no batch.

        That rank records its state when it runs out. The other ranks meet it inside the step, when they may already
        have run the step's forward.
        """
        if not self.tail_log.members.uneven:
            self._record(at_top=True)
            self._recorded_at = step

    # Tensors that are created here (gradients, buckets, optimizer state) outlive a loop under inference_mode.
    @torch.inference_mode(False)
    def begin(self, step: int, at_top: bool) -> None:
        """Start a tail on an active rank.

        Args:
            step: The number of the step.
            at_top: Whether this rank is at the top of the step, before any user code runs.
        """
        if self._recorded_at == step:
            self._audit.joined = self.tail_log.members.joined_names
        else:
            self._record(at_top)
        self.tail_log.begin_tail()
        self._began_at = step

    @torch.inference_mode(False)
    def end(self, step: int, has_run: bool) -> None:
        """End a loop in which all ranks have joined; if some joined earlier, give all ranks the last one's state.

        Args:
            step: The number of the step that would have come next.
            has_run: Whether this rank has run a step since the last loop ended.
        """
        self._recorded_at = -1
        self.tail_log.members.last_joiner = True
        if self.tail_log.members.announces:
            silent = self._began_at == step and self.tail_log.is_silent
            self._hand_over(self.tail_log.end_tail(silent), silent)
        elif has_run and self._options.audit is True:
            self._audit.even(self.tail_log.channel, self._has_synced, self.early_exit is not None)
        self.tail_log.members.all_active()

    @torch.inference_mode(False)
    def serve(self, at_top: bool, has_run: bool) -> None:
        """Follow the active ranks' announcements, with neutral values, until these ranks have joined too.

        Args:
            at_top: Whether this rank has asked for a batch, and has run no user code since.
            has_run: Whether this rank has run a step before.
        """
        if self.refusal is not None:
            raise self.refusal
        self._recorded_at = -1
        members = self.tail_log.members
        if not members.announces:
            self._record(at_top)
        self._audit.forgotten.leave(has_run)
        self.tail_log.join()
        with on_device(self.tail_log.members.group):
            closing_messages, leader, in_pieces, silent = self.tail_log.follow(END)
        self.tail_log.backwards.in_pieces = in_pieces or self.tail_log.backwards.in_pieces
        self.tail_log.change(())
        # The last announcement may have named another leader: ranks may have left since without announcing anything.
        members.follow_leader(leader)
        members.last_joiner = False
        self._hand_over(closing_messages, silent)
        members.all_active()

    def compare_steps(self, steps: Steps, is_late: bool) -> None:
        """Check, when some rank joins, that the optimizers of the ranks active until then have stepped together."""
        members, channel = self.tail_log.members, self.tail_log.channel
        # Two ranks may leave with no announcement in between, so the number of records alone is no unique key.
        place = f"steps/{channel.records}/{len(members.active)}"
        answers = channel.gather(steps.recorded(is_late), of=Recorded, among=(place, members.before))
        steps.compare(dict(zip(members.named(sorted(members.before)), answers, strict=True)))

    def _record(self, at_top: bool) -> None:
        """Record the state for later comparisons, on every rank, when the first ranks join."""
        models = self.tail_log.models()
        changed = [] if at_top else [id(buffer) for model in models for buffer in model.changed_buffers()]
        self._buffers.record([model.modules[-1] for model in models if model.synced or model.accumulates], changed)
        untouched = self.early_exit is None or self.early_exit.changed() == []
        self._audit.begin(self.tail_log.members.joined_names, at_top, untouched)

    def _hand_over(self, closing_messages: list[Any], silent: bool) -> None:
        members = self.tail_log.members
        # Ignore a joined rank's own value: as a shadow it has synced its accumulated gradients.
        has_synced = self._has_synced or not members.leads
        with on_device(self.tail_log.members.group):
            finishers = [
                each.receive_closing(message, members.leader)
                for each, message in zip(self.tail_log.participants, closing_messages, strict=True)
            ]

            def end() -> None:
                for finish in filter(None, finishers):
                    finish()

            if silent:  # all left at the same step, and those that left by `break` may have changed state since then
                end()
                self._audit.forget()
            else:
                self._audit.end(self.tail_log.channel, self._take_states(end), has_synced)
            self._buffers.clear()
        self._restore_flags()

    def hand_over_states(self) -> None:
        """Give all ranks the leader's state of all stateful objects; every rank calls this.

        Raises:
            JoinError: A rank has changed state between its `break` and this call.
        """
        with on_device(self.tail_log.members.group):
            self._take_states()
        self._restore_flags()

    def _take_states(self, meanwhile: Callable[[], None] = lambda: None) -> frozenset[int]:
        """Hand over all state, and call `meanwhile` during it; return the `id`s of the parameters left unchanged."""
        left, tail_log = self.early_exit, self.tail_log
        self.handovers += 1
        is_shard = any(is_sharded(innermost_optimizer(thing)) for thing in self._objects)
        sharded = left is not None and is_shard and not tail_log.members.last_joiner
        exit_report = left is not None, [] if left is None else left.changed(), sharded
        local = self._audit.local(tail_log.channel)
        buffers = [self._buffers] if self._buffers.agree(tail_log.channel) else []
        for model in tail_log.models():
            model.before_handover()
        if states := [*stateful(self._objects), *buffers]:
            members = tail_log.members
            hand_over(states, members.leader, tail_log.channel, members.group, local, exit_report, meanwhile)
        else:
            meanwhile()
        return local

    def _restore_flags(self) -> None:
        """Restore the flags that this rank has set after a `break`, the only time when ranks may differ in them."""
        if self.early_exit is not None:
            self.early_exit.after_handover()

    @property
    def _watched(self) -> list[Any]:
        return [thing for thing in stateful(self._objects) if thing is not self.changes_freely]

    @property
    def _has_synced(self) -> bool:
        """Whether every model has synced gradients, and accumulated none since."""
        return all(each.synced and not each.accumulates for each in self.tail_log.models())

    # ------------------------------------------------------------ checks

    @property
    def given(self) -> list[str]:
        """The names of this rank's objects, for `compare_given`."""
        monitor = [] if self._options.monitor is None else ["a monitor"]
        return [type(thing).__name__ for thing in self._objects] + monitor

    def compare_given(self, all_given: Sequence[list[str]]) -> None:
        """Compare the objects passed to the ranks' `Join`s.

        Args:
            all_given: By rank, its `given`.

        Raises:
            JoinValueError: The types or their order differ.
            JoinError: A rank has ended its training.
        """
        check_all_go_on(all_given, self.tail_log.channel.global_ranks)
        if any(names != all_given[0] for names in all_given):
            by_rank = zip(self.tail_log.channel.global_ranks, all_given, strict=True)
            given = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in by_rank)
            raise JoinValueError(
                f"The ranks passed different joinables to Join: {given}. Pass the same ones in the same order."
            )

    def check_backward(self, group: list[int], is_ddps: bool) -> None:
        """Raise for a collective in backward that would give wrong results or wait forever."""
        members = self.tail_log.members
        if any({*group} <= {*peers} for each in self.tail_log.participants for peers in each.model_parallel_groups):
            return  # tensor parallelism: all these ranks have the same batch, or none
        if not is_ddps and members.count is not None:
            if not all(isinstance(model, ModelParticipant) for model in self.tail_log.models()):
                raise UnsupportedError(
                    f"The backward of a sharded model called a collective under {name_of(members.weighting)}."
                    " Gradients are weighted only when they reach the parameters, where those of other ranks are"
                    " already mixed in. Use weighting='world' with a loss that weights samples itself, or call the"
                    " collective on detached tensors in the forward."
                )
            if members.loss_factor == 0:
                raise UnsupportedError(
                    f"The backward of a batch that is empty or counts 0 under {name_of(members.weighting)} called a"
                    " collective, so other ranks' gradients through this batch would be multiplied by zero. Remove"
                    " such batches, or use weighting='active'."
                )
        if not (is_ddps and members.announces) or any(model.in_backward for model in self.tail_log.models()):
            return
        if joined := [rank for rank in group if members.has_joined(rank)]:
            raise missing_model(joined)
