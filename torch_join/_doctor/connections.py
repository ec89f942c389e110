"""The job's store, the backend of its process group, and the connections that torch_join makes itself."""

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_join._base.devices import use_device
from torch_join._control.rendezvous import open_channel, tree_of
from torch_join._doctor.check import Check
from torch_join._doctor.job import Job
from torch_join._doctor.report import Finding

_TIMES = 20  # what is measured is a median of so many
_MEETS_WITHIN = 30.0  # seconds, for all ranks to have begun
_REACHES_WITHIN = timedelta(seconds=15)  # torch tries for up to twice as long
_GROUP_TIMEOUT = timedelta(seconds=30)


def _milliseconds(act: Callable[[], object]) -> float:
    durations = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        act()
        durations.append(1000 * (time.perf_counter() - start))
    return statistics.median(durations)


# ------------------------------------------------------------ the store


def reach_store(job: Job) -> dict[str, Any]:
    """Connect to the store, and see that all ranks have."""
    if job.store is None:
        job.reach_store(_REACHES_WITHIN)
    store, key = job.store, f"doctor/time/{job.rank}"
    assert store is not None
    store.set(key, "")
    return {"ms": _milliseconds(lambda: store.get(key)), "at": job.where}


def judge_store(said: Sequence[dict[str, Any]]) -> Finding:
    """Report how long a question takes."""
    slowest = max(range(len(said)), key=lambda rank: said[rank]["ms"])
    ranks = "the only rank reaches it" if len(said) == 1 else f"all {len(said)} ranks reach it"
    text = f"{ranks}; a question takes {said[slowest]['ms']:.2f} ms (rank {slowest}, the slowest)"
    return Finding("store", "ok", text, data={"ms": [each["ms"] for each in said], "at": [each["at"] for each in said]})


STORE = Check(
    "store",
    reach_store,
    judge_store,
    seconds=_MEETS_WITHIN + 5.0,
    remedy=(
        "Start the doctor on all ranks, with the same MASTER_ADDR and MASTER_PORT (torchrun: the same --rdzv-endpoint),"
        " and let TCP connections through to that port from every host of the job."
    ),
)

# ------------------------------------------------------------ the backend


def add_up(job: Job) -> dict[str, Any]:
    """Begin the process group, unless there is one, and add up a tensor over all ranks."""
    there = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator() if there else None  # where there is none, older torch (2.6) raises
    if kind is None or dist.get_default_backend_for_device(kind.type) == "gloo":
        kind, there = None, 0
    own = _name_device() if there == 1 and job.local_world_size > 1 else ""
    has_one = job.share("only device", own, _MEETS_WITHIN).count(own) == 1 and bool(own)
    choice = "cpu" if kind is None or not (has_one or there >= job.local_world_size) else kind.type
    if len({*job.share("choice", choice, _MEETS_WITHIN)}) > 1:
        choice = "cpu"
    if choice != "cpu":
        job.device = torch.device(choice, 0 if has_one else job.local_rank)
        torch.get_device_module(job.device).set_device(job.device)
    if not dist.is_initialized():
        dist.init_process_group(
            dist.get_default_backend_for_device(choice),
            store=job.store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=_GROUP_TIMEOUT,
        )
    tensor = torch.ones(1024, device=job.device)

    def act() -> float:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        return float(tensor.sum().item())

    if (total := act()) != 1024 * job.world_size:
        raise ArithmeticError(f"an all-reduce of 1024 ones gave {total} in place of {1024 * job.world_size}")
    name = (
        "CPU" if choice == "cpu" else getattr(torch.get_device_module(job.device), "get_device_name", str)(job.device)
    )
    backend = dist.get_backend()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else None  # type: ignore[no-untyped-call]
    return {
        "device": str(job.device),
        "name": name,
        "there": there,
        "backend": backend,
        "nccl": nccl,
        "ms": _milliseconds(act),
    }


def _name_device() -> str:
    """Name the only visible device, so that no other on any host has that name; nothing where none is known."""
    return str(getattr(torch.cuda.get_device_properties(0), "uuid", "")) if torch.cuda.is_available() else ""


