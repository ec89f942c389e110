"""The strategy's own collectives: in a step that some ranks do not have, over the ranks that have it.

Also where all ranks are when: who has joined, who is in the step, and that all leave a run at the same time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from torch_join import UnsupportedError
from torch_join.integration import Channel, Lockstep, StepDriver, telling_failures


class StepCollectives(ParallelStrategy):
    """`reduce`, `broadcast`, `all_gather` and decisions, exact over the ranks that take part.

    Where some rank has no batch, the others' collectives are mirrored by it. Averages are then over
    the ranks that have one, gathers return their entries only, and a broadcast from a rank that has none
    comes from the lowest one that has.
    """

    enable_join = True
    # Until a run of several processes begins there is nobody else.
    channel = Channel()
    driver: StepDriver | None = None
    join: Lockstep | None = None
    # Whether no loop has run since the channel was opened: nobody says yet what has ended a rank that others wait for.
    sets_up = False

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches while others have not: it makes a shadow step."""
        return self.join is not None and self.join.in_tail and self.join.joined

    @property
    def step_ranks(self) -> tuple[int, ...] | None:
        """The ranks that have a batch, inside of a step that some rank does not have; otherwise `None`."""
        return self.driver.ranks if self.driver is not None else None

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, as `DDPStrategy.reduce`, but with an exact mean of integers.

        Lightning truncates it: batch sizes 10 and 25 have the mean 17 there. Here it is a float64.
        """
        if not self.enable_join or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        averages = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if averages and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        ranks = self.step_ranks
        if averages and ranks is not None and (group is None or group == dist.group.WORLD):
            return super().reduce(tensor, group, "sum") / len(ranks)  # type: ignore[safe-super]
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def meet_in_set_up(self) -> None:
        """Wait for all ranks, in the set-up, where a failure of one is heard of: not in a collective that lacks it."""
        if self.sets_up:
            self.channel.gather(None)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.meet_in_set_up()
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.meet_in_set_up()
        ranks = self.step_ranks
        source = src if ranks is None or src in ranks else ranks[0]
        return super().broadcast(obj, source)  # type: ignore[safe-super]

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        ranks, join = self.step_ranks, self.join
        everyone = group is None or group == dist.group.WORLD
        with_backward = sync_grads and tensor.requires_grad and torch.is_grad_enabled()
        if with_backward and everyone and join is not None and join.follows_backward:
            join.note_gather()
        elif with_backward and ranks is not None:
            raise UnsupportedError(
                "all_gather(sync_grads=True) while some rank has run out of batches takes automatic optimization and"
                f" the group of all ranks (here: {'manual optimization' if everyone else 'another group'})."
                " Gather detached tensors (sync_grads=False)."
            )
        # Detached: what has no backward must not look as if it had one.
        gathered = super().all_gather(tensor if with_backward else tensor.detach(), group, sync_grads)
        return gathered[list(ranks)] if everyone and ranks is not None else gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        ranks = self.step_ranks
        if ranks is None or not all:
            return super().reduce_boolean_decision(decision, all)
        return not super().reduce_boolean_decision(not decision, all=False)

    @contextmanager
    def around_run(self, last: bool = True) -> Iterator[None]:
        """Put around a run of a loop: failures reach the other ranks, and all ranks leave at the same time.

        Args:
            last: Whether no other loop runs after it before the teardown.
        """
        self.sets_up = False
        with telling_failures(self.channel):
            yield
        if last:
            self.channel.finish()
        else:
            self.channel.gather(None)
