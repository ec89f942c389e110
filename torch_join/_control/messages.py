"""What ranks say to each other, as keys of a store that they write, wait for and delete."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from torch_join._base.errors import JoinError, PeerFailedError
from torch_join._control import codec as _codec
from torch_join._control.channel import Beat

P = ParamSpec("P")
T = TypeVar("T")

_ONE = 1 << 48  # above a sum of as many numbers below 2**32 as there may be ranks


def naming_failures(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method say who has failed, if the store has hung up, and what is wrong with a number."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        channel: Any = args[0]
        try:
            return method(*args, **kwargs)
        except dist.DistNetworkError as error:
            raise channel._lost() or error from error
        except _codec.Malformed as problem:
            raise channel._published(_codec.foreign("a number of a meeting", problem)) from None

    return call


class Messages:
    """The part of a channel that is the same over every kind of store."""

    rank: int
    names: Sequence[int]
    world_size: int
    failure: Callable[[], PeerFailedError | None]
    before_meeting: Callable[[], object]
    _store: Any
    _beats: Any
    _wait: Callable[..., list[bytes]]
    delete: Callable[[str], None]
    _decode: Callable[[str, bytes, Any], Any]
    _published: Callable[[JoinError], JoinError]

    def __init__(self) -> None:
        self._gathers = self._log = 0
        self._until_met: list[str] = []  # keys that all will have read when they have met

    def say(
        self,
        count: int = 0,
        notice: dict[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        waits: bool = True,
    ) -> None:
        self.before_meeting()
        self._beats.say(count, notice, range(self.world_size) if ranks is None else ranks, waits)

    def hear(self) -> Beat:
        beat: Beat = self._beats.hear()
        return beat

    def announce(self, record: Any, leads: bool) -> None:
        if leads:
            self.post(f"log/{self._log}", record)
        self._log += 1

    @property
    def records(self) -> int:
        return self._log

    def follow(self, meanwhile: Callable[[], None] | None = None, of: Any = Any) -> Any:
        number, self._log = self._log, self._log + 1
        return self.read(f"log/{number}", meanwhile, of)

    @naming_failures
    def post(self, key: str, value: Any, until_met: bool = False) -> None:
        self._store.set(key, _codec.encode(value))
        if until_met:
            self._until_met.append(key)

    @naming_failures
    def posted(self, key: str) -> bool:
        return bool(self._store.check([key]))

    @naming_failures
    def read(
        self, key: str, meanwhile: Callable[[], None] | None = None, of: Any = Any, is_polled: bool = False
    ) -> Any:
        return self._decode(key, self._wait([key], meanwhile, not is_polled)[0], of)

    @naming_failures
    def add(self, key: str, number: int) -> int:
        return int(self._store.add(key, number))

    def keep(self, key: str, value: Any) -> None:
        self.post(f"{key}/{self.rank}", value, until_met=True)

    def ask(self, key: str, ranks: Sequence[int], of: Any = Any) -> dict[int, Any]:
        return {rank: self.read(f"{key}/{rank}", of=of) for rank in ranks}

    def exchange(self, key: str, value: T, ranks: Sequence[int], of: Any = Any) -> dict[int, T]:
        self.post(f"{key}/{self.rank}", value, until_met=True)
        return {rank: self.read(f"{key}/{rank}", of=of) for rank in ranks}

    def contribute(self, key: str, number: int, ranks: Sequence[int]) -> None:
        self.add(key, _ONE + number)

    def contributed(self, key: str, ranks: Sequence[int]) -> int | None:
        count, total = divmod(self.add(key, 0), _ONE)
        if count < len(ranks):
            return None
        self.delete(key)
        return total if count == len(ranks) else -1

    @property
    def beats(self) -> int:
        number: int = self._beats.number
        return number

    @property
    def position(self) -> Any:
        return self._beats.position

    def skip_to(self, position: Any) -> None:
        self._beats.skip_to(position)

    def _refuse_beat(self, have_met: Callable[[], bool]) -> None:
        # A rank that has met this one here comes to the next beat later, when all have met.
        if self._beats.somebody_came() and not have_met():
            raise JoinError(
                f"Rank {self.names[self.rank]} came to something that all ranks do together (a metric's compute(), the"
                " begin of a loop over join.batches) while another rank is at the end of its `with`, or at a forward"
                " outside of such a loop. Usual causes: a `return`, or a `break` out of the epochs, at a step that each"
                " rank counts for itself, and that is lower where a rank has run out of batches (count epochs, or steps"
                " in an object with a state_dict that is given to Join); a loop that reads ahead of its step (put that"
                " inside: join.batches(prefetcher(loader))); a plain `for`, which ranks leave at different steps (use"
                " `for batch in join.batches(loader)`, which all leave together, or do it after the `with`)."
            )

    def _all_have_met(self) -> None:
        while self._until_met:
            self.delete(self._until_met.pop())
