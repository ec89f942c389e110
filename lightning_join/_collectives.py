"""A strategy's own collectives: in a step that some ranks do not have, over the ranks that have it.

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
from torch_join.integration import (
    Channel,
    Lockstep,
    Options,
    StepDriver,
    in_backward,
    join_rows,
    telling_failures,
    whole_signature,
)

_MOST_DIMENSIONS = 16


class ActiveCollectives:
    """What the strategies of the Trainer and of Fabric do alike, before a class of Lightning's own.

    Where some rank has no batch, the others' collectives are mirrored by it. Averages are then over
    the ranks that have one, gathers return their entries only, and a broadcast from a rank that has none
    comes from the lowest one that has.
    """

    options: Options
    # Whether what ranks gather now surely has the same shape on all of them: something of batches that are all full.
    gathers_alike = False
    world_size: int
    root_device: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = whole_signature(cls, ActiveCollectives)  # type: ignore[attr-defined]

    def find_step_ranks(self) -> tuple[int, ...] | None:
        """Return the ranks that have a batch, inside of a step that some rank does not have; otherwise `None`."""
        raise NotImplementedError

    @property
    def meets_over(self) -> Channel | None:
        """Where the ranks can meet; `None` outside of a run."""
        raise NotImplementedError

    def check_backward(self, everyone: bool) -> None:
        """Note that gradients flow through a gather, of all ranks or of some.

        Raises:
            UnsupportedError: Ranks without a batch cannot follow it.
        """

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        ranks = self.find_step_ranks()
        source = src if ranks is None or src in ranks else ranks[0]
        return super().broadcast(obj, source)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        ranks = self.find_step_ranks()
        everyone = group is None or group == dist.group.WORLD
        # What checkpointing computes again in backward has been looked at in forward.
        if everyone and tensor.dim() > 0 and not self.gathers_alike and not in_backward():
            self._check_shapes(self._shapes_of_all(tensor))
        with_backward = sync_grads and tensor.requires_grad and torch.is_grad_enabled()
        if with_backward:
            self.check_backward(everyone)
        # Detached: what has no backward must not look as if it had one.
        gathered: Tensor = super().all_gather(tensor if with_backward else tensor.detach(), group, sync_grads)  # type: ignore[misc]
        return gathered if ranks is None else gathered[active_places(ranks, group)]

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks that take part, without gradients; all of these call it.

        Args:
            tensor: This rank's, of as many rows as it has, from none on; all else of its shape is as the others'.

        Returns:
            One tensor of all rows, in the order of the ranks.

        Raises:
            UnsupportedError: The ranks' tensors differ in more than their number of rows.
        """
        tensor = tensor.detach()
        shapes = self._shapes_of_all(tensor)
        rows = [shape[0] for shape in shapes.values()]
        if any(shape[1:] != [*tensor.shape[1:]] for shape in shapes.values()):
            self._check_shapes(shapes)
        if not self.options.enable or len(rows) == 1:
            return tensor
        own = super().all_gather  # type: ignore[misc]
        return join_rows(tensor, rows, lambda padded: own(padded)[list(shapes)])

    def _shapes_of_all(self, tensor: Tensor) -> dict[int, list[int]]:
        """Exchange the shape of what is about to be gathered: gloo ends the process where one does not fit."""
        mine, ranks = [*tensor.shape], self.find_step_ranks()
        if not self.options.enable or self.world_size == 1 or not dist.is_initialized():
            return {0: mine}
        if (channel := self.meets_over) is not None:
            among = None if ranks is None else (f"shapes/{channel.records}", ranks)
            found = channel.gather(mine, of=list[int], among=among)
            return dict(zip(range(len(found)) if ranks is None else sorted(ranks), found, strict=True))
        padded = torch.tensor([len(mine), *mine, *[0] * _MOST_DIMENSIONS][:_MOST_DIMENSIONS], device=self.root_device)
        everyone = super().all_gather(padded)  # type: ignore[misc]
        return {rank: each[1 : 1 + each[0]] for rank, each in enumerate(everyone.tolist())}

    def _check_shapes(self, shapes: dict[int, list[int]]) -> None:
        if all(shape == next(iter(shapes.values())) for shape in shapes.values()):
            return
        said = ", ".join(f"{tuple(shape)} on rank {rank}" for rank, shape in shapes.items())
        raise UnsupportedError(
            f"`all_gather` takes tensors of one shape, and the ranks' differ: {said}. Ranks may have other numbers of"
            " samples here, as none is repeated to make them equal. Where only the numbers of rows differ, use the"
            " strategy's `gather_rows(tensor)` (of `self.trainer.strategy`, or `fabric.strategy`), which returns the"
            " rows of all ranks in one tensor."
        )

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        own = super().reduce_boolean_decision  # type: ignore[misc]
        found: bool = (
            own(decision, all) if self.find_step_ranks() is None or not all else not own(not decision, all=False)
        )
        return found


class StepCollectives(ParallelStrategy):
    """What of the collectives is a strategy of the Trainer's; it comes before `ActiveCollectives`."""

    options: Options
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

    def find_step_ranks(self) -> tuple[int, ...] | None:
        """See `ActiveCollectives`."""
        return self.step_ranks

    @property
    def meets_over(self) -> Channel | None:
        """Where the ranks can meet; `None` outside of a run."""
        return self.channel if self.driver is not None else None

    def check_backward(self, everyone: bool) -> None:
        """See `ActiveCollectives`."""
        if everyone and self.join is not None and self.join.follows_backward:
            self.join.note_gather()
        elif self.step_ranks is not None:
            raise UnsupportedError(
                "all_gather(sync_grads=True) while some rank has run out of batches takes automatic optimization and"
                f" the group of all ranks (here: {'manual optimization' if everyone else 'another group'})."
                " Gather detached tensors (sync_grads=False)."
            )

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, as `DDPStrategy.reduce`, but with an exact mean of integers.

        Lightning truncates it: batch sizes 10 and 25 have the mean 17 there. Here it is a float64.
        """
        if not self.options.enable or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        averages = is_mean(reduce_op)
        if averages and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        ranks = self.step_ranks
        if averages and ranks is not None:
            return super().reduce(tensor, group, "sum") / len(active_places(ranks, group))  # type: ignore[safe-super]
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
        return super().broadcast(obj, src)  # type: ignore[safe-super]

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
            self.channel.close(meets=True)
        else:
            self.channel.gather(None)


def is_mean(reduce_op: Any) -> bool:
    """Whether a reduction averages, as Lightning spells it."""
    return isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")


def active_places(ranks: tuple[int, ...], group: Any | None) -> list[int]:
    """Return the places, among the ranks of a group, of those that take part."""
    whole = dist.group.WORLD if group is None else group  # which `None` is not for older torch
    return [place for place, rank in enumerate(dist.get_process_group_ranks(whole)) if rank in ranks]
