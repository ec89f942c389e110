"""Steps that are the last for some ranks only: does a collective belong to the step, or come after the loop?

In a loop by `iter` and `next` that never asks for a batch after its last one, a rank cannot tell whether the code that
follows still belongs to its last step. So in such a step ranks count their collectives, and a rank in its last step
asks a rank that continues whether it issues the same one. If not, the call raises: it would meet one of the next step.
"""

import time
from collections.abc import Collection

from torch_join._base.errors import JoinError, name_ranks
from torch_join._base.membership import Membership
from torch_join._control.channel import Channel

_GRACE = 1.0  # seconds in which a rank that has failed can report it
# Collectives that complete only once all ranks have called them.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "accelerator.", "DDP's")


class Parting:
    """One rank's view of such a step.

    Args:
        members: Which ranks are active.
        channel: The channel between the ranks.
    """

    def __init__(self, members: Membership, channel: Channel) -> None:
        self._members = members
        self._loops = 0
        self.begin_loop(channel)

    @property
    def is_on(self) -> bool:
        """Whether the current step is the last one of some ranks only."""
        return bool(self._ending)

    def begin_loop(self, channel: Channel) -> None:
        """Start a loop; all ranks call this after all have left the last loop, so no rank asks about that any more."""
        self._loops += 1
        self._channel = channel
        self._ending: Collection[int] = ()
        self._count = 0

    def begin(self, step: int, ending: Collection[int]) -> bool:
        """Start a step, which is the last one of the ranks `ending`; return whether other ranks continue."""
        self._ending = ending if 0 < len(ending) < len(self._members.active) else ()
        self._place = f"parting/{self._loops}/{step}"
        self._count = 0
        return bool(self._ending)

    def end(self) -> None:
        """End the step: this rank continues, or has left the loop."""
        if self._ending:
            if self._members.rank not in self._ending:
                self._count += 1
                self._channel.keep(self._key, False)
            self._ending = ()

    def before_collective(self, operation: str, waits: bool = True) -> None:
        """Prepare for a collective of all ranks.

        Args:
            operation: Its name.
            waits: Whether it is synchronous. If not, it is not checked: other ranks may need to know of it first.

        Raises:
            JoinError: This is the rank's last step, and ranks that continue have not issued the collective in theirs.
        """
        if not (operation.startswith(_TOGETHER) and (continuing := self._unlike(True, waits))):
            return
        others = name_ranks(self._members.named(continuing))
        inner = " A forward of a DDP model with buffers needs all ranks: call the inner model, `ddp.module(x)`."
        raise JoinError(
            f"Rank {self._members.name} called {operation} after its last batch, but {others} continued without that"
            " call, so this rank would wait forever. If you loop with iter() and next(), call next(iterator, None)"
            " once more before the call, or use `for`. If the call belongs to the step, make it in the same steps on"
            f" all ranks.{inner if operation.startswith('DDP') else ''}"
        )

    def before_backward(self, syncs: bool) -> None:
        """Prepare for a backward of a sharded model.

        Args:
            syncs: Whether it reduces gradients, which takes all ranks.

        Raises:
            JoinError: This is the rank's last step, and ranks that continue do the opposite in theirs.
        """
        if not (continuing := self._unlike(syncs)):
            return
        rank, other = self._members.named((self._members.rank, continuing[0]))
        ways = ("reduces gradients", "only accumulates them")
        own, others = ways if syncs else ways[::-1]
        raise JoinError(
            f"Rank {rank}'s last backward in this loop {own}, but rank {other}'s backward in the same step {others},"
            " so both would wait forever. Usually each rank syncs at its own last batch (`if i + 1 == len(loader)`)."
            " Sync in the same steps on all ranks: `(step + 1) % k == 0`."
        )

    def _unlike(self, action: bool, waits: bool = True) -> list[int]:
        """Record what this rank does next. In its last step, return the continuing ranks if they do something else."""
        if not self._ending:
            return []
        self._count += 1
        if self._members.rank not in self._ending:
            self._channel.keep(self._key, action)
            return []
        continuing = [rank for rank in self._members.active if rank not in self._ending]
        if not waits or action in self._channel.ask(self._key, continuing[:1], bool).values():
            return []
        # They may be about to report the error with which they left the step.
        check, end = self._channel.failure_check(), time.monotonic() + _GRACE
        while time.monotonic() < end:
            check()
            time.sleep(0.01)
        return continuing

    @property
    def _key(self) -> str:
        return f"{self._place}/{self._count}"
