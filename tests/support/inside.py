"""What tests look at and change inside the packages, in one place: where a private name moves, this file follows."""

import json
import os
import pickle
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.nn.utils import clip_grad

from tests.emulator import place
from torch_join import integration, own_loops
from torch_join._base.devices import use_device
from torch_join._collectives import call as _call
from torch_join._collectives.tap import CollectiveTap
from torch_join._compat import groups as _compat_groups
from torch_join._compat import metrics as _compat_metrics
from torch_join._compat import whereabouts as _whereabouts
from torch_join._control import channel as _channel
from torch_join._control import codec as _codec
from torch_join._control import deadlock as _deadlock
from torch_join._control import exit_guard as _exit_guard
from torch_join._control import rendezvous as _rendezvous
from torch_join._control._links import handshake as _handshake
from torch_join._control._links import layout as _layout
from torch_join._control._links import links as _links
from torch_join._control._links import tree as _tree
from torch_join._control._links import wiring as _wiring
from torch_join._control._links.tree import Tree
from torch_join._control.channel import Channel
from torch_join._handover import digest as _digest
from torch_join._handover import optimizers as _optimizers
from torch_join._handover import replicas as _replicas
from torch_join._handover import transfer as _transfer
from torch_join._handover.state import Capture
from torch_join._monitor import monitor as _monitor
from torch_join._participants.hook import Hook
from torch_join._schedule import batch_exchange as _exchange
from torch_join._schedule import rebalancing as _rebalancing
from torch_join._schedule.packing import Skeleton, pack, unpack
from torch_join._schedule.plan import Plan
from torch_join._tail import nesting as _nesting

Where = _handshake.Where

# Of the ranks' connections: children of a rank in each heap, seconds in which they are made, and the default timeout.
CHILDREN, LISTENS, TIMEOUT = _layout._WIDTH, _wiring._WITHIN, _channel.TIMEOUT

# What tests read or call.
PASSING_ON, concatenates = _compat_metrics._PASSING_ON, _compat_metrics._concatenates
REVIVERS, dtypes = _codec._REVIVERS, _codec._dtypes
LARGE = _transfer._LARGE
TILE = _digest._TILE
Override = Hook
REFUSALS = tuple(value for value in vars(_call).values() if isinstance(value, _call.Refusal))
entered_joins = _nesting._entered

PLACES_PLACE = (_optimizers, "_places")
SET_TRAINING_PLACE = (_replicas, "_set_training")
EXIT_GUARD_PLACE = (_exit_guard, "_drain_gloo")
asks_at_exit = _exit_guard.drain_gloo_at_exit.cache_info


def transfer_sizes(bucket: int = _transfer.BUCKET_BYTES, large: int = LARGE) -> AbstractContextManager[Any]:
    """Have the handover send tensors from `large` bytes on alone, and the others in buckets of at most `bucket`."""
    return mock.patch.multiple(_transfer, BUCKET_BYTES=bucket, _LARGE=large)


@contextmanager
def asked_shapes(strategy: Any) -> Iterator[list[Tensor]]:
    """The tensors whose shapes this rank tells the others of, before a gather, for as long as this lasts."""
    found: list[Tensor] = []
    original = strategy._shapes_of_all

    def ask(tensor: Tensor) -> Any:
        found.append(tensor)
        return original(tensor)

    with mock.patch.object(strategy, "_shapes_of_all", ask):
        yield found


