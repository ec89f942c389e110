"""Batches on their way from rank to rank, over a gloo group of their own, beside whatever the step does.

The group's own threads move the bytes. The giver sends from the memory that the batch is in. Two threads wait: one
receives, since what comes is known only when its head has come, and one waits until what was sent has been received.
So whoever waits for them looks at failures meanwhile, and the channel's timeout is the one that counts.

Contract of gloo (torch 2.13): messages of one tag from one rank come in order; a message that was sent is kept by the
work object that `send` returns, and lost with it; a wait cannot be called off, and ends with an error when the other
process does, but not in the middle of a message; one that times out breaks all connections of the group.
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
_LARGE_BYTES = 2**15  # contents of this size travel on their own, from where they are
_THREAD = "torch_join exchange"
_CANNOT = (
    "Rebalancing moves batches over a gloo process group, which cannot be made: {}. If the name of a host resolves to a"
    " loopback address, name its network interface in GLOO_SOCKET_IFNAME; or train without rebalance=True."
)
_FOREVER = timedelta(days=30)
_LEFT_SECONDS = 60.0
_STOP = -1  # in place of a skeleton's size: nothing comes any more
_POLL_SECONDS = 0.05


_Group: TypeAlias = Any  # a `ProcessGroupGloo`, of which torch's stubs leave `send` and `recv` out
Coming: TypeAlias = "Future[tuple[Skeleton, list[Tensor]]]"


class _Sent(NamedTuple):
    step: int
    works: list[Any]
    tensors: list[Tensor]
    received: "Future[None]"


class Exchange:
    """Gives batches to other ranks, and takes theirs.

    Args:
        group: The ranks' process group; all of them make an exchange at the same time.
        channel: What tells of failures.
        names: By rank, what it calls its connections, see `connections_of`: they are made if these are not the same.

    Attributes:
        nbytes: The bytes of contents that this rank has given away.
        is_new: Whether its connections were made for it.

    Raises:
        JoinError: There is no gloo, or its connections cannot be made.
        PeerFailedError: Another rank has failed meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, channel: Channel, names: Sequence[str]) -> None:
        self._of = group or cast(dist.ProcessGroup, dist.group.WORLD)
        self._channel = channel
        # While this one has them, another exchange makes connections of its own.
        self._name, self._group = _made.pop(self._of, ("", None))
        self.is_new = len({*names}) > 1 or self._group is None
        if self.is_new:
            self._name = hashlib.sha256(" ".join(names).encode()).hexdigest()  # another one each time: no key is stale
            self._group = _connect(self._of, self._name, channel)
        self.nbytes = 0
        self._sent: deque[_Sent] = deque()
        self._skeleton_to: dict[int, bytes] = {}
        self._wanted: queue.SimpleQueue[tuple[int, Coming] | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        threads = (_receive, (self._group, self._wanted, channel.global_ranks)), (_wait_for_sent, (self._under_way,))
        self._threads = [threading.Thread(target=run, args=args, name=_THREAD, daemon=True) for run, args in threads]
        for thread in self._threads:
            thread.start()

    def tidy(self) -> None:
        """Delete what making the connections has left in the job's store."""
        with suppress(RuntimeError):
            _store(self._of, self._name).delete_key(f"0/{self._group.rank()}")

    def give(self, batch: Any, receiver: int, step: int) -> None:
        """Send a batch, which nobody may use any more, for a step; waits for nobody.

        Raises:
            JoinTypeError: It cannot be described.
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
        """Wait until what was given for the steps before this one has been received: a loader may refill its memory.

        Raises:
            PeerFailedError: A rank has failed.
        """
        while self._sent and self._sent[0].step < step:
            awaited(self._sent[0].received, self._channel)
            self._sent.popleft()

    def expect(self, sender: int) -> Coming:
        """Receive a batch that another rank gives, while this one goes on."""
        coming: Coming = Future()
        self._wanted.put((sender, coming))
        return coming

    def flush(self) -> None:
        """Wait until whatever was given has been received."""
        self.wait_until_received(sys.maxsize)

    def close(self) -> None:
        """End, when all that was given has been received."""
        self.flush()
        self._wanted.put(None)
        self._under_way.put(None)
        for thread in self._threads:
            thread.join()
        _made[self._of] = self._name, self._group

    def abandon(self) -> None:
        """End after an error, and wait for nobody: whoever still waits for a batch of this rank's gets none."""
        self._wanted.put(None)
        self._under_way.put(None)
        stop, now = torch.tensor([_STOP]), time.monotonic()
        while _left and now - _left[0][0] > _LEFT_SECONDS:
            _left.popleft()
        for rank in range(self._group.size()):
            if rank != self._group.rank():
                with suppress(RuntimeError):  # its process may be gone
                    _left.append((now, self._group.send([stop], rank, _HEAD), stop))


# By process group, the one over which its ranks exchange batches, and its name: made once.
_made: WeakKeyDictionary[dist.ProcessGroup, tuple[str, _Group]] = WeakKeyDictionary()
_works: set[str] = set()  # with which interfaces this process has found that gloo can be used
# What ends others' waits, and is not received by whoever does not wait, is kept for a while.
_left: deque[tuple[float, Any, Tensor]] = deque()


def connections_of(group: dist.ProcessGroup | None) -> str:
    """Return what this rank calls the connections that no exchange has, or a new name if there are none."""
    return _made.get(group or cast(dist.ProcessGroup, dist.group.WORLD), (uuid.uuid4().hex,))[0]


def _store(group: dist.ProcessGroup, name: str) -> dist.Store:
    return dist.PrefixStore(f"torch_join/exchange/{name}", compat.group_store(group))


def _connect(group: dist.ProcessGroup, name: str, channel: Channel) -> _Group:
    """Make a group that torch does not count: the names of those that it does may differ by rank, or come twice."""
    store, rank, world_size = _store(group, name), dist.get_rank(group), dist.get_world_size(group)
    try:  # it waits for all ranks, whatever happens to them
        return run_polling(lambda: dist.ProcessGroupGloo(store, rank, world_size, _FOREVER), channel.failure_check())
    except JoinError:
        raise
    except RuntimeError as error:
        channel.failure_check()()  # if another rank has told why, this raises
        raise JoinError(_CANNOT.format(error)) from error


def find_problem() -> str:
    """Return why gloo cannot be used in this process, if so."""
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
    """Wait for what another thread does, and return it.

    Args:
        future: What it will have done.
        channel: What tells of failures meanwhile.

    Raises:
        PeerFailedError: Another rank has failed.
        JoinTimeoutError: It did not come within the channel's timeout.
    """
    look = channel.failure_check()
    while not wait([future], _POLL_SECONDS).done:
        look()
    if future.exception() is not None:
        channel.failure_check()()  # if another rank has told why, this raises
    return future.result()


def arrived(coming: Coming, channel: Channel) -> Any:
    """Wait for a batch that comes, and put it together; see `awaited`."""
    return unpack(*awaited(coming, channel))


def _wait_for_sent(under_way: "queue.SimpleQueue[_Sent | None]") -> None:
    while (sent := under_way.get()) is not None:
        try:
            for work in sent.works:
                work.wait()
            sent.received.set_result(None)
        except BaseException as error:
            sent.received.set_exception(error)
        del sent  # else what was sent would live until the next is


class _Stopped(Exception):  # noqa: N818
    """Who is to give a batch has raised."""


def _receive(group: _Group, wanted: "queue.SimpleQueue[tuple[int, Coming] | None]", names: Sequence[int]) -> None:
    skeletons: dict[int, Skeleton] = {}
    stopped: set[int] = set()
    while (want := wanted.get()) is not None:
        sender, coming = want
        try:
            if sender in stopped:
                raise _Stopped
            coming.set_result(_receive_batch(group, sender, skeletons))
        except _Stopped:
            stopped.add(sender)
            why = f"Rank {names[sender]} has raised, and gives no batch any more. Its own log says why."
            coming.set_exception(PeerFailedError(why))
        except BaseException as error:
            coming.set_exception(error)
        del want, coming  # else what has come would live until the next one does


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
