"""Ranks of which some have joined."""

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.collectives import Case
from torch_join._collectives.neutral import mirror
from torch_join._collectives.tap import Call, CollectiveTap
from torch_join._compat import ddp as _compat


@contextlib.contextmanager
def listening(tap: CollectiveTap) -> Iterator[None]:
    tap.install()
    try:
        yield
    finally:
        tap.remove()


class Party:
    """Ranks of which some have joined: active ones run code, joined ones mirror what they are told of."""

    def __init__(self, rank: int, joined: set[int]) -> None:
        self.rank = rank
        self.active = [r for r in range(dist.get_world_size()) if r not in joined]
        self.store: Any = dist.PrefixStore("party", _compat.group_store(dist.group.WORLD))  # type: ignore[arg-type]
        self.store.set_timeout(timedelta(seconds=15))
        self.calls: list[Call] = []
        self.sent = 0
        self.announcer: int | None = None
        self.tap = CollectiveTap(self.observe, lambda r: r in joined)
        everyone = tuple(range(dist.get_world_size()))
        self.groups: dict[tuple[int, ...], Any] = {}
        for size in range(1, len(everyone) + 1):
            for ranks in itertools.combinations(everyone, size):
                self.groups[ranks] = dist.new_group(list(ranks))

    def observe(self, call: Call) -> None:
        self.calls.append(call)
        self.send(call)

    def send(self, message: Call | None) -> None:
        if self.rank == self.announcer:
            self.store.set(str(self.sent), pickle.dumps(message))
            self.sent += 1

    def play(self, function: Callable[[], Any], ranks: tuple[int, ...] | None = None) -> Any:
        """Run `function` on the active ranks of `ranks`, mirror its collectives on the others."""
        self.announcer = min(r for r in ranks or self.active if r in self.active)
        self.calls.clear()
        result = None
        if self.rank not in self.active:
            while (call := pickle.loads(self.store.get(str(self.sent)))) is not None:
                self.sent += 1
                mirror(call)
            self.sent += 1
        else:
            try:
                if ranks is None or self.rank in ranks:
                    with listening(self.tap):
                        result = function()
            finally:
                self.send(None)
            if self.rank != self.announcer:
                # The numbers go on with another announcer.
                while pickle.loads(self.store.get(str(self.sent))) is not None:
                    self.sent += 1
                self.sent += 1
        return result

    def case(self, ranks: tuple[int, ...], default: bool = False, **kwargs: Any) -> Case:
        active = [r for r in ranks if r in self.active]
        return Case(self.rank, list(ranks), active, None if default else self.groups[ranks], **kwargs)
