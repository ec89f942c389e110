"""Collectives of process groups that lack some active ranks.

Those ranks cannot count these collectives, so the common log of all active ranks cannot hold them. Each such group has
its own log, which its lowest active member writes. Each record in it has the number of common records before it, and at
each common record that member posts the number of group records before it. So a joined rank takes part in everything in
the members' order, and never waits in one collective while a member waits for it in another.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_join._base.errors import UnsupportedError
from torch_join._collectives.call import Call
from torch_join._collectives.neutral import begin
from torch_join._compat import operators as _compat_c10d
from torch_join._control.channel import Channel

_RECORD = tuple[int, Call]  # the number of common records before it, and the collective


class Subgroups:
    """The groups that are part of a larger group, on one rank of the larger group.

    Args:
        channel: The channel of the larger group.
        members: The larger group's members, as global ranks.
        rank: This rank in the larger group.

    Attributes:
        groups: By name, the members of each group, as ranks of the larger group.
    """

    def __init__(self, channel: Channel, members: list[int], rank: int) -> None:
        self._channel = channel
        self._members = members
        self._rank = rank
        self.groups: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}
        self._next: dict[str, tuple[int, Call]] = {}  # read, but not yet taken part in
        self._works: list[dist.Work] = []
        self._active: tuple[int, ...] = ()  # at the last record

    def find(self, active: tuple[int, ...]) -> None:
        """Find the groups that exist; `active` are the ranks that had an input in the last step."""
        self._active = active
        all_ranks = set(self._members)
        for name, ranks in _compat_c10d.groups_of_this_rank().items():
            if set(ranks) < all_ranks:
                self.groups[name] = [self._members.index(rank) for rank in ranks]
                self._counts.setdefault(name, 0)

    def holds(self, call: Call) -> bool:
        """Whether a collective is in one of these groups, and not in a group of all ranks.

        Raises:
            UnsupportedError: Its group has ranks outside the larger group, or was created too late.
        """
        if call.group in self.groups:
            return True
        ranks = _compat_c10d.groups_of_this_rank().get(call.group, self._members)
        if set(self._members) <= set(ranks):
            return False
        raise UnsupportedError(
            f"{call.operation} was called on a process group of ranks {ranks}, but Join covers only ranks"
            f" {self._members}. Use a group of only these ranks, and create it before the first rank finishes."
        )

    def announce(self, call: Call, active: tuple[int, ...]) -> None:
        """Announce a collective of one of these groups; every active member calls this."""
        key = self._key(call.group)
        self._counts[call.group] += 1
        if self._speaks(call.group, active):
            self._channel.post(key, (self._channel.records, call))

    def mark(self, active: tuple[int, ...]) -> None:
        """Post the counts before the next record of the common log; every active rank calls this, also as it joins."""
        for name, ranks in self.groups.items():
            if self._speaks(name, active) and _in_part(ranks, active):
                self._channel.post(f"sub/{name}/at/{self._channel.records}", self._counts[name])

    def follow(self, of: Any, act: Callable[[], None] | None = None) -> Any:
        """Wait for the next record of the common log; meanwhile, take part in these groups' collectives.

        Args:
            of: The type of a record, whose last item is the active ranks.
            act: Other work to do meanwhile, and once more when the record is there.
        """
        number = self._channel.records

        def meanwhile() -> None:
            self._take_part(number)
            if act is not None:
                act()

        record = self._channel.follow(meanwhile if self.groups or act is not None else None, of)
        if act is not None:
            act()
        before_, self._active = self._active, record[-1]  # a rank that has joined since has posted its counts, too
        for name, ranks in self.groups.items():
            if _in_part(ranks, before_) or _in_part(ranks, self._active):
                mark = f"sub/{name}/at/{number}"
                before = self._channel.read(mark, lambda: self._take_part(number), int)
                while self._counts[name] < before:
                    self._take_part(number)
        while self._works:
            self._works.pop().wait()
        return record

    def expect(self, group: str, active: tuple[int, ...]) -> Call | None:
        """Return a group's next collective, in which this rank's own code takes part; `None` if all have joined."""
        if not any(rank in active for rank in self.groups[group]):
            return None
        if group not in self._next:
            self._next[group] = self._channel.read(self._key(group), of=_RECORD)
        return self._take(group)

    def _take_part(self, number: int) -> None:
        """Take part in the collectives announced so far that come before a record of the common log."""
        for name in self.groups:
            while name in self._next or self._channel.posted(self._key(name)):
                if name not in self._next:
                    self._next[name] = self._channel.read(self._key(name), of=_RECORD)
                if self._next[name][0] > number:
                    break
                if (work := begin(self._take(name))) is not None:
                    self._works.append(work)

    def _take(self, name: str) -> Call:
        self._counts[name] += 1
        _, call = self._next.pop(name)
        return call

    def _key(self, name: str) -> str:
        return f"sub/{name}/{self._counts[name]}"

    def _speaks(self, name: str, active: tuple[int, ...]) -> bool:
        return self._rank == min((rank for rank in self.groups[name] if rank in active), default=-1)


def _in_part(ranks: list[int], active: tuple[int, ...]) -> bool:
    """Whether some of a group's members are active and others are not."""
    return 0 < len(set(ranks) & set(active)) < len(ranks)