def judge_backend(said: Sequence[dict[str, Any]]) -> Finding:
    """Report the devices, the backend, and how long an all-reduce takes."""
    names = sorted({each["name"] for each in said})
    versions = sorted({each["nccl"] for each in said if each["nccl"]})
    backend = " ".join([said[0]["backend"], *versions])
    slowest = max(each["ms"] for each in said)
    text = f"{backend} on {', '.join(names)}; an all-reduce takes {slowest:.2f} ms"
    data = {"backend": said[0]["backend"], "nccl": versions, "ranks": [*said]}
    if len(versions) > 1:
        return Finding("backend", "warning", text, "Install the same NCCL on all hosts.", data)
    if said[0]["device"] == "cpu" and any(each["there"] for each in said):
        text += ". All ranks are on CPUs, since some host has fewer accelerators than ranks: those were not tried"
        remedy = "Start as many ranks on each host as it has accelerators, by torchrun, which sets LOCAL_WORLD_SIZE."
        return Finding("backend", "warning", text, remedy, data)
    return Finding("backend", "ok", text, data=data)


BACKEND = Check(
    "backend",
    add_up,
    judge_backend,
    seconds=40.0,  # those that wait for others give up after 30, and say what for
    needs="store",
    remedy=(
        "This is torch's own process group, which no training runs without: name the interface between the hosts in"
        " GLOO_SOCKET_IFNAME (gloo) and NCCL_SOCKET_IFNAME (NCCL, which says more with NCCL_DEBUG=INFO)."
    ),
)

# ------------------------------------------------------------ our connections


def connect(job: Job) -> dict[str, Any]:
    """Make torch_join's connections between the ranks, and measure each of them."""
    if job.world_size == 1:
        return {"connections": [], "meet_ms": 0.0}
    use_device(job.device, None)
    channel = open_channel(timeout=_GROUP_TIMEOUT)
    tree = tree_of(dist.group.WORLD)
    assert tree is not None
    channel.keep("doctor", None)
    found = []
    for turn in range(job.world_size):  # one after the other: the others wait, and answer at once
        channel.barrier()
        if turn == job.rank:
            for peer, (own, theirs) in sorted(tree.links.ends().items()):
                listens = theirs if peer == tree.node.layout.parent else own
                ms = _milliseconds(lambda peer=peer: channel.ask("doctor", [peer]))  # type: ignore[misc]
                found.append({"rank": peer, "at": listens, "ms": ms})
    channel.barrier()
    meet_ms = _milliseconds(channel.barrier)
    channel.close(meets=True)
    return {"connections": found, "meet_ms": meet_ms}


def judge_links(said: Sequence[dict[str, Any]]) -> Finding:
    """Report who is connected to whom, and how long a question takes."""
    pairs = {
        (min(rank, link["rank"]), max(rank, link["rank"])): link["at"]
        for rank, each in enumerate(said)
        for link in each["connections"]
    }
    data = {"ranks": [*said]}
    if not pairs:
        return Finding("links", "ok", "one rank needs none", data=data)
    within_host = sum(at.startswith("unix:") for at in pairs.values())
    ms, rank, peer = max(
        (link["ms"], rank, link["rank"]) for rank, each in enumerate(said) for link in each["connections"]
    )
    text = (
        f"{len(pairs)} connections, {within_host} of them within a host: "
        f"{', '.join(f'{a} to {b}' for a, b in sorted(pairs)[:4])}{', ...' if len(pairs) > 4 else ''};"
        f" the slowest answers in {ms:.2f} ms (rank {peer} to rank {rank});"
        f" all ranks meet in {max(each['meet_ms'] for each in said):.2f} ms"
    )
    return Finding("links", "ok", text, data=data)


LINKS = Check(
    "links",
    connect,
    judge_links,
    seconds=40.0,  # those that connect give up after 30, and say whom they did not reach
    needs="backend",
    remedy=(
        "Let TCP connections through between any two hosts, to ports of the system's choice. Where hosts have several"
        " networks, name the right interface of each host in GLOO_SOCKET_IFNAME."
    ),
)
