"""The channel over a tree of connections: what another rank says is here when it is needed, or waited for.

A failure that a rank tells of ends every wait at once. A process that has ended is noticed by its neighbours, by the
end of its connections, and by whoever waits on its host, as one that is stopped is.
"""

import time
import weakref
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_join._base.errors import PeerFailedError
from torch_join._control import codec as _codec
from torch_join._control._links.node import BROKEN
from torch_join._control._links.stream import no_place
from torch_join._control._links.tree import Tree
from torch_join._control._links.tree_store import TreeBeats, TreeStore
from torch_join._control.beats import read_notices
from torch_join._control.channel import Beat, Channel, Status
from torch_join._control.messages import Messages, naming_failures
from torch_join._control.waiting import MOST_TEXT, WaitingChannel

T = TypeVar("T")

_ANSWERS_WITHIN = 3.0  # seconds
_WATCHES_AFTER = 0.2  # seconds: most gathers have ended by then, and have said nothing more
_ANSWER = tuple[bool, Status | None]


class TreeChannel(Messages, WaitingChannel, Channel):
    """A channel over a tree.

    Args:
        tree: This rank's node.
        rank: This rank.
        world_size: The number of ranks.
        timeout: How long a rank waits for another one.
        group: The process group.
    """

    _looks_every, _probes_after, _probes_every = 0.0, 1.0, 1.0

    def __init__(self, tree: Tree, rank: int, world_size: int, timeout: timedelta, group: dist.ProcessGroup) -> None:
        self._tree = tree
        self._is_awake = False  # while it waits for what others wait for it to answer
        self._passing_on: set[int] = set()  # whom the last roll call has reached
        store: Any = TreeStore(tree)
        Messages.__init__(self)
        Channel.__init__(self, rank, world_size)
        WaitingChannel.__init__(self, store, timeout, group)
        self.processes = tree.processes
        self._values = store.sayer.stream.values
        # Weakly, so that a channel that is dropped is gone at once.
        store.sayer.stream.place = weakref.WeakMethod(self._place)
        me = weakref.proxy(self)
        self._beats: Any = TreeBeats(store, rank, world_size, lambda ready: me._until(ready))

    def gather(self, value: T, unless_beat: bool = False, of: Any = Any) -> list[T]:
        self.before_meeting()
        data = _codec.encode(value)
        index, self._gathers = self._gathers, self._gathers + 1
        watches = False

        def refuse(have_met: Callable[[], bool]) -> None:
            nonlocal watches
            if not watches:
                watches = True
                self._beats.watch(index)
            self._refuse_beat(have_met)

        try:
            found = self._exchange(f"gather/{index}", data, 0, of, refuse if unless_beat else None)
        finally:
            if watches:
                self._beats.unwatch(index)
        self._all_have_met()
        self._store.pass_log(self._log)
        return [*found.values()]

    def exchange(self, key: str, value: T, ranks: Sequence[int], of: Any = Any) -> dict[int, T]:
        return self._exchange(key, _codec.encode(value), sum(1 << rank for rank in ranks), of)

    def _exchange(
        self, key: str, data: bytes, ranks: int, of: Any, refuse: Callable[[Callable[[], bool]], None] | None = None
    ) -> dict[int, Any]:
        found = self._store.sayer.give(key, data, ranks)
        values: dict[int, bytes] | None = None

        def ready() -> bool:
            nonlocal values
            values = values or found()
            return values is not None

        self._until(ready, later=None if refuse is None else lambda: refuse(ready))
        assert values is not None
        return {rank: self._decode(f"{key}/{rank}", said, of) for rank, said in values.items()}

    def hear(self) -> Beat:
        total, notices = self._beats.hear()
        return Beat(total, self._read_notices(notices) if notices else {})

    @naming_failures
    def _read_notices(self, data: bytes) -> dict[int, dict[str, Any]]:
        return read_notices(data, self.world_size)

    def put_off(self) -> None:
        self._tree.links.put_off()

    def catch_up(self) -> None:
        self._beats.catch_up()

    def add(self, key: str, number: int) -> int:
        return int(self._store.add(key, number, self.vigil()))

    def keep(self, key: str, value: Any) -> None:
        self._store.sayer.keep(key, _codec.encode(value))

    def ask(self, key: str, ranks: Sequence[int], of: Any = Any) -> dict[int, Any]:
        asked = {rank: self._store.sayer.ask(rank, key, waits=True) for rank in ranks}
        answers = self._store.sayer.stream.answers
        self._until(lambda: all(number in answers for number in asked.values()))
        found = {rank: answers.pop(number) for rank, number in asked.items()}
        return {rank: self._decode(key, data, of) for rank, data in found.items()}

    def contribute(self, key: str, number: int, ranks: Sequence[int]) -> None:
        self._store.sayer.contribute(key, number, sum(1 << rank for rank in ranks))

    def contributed(self, key: str, ranks: Sequence[int]) -> int | None:
        self._tree.links.read()
        total: int | None = self._store.sayer.contributed(key)
        return total

    def delete(self, key: str) -> None:
        self._store.delete_keys([key])

    def post(self, key: str, value: Any, until_met: bool = False) -> None:
        super().post(key if until_met else f"{key}@{self._log}", value, until_met)

    def announce(self, record: Any, leads: bool) -> None:
        super().announce(record, leads)
        self._store.pass_log(self._log)

    def follow(self, meanwhile: Callable[[], None] | None = None, of: Any = Any) -> Any:
        self._store.pass_log(self._log)  # what belongs to this record is still to be read when it has come
        self._is_awake = True
        try:
            return super().follow(meanwhile, of)
        finally:
            self._is_awake = False

    def fail(self, reason: str, rank: int | None = None) -> None:
        self._has_told = self._has_told or rank is None
        told = _codec.encode((self.rank if rank is None else rank, reason[:MOST_TEXT])).decode()
        self._store.compare_set("failure", "", told)

    def finish(self) -> None:
        self.gather(None)
        self.close()

    def leave(self) -> None:
        self._store.sayer.stream.place = no_place
        self._tree.part()  # with what was said of a failure, before the process may end

    def close(self) -> None:
        self.leave()
        self._store.close()

    def _call_roll(self, _: Container[int]) -> dict[int, Any]:
        sayer, places = self._store.sayer, self._store.sayer.stream.places
        (call, until), deadline = sayer.call_roll(), time.monotonic() + _ANSWERS_WITHIN

        def answered(rank: int) -> bool:
            return rank in places and places[rank][0] >= call

        def enough() -> bool:
            now = time.monotonic()
            late = now > deadline or self.failure() is not None
            return late or (now > until and all(map(answered, range(self.world_size))))

        self._tree.wait(enough, lambda: None)
        found = {rank: places[rank][1] for rank in range(self.world_size) if answered(rank)}
        self._passing_on = {*found}  # also who has left, and answers nothing
        return {rank: self._decode("an answer to a roll call", data, _ANSWER) for rank, data in found.items() if data}

    def silent(self, answers: Container[int]) -> list[int]:
        missing = super().silent(answers)
        stuck = {*missing} - self._passing_on
        return [rank for rank in missing if self._tree.layout.between(rank).isdisjoint(stuck)]

    def _place(self) -> bytes:
        try:
            return _codec.encode(self.place())
        except Exception:  # the status is in the making, in another thread
            return _codec.encode((self._waits is not None, None))

    def failure(self) -> PeerFailedError | None:
        self._tree.links.read()
        return super().failure()

    def _read_failure(self, store: Any) -> PeerFailedError | None:
        if not self._store.has("failure"):
            return None
        failure = super()._read_failure(store)
        if failure is None or f": {BROKEN}" not in str(failure):
            return failure
        what = str(failure).partition(f": {BROKEN}")[2]
        text = f"Rank {self.names[self.rank]} cannot go on: {BROKEN}{what}"
        return PeerFailedError(text, failure.rank, failure.reason)

    def _wait(self, keys: list[str], meanwhile: Callable[[], None] | None = None, wakes: bool = True) -> list[bytes]:
        there = self._store.has
        self._until(lambda: all(map(there, keys)), meanwhile)
        found: list[bytes] = self._store.multi_get(keys)
        return found

    def _until(
        self,
        ready: Callable[[], bool],
        meanwhile: Callable[[], None] | None = None,
        later: Callable[[], None] | None = None,
    ) -> None:
        vigil: Callable[[], None] | None = None
        start = time.monotonic()

        def look() -> None:
            nonlocal vigil
            if meanwhile is not None:
                meanwhile()
            if later is not None and time.monotonic() - start > _WATCHES_AFTER:
                later()
            vigil = vigil or self.vigil(known=super(TreeChannel, self).failure)
            vigil()

        self._waits = True
        try:
            self._tree.wait(ready, look, self._values if meanwhile is None else None, self._is_awake)
        finally:
            self._waits = None

    def _probe(self) -> None:
        left = "it has destroyed the process group, or ended, before the others."
        self._look_at_processes(dict.fromkeys(self._tree.links.left, left))
