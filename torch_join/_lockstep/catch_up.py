"""Copies changes besides gradients from active to joined ranks, in a lockstep loop.

A joined rank steps its own optimizers and schedulers, but does not run user code in a step. That code may update a
teacher, clamp weights, set a learning rate, or clear an optimizer's state. So before a validation or a checkpoint, and
at an epoch's end, all ranks compare digests of their states. States that differ are copied from the lowest rank that
was active in the last step. A warning lists changed objects without a state to copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_join._base.devices import on_device
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._compat.ddp import zero_shard
from torch_join._handover.audit import Audit
from torch_join._handover.buffers import Unsynced, UnsyncedBuffers
from torch_join._handover.digest import checksums, hash_of
from torch_join._handover.early_exit import digests_of
from torch_join._handover.forgotten import Forgotten
from torch_join._handover.handover import hand_over
from torch_join._handover.replicas import named
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants.kinds import is_sharded_model, stateful


class CatchUp:
    """The state of the trained objects, over the tails of all epochs.

    Args:
        driver: The driver of the steps.
        unsynced: Models with buffers that no wrapper synchronizes: these are copied after each step in the tail.
    """

    def __init__(self, driver: StepDriver, unsynced: Sequence[Unsynced]) -> None:
        self._unsynced, self._buffers = unsynced, UnsyncedBuffers(unsynced, driver.options.hand_over_buffers)
        self._channel, self._group, self._options = driver.tail_log.channel, driver.members.group, driver.options
        self.begin(())

    def begin(self, objects: Sequence[Any]) -> None:
        """Start an epoch that trains these objects: models, optimizers, LR schedulers."""
        self._objects = [*{id(thing): thing for thing in objects}.values()]  # each once
        self._source: int | None = None  # the lowest rank that was active in the last step of a tail

    @property
    def lacks(self) -> bool:
        """Whether there was a tail since the last `take`, so that a rank may lack changes."""
        return self._source is not None

    @torch.inference_mode(False)
    def begin_step(self, active: tuple[int, ...], has_trained: bool) -> None:
        """Start a step in which only these ranks are active; all ranks call this.

        Args:
            active: The ranks.
            has_trained: Whether this rank has run a forward with gradients.

        Raises:
            JoinError: The hyperparameters of the ranks' optimizers differ already.
        """
        if self._source is None:
            all_hyperparameters = self._channel.gather(hyperparameters(self._objects), of=Hyperparameters)
            compare(all_hyperparameters, self._channel.global_ranks)
            chosen, shards = self._options, [thing for thing in self._objects if is_sharded_model(thing)]
            self._states = stateful(self._objects)
            left_out = Forgotten(self._objects)
            options = chosen.audit, chosen.hand_over_ignored
            self._audit = Audit(self._states, *options, left_out, self._buffers, shards)
            self._decide(has_trained)
            joined = [name for rank, name in enumerate(self._channel.global_ranks) if rank not in active]
            self._audit.begin(joined, settled=True)
        self._source, self._active = active[0], active

    def give_buffers(self) -> None:
        """Copy the first active rank's unsynchronized buffers to all ranks after a step; all ranks call this."""
        with on_device(self._group):
            if self._unsynced and not self._buffers.can_tell and len(self._active) > 1:
                self._decide(self._channel.rank in self._active)  # active ranks have trained by now
            if self._gives:
                hand_over([self._buffers], self._active[0], self._channel, self._group)

    def _decide(self, has_trained: bool) -> None:
        self._buffers.record([model for model, _ in self._unsynced] if has_trained else [])
        self._gives = self._buffers.agree(self._channel)

    @torch.inference_mode(False)
    def take(self) -> None:
        """Copy the states that joined ranks lack; all ranks call this, after a tail.

        Raises:
            JoinError: The hyperparameters differ on ranks that ran the same steps.
        """
        source = self._source
        assert source is not None
        digests = digests_of(self._states)
        own = {} if digests is None else digests.read()
        sent = self._channel.gather((hyperparameters(self._objects), own), of=tuple[Hyperparameters, dict[str, int]])
        compare([sent[rank][0] for rank in self._active], [self._channel.global_ranks[rank] for rank in self._active])
        first = sent[source][1]
        differ = {name for _, other in sent for name in first.keys() | other if first.get(name) != other.get(name)}
        lacking = [thing for name, thing in named(self._states) if any(each.startswith(f"{name}: ") for each in differ)]
        with on_device(self._group):
            local = self._audit.local(self._channel)
            if differ:  # it is equal on all ranks; if `lacking` is not, this raises
                hand_over(lacking, source, self._channel, self._group, local)
            self._source = None
            settled = not differ and digests is not None  # nothing has been handed over, and the states are equal
            self._audit.end(self._channel, local, False, self._active, settled)

    @torch.inference_mode(False)
    def take_shards(self, zeros: Sequence[Any]) -> None:
        """Copy the models if they differ where a joined rank is about to step its shard; all ranks call this.

        Such an optimizer reads its options before the step that may set them, and resets them after it.

        Args:
            zeros: The `ZeroRedundancyOptimizer`s.
        """
        joined = [rank for rank in range(self._channel.world_size) if rank not in self._active]
        sums = checksums([p for zero in zeros for rank in joined for p in zero_shard(zero, rank)])
        if len({*self._channel.gather(hash_of(repr(sums).encode()), of=str)}) > 1:
            models = [thing for thing in self._states if isinstance(thing, nn.Module)]
            with on_device(self._group):
                local = self._audit.local(self._channel)
                hand_over(models, self._active[0], self._channel, self._group, local)
