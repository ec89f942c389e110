"""Who is still there: every rank answers roll calls from a thread of its own.

A rank that waits in a collective cannot look at the store, and would be taken for dead by whoever
looks for the cause of a failure. The thread answers for it, so silence means that the process has
ended or is stopped. It looks four times a second, over a connection of its own, and deletes then what
all have read: no step of the training waits for that.

A rank that fails calls the roll too. So each hears of it, and what it says, within a quarter of a second, in a
collective or not, and still knows it when the store has gone down with its host.

The contract relied on: a store's methods give up the interpreter's lock, and one connection carries
the requests of several threads in turn.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import Any, Protocol

import torch.distributed as dist

from torch_join._control import codec as _codec
from torch_join._control.channel import Status

_LOOKS_EVERY = 0.25  # seconds
_ANSWERS_WITHIN = 3.0
_CLOSED_WITHIN = 0.6
_ENDS_WITHIN = 1.0  # unless the store has been stopped, amid a request
_POLL = 0.05
_ANSWER = tuple[int, bool, Status | None]


class Rank(Protocol):
    """What the thread asks of its rank."""

    def place(self) -> tuple[bool, Status | None]:
        """Return what the rank answers: whether it waits on the channel, and its status."""

    def listen(self, store: Any) -> None:
        """Look whether a rank has failed."""

    def look(self, store: Any) -> None:
        """Wake up this rank if it has waited long, or in vain."""


class Presence:
    """This rank's part in roll calls, until `leave` is called (or this object, or the interpreter, ends).

    Args:
        store: A connection that nobody waits on; used in both threads.
        number: This rank.
        world_size: The number of ranks.
        rank: Returns what the thread asks, as long as it is there; called in another thread.
        read: Keys to delete.
    """

    def __init__(
        self,
        store: dist.Store,
        number: int,
        world_size: int,
        rank: Callable[[], Rank | None],
        read: deque[str],
    ) -> None:
        self._store: Any = store
        self._keys = [f"here/{rank}" for rank in range(world_size)]
        stop = threading.Event()
        thread = threading.Thread(target=_answer, args=(store, self._keys[number], stop, rank, read), daemon=True)
        # Before the interpreter ends, too: a thread that waits in C++ then would abort the process.
        self.leave = weakref.finalize(self, _end, stop, thread)
        thread.start()

    def call(
        self,
        enough: Callable[[dict[int, Any]], bool],
        within: float = _ANSWERS_WITHIN,
        closed: Container[int] = (),
    ) -> dict[int, Any]:
        """Return what the ranks answer that do so in time.

        Args:
            enough: Whether these answers are all that the caller wants to wait for.
            within: How many seconds to wait.
            closed: Ranks that have lost their connections: they get time to answer, and no more where all others have.

        Returns:
            The answers by rank.

        Raises:
            Malformed: An answer is not one.
        """
        answers: dict[int, Any] = {}
        try:
            number = call(self._store)
            start = time.monotonic()
            ranks = range(len(self._keys))
            while (waited := time.monotonic() - start) < within and not enough(answers):
                if all(rank in answers or (rank in closed and waited > _CLOSED_WITHIN) for rank in ranks):
                    break
                time.sleep(_POLL)
                for rank, key in enumerate(self._keys):
                    if rank not in answers and self._store.check([key]):
                        answered, *answer = _codec.decode(self._store.get(key), _ANSWER)
                        if answered >= number:
                            answers[rank] = answer
        except RuntimeError:  # the store went down with its host
            pass
        return answers

    @property
    def connection(self) -> Any:
        """A connection to the store that works, or `None`."""
        try:
            self._store.check(["roll"])
        except RuntimeError:
            return None
        return self._store


def call(store: Any) -> int:
    """Call the roll, and return its number.

    Raises:
        Malformed: The number of the last one is none.
    """
    last = _last_call(store)
    store.compare_set("roll", str(last) if last else "", str(last + 1))  # unless another rank has called meanwhile
    return last + 1


def delete_all(store: Any, keys: deque[str]) -> None:
    """Delete `keys` from the store, and from the queue."""
    found = []
    while keys:
        found.append(keys.popleft())
    if found and hasattr(store, "delete_keys"):
        store.delete_keys(found)
        return
    for key in found:
        store.delete_key(key)


def _last_call(store: Any) -> int:
    if not store.check(["roll"]):
        return 0
    text: bytes = store.get("roll")
    if len(text) > 18 or not text.isdigit():
        raise _codec.Malformed(f"{text[:60]!r} in place of a number")
    return int(text)


def _answer(store: Any, key: str, stop: threading.Event, rank: Callable[[], Rank | None], read: deque[str]) -> None:
    answered: int | None = 0
    while answered is not None and not stop.wait(_LOOKS_EVERY):
        try:
            answered = _look(store, key, rank(), answered)
            delete_all(store, read)
        except Exception:
            # A status in the making, or something that a stranger has written: the next look may succeed. Who does not
            # answer counts as dead.
            try:
                store.check([key])
            except RuntimeError:  # the store went down with its host: nobody is left to answer
                return


def _look(store: Any, key: str, me: Rank | None, answered: int) -> int | None:
    """Look once, for a rank unless it is no more; return the number of the last call that is answered."""
    if me is None:
        return None
    try:
        number = _last_call(store)
    except _codec.Malformed:  # whoever calls says so
        number = answered
    if number > answered:
        me.listen(store)
        store.set(key, _codec.encode((number, *me.place())))
        answered = number
    me.look(store)
    return answered


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # the garbage collector may call from there
        thread.join(_ENDS_WITHIN)