def planned_rows(
    lengths: Sequence[int],
    said: Sequence[int | None] | None = None,
    max_sent_per_step: Sequence[int] | None = None,
    leaves: tuple[int, int] | None = None,
) -> list[dict[int, tuple[int, int]]]:
    """By step and rank that trains: whose batch, and which of its.

    `said` are the lengths that ranks know at the begin, which may turn out shorter; by default all of them. The rank
    and the step of `leaves` are where one leaves the epoch, when the step after that is planned already.
    """
    plan, at, rows = Plan(said or lengths, max_sent_per_step or [len(lengths)] * len(lengths)), [0] * len(lengths), []
    while True:
        if leaves is not None and len(rows) == leaves[1] + 2:
            gone = leaves[0]
            plan.leave([gone])
            rows[-2:] = [(*row[:gone], None, *row[gone + 1 :]) for row in rows[-2:]]
        while True:
            read, left = plan.ahead, [length - done for length, done in zip(lengths, at, strict=True)]
            plan.announce({rank: left[rank] for rank in range(len(at)) if left[rank] < read[rank]})
            if all(now <= before for now, before in zip(plan.ahead, read, strict=True)):
                break
        if not any(row := plan.plan()):
            return [{rank: tuple(share) for rank, share in enumerate(row) if share is not None} for row in rows]
        rows.append(row)
        for share in row:
            if share is not None:
                at[share.owner] += 1


def over_the_wire(batch: Any) -> Any:
    """A batch as its receiver gets it."""
    skeleton, contents = pack(batch)
    described = Skeleton(*pickle.loads(skeleton))
    assert described.sizes == list(map(len, contents))
    small = torch.cat([content for content in contents if len(content)]) if any(described.sizes) else torch.empty(0)
    return unpack(described, [part.clone() for part in torch.split(small, described.sizes)] if described.sizes else [])


