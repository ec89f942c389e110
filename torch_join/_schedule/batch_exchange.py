"""Sends batches from rank to rank, over a separate gloo group, while the step runs.

The group's own threads move the bytes, directly from the memory of the sent batch. Two more threads wait: one receives,
since a message's head tells what follows, and one waits until other ranks have received the sent data. A rank that
waits for these threads can check for failures meanwhile, and the channel's timeout applies.

Contract of gloo (torch 2.13): Messages with one tag from one rank arrive in order. The work object that `send` returns
holds the message: it is lost if the object is dropped. A wait cannot be cancelled. It ends with an error when the other
process ends, but not in the middle of a message. A wait that times out breaks all connections of the group.
"""

import hashlib
import os
import pickle
import queue
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.errors import JoinError, PeerFailedError
from torch_join._base.specs import copied_bytes
from torch_join._compat import ddp as compat
from torch_join._control.channel import Channel
from torch_join._control.run_polling import run_polling
from torch_join._schedule.packing import Skeleton, pack, unpack

T = TypeVar("T")

_HEAD, _SKELETON, _SMALL, _LARGE = range(4)  # tags
_LARGE_BYTES = 2**15  # contents of this size or more are sent separately, from their own memory
_THREAD = "torch_join exchange"
_CANNOT = (
    "Rebalancing sends batches over a gloo process group, which cannot be created: {}. If a host's name resolves to a"
    " loopback address, set GLOO_SOCKET_IFNAME to its network interface, or train without rebalance=True."
)
_FOREVER = timedelta(days=30)
_LEFT_SECONDS = 60.0
_STOP = -1  # sent instead of a skeleton's size: no more batches come
_POLL_SECONDS = 0.05


_Group: TypeAlias = Any  # a `ProcessGroupGloo`, whose `send` and `recv` torch's stubs lack
Expected: TypeAlias = "Future[tuple[Skeleton, list[Tensor]]]"


class _Sent(NamedTuple):
    step: int
    works: list[Any]
    tensors: list[Tensor]
    received: "Future[None]"


class Exchange:
    """Sends batches to other ranks, and receives batches from them.

    Args:
        group: The ranks' process group; all its ranks create an exchange at the same time.
        channel: Reports failures.
        names: By rank, the name of its connections, see `connections_of`. If the names differ, ranks connect anew.

    Attributes:
        nbytes: The number of bytes of batches that this rank has sent.
        is_new: Whether the ranks connected anew for this exchange.

    Raises:
        JoinError: gloo is not available, or cannot connect the ranks.
        PeerFailedError: Another rank has failed meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, channel: Channel, names: Sequence[str]) -> None:
        self._of = group or cast(dist.ProcessGroup, dist.group.WORLD)
        self._channel = channel
        # Until this exchange puts the connections back, another exchange makes its own.
        self._name, self._group = _made.pop(self._of, ("", None))
        self.is_new = len({*names}) > 1 or self._group is None
        if self.is_new:
            self._name = hashlib.sha256(" ".join(names).encode()).hexdigest()  # new each time, so that no key is stale
            self._group = _connect(self._of, self._name, channel)
        self.nbytes = 0
        self._sent: deque[_Sent] = deque()
        self._skeleton_to: dict[int, bytes] = {}
        self._wanted: queue.SimpleQueue[tuple[int, Expected] | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        threads = (_receive, (self._group, self._wanted, channel.global_ranks)), (_wait_for_sent, (self._under_way,))
        self._threads = [threading.Thread(target=run, args=args, name=_THREAD, daemon=True) for run, args in threads]
        for thread in self._threads:
            thread.start()

    def tidy(self) -> None:
        """Delete this rank's key, which connecting has left in the job's store."""
        with suppress(RuntimeError):
            _store(self._of, self._name).delete_key(f"0/{self._group.rank()}")

    def give(self, batch: Any, receiver: int, step: int) -> None:
        """Send a batch for a step, without waiting. The caller must not use the batch any more.

        Raises:
            JoinTypeError: The batch cannot be sent to another rank.
        """
        skeleton, contents = pack(batch)
        is_same = self._skeleton_to.get(receiver) == skeleton
        self._skeleton_to[receiver] = skeleton
        head = torch.tensor([0 if is_same else len(skeleton)])
        messages = [(_HEAD, head)]
        if not is_same:
            messages.append((_SKELETON, torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)))
        small = [content for content in contents if len(content) < _LARGE_BYTES]
        if any(map(len, small)):
            messages.append((_SMALL, torch.cat(small)))
        messages += [(_LARGE, content) for content in contents if len(content) >= _LARGE_BYTES]
        works = [self._group.send([tensor], receiver, tag) for tag, tensor in messages]
        sent = _Sent(step, works, [tensor for _, tensor in messages], Future())
        self._sent.append(sent)
        self._under_way.put(sent)
        self.nbytes += sum(map(len, contents))

    def wait_until_received(self, step: int) -> None:
        """Wait until all batches sent for earlier steps have been received, since a loader may reuse their memory.

        Raises:
            PeerFailedError: A rank has failed.
        """
        while self._sent and self._sent[0].step < step:
            awaited(self._sent[0].received, self._channel)
            self._sent.popleft()

    def expect(self, sender: int) -> Expected:
        """Start to receive a batch from another rank, in the background."""
        expected: Expected = Future()
        self._wanted.put((sender, expected))
        return expected

    def flush(self) -> None:
        """Wait until all sent batches have been received."""
        self.wait_until_received(sys.maxsize)

    def close(self) -> None:
        """Wait until all sent batches have been received; then end the threads and keep the connections."""
        self.flush()
        self._wanted.put(None)
        self._under_way.put(None)
        for thread in self._threads:
            thread.join()
        _made[self._of] = self._name, self._group

    def abandon(self) -> None:
        """End after an error, without waiting; ranks that wait for a batch from this rank get an error."""
        self._wanted.put(None)
        self._under_way.put(None)
        stop, now = torch.tensor([_STOP]), time.monotonic()
        while _left and now - _left[0][0] > _LEFT_SECONDS:
            _left.popleft()
        for rank in range(self._group.size()):
            if rank != self._group.rank():
                with suppress(RuntimeError):  # that rank's process may be gone
                    _left.append((now, self._group.send([stop], rank, _HEAD), stop))


# By process group, unused connections: their name, and the gloo group over which its ranks exchange batches.
_made: WeakKeyDictionary[dist.ProcessGroup, tuple[str, _Group]] = WeakKeyDictionary()
_works: set[str] = set()  # network interfaces on which gloo is known to work in this process
# Stop messages, kept for a while so that waiting ranks receive them; ranks that do not wait never receive them.
_left: deque[tuple[float, Any, Tensor]] = deque()


def connections_of(group: dist.ProcessGroup | None) -> str:
    """Return the name of this rank's unused connections, or a new name if there are none."""
    return _made.get(group or cast(dist.ProcessGroup, dist.group.WORLD), (uuid.uuid4().hex,))[0]


