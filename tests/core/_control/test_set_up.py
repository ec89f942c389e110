"""What ranks wait for, and how, while their connections are made."""

import errno
import gc
import os
import pickle
import re
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.inside import shared_tensor
from torch_join import JoinError, JoinTimeoutError, PeerFailedError
from torch_join._control.codec import encode
from torch_join._control.processes import Process, this_process
from torch_join._control.run_polling import run_polling
from torch_join._control.set_up import SetUp


def test_what_is_done_beside_is_returned_and_raised() -> None:
    assert run_polling(lambda: 3, lambda: None) == 3
    with pytest.raises(KeyError, match="a hole"):
        run_polling(lambda: {}["a hole"], lambda: None)


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
            run_polling(lambda: over.wait(20), look)
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


def set_up_over(store: Any, rank: int = 1, world_size: int = 3, seconds: float = 60.0) -> SetUp:
    return SetUp(store, rank, range(world_size), timedelta(seconds=seconds))


def end_of_set_up(store: Dying, processes: dict[int, Process]) -> tuple[PeerFailedError, float]:
    """Return what rank 1 of three raises when its store's server goes as it waits, and how long it takes to leave."""
    set_up = set_up_over(store)
    set_up.peers.processes = processes
    store.is_gone = True
    start = time.monotonic()
    try:
        with pytest.raises(PeerFailedError) as found, set_up.telling():
            set_up.exchange(None, None)
        return found.value, time.monotonic() - start
    finally:
        store.over.set()


ENDED = Process(os.getpid(), began=0)  # whose number has come to mean this one
BOTH = "Rank 0: its process is gone.* The same goes for rank 2, and any of them may have been the first."


def test_whoever_is_gone_with_a_store_is_named() -> None:
    error, _ = end_of_set_up(Dying(0.01), {0: ENDED, 2: ENDED})
    assert re.search(BOTH, str(error))


def test_a_store_that_is_gone_is_said_to_be() -> None:
    error, seconds = end_of_set_up(Dying(0.5), {})
    assert str(error).startswith("The rank that hosts the job's key-value store")
    assert seconds < 0.5 + 1.0 + 0.7


def test_a_store_that_is_gone_with_the_first_rank_is_not_waited_for() -> None:
    error, seconds = end_of_set_up(Dying(20), {0: ENDED})
    assert str(error).startswith("Rank 0 failed, so rank 1 cannot go on. Rank 0: its process is gone")
    assert error.rank == 0
    assert seconds < 2.0


def test_why_a_rank_that_is_gone_failed_is_read_where_it_has_said_so() -> None:
    store: Any = dist.HashStore()
    set_up = set_up_over(store)
    store.set("torch_join/1/failure", encode((2, "KeyError: 'a hole'")))
    set_up.peers.processes = {2: ENDED}
    with pytest.raises(PeerFailedError, match=r"^Rank 2 failed, so rank 1 cannot go on. Rank 2: KeyError: 'a hole'$"):
        set_up.exchange(None, None)


@pytest.mark.parametrize(
    ("error", "is_there"), [(OSError(errno.EMFILE, "Too many open files"), True), (FileNotFoundError(), False)]
)
def test_only_what_proves_that_a_process_has_ended_counts(error: OSError, is_there: bool) -> None:
    process = this_process()
    with mock.patch.object(Path, "read_text", side_effect=error):
        assert (process.is_there, process.is_stopped, this_process().pid) == (is_there, False, 0)


def test_who_does_not_come_in_time_is_named() -> None:
    store: Any = dist.HashStore()
    store.set("torch_join/1/0/0", encode(None))
    with pytest.raises(JoinTimeoutError, match="Rank 1 waited 0 s for rank 2 to begin its `with`"):
        set_up_over(store, seconds=0.2).exchange(None, None)


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("what", ["pickle", "garbage", "wrong"])
@pytest.mark.parametrize("key", ["0/0/all", "failure"])
def test_what_a_stranger_writes_is_no_message(tmp_path: Path, key: str, what: str) -> None:
    store: Any = dist.HashStore()
    evil = pickle.dumps([Evil(str(tmp_path / "run"))] * 3)
    store.set(f"torch_join/1/{key}", {"pickle": evil, "garbage": b"\x00", "wrong": encode({"a": [None, -1]})}[what])
    with pytest.raises(JoinError, match=r"is not a message of its ranks.*let nobody but the job's own machines"):
        set_up_over(store).exchange(1, int)
    assert not (tmp_path / "run").exists()


class Held:
    pass


def raise_beside(held: Held) -> None:
    def fail() -> None:
        raise KeyError("a hole")

    with suppress(KeyError):
        run_polling(fail, lambda: None)


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


class Silent:
    """A store whose server does not answer."""

    def __init__(self) -> None:
        self.ends = threading.Event()

    def add(self, *_: Any) -> int:
        self.ends.wait(30)
        return 1


def test_a_store_that_does_not_answer_ends_the_wait() -> None:
    store: Any = Silent()
    with (
        mock.patch("torch_join._control.set_up._ANSWERS_WITHIN", 0.5),
        pytest.raises(JoinTimeoutError, match="does not answer"),
    ):
        SetUp(store, 1, [0, 1], timedelta(seconds=1))
    store.ends.set()