class Gifts:
    """What this rank gets of others; see `counted_gifts`."""

    def __init__(self, receive: Callable[..., Any], seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self._donated: list[list[weakref.ref[torch.UntypedStorage]]] = []
        self.most_alive = 0

    def __call__(self, *args: Any) -> Any:
        time.sleep(self._seconds)
        skeleton, contents = self._receive(*args)
        self._donated.append([weakref.ref(content.untyped_storage()) for content in contents])
        self.most_alive = max(self.most_alive, self.alive)
        return skeleton, contents

    @property
    def count(self) -> int:
        return len(self._donated)

    @property
    def alive(self) -> int:
        """Of how many gifts there are bytes in memory."""
        return sum(any(ref() is not None for ref in donated) for donated in self._donated)


@contextmanager
def counted_gifts(seconds: float = 0.0) -> Iterator[Gifts]:
    """Count what this rank is given, each of which it begins to receive some seconds later than it could."""
    donated = Gifts(_exchange._receive_batch, seconds)
    with mock.patch.object(_exchange, "_receive_batch", donated):
        yield donated


def gives_at_most(number: int) -> AbstractContextManager[Any]:
    """Have this rank give away as many batches in one step, whatever their size."""
    return mock.patch.object(_rebalancing, "max_sent_per_step_of", lambda source: number if source.read(1) else 0)


def exchange_threads() -> list[str]:
    """The threads that receive batches."""
    return [thread.name for thread in threading.enumerate() if thread.name == "torch_join exchange"]


def checksum(objects: Sequence[Any]) -> int:
    """A digest of all that a handover of `objects` covers: replicas that are alike have the same."""
    capture = Capture(canonical=True, local=frozenset(map(id, _replicas.ignored_parameters(objects).values())))
    with torch.inference_mode(False), torch.no_grad():
        named = _replicas.named(objects)
        states = [_replicas.kind_of(value).capture(value, capture, name).state for name, value in named]
        return _digest.Digests({"": states}, capture.tensors).read()[""]


# ---------------------------------------------------------------- a channel


def keys_of(channel: Channel) -> int:
    """How much of what was said in a channel this rank holds, besides what it keeps for others."""
    stream = channel._stream
    return sum(map(len, (stream.values, stream.numbers, stream.arrivals, stream.barriers, stream.answers)))


def gathered(group: Any, tensor: Tensor, look: Callable[[], None]) -> list[Tensor]:
    """Each rank's tensor."""
    return _compat_groups.gather_directly(group, tensor, look, timedelta(seconds=30))


@contextmanager
def counting_trips() -> Iterator[Counter[str]]:
    """Count how often this rank waits for others' messages, within; once where it has said its parts at once."""
    found, gather, wait = Counter[str](), Channel.begin_gather, Channel.wait

    def begin_gather(channel: Channel, *args: Any, **kwargs: Any) -> Callable[[], list[Any]]:
        end, begun = gather(channel, *args, **kwargs), found["trips"]

        def end_and_count() -> list[Any]:
            found["trips"] = max(found["trips"], begun + 1)
            return end()

        return end_and_count

    def wait_and_count(channel: Channel) -> Any:
        found["trips"] += 1
        return wait(channel)

    with (
        mock.patch.object(Channel, "begin_gather", begin_gather),
        mock.patch.object(Channel, "wait", wait_and_count),
    ):
        yield found


# ---------------------------------------------------------------- links between ranks

Links, Layout, MOST_BYTES = _links.Links, _layout.Layout, _links.MAX_BYTES


def open_channel(group: dist.ProcessGroup | None = None, **options: Any) -> Channel:
    """Open a channel as the packages do, which know by then from what they were given on which device a rank is."""
    if place().type != "cpu":
        use_device(place(), group)
    return integration.open_channel(group, **options)


def is_linked(channel: Any) -> bool:
    return isinstance(channel, Channel) and channel.world_size > 1


def on_host(name: str) -> AbstractContextManager[Any]:
    """Within this, the ranks that open a channel are taken for others' on the host of this name."""
    return mock.patch.object(_wiring, "this_host", return_value=name)


def listen(on_this_host: bool) -> tuple[socket.socket, Where]:
    """Listen as a rank with children does; where is it to be reached?"""
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        listener = _wiring._listen(on_this_host, where_gloo_does=True)
    return listener, _wiring._where(listener)


def reach(where: Where) -> socket.socket:
    """Connect; raises `BlockingIOError` where the queue of a host's own socket is full, since nobody waits in it."""
    addresses, port = where
    problems: list[str] = []
    for _, connection in _handshake._reached(addresses[:1], port, lambda: None, problems):
        connection.setblocking(True)
        return connection
    raise BlockingIOError(*problems)


def reaching_nothing() -> AbstractContextManager[object]:
    """Have this rank reach no other one that listens."""
    return mock.patch.object(_handshake, "_reach", side_effect=OSError("no network here"))


def _nothing() -> None:
    """Look for no failure."""


def accept(
    listener: socket.socket,
    children: set[int],
    secret: bytes,
    seconds: float,
    look: Callable[[], None] = _nothing,
) -> dict[int, socket.socket]:
    return _handshake.accept(listener, {child: child for child in children}, secret, time.monotonic() + seconds, look)


def connect_to(
    where: Where, rank: int, secret: bytes, seconds: float, look: Callable[[], None] = _nothing
) -> socket.socket:
    return _handshake.connect(where, rank, secret, time.monotonic() + seconds, look)


def connects_within(seconds: float) -> AbstractContextManager[Any]:
    return mock.patch.object(_wiring, "_WITHIN", seconds)


def tree_over(links: Any) -> Tree:
    """A tree that has nothing but these connections, to wait with."""
    tree = Tree.__new__(Tree)
    tree.links, tree._has_cores = links, False
    return tree


def awake_longer(factor: int) -> AbstractContextManager[Any]:
    """Within this, whoever waits keeps its core awake for so many times as long."""
    awake, briefly = factor * _tree._AWAKE_SECONDS, factor * _tree._BRIEFLY
    return mock.patch.multiple(_tree, _AWAKE_SECONDS=awake, _BRIEFLY=briefly)


def without_epoll() -> AbstractContextManager[Any]:
    """Within this, connections are made as on a system that has no epoll."""
    return mock.patch.object(_tree, "has_epoll", return_value=False)


def limit_waits(channel: Any, seconds: float) -> None:
    """Have this rank wait no longer for others, from now on."""
    channel._timeout = timedelta(seconds=seconds)


@contextmanager
def at_set_up(step: str, act: Callable[[], None]) -> Iterator[None]:
    """Within this, call `act` when this rank comes to a step of making its connections."""
    places = {
        "first": (_rendezvous, "wire"),
        "listen": (_wiring, "_listen"),
        "connect": (_wiring, "connect"),
        "accept": (_wiring, "accept"),
        "last": (_wiring, "Tree"),
    }
    module, name = places[step]
    original = getattr(module, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    with mock.patch.object(module, name, late):
        yield


@contextmanager
def seen_listeners() -> Iterator[list[tuple[socket.socket, Where]]]:
    """The sockets that this rank's children connect to, and where they do, for as long as this lasts."""
    found: list[tuple[socket.socket, Where]] = []
    original = _wiring._listen

    def note(*args: Any) -> socket.socket:
        listener = original(*args)
        found.append((listener, _wiring._where(listener)))
        return listener

    with mock.patch.object(_wiring, "_listen", note):
        yield found


def silent(layout: Layout, rank: int, world_size: int, reached: set[int], answered: set[int]) -> list[int]:
    """Whom a rank takes for failed that has asked who is there."""
    channel = Channel()
    channel.rank, channel.world_size = rank, world_size
    stream, channel._node = channel._stream, mock.Mock(layout=layout)
    channel._node.call_roll.return_value = 1, 0.0
    answer = _codec.encode((False, None))
    stream.places = {other: (1, answer if other in answered else b"") for other in reached}
    with mock.patch.object(_channel, "_ANSWERS_WITHIN", 0.0):
        return channel.health().silent


def links_of(channel: Any) -> Any:
    return channel._tree.links


def neighbours(channel: Any) -> dict[int, socket.socket]:
    """This rank's connections, by rank."""
    return {peer: link.socket for peer, link in links_of(channel)._links.items()}


def messages(channel: Any) -> list[int]:
    """How many messages this rank has sent and got."""
    return [*links_of(channel).messages]


# ---------------------------------------------------------------- a `Join`, and its parts


def channel_of(join: Any) -> Channel:
    channel: Channel = join._driver.tail_log.channel
    return channel


def leader_of(join: Any) -> int:
    leader: int = join._driver.members.leader
    return leader


def given_objects(join: Any) -> list[Any]:
    found: list[Any] = join._driver.given
    return found


def unwritten(join: Any) -> list[Any]:
    """What has been announced, and is not in the log yet."""
    found: list[Any] = join._driver.tail_log._unwritten
    return found


def accelerate_loops() -> Any:
    """The loops of all Accelerators that have begun and not ended."""
    return own_loops._loops


def end_accelerate_loops() -> None:
    """What is done as the process ends."""
    own_loops._at_exit()


def total_norm() -> Callable[..., Any]:
    """torch's own norm of all gradients."""
    return clip_grad._get_total_norm  # type: ignore[attr-defined, no-any-return]


def with_total_norm(norm: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within, torch clips by another norm of all gradients."""
    return mock.patch.object(clip_grad, "_get_total_norm", norm)


def reports_put_off() -> AbstractContextManager[Any]:
    """Have a monitor write no page before the end."""
    return mock.patch.object(_monitor, "_SECONDS", -1.0)


def remove_launcher(fabric: Any) -> None:
    """Have a Fabric start no processes."""
    fabric._strategy._launcher = None


def installed_tap() -> CollectiveTap | None:
    return CollectiveTap._installed


def see(tap: CollectiveTap, operator: str, arguments: dict[str, Any]) -> Any:
    """Have the tap see a call of an operator of `torch.distributed`."""
    return tap._see(operator, arguments, None)


# ---------------------------------------------------------------- a sharded model


def recorded_collectives() -> list[tuple[str, str, Any]]:
    """Return what torch's flight recorder holds: each collective's process group, name and sizes, in order."""
    from torch._C import _distributed_c10d

    entries = json.loads(_distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])  # type: ignore[attr-defined]
    return [(entry["process_group"][0], entry["profiling_name"], entry["input_sizes"]) for entry in entries]


def late_records(seconds: float) -> AbstractContextManager[Any]:
    """Write each record of the log so much later."""
    original = Channel.append

    def announce(*args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        original(*args, **kwargs)

    return mock.patch.object(Channel, "append", announce)


def slow_to_follow(seconds: float) -> AbstractContextManager[Any]:
    """Within this, this rank waits before it reads each record."""
    follow = Channel.follow

    def late(self: Channel, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return follow(self, *args, **kwargs)

    return mock.patch.object(Channel, "follow", late)


def lacking_of_engine(engine: Any) -> list[str]:
    """Return what the objects of a DeepSpeed engine lack of what is relied on, by what has it."""
    from torch_join._compat import deepspeed as compat

    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    needed: list[tuple[Any, Sequence[str]]] = [
        (engine, ["_backward_prologue", "_backward_epilogue", "inside_no_sync_ctxt", "_running_engine_backward"])
    ]
    if stage:
        needed.append((optimizer, ["clear_backward_seen_flag", "reenter_backward_if_needed", "param_groups"]))
    if stage in (1, 2):
        needed.append((optimizer, ["process_gradients", "reduce_ipg_grads", "bit16_groups", "_grad_acc_hooks"]))
    if stage == 3:
        offload, parameter = compat.offload_of(engine), next(engine.module.parameters())
        needed.append((optimizer, ["reduce_ready_partitions_and_remove_grads", compat.REDUCE_BUCKET_3]))
        needed.append((offload, compat.PHASES))
        needed.append((offload.get_param_coordinator(), ["reset_step"]))
        needed.append((parameter, ["all_gather", "all_gather_coalesced", "partition", "is_external_param"]))
        needed.append((engine.module, ["_external_params"]))
    return [f"{type(owner).__name__}.{name}" for owner, names in needed for name in names if not hasattr(owner, name)]


RECORDED = Version(torch.__version__) >= Version("2.13")  # what gloo issues; not in 2.6 and 2.9


@contextmanager
def deadlock_seconds(seconds: float) -> Iterator[None]:
    """How often a rank looks whether it waits for ever."""
    shorter = {"LOOKS_EVERY": seconds, "_AGAIN": seconds / 2, "_ANSWERS_WITHIN": seconds / 4}
    with mock.patch.multiple(_deadlock, **shorter):
        yield


def issued_collectives() -> tuple[int, dict[str, str], tuple[str, int, str] | None]:
    """What is known of this rank's collectives of all ranks: how many, the last few, and the one that is pending."""
    found = _whereabouts.issued(threading.get_ident())
    names = found.last["0:gloo"]
    return max(names), {str(number): name for number, name in names.items()}, found.pending


def where(
    kind: str,
    awaits: tuple[str, int] | None = None,
    passed: tuple[int, ...] = (0, 0, 0),
    issued: tuple[int, bool, str] | None = None,
    most: int = 0,
) -> _deadlock.Where:
    """Where a rank of three is: what it waits for, what it has passed, and what it has issued in the group of all."""
    count, is_pending, name = issued or (most, False, "")
    groups = {"0:gloo": {count: name}} if issued else {}
    pending = ("0:gloo", count, name) if is_pending else None
    waits = None if awaits is None else (0, *awaits, 0)
    place, found = _whereabouts.Place(kind, kind, "", "", 0), _whereabouts.Issued(groups, pending)
    return _deadlock.Where(place, waits, {0: [*passed]}, 1, {"0": count}, found, None, [])


def stuck_ranks(places: Sequence[_deadlock.Where]) -> dict[int, set[int]]:
    """The ranks of these that wait for ever, and for whom."""
    with mock.patch.object(_deadlock, "groups_of_this_rank", return_value={"0": [0, 1, 2]}):
        return _deadlock.deadlocked(dict(enumerate(places)), [0, 1, 2])
