"""What ranks wait for, and how, while their connections are made."""

import gc
import os
import re
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.inside import found_keys, replaced_clone, shared_tensor
from tests.support.workers import Workers
from torch_join import JoinTimeoutError, PeerFailedError
from torch_join._control.beside import beside
from torch_join._control.failures import telling_failures
from torch_join._control.processes import Process
from torch_join._control.store_channel import StoreChannel
from torch_join.integration import open_channel


class Counted:
    """A store that counts how many keys it is asked for."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += len(keys)
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_one_key_that_is_late_is_asked_for_alone() -> None:
    store: Any = Counted()
    keys = [f"key/{index}" for index in range(64)]
    channel = StoreChannel(store, 0, 64, timedelta(seconds=1), group=None, second=dist.HashStore(), hosts=False)
    try:
        for late in (keys[0], keys[37], keys[63]):
            for key in keys:
                store.set(key, "there")
            store.delete_key(late)
            assert found_keys(channel, keys) is None
            before = store.asked
            assert found_keys(channel, keys) is None
            assert store.asked == before + 1
            store.set(late, "there too")
            found = found_keys(channel, keys)
            assert found is not None
            assert found[keys.index(late)] == b"there too"
        assert found_keys(channel, keys[:5]) == [b"there"] * 5
    finally:
        channel.leave()


def test_what_is_done_beside_is_returned_and_raised() -> None:
    assert beside(lambda: 3, lambda: None) == 3
    with pytest.raises(KeyError, match="a hole"):
        beside(lambda: {}["a hole"], lambda: None)


def test_a_look_ends_a_wait_that_nothing_else_does() -> None:
    over = threading.Event()
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise PeerFailedError("another rank")

    start = time.monotonic()
    try:
        with pytest.raises(PeerFailedError, match="another rank"):
            beside(lambda: over.wait(20), look)
        assert time.monotonic() - start < 2
    finally:
        over.set()


class Dying:
    """A store whose server is gone from a moment on: each request then ends after so many seconds, with an error."""

    def __init__(self, seconds: float) -> None:
        self.store = dist.HashStore()
        self.seconds, self.over, self.is_gone, self.asked = seconds, threading.Event(), False, 0

    def _ask(self, name: str, *args: Any) -> Any:
        if self.is_gone:
            self.asked += 1
            self.over.wait(self.seconds)
            raise dist.DistNetworkError("Failed to recv, got 0 bytes")
        return getattr(self.store, name)(*args)

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name)


def end_of_set_up(store: Dying, second: Dying, processes: dict[int, Process]) -> tuple[PeerFailedError, float]:
    """Return what rank 1 of three raises when its store's server goes as it waits, and how long it takes to leave."""
    first: Any = store
    other: Any = second
    channel = StoreChannel(first, 1, 3, timedelta(seconds=60), None, other, hosts=False, is_watchful=True)
    channel.processes = processes
    store.is_gone = second.is_gone = True
    start = time.monotonic()
    try:
        with pytest.raises(PeerFailedError) as found, telling_failures(channel):
            channel.gather(None)
        channel.leave()
        return found.value, time.monotonic() - start
    finally:
        store.over.set()
        second.over.set()


ENDED = Process(os.getpid(), began=0)  # whose number has come to mean this one
BOTH = "Rank 0: its process is gone.* The same goes for rank 2, and any of them may have been the first."


def test_whoever_is_gone_with_a_store_is_named() -> None:
    error, _ = end_of_set_up(Dying(0.01), Dying(0.01), {0: ENDED, 2: ENDED})
    assert re.search(BOTH, str(error))


def test_whoever_is_gone_at_a_roll_call_is_named() -> None:
    store: Any = dist.HashStore()
    channel = StoreChannel(store, 1, 3, timedelta(seconds=1), None, store, hosts=False)
    channel.processes = {0: ENDED, 2: ENDED}
    try:
        channel.roll_call()
        assert re.search(BOTH, str(channel.failure()))
    finally:
        channel.leave()


def test_a_store_that_is_gone_is_asked_once() -> None:
    store, second = Dying(0.5), Dying(20)
    error, seconds = end_of_set_up(store, second, {})
    assert str(error).startswith("The rank that hosts the job's key-value store")
    assert store.asked == 1
    assert seconds < 0.5 + 1.0 + 0.7  # the thread that answers roll calls is waited for


def test_a_store_that_is_gone_with_the_first_rank_is_not_waited_for() -> None:
    error, seconds = end_of_set_up(Dying(20), Dying(20), {0: ENDED})
    assert str(error).startswith("Rank 0 failed, so rank 1 cannot go on. Rank 0: its process is gone")
    assert error.rank == 0
    assert seconds < 1.0 + 1.0 + 1.0


class Held:
    pass


def raise_beside(held: Held) -> None:
    def fail() -> None:
        raise KeyError("a hole")

    with suppress(KeyError):
        beside(fail, lambda: None)


def test_an_error_beside_keeps_no_frame() -> None:
    gc.collect()
    gc.disable()
    try:
        held = Held()
        reference = weakref.ref(held)
        raise_beside(held)
        del held
        deadline = time.monotonic() + 5  # the thread may yet be ending
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reference() is None
    finally:
        gc.enable()


def connect_with(rank: int, text: str) -> str:
    """Return what a rank hears whose own connection to the job's store cannot be made."""
    error = dist.DistNetworkError(text)
    try:
        with replaced_clone(mock.Mock(side_effect=error)):
            open_channel(timeout=timedelta(seconds=5))
    except (PeerFailedError, JoinTimeoutError, dist.DistNetworkError) as found:
        return f"{type(found).__name__}: {found}"
    return ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Failed to recv, got 0 bytes", "PeerFailedError: The rank that hosts the job's key-value store"),
        ("Too many open files", "DistNetworkError: Too many open files"),
    ],
)
def test_who_cannot_connect_blames_no_other_rank(workers: Workers, text: str, said: str) -> None:
    for found in workers.run(2, connect_with, text, store="tcp", links=True):
        assert found.startswith(said)


class Unsaid(dist._Work):
    """The work of a backend in Python, which need not say whether it is completed."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True


class OfPython:
    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Unsaid:
        tensors[0].fill_(7)
        return Unsaid()


def test_works_that_do_not_say_when_they_are_completed_are_waited_for() -> None:
    group: Any = mock.Mock()
    group._get_backend.return_value = OfPython()
    looks = mock.Mock(side_effect=[None] * 20 + [TimeoutError()])
    assert shared_tensor(group, torch.zeros(3), looks).tolist() == [7.0] * 3
