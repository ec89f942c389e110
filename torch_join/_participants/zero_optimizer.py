"""ZeroRedundancyOptimizer: a joined rank still owns a shard, and must step it.

It steps with the parameters, gradients and hyperparameters that the active ranks have at that time. User code changes
these in ways that cannot be announced (clamping, clipping, schedulers), so the lowest active rank sends them.
"""

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import UnsupportedError
from torch_join._base.hyperparameters import group_options, take_group_options
from torch_join._compat import ddp as _compat
from torch_join._participants.hook import Hook, around_steps
from torch_join._participants.participant import Driver, Participant


class ShardedOptimizerParticipant(Participant):
    """A `ZeroRedundancyOptimizer` in a plain loop.

    Raises:
        UnsupportedError: The optimizer has `overlap_with_ddp=True`.
    """

    kinds: ClassVar[dict[str, Any]] = {"step": tuple[list[dict[str, Any]], dict[int, list[bool]], list[bool], bool]}
    closing: ClassVar[Any] = bool

    def __init__(self, driver: Driver, index: int, zero: Any) -> None:
        super().__init__(driver, index)
        if zero._overlap_with_ddp:
            raise UnsupportedError(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside DDP's backward, which a finished rank"
                " cannot follow. Use overlap_with_ddp=False."
            )
        self.zero = zero
        self._had_state = False  # after the last step: if the state is missing now, user code has cleared it

    def enter(self) -> None:
        self._undo.append(_compat.configure(self.zero))
        self._undo.append(around_steps(self.zero, self._send, lambda: not self.tail_log.meet()))
        self._undo.append(self.zero.register_step_post_hook(Hook(self._after_step)).remove)

    def _after_step(self, *_: Any) -> None:
        self._had_state = bool(self.zero.optim.state)

    @property
    def _has_forgotten(self) -> bool:
        return self._had_state and not self.zero.optim.state

    def _send(self) -> AbstractContextManager[None]:
        shards = {rank: _compat.zero_shard(self.zero, rank) for rank in self.members.joined_ranks}
        trains = [p.requires_grad for p in self._parameters()]  # ZeRO rebuilds its buckets when this changes
        present = {rank: [p.grad is not None for p in shard] for rank, shard in shards.items()}
        self.announce_open("step", (group_options(self.zero), present, trains, self._has_forgotten))
        with self.tail_log.own_collectives():
            for shard in shards.values():
                self._exchange([*(p.grad for p in shard if p.grad is not None), *(p.detach() for p in shard)])
        return self.tail_log.own_collectives()  # until the step is over

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.zero.param_groups for p in group["params"]]

    def _exchange(self, gradients: list[Tensor]) -> None:
        works = [
            dist.broadcast(g, group_src=self.members.leader, group=self.zero.process_group, async_op=True)
            for g in gradients
        ]
        for work in works:
            if work is not None:
                work.wait()

    def mirror(self, kind: str, payload: Any) -> None:
        groups, present, trains, forgets = payload
        if forgets:
            self.zero.optim.state.clear()
        for parameter, trained in zip(self._parameters(), trains, strict=True):
            parameter.requires_grad_(trained)
        take_group_options(self.zero, groups)
        for rank in self.members.joined_ranks:
            shard = _compat.zero_shard(self.zero, rank)
            if rank == self.members.rank:
                for parameter, is_present in zip(shard, present[rank], strict=True):
                    if not is_present:
                        parameter.grad = None
                    elif parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                self._exchange([*(p.grad for p in shard if p.grad is not None), *(p.detach() for p in shard)])
            else:
                shapes = [*(p for p, is_present in zip(shard, present[rank], strict=True) if is_present), *shard]
                self._exchange([torch.zeros_like(p) for p in shapes])
        with _compat.without_step_hooks(self.zero):  # the active ranks' hooks ran before they sent
            self.zero.step()

    def closing_message(self) -> bool:
        return self._has_forgotten

    def close(self, message: bool, source: int) -> None:
        if message:
            self.zero.optim.state.clear()
