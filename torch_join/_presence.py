"""Who is still there: every rank answers roll calls from a thread of its own.

A rank that waits in a collective cannot look at the store, and would be taken for dead by whoever
looks for the cause of a failure. The thread answers for it, so silence means that the process has
ended or is stopped. It looks four times a second, over a connection of its own, and deletes then what
all have read: no step of the training waits for that.

The contract relied on: a store's methods give up the interpreter's lock, and one connection carries
the requests of several threads in turn.
"""

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_join._errors import JoinError, JoinTimeoutError, PeerFailedError, name_ranks

_LOOKS_EVERY = 0.25  # seconds
_ANSWERS_WITHIN = 3.0
_POLL = 0.05


class Presence:
    """This rank's part in roll calls, until `leave` is called (or this object, or the interpreter, ends).

    Args:
        connect: Returns a connection that nobody waits on; called in both threads.
        rank: This rank.
        world_size: The number of ranks.
        say: Returns what this rank answers, as a JSON value; called in another thread.
        read: Keys to delete.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        world_size: int,
        say: Callable[[], Any],
        read: deque[str],
    ) -> None:
        self._connect: Callable[[], Any] = connect
        self._keys = [f"here/{rank}" for rank in range(world_size)]
        stop = threading.Event()
        thread = threading.Thread(target=_answer, args=(connect, self._keys[rank], stop, say, read), daemon=True)
        # Before the interpreter ends, too: a thread that waits in C++ then would abort the process.
        self.leave = weakref.finalize(self, _end, stop, thread)
        thread.start()

    def call(self, enough: Callable[[], bool]) -> dict[int, Any]:
        """Return what the ranks answer that do so within three seconds.

        Args:
            enough: Whether the caller knows all that it wants without waiting for more answers.

        Returns:
            The answers by rank.
        """
        answers: dict[int, Any] = {}
        try:
            store = self._connect()
            number = store.add("roll", 1)
            deadline = time.monotonic() + _ANSWERS_WITHIN
            while len(answers) < len(self._keys) and time.monotonic() < deadline and not enough():
                time.sleep(_POLL)
                for rank, key in enumerate(self._keys):
                    if rank not in answers and store.check([key]):
                        answered, answer = json.loads(store.get(key))
                        if answered >= number:
                            answers[rank] = answer
        except RuntimeError:  # the store went down with its host
            pass
        return answers


def timed_out(
    waited: str, world_size: int, answers: dict[int, Any], explain: Callable[[dict[int, Any]], JoinError | None]
) -> JoinError:
    """Return the error of a rank that has waited too long.

    Args:
        waited: Who waited how long, as the beginning of a sentence.
        world_size: The number of ranks.
        answers: By rank: whether it waits too, and what it says of itself.
        explain: What the latter tells of the cause, by rank.
    """
    if silent := [rank for rank in range(world_size) if rank not in answers]:
        return PeerFailedError(f"{waited}, and {name_ranks(silent)} did not answer: killed, or stopped.")
    if (explained := explain({rank: status for rank, (_, status) in answers.items()})) is not None:
        return explained
    busy = [rank for rank, (waits, _) in answers.items() if not waits]
    who = f"{name_ranks(busy)} at work elsewhere" if busy else "all wait"
    return JoinTimeoutError(
        f"{waited} to say whether they have a next batch, or what comes next: {who}. Usual causes: a dataloader that"
        " takes longer than the timeout (raise `timeout`); a `break` at different steps (a counter of a rank's own"
        " steps is lower where a rank has run out of batches: use heartbeat=True, or count what all count); a step"
        " that only some ranks run. py-spy dump tells what these ranks are doing."
    )


def delete_all(store: Any, keys: deque[str]) -> None:
    """Delete `keys` from the store, and from the queue."""
    while keys:
        store.delete_key(keys.popleft())


def _answer(
    connect: Callable[[], Any], key: str, stop: threading.Event, say: Callable[[], Any], read: deque[str]
) -> None:
    answered = 0
    while not stop.wait(_LOOKS_EVERY):
        try:
            store = connect()
            if store.check(["roll"]) and (number := store.add("roll", 0)) > answered:
                store.set(key, json.dumps([number, say()]))
                answered = number
            delete_all(store, read)
        except RuntimeError:  # the store went down with its host: nobody is left to answer
            return


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # the garbage collector may call from there
        thread.join()
