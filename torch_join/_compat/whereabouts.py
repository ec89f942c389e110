"""Finds out where a rank's code is, and in which collective, by private names of torch (seen in torch 2.13.0).

`tests/core/_control/test_deadlock.py` fails when one of them is gone. The source is torch's flight recorder. It numbers
the collectives of a group alike on all members, does not count point-to-point messages, and records whether a
collective is done. Without it (`TORCH_FR_BUFFER_SIZE=0`, or a torch that does not record gloo) none of that is known.
"""

import os
import pickle
import sys
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import NOT_USERS
from torch_join._compat.operators import _C10D_FILE, _COLLECTIVES, _DDP_FORWARD, _ENGINE, _LOGGER_FILE, _frames

_FOLDER = os.path.join(os.path.dirname(_C10D_FILE), "")
# Where torch waits for its own work, below a function that issues collectives.
_WAITS = tuple(_FOLDER + name for name in ("fsdp", "tensor", "_functional_collectives", "_composable", "optim"))
_WRAPS = ("torch._ops", "torch._library", "torch.utils._contextlib")
_PASSED = NOT_USERS | sys.stdlib_module_names
_LAST = 8  # the most operations that are listed per group


class Place(NamedTuple):
    """Where a thread's code is.

    Attributes:
        kind: "collective", if it waits for one; "backward"; or "elsewhere".
        what: In words.
        group: The name of the collective's group, if known.
        at: File and line of user code.
        computed: Its processor time in ticks, which stand still while it waits.
    """

    kind: str
    what: str
    group: str
    at: str
    computed: int


class Issued(NamedTuple):
    """A rank's collectives.

    Attributes:
        last: By group and backend ("0:gloo"), each of which has its own numbers: the names of the last few collectives,
            by number.
        pending: The last one that a thread has issued, if it is not done: its key in `last`, its number and its name.
    """

    last: dict[str, dict[int, str]]
    pending: tuple[str, int, str] | None


def place_of(thread: int, native: int) -> Place:
    """Return where a thread is, given its Python identifier and its native one; the thread keeps running."""
    frame = inner = _frames().get(thread)
    while inner is not None and (inner.f_code.co_filename == _LOGGER_FILE or _module(inner).startswith(_WRAPS)):
        inner = inner.f_back
    return Place(*(("elsewhere", "", "") if inner is None else _waits_in(inner)), _at(frame), _computed(native))


def _waits_in(inner: FrameType) -> tuple[str, str, str]:
    file, function = inner.f_code.co_filename, inner.f_code.co_name
    if inner.f_code is _ENGINE:  # other systems cannot tell whether it computes
        return ("backward" if sys.platform == "linux" else "elsewhere"), "a backward", ""
    if file == _C10D_FILE and function in _COLLECTIVES:
        if inner.f_locals.get("async_op", False):
            return "elsewhere", "", ""
        group: Any = inner.f_locals.get("group") or dist.group.WORLD
        return "collective", function, distributed_c10d._world.pg_names.get(group, "")
    if file == _DDP_FORWARD.co_filename:
        ddp = inner.f_locals.get("self")
        if isinstance(ddp, DistributedDataParallel):
            return "collective", "DDP's broadcast of buffers, in a forward", ddp.process_group.group_name
    if file.startswith(_WAITS):
        return "collective", f"{function}, of a sharded model or tensor", ""
    if _module(inner).startswith("torch_join._collectives"):
        return "collective", "a collective that other ranks have announced", ""
    if _module(inner) == "torch_join._compat.ddp":
        return "collective", f"DDP's {function}, between two steps", ""
    return "elsewhere", "", ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _at(frame: FrameType | None) -> str:
    while frame is not None and (_module(frame).partition(".")[0] in _PASSED or frame.f_code.co_filename[0] == "<"):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _computed(native: int) -> int:
    with suppress(OSError):
        fields = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def sequence_numbers() -> dict[str, int]:
    """Return, by group's name, a number no lower than that of any collective that this rank has issued in it."""
    numbers: dict[str, int] = {}
    groups: list[tuple[Any, str]] = [*distributed_c10d._world.pg_names.items()]
    for group, name in groups:
        with suppress(RuntimeError):  # from a backend that does not count
            numbers[name] = group._get_sequence_number_for_group()
    return numbers


def issued(thread: int) -> Issued:
    """Return the recorder's contents. A full one takes 0.1 s, during which the interpreter's lock is held.

    Args:
        thread: The thread whose last collective may be pending; it does not wait for those of other threads.
    """
    if not hasattr(_distributed_c10d, "_dump_fr_trace"):
        return Issued({}, None)
    last: dict[str, dict[int, str]] = {}
    pending: tuple[str, int, str] | None = None
    entries = pickle.loads(_distributed_c10d._dump_fr_trace(True, False, False)).get("entries", ())
    for entry in sorted(entries, key=itemgetter("record_id")):
        if entry["is_p2p"]:
            continue
        backend, _, name = entry["profiling_name"].partition(":")
        key, number = f"{entry['process_group'][0]}:{backend}", entry["collective_seq_id"]
        names = last.setdefault(key, {})
        if names and number <= max(names):  # a new group of that name
            names.clear()
        names[number] = name
        if entry.get("thread_id") == str(thread):
            pending = None if entry["retired"] else (key, number, name)
        names.pop(number - _LAST, None)
    return Issued(last, pending)


def store_port() -> int:
    """Return the port of the job's key-value store, which belongs to no rank; -1 without one."""
    store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else -1
