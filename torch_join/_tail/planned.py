"""Loops of the user's in which batches are rebalanced: a plan says who is active, and which batch a rank has."""

from typing import Any

from torch_join._base.errors import JoinValueError, UnsupportedError, name_ranks, raise_any
from torch_join._control.said import Beat
from torch_join._schedule.plan import Share
from torch_join._schedule.rebalancer import Rebalancer
from torch_join._schedule.rebalancing import Rebalancing
from torch_join._tail.reader import Reader
from torch_join._tail.server import Server


def refuse_teams(server: Server) -> None:
    """Raise where several ranks compute a batch together.

    Raises:
        UnsupportedError: Some do.
    """
    if any(part.teams for part in server.parts):
        raise UnsupportedError(
            "rebalance=True with tensor parallelism: a batch that is given away would have to reach all ranks of the"
            " group that computes it together. Train without rebalance=True."
        )


class PlannedReader(Reader[Any]):
    """Reads the batches that a plan gives to this rank."""

    def __init__(self, plan: Rebalancer) -> None:
        self._plan = plan
        self._taken = -1  # up to which step
        self.pulling = False

    def has_next(self, ahead: int = 1) -> bool:
        return self._plan.has_batch(self._taken + ahead - self._plan.step)

    def take(self) -> Any:
        self._taken += 1
        return self._plan.take(self._taken - self._plan.step)

    @property
    def at_last(self) -> bool:
        return not self.has_next(2)


class PlannedLoops:
    """The loops of one `Join`, on this rank.

    Args:
        rebalancing: What rebalances batches, if they are.

    Attributes:
        rebalancing: The same.
        server: The ranks' server.
    """

    def __init__(self, rebalancing: Rebalancing) -> None:
        self.rebalancing = rebalancing
        self.server: Server

    @property
    def enabled(self) -> bool:
        """Whether there is rebalancing at all."""
        return self.rebalancing.enabled

    @property
    def plan(self) -> Rebalancer | None:
        """What goes through the current loop, if there is anything to rebalance in it."""
        return self.rebalancing.current

    @property
    def share(self) -> Share | None:
        """Whose batch this rank has at the current step."""
        return None if self.plan is None else self.plan.share

    def check_in_loop(self, in_loop: bool) -> None:
        """Raise where a forward outside of a loop over `batches` would be one of a plain `for`."""
        if self.enabled and not in_loop:
            raise JoinValueError(
                "A forward outside of a loop over join.batches, with rebalance=True: in a plain `for`, nothing can"
                " bring this rank another one's batch. Write `for batch in join.batches(loader)`."
            )

    def begin(self, reader: Reader[Any]) -> Reader[Any]:
        """Begin a loop over what `reader` reads; all ranks meet.

        Returns:
            What reads the batches that this rank trains on.

        Raises:
            UnsupportedError: The loader has a state that users save, or ranks compute a batch together.
        """
        self.rebalancing.current = None  # of the loop before
        if not self.enabled:
            return reader
        refuse_teams(self.server)
        return reader.rebalanced(self._begin)

    def _begin(self, source: Reader[Any]) -> Reader[Any] | None:
        length, lead, count = source.certain_length(), source.lead, self.server.members.count
        plan = self.rebalancing.begin(
            self.server.channel, source, length, self._meet, lead=lead, count=count, meets=False
        )
        return None if plan is None else PlannedReader(plan)

    @property
    def puts_off(self) -> bool:
        """Whether who is active is certain, and is everybody: ranks need to know late only that nobody has left."""
        return self.plan is not None and not self.plan.meets and not self.server.members.uneven

    def advance(self, step: int) -> bool:
        """Go on to a step, if there is a plan; return whether this is the last one."""
        assert self.plan is not None
        if step > 0:  # the first is planned
            with self.server.own_collectives():
                self.plan.advance(self._meet)
        if not self.plan.meets and len(self.plan.active_ranks) < self.server.members.world_size:
            self.plan.total = self._meet(self.plan.count(), {}).total
        if self.plan.has_batch():
            self.server.members.total = self.plan.total
        self.server.change(self.plan.active_ranks)
        return self.plan.is_last_step

    def take(self, reader: Reader[Any]) -> Any:
        """Return this rank's batch of the current step."""
        batch = reader.take()
        if self.plan is not None:
            self.server.members.counted = self.plan.count()
        return batch

    def _meet(self, count: float, notice: dict[str, Any]) -> Beat:
        self.server.channel.arrive(count, notice or None, self.server.members.active)
        return self.hear()

    def hear(self) -> Beat:
        """Hear what the ranks say that meet.

        Raises:
            JoinValueError: With a plan, some of them have left the loop.
            PeerFailedError: Another rank has failed, perhaps since it said its part.
        """
        beat = self.server.channel.wait()
        if self.puts_off:
            raise_any(self.server.channel.failure())
        left = self.server.members.named(rank for rank, notice in beat.notices.items() if not notice)
        if self.plan is not None and 0 < len(left) < len(self.server.members.active):
            raise JoinValueError(
                f"The loop of {name_ranks(left)} was left by `break` where others go on, and count on its batches, with"
                " rebalance=True. Leave it on all ranks at the same step."
            )
        return beat
