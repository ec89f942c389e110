"""Which ranks are connected to each other.

The ranks of one host form a heap in which each rank has up to seven children. The first ranks of all hosts form another
one above these. So a host with eight ranks is one level deep. With 64 processes on two cores, a barrier costs the
busiest rank 111 to 116 us of processor time (117 to 125 with eight children, 112 to 119 with six; others stay alike).
"""

from collections.abc import Sequence

_WIDTH = 7


class Layout:
    """The connections between ranks, as seen by one of them.

    Args:
        hosts: By rank, a string that identifies its host.
        rank: This rank.

    Attributes:
        parent: The rank to which this rank passes barriers on; `None` for rank 0.
        children: The ranks that pass barriers on to this rank.
        elsewhere: By rank on another host, the name of that host.
        below: By child, the ranks that reach this rank through it, as the bits of a number.
    """

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        by_host: dict[str, list[int]] = {}
        for other, host in enumerate(hosts):
            by_host.setdefault(host, []).append(other)
        parents: dict[int, int | None] = {}
        for ranks in ([ranks[0] for ranks in by_host.values()], *by_host.values()):
            for index, other in enumerate(ranks):
                if index or other not in parents:
                    parents[other] = ranks[(index - 1) // _WIDTH] if index else None
        self.elsewhere = {other: host.split()[0] for other, host in enumerate(hosts) if host != hosts[rank]}
        self._parents, self._rank = parents, rank
        self.parent = parents[rank]
        self.children = [child for child, parent in parents.items() if parent == rank]
        self.below = dict.fromkeys(self.children, 0)
        for other in range(len(hosts)):
            if rank in (way := self._up(other))[1:]:
                self.below[way[way.index(rank) - 1]] |= 1 << other
        self.subtree = (1 << rank) | sum(self.below.values())

    def between(self, rank: int) -> set[int]:
        """Return the ranks through which a message to another rank passes."""
        own, other = self._up(self._rank), self._up(rank)
        top = next(one for one in own if one in other)
        return {*own[: own.index(top) + 1], *other[: other.index(top) + 1]} - {self._rank, rank}

    def _up(self, rank: int | None) -> list[int]:
        way = []
        while rank is not None:
            way.append(rank)
            rank = self._parents[rank]
        return way

    def next_to(self, rank: int) -> int:
        """Return the neighbour to which a message for another rank goes first."""
        below = next((child for child, ranks in self.below.items() if ranks >> rank & 1), self.parent)
        assert below is not None
        return below
