"""What tests look at and change inside the packages, in one place: where a private name moves, this file follows."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base import compat_metrics as _compat_metrics
from torch_join._collectives import call as _call
from torch_join._collectives import compat as _compat_c10d
from torch_join._collectives.tap import CollectiveTap
from torch_join._control import beats as _beats
from torch_join._control import codec as _codec
from torch_join._control import quiesce as _quiesce
from torch_join._control.beats import Beats
from torch_join._control.store_channel import StoreChannel
from torch_join._handover import digest as _digest
from torch_join._handover import optimizers as _optimizers
from torch_join._handover import replicas as _replicas
from torch_join._handover import transfer as _transfer
from torch_join._handover.state import Capture
from torch_join._tail import nesting as _nesting
from torch_join.joinables._sharded import model as _sharded_model
from torch_join.joinables.hook import Hook
from torch_join.joinables.model import ModelPart

# What tests read or call.
MODEL_AVERAGING_FOLDER = _compat_c10d._MODEL_AVERAGING_FOLDER
PASSING_ON, concatenates = _compat_metrics._PASSING_ON, _compat_metrics._concatenates
REVIVERS, dtypes = _codec._REVIVERS, _codec._dtypes
LARGE, buckets_of = _transfer._LARGE, _transfer._buckets
FULL, TILE = _beats._FULL, _digest._TILE
Override = Hook
REFUSALS = tuple(value for value in vars(_call).values() if isinstance(value, _call.Refusal))
entered_joins, asked_at_exit = _nesting._entered, _quiesce._asked

# What tests replace: a module, and a name in it.
FULL_PLACE = (_beats, "_FULL")
TILES_PLACE = (_digest, "_tiles")
PLACES_PLACE = (_optimizers, "_places")
DELETES_AFTER_PLACE = (_sharded_model, "_MANY")
SET_TRAINING_PLACE = (_replicas, "_set_training")
QUIESCE_PLACE = (_quiesce, "_quiesce")


def transfer_sizes(bucket: int = _transfer.BUCKET_BYTES, large: int = LARGE) -> AbstractContextManager[Any]:
    """Have the handover send tensors from `large` bytes on alone, and the others in buckets of at most `bucket`."""
    return mock.patch.multiple(_transfer, BUCKET_BYTES=bucket, _LARGE=large)


def checksum(objects: Sequence[Any]) -> int:
    """A digest of all that a handover of `objects` covers: replicas that are alike have the same."""
    capture = Capture(canonical=True, local=frozenset(map(id, _replicas.ignored_parameters(objects).values())))
    with torch.inference_mode(False), torch.no_grad():
        named = _replicas.named(objects)
        states = [_replicas.kind_of(value).capture(value, capture, name).state for name, value in named]
        return _digest.Digests({"": states}, capture.tensors).read()[""]


# ---------------------------------------------------------------- a channel


def store_of(channel: StoreChannel | Beats) -> Any:
    return channel._store


def presence_store(channel: StoreChannel) -> Any:
    """The store that roll calls are held over: a connection of its own."""
    return channel._presence._store


def who_answers(channel: StoreChannel) -> list[int]:
    """Call the roll; wait for all."""
    return list(channel._presence.call(lambda _: False))


def keys_at_rest(channel: StoreChannel) -> int:
    """How many keys there are once all ranks, which all call this, have deleted what they are going to."""
    dist.barrier()
    while channel._read:  # another thread deletes
        time.sleep(0.01)
    dist.barrier()
    count = channel._store.num_keys()
    dist.barrier()
    return count


def forget_failure(channel: StoreChannel) -> None:
    """Have the channel look again whether a rank has failed."""
    channel._heard = None


def delay_next_wait(channel: Any, seconds: float) -> None:
    wait = channel._wait

    def wait_late(*args: Any) -> Any:
        channel._wait = wait
        time.sleep(seconds)
        return wait(*args)

    channel._wait = wait_late


# ---------------------------------------------------------------- a `Join`, and its parts


def channel_of(join: Any) -> StoreChannel:
    channel = join._driver.server.channel
    assert isinstance(channel, StoreChannel)
    return channel


def rank_of(join: Any) -> int:
    rank: int = join._driver.members.rank
    return rank


def leader_of(join: Any) -> int:
    leader: int = join._driver.members.leader
    return leader


def answer(server: Any, kind: str, payload: Any) -> None:
    """Have a joined rank answer a record that is no part's."""
    server._answer(-1, kind, payload)


def given_objects(join: Any) -> list[Any]:
    found: list[Any] = join._driver._objects
    return found


def unwritten(join: Any) -> list[Any]:
    """What has been announced, and is not in the log yet."""
    found: list[Any] = join._driver.server._said
    return found


def accelerate_loops() -> Any:
    """The loops of all Accelerators that have begun and not ended."""
    from accelerate_join import _batches  # many tests need no Accelerate

    return _batches._loops


def installed_tap() -> CollectiveTap | None:
    return CollectiveTap._installed


def see(tap: CollectiveTap, operator: str, arguments: dict[str, Any]) -> Any:
    """Have the tap see a call of an operator of `torch.distributed`."""
    return tap._see(operator, arguments, None)


def gradient_hook(begin: Callable[[], float]) -> Callable[[tuple[Tensor, ...]], Any]:
    """Return a model's hook on gradients, where `begin` finds the factor when a backward begins."""

    class Part(ModelPart):
        def __init__(self) -> None:
            self._task, self._factor, self._beginning = -1, 1.0, threading.Lock()
            self._pieces = mock.Mock()

        def _begin_backward(self) -> None:
            self._factor = begin()

    return partial(Part()._before_gradient, 0)


# ---------------------------------------------------------------- a sharded model


def bytes_unsharded(unit: Any) -> int:
    """How many bytes of whole parameters this rank holds now of a unit."""
    if hasattr(unit, "_group"):
        outputs = [output for p in unit._group.fsdp_params for output in p.all_gather_outputs]
        return sum(output.untyped_storage().size() for output in outputs)
    flat = unit._handle.flat_param
    if not unit._handle.uses_sharded_strategy or not hasattr(flat, "_full_param_padded"):
        return 0
    return int(flat._full_param_padded.untyped_storage().size())


def recorded_collectives() -> list[tuple[str, str, Any]]:
    """Return what torch's flight recorder holds: each collective's process group, name and sizes, in order."""
    from torch._C import _distributed_c10d

    entries = json.loads(_distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])  # type: ignore[attr-defined]
    return [(entry["process_group"][0], entry["profiling_name"], entry["input_sizes"]) for entry in entries]


def slow_to_follow(seconds: float) -> AbstractContextManager[Any]:
    """Within this, this rank waits before it reads each record."""
    follow = StoreChannel.follow

    def late(self: StoreChannel, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return follow(self, *args, **kwargs)

    return mock.patch.object(StoreChannel, "follow", late)