def _store(group: dist.ProcessGroup, name: str) -> dist.Store:
    return dist.PrefixStore(f"torch_join/exchange/{name}", compat.group_store(group))


def _connect(group: dist.ProcessGroup, name: str, channel: Channel) -> _Group:
    """Create a group outside torch's registry, whose group names may differ between ranks or repeat."""
    store, rank, world_size = _store(group, name), dist.get_rank(group), dist.get_world_size(group)
    try:  # the constructor waits for all ranks, without noticing failures
        return run_polling(lambda: dist.ProcessGroupGloo(store, rank, world_size, _FOREVER), channel.failure_check())
    except JoinError:
        raise
    except RuntimeError as error:
        channel.failure_check()()  # raises if another rank has reported the cause
        raise JoinError(_CANNOT.format(error)) from error


def find_problem() -> str:
    """Return why gloo cannot be used in this process, or an empty string."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces in _works:
        return ""
    try:
        for name in filter(None, interfaces.split(",")):
            dist.ProcessGroupGloo.create_device(interface=name)
        if not dist.is_gloo_available():
            return _CANNOT.format("this build of torch has no gloo")
    except RuntimeError as error:
        return _CANNOT.format(error)
    _works.add(interfaces)
    return ""


def awaited(future: "Future[T]", channel: Channel) -> T:
    """Wait for another thread's result, and return it.

    Args:
        future: The result.
        channel: Reports failures meanwhile.

    Raises:
        PeerFailedError: Another rank has failed.
        JoinTimeoutError: The result did not come within the channel's timeout.
    """
    check = channel.failure_check()
    while not wait([future], _POLL_SECONDS).done:
        check()
    if future.exception() is not None:
        channel.failure_check()()  # raises if another rank has reported the cause
    return future.result()


def arrived(expected: Expected, channel: Channel) -> Any:
    """Wait for an expected batch, and unpack it; see `awaited`."""
    return unpack(*awaited(expected, channel))


def _wait_for_sent(under_way: "queue.SimpleQueue[_Sent | None]") -> None:
    while (sent := under_way.get()) is not None:
        try:
            for work in sent.works:
                work.wait()
            sent.received.set_result(None)
        except BaseException as error:
            sent.received.set_exception(error)
        del sent  # else its batch would stay in memory until the next one is sent


class _Stopped(Exception):  # noqa: N818
    """The rank that should send a batch has raised."""


def _receive(group: _Group, wanted: "queue.SimpleQueue[tuple[int, Expected] | None]", names: Sequence[int]) -> None:
    skeletons: dict[int, Skeleton] = {}
    stopped: set[int] = set()
    while (want := wanted.get()) is not None:
        sender, expected = want
        try:
            if sender in stopped:
                raise _Stopped
            expected.set_result(_receive_batch(group, sender, skeletons))
        except _Stopped:
            stopped.add(sender)
            why = f"Rank {names[sender]} raised an error and sends no more batches. Read its log."
            expected.set_exception(PeerFailedError(why))
        except BaseException as error:
            expected.set_exception(error)
        del want, expected  # else its batch would stay in memory until the next one comes


def _receive_batch(group: _Group, sender: int, skeletons: dict[int, Skeleton]) -> tuple[Skeleton, list[Tensor]]:
    def receive(tag: int, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        tensor = torch.empty(size, dtype=dtype)
        group.recv([tensor], sender, tag).wait()
        return tensor

    size = int(receive(_HEAD, 1, torch.int64))
    if size == _STOP:
        raise _Stopped
    if size:
        skeletons[sender] = Skeleton(*pickle.loads(copied_bytes(receive(_SKELETON, size))))
    skeleton = skeletons[sender]
    small = [size for size in skeleton.sizes if size < _LARGE_BYTES]
    together = iter(torch.split(receive(_SMALL, sum(small)), small) if any(small) else map(torch.empty, small))
    contents = [receive(_LARGE, size) if size >= _LARGE_BYTES else next(together).clone() for size in skeleton.sizes]
    return skeleton, contents
