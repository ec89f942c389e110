"""What ranks wait for, and how, while their connections are made."""

import errno
import gc
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.inside import gathered, open_channel
from tests.support.workers import Workers
from torch_join import JoinError, PeerFailedError
from torch_join._control.peers import this_process
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


@pytest.mark.parametrize(
    ("error", "is_there"), [(OSError(errno.EMFILE, "Too many open files"), True), (FileNotFoundError(), False)]
)
def test_only_what_proves_that_a_process_has_ended_counts(error: OSError, is_there: bool) -> None:
    process = this_process()
    with mock.patch.object(Path, "read_text", side_effect=error):
        assert (process.is_there, process.is_stopped, this_process().pid) == (is_there, False, 0)


def come_late(rank: int, before: int) -> str:
    dist.barrier()
    text = ""
    time.sleep(before * (rank == 0))
    if rank < 2:
        try:
            open_channel(timeout=timedelta(seconds=3))
        except JoinError as error:
            text = str(error)
    else:
        time.sleep(9)
    dist.destroy_process_group()
    return text


@pytest.mark.parametrize("before", [0, 2])
def test_who_does_not_come_in_time_is_named(workers: Workers, before: int) -> None:
    """However long before rank 0 another one has come, and whatever the group's own timeout is."""
    first, second, _ = workers.run(3, come_late, before, timeout=2.0)
    assert first.startswith("Rank 0 waited 3 s for rank 2 to start its `with`")
    assert second.startswith(
        "Rank 0 failed, so rank 1 cannot continue. Rank 0: its process is gone"
    )  # it has just said so


def say(rank: int, what: str) -> str:
    set_up = SetUp(dist.distributed_c10d._get_default_group(), timedelta(seconds=5))
    set_up.meet()
    if rank == 0:
        sizes = {"large": -1, "small": 1 << 62, "garbage": 3, "wrong": 3}[what]
        dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([sizes]))
        if sizes == 3:
            data = torch.frombuffer(bytearray({"garbage": b"{]~", "wrong": b'"a"'}[what]), dtype=torch.uint8)
            dist.all_gather([torch.zeros(3, dtype=torch.uint8) for _ in range(2)], data)
        return ""
    with pytest.raises(JoinError) as found:
        set_up.exchange(7, int)
    return str(found.value)


@pytest.mark.parametrize("what", ["large", "small", "garbage", "wrong"])
def test_what_no_rank_says_is_refused(workers: Workers, what: str) -> None:
    text = workers.run(2, say, what)[1]
    assert "This rank read a malformed message (the ranks' first message)" in text


def look_at_the_store(rank: int) -> bool:
    open_channel().barrier()
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return b"torch_join" in Path(store.path).read_bytes()


def test_nothing_is_said_over_the_store(workers: Workers) -> None:
    """Torchrun keeps one for all its attempts to run a job: what an earlier one had said would be read in the next."""
    assert workers.run(2, look_at_the_store) == [False, False]


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
    def allgather(self, found: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Unsaid:
        for each in found[0]:
            each.fill_(7)
        return Unsaid()


def test_works_that_do_not_say_when_they_are_completed_are_waited_for() -> None:
    group: Any = mock.Mock()
    group._get_backend.return_value = OfPython()
    with mock.patch.object(dist, "get_world_size", return_value=2):
        assert [each.tolist() for each in gathered(group, torch.zeros(3), mock.Mock(side_effect=TimeoutError))] == [
            [7.0] * 3
        ] * 2
