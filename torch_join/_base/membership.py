"""Which ranks take part in a step, and this rank's role in it."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from torch_join._base.weighting import (
    Weighting,
    check_sees_batches,
    count_samples,
    counter,
    loss_factor,
)


class Role(Enum):
    """A rank's role for the other ranks."""

    EVEN = "even"  # none: all ranks have an input
    TAIL = "tail"  # it has an input, and announces its actions to ranks that have none
    SERVING = "serving"  # it has no input, and follows the announcements


class MeetingPoint(Enum):
    """The point in a step of a user's loop at which the ranks find out which of them are active."""

    TOP = "top"  # before any user code
    FIRST_USE = "first use"  # at a rank's first communication in the step: it may leave before that
    FORWARD = "forward"  # outside of `batches`, at a model's forward


class Membership:
    """The ranks that have an input at the current step, and this rank's role among them.

    Args:
        group: The process group; a single process needs none.
        weighting: How the gradients of the active ranks are combined.
        may_break: Whether a rank may leave a loop in any step.
        sizes: Returns a batch's number of samples.

    Attributes:
        meets_late: Whether ranks meet in every step, at its `MeetingPoint.FIRST_USE`. They do if ranks may leave a loop
            in any step, or if batches are counted.
        count: Returns the count of a batch; `None` if the weighting needs no count.
        rank: This rank in the group.
        global_ranks: The global rank of each of the group's ranks.
        active: The ranks that have an input.
        before: The ranks that had an input at the step before.
        leader: The lowest active rank, which announces for all; after the tail, the rank whose state is handed over.
        role: This rank's role for the others; set by `take_role`.
        announces: Whether this rank is active and announces its actions, since another one has joined.
        serves: Whether this rank has joined and follows the others.
        joined: Whether this rank has run out of inputs.
        uneven: Whether some rank has no input at this step.
        leads: Whether this is the leader.
        counted: The count of this rank's batch, if batches are counted.
        total: The sum of all ranks' counts.
        last_joiner: Whether this rank was among the last to run out of inputs, in a loop of a `LoopDriver`.
    """

    def __init__(
        self,
        group: Any,
        weighting: Weighting,
        may_break: bool = False,
        sizes: Callable[[Any], int] = count_samples,
    ) -> None:
        self.group = group
        is_single = not dist.is_initialized()  # or `enable=False`
        self.rank = 0 if is_single else dist.get_rank(group)
        self.global_ranks = [0] if is_single else dist.get_process_group_ranks(group)
        self.world_size = len(self.global_ranks)
        self._sizes = sizes
        self.weigh(weighting, may_break)
        self.reset()

    def weigh(self, weighting: Weighting, may_break: bool = False) -> None:
        """Set the weighting from now on."""
        self.weighting = weighting
        self.count = counter(weighting, self.name, self._sizes)
        self.meets_late = may_break or self.count is not None

    def reset(self) -> None:
        """Reset to the state before the first step."""
        self.all_active()
        self.before = self.active
        self.follow_leader(0)
        self.take_role(Role.EVEN)
        self.counted = self.total = 0.0
        self.last_joiner = False

    def all_active(self) -> None:
        """Record that all ranks have an input again, after a tail."""
        self._set_active(tuple(range(self.world_size)))

    def change(self, active: tuple[int, ...]) -> None:
        """Move to the next step, in which these ranks are active."""
        self.before = self.active
        self._set_active(active)
        if active:
            self.follow_leader(active[0])

    # The following values are read many times in a step of the tail, so they are stored.

    def _set_active(self, active: tuple[int, ...]) -> None:
        self.active = active
        self.joined, self.uneven = self.rank not in active, len(active) < self.world_size

    def follow_leader(self, leader: int) -> None:
        """Record the rank that announces for all."""
        self.leader, self.leads = leader, self.rank == leader

    def take_role(self, role: Role) -> None:
        """Change to another role."""
        self.role, self.announces, self.serves = role, role is Role.TAIL, role is Role.SERVING

    @property
    def joined_ranks(self) -> list[int]:
        """The ranks that have run out of inputs."""
        return [rank for rank in range(self.world_size) if rank not in self.active]

    @property
    def joined_names(self) -> list[int]:
        """The joined ranks' names in errors."""
        return self.named(self.joined_ranks)

    @property
    def name(self) -> int:
        """This rank's name in errors."""
        return self.global_ranks[self.rank]

    def named(self, ranks: Iterable[int]) -> list[int]:
        """Return the names of these ranks in errors: their global ranks."""
        return [self.global_ranks[rank] for rank in ranks]

    @property
    def loss_factor(self) -> float:
        """The factor for this rank's gradients, given that DDP divides their sum by the world size."""
        return loss_factor(self.weighting, self.world_size, len(self.active), self.counted, self.total)

    def count_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return the count of a batch of which only a forward's arguments are known; used if batches are counted.

        Raises:
            UnsupportedError: The count is a user's function of the batch, which is not known here.
        """
        if not torch.is_grad_enabled():
            return 0 if callable(self.weighting) else count_samples((args, kwargs))
        check_sees_batches(self.weighting)
        return count_samples((args, kwargs))

    def has_joined(self, global_rank: int) -> bool:
        """Whether a rank, given its global rank, is in the group and has run out of inputs."""
        return global_rank in self.global_ranks and self.global_ranks.index(global_rank) not in self.active
