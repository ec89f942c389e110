"""Checks of the job's store, the backend of its process group, and torch_join's own connections."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_join._base.devices import use_device
from torch_join._control.rendezvous import open_channel
from torch_join._doctor.check import Check, Finding, Job

_TIMES = 20  # measurements per median
_REACHES_WITHIN = timedelta(seconds=15)  # torch tries for up to twice as long
TIMEOUT = timedelta(seconds=30)  # how long a rank waits for others before it reports which ones


def _milliseconds(act: Callable[[], object]) -> float:
    durations = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        act()
        durations.append(1000 * (time.perf_counter() - start))
    return statistics.median(durations)


# ------------------------------------------------------------ the store


def reach_store(job: Job) -> float:
    """Connect to the store, unless connected, and return how many milliseconds a request takes."""
    store = job.store = job.store or dist.PrefixStore("torch_join/doctor", _open_store())
    store.set(key := f"time/{job.rank}", "")
    return _milliseconds(lambda: store.get(key))


def _open_store() -> dist.Store:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store: dist.Store = next(dist.rendezvous("env://", timeout=_REACHES_WITHIN))[0]
    except Exception as error:
        if "EADDRINUSE" in str(error):
            why = "another program listens there (EADDRINUSE): choose another MASTER_PORT, on all ranks"
            raise ConnectionError(f"cannot host the store at {where}: {why}") from error
        raise ConnectionError(f"cannot reach the store at {where}: {error}") from error
    return store


def judge_store(by_rank: Sequence[float]) -> Finding:
    """Report how long a request takes."""
    slowest = max(range(len(by_rank)), key=by_rank.__getitem__)
    ranks = "the only rank reaches it" if len(by_rank) == 1 else f"all {len(by_rank)} ranks reach it"
    text = f"{ranks}; a request takes {by_rank[slowest]:.2f} ms (rank {slowest}, the slowest)"
    return Finding("store", "ok", text, data={"ms": [*by_rank]})


_REMEDY = (
    "Start the doctor on all ranks, with the same MASTER_ADDR and MASTER_PORT (torchrun: the same --rdzv-endpoint), and"
    " allow TCP connections to that port from every host of the job."
)
STORE = Check("store", reach_store, judge_store, seconds=35.0, remedy=_REMEDY)

# ------------------------------------------------------------ the backend


def add_up(job: Job) -> dict[str, Any]:
    """Create the process group, unless there is one, and sum a tensor over all ranks."""
    seen = _choose_device(job)
    if not dist.is_initialized():
        kind = dist.get_default_backend_for_device(job.device)
        dist.init_process_group(kind, store=job.store, rank=job.rank, world_size=job.world_size, timeout=TIMEOUT)
    tensor = torch.ones(1024, device=job.device)

    def act() -> float:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        return float(tensor.sum().item())

    if (total := act()) != 1024 * job.world_size:
        raise ArithmeticError(f"an all-reduce of 1024 ones gave {total} in place of {1024 * job.world_size}")
    backend, name = dist.get_backend(), "CPU"
    if job.device.type != "cpu":
        name = getattr(torch.get_device_module(job.device), "get_device_name", str)(job.device)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else None  # type: ignore[no-untyped-call]
    found = {"device": str(job.device), "name": name, "there": seen, "backend": backend, "nccl": nccl}
    return {**found, "ms": _milliseconds(act)}


def _choose_device(job: Job) -> int:
    """Choose an accelerator if each rank has its own, else the CPU; return how many this rank sees."""
    seen = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator() if seen else None  # without any, older torch (2.6) raises
    if kind is None or dist.get_default_backend_for_device(kind.type) == "gloo":
        kind, seen = None, 0
    # The name of the only visible one, which is unique over all hosts.
    only = getattr(torch.cuda.get_device_properties(0), "uuid", "") if seen == 1 and torch.cuda.is_available() else ""
    offer = [kind.type if kind else "cpu", seen >= job.local_world_size, str(only)]
    offers = job.collect("devices", offer, TIMEOUT.total_seconds())
    if len(offers) < job.world_size:
        raise TimeoutError("other ranks did not come to this check")
    kinds, are_enough, names = zip(*offers.values(), strict=True)
    are_own = "" not in names and len({*names}) == len(names)
    if len({*kinds}) == 1 and kind is not None and (are_own or all(are_enough)):
        job.device = torch.device(kind.type, 0 if are_own else job.local_rank)
        torch.get_device_module(job.device).set_device(job.device)
    return seen


def judge_backend(by_rank: Sequence[dict[str, Any]]) -> Finding:
    """Report the devices, the backend, and how long an all-reduce takes."""
    names = sorted({each["name"] for each in by_rank})
    versions = sorted({each["nccl"] for each in by_rank if each["nccl"]})
    backend = " ".join([by_rank[0]["backend"], *versions])
    text = f"{backend} on {', '.join(names)}; an all-reduce takes {max(each['ms'] for each in by_rank):.2f} ms"
    remedy = "Install the same NCCL on all hosts." if len(versions) > 1 else ""
    if by_rank[0]["device"] == "cpu" and any(each["there"] for each in by_rank):
        text += (
            ". All ranks ran on CPUs, since some host has fewer accelerators than ranks: the accelerators were not"
            " tried"
        )
        remedy = "Start as many ranks on each host as it has accelerators, with torchrun, which sets LOCAL_WORLD_SIZE."
    data = {"backend": by_rank[0]["backend"], "nccl": versions, "ranks": [*by_rank]}
    return Finding("backend", "warning" if remedy else "ok", text, remedy, data)


_REMEDY = (
    "Training needs this process group of torch's: name the interface between the hosts in GLOO_SOCKET_IFNAME (gloo)"
    " and NCCL_SOCKET_IFNAME (NCCL, which logs more with NCCL_DEBUG=INFO)."
)
BACKEND = Check("backend", add_up, judge_backend, seconds=40.0, needs="store", remedy=_REMEDY)

# ------------------------------------------------------------ our connections


def connect(job: Job) -> float:
    """Make torch_join's connections between the ranks; return the milliseconds of a meeting of all ranks."""
    use_device(job.device, None)
    channel = open_channel(timeout=TIMEOUT)
    channel.barrier()
    ms = _milliseconds(channel.barrier)
    channel.close(meets=True)
    return ms


def judge_links(by_rank: Sequence[float]) -> Finding:
    """Report how long a meeting of all ranks takes."""
    if len(by_rank) == 1:
        return Finding("links", "ok", "one rank needs none")
    text = f"all {len(by_rank)} ranks are connected, and meet in {max(by_rank):.2f} ms"
    return Finding("links", "ok", text, data={"ms": [*by_rank]})


_REMEDY = (
    "Allow TCP connections between any two hosts, to ports that the system chooses. If hosts have several networks,"
    " name the right interface of each host in GLOO_SOCKET_IFNAME."
)
LINKS = Check("links", connect, judge_links, seconds=40.0, needs="backend", remedy=_REMEDY)
