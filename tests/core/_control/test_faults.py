"""What all ranks hear when one fails that others are connected through: its name, the cause, and soon.

`-m long` runs each listed fault at 16 ranks and at four with a DataLoader's processes, and 200 random ones, or as many
as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.support.inside import Layout, at_set_up, is_linked, limit_waits, neighbours, on_host, open_channel
from tests.support.workers import Workers, sum_and_read
from torch_join.integration import Channel, telling_failures

FEW = 4
CASES = int(os.environ.get("TORCH_JOIN_CASES", 200))
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW))

WORLD_SIZE, SMALL = 16, 4
ONE, BLOCKS, APART = "a" * 16, "aaaabbbbccccdddd", "abcdefghijklmnop"  # by rank, the host that it is taken to be on
PLACES = ("beat", "late beat", "gather", "log", "sub-group", "collective", "model", "set-up")
HOW = ("kill", "raise", "stop", "cut")
STEPS = ("first", "listen", "connect", "accept", "last")  # of the set-up
WAITS = 6.0  # seconds, after which a rank that does not answer counts as failed


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        hosts: By rank, the host that it is taken to be on.
        victim: Who fails.
        how: `"kill"`, `"raise"`, `"stop"`, or `"cut"`: a connection of the victim's breaks.
        where: What the others wait for.
        peer: Whom it is connected to.
        members: The ranks of the sub-group.
        step: Of the set-up, before which the victim fails.
        loads: What processes of a DataLoader's each rank has: none, `"idle"` ones, or `"busy"` ones.
        delay: Seconds that the others wait for the victim before it fails.
    """

    hosts: str
    victim: int
    how: str
    where: str
    peer: int
    members: tuple[int, ...] = ()
    step: str = ""
    loads: str = ""
    delay: float = 0.3

    @property
    def names(self) -> tuple[int, ...]:
        """Whom the connections are between, by their number there."""
        return self.members or tuple(range(len(self.hosts)))

    def __str__(self) -> str:
        return "-".join((self.hosts, str(self.victim), self.how, self.where, self.step, self.loads)).strip("-")


def kinds(hosts: Sequence[str]) -> dict[str, list[int]]:
    """The ranks by their place in the tree."""
    found: dict[str, list[int]] = {"root": [0], "inner": [], "leaf": []}
    for rank in range(1, len(hosts)):
        found["inner" if Layout(hosts, rank).children else "leaf"].append(rank)
    return {kind: ranks for kind, ranks in found.items() if ranks}


def neighbours_of(hosts: Sequence[str], rank: int) -> list[int]:
    layout = Layout(hosts, rank)
    return [*layout.children, *([] if layout.parent is None else [layout.parent])]


# ---------------------------------------------------------------- what a rank does


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, is_busy: bool) -> None:
        self.is_busy = is_busy

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        end = time.monotonic() + (0.2 if self.is_busy else 0.0)
        while time.monotonic() < end:
            pass
        return index


def load(kind: str) -> Iterator[Any]:
    """Begin to iterate over a loader with processes of its own."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        loader = DataLoader(Numbers(kind == "busy"), num_workers=1, multiprocessing_context="fork")
        return iter(loader)


def strike(case: Case, path: str, channel: Channel | None) -> None:
    time.sleep(case.delay)  # the others wait
    Path(path).write_text(str(time.monotonic()))
    if case.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.how == "raise":
        raise KeyError("a hole")
    elif case.how == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {2 * WAITS}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        peer = case.names.index(case.peer)
        neighbours(channel)[peer].shutdown(socket.SHUT_RDWR)
        assert channel is not None
        channel.read("never")


def backward_of_a_model() -> Callable[[], object]:
    model = DistributedDataParallel(torch.nn.Linear(5, 1))
    return lambda: model(torch.ones(2, 5)).sum().backward()


def wait_for_others(channel: Channel, where: str) -> None:
    if where == "late beat":
        for _ in range(1000):
            channel.arrive(1)
            channel.defer_reads()
            time.sleep(0.01)
            channel.poll()
            channel.wait()
    elif where == "gather":
        channel.gather(None)
    elif where in ("log", "sub-group"):
        channel.follow()
    elif where == "collective":
        sum_and_read()
    else:
        channel.barrier()


kept: list[Any] = []  # gloo may wait for ever for a message of which a rank has sent a part, and so does its end


def suffer(rank: int, case: Case, path: str) -> tuple[str, float, float]:
    """Return what this rank hears of a fault, when, and since when it could."""
    text, start, end, back = "", time.monotonic(), 0.0, None
    is_hit, channels = rank == case.victim, []
    with ExitStack() as stack:
        try:
            stack.enter_context(on_host(case.hosts[rank]))
            if is_hit and case.where == "set-up":
                stack.enter_context(at_set_up(case.step, lambda: strike(case, path, None)))
            channels.append(channel := open_channel(timeout=timedelta(seconds=30)))
            assert is_linked(channel)
            back = backward_of_a_model() if case.where == "model" else None
            loads = load(case.loads) if case.loads else iter([])
            next(loads, None)
            dist.barrier()
            if case.members:
                group = dist.new_group(case.members)
                if rank in case.members:
                    channels.append(open_channel(group, timeout=timedelta(seconds=30)))
                dist.barrier()
            for each in channels:
                limit_waits(each, WAITS)
            if case.how == "cut" and rank not in case.names:
                return "", 0.0, 0.0
            start = time.monotonic()
            with telling_failures(channel), telling_failures(channels[-1]):
                if is_hit and case.where != "set-up":
                    strike(case, path, channels[-1])
                if back is not None:
                    back()
                else:
                    wait_for_others(channels[-1], case.where if rank in case.names else "beat")
        except Exception as error:
            text, end = f"{type(error).__name__}: {error}", time.monotonic()
        for each in channels:
            each.close()
        if case.where in ("collective", "model") and not is_hit:
            kept.append((back, dist.group.WORLD))
        dist.destroy_process_group()
    return text, start, end


# ---------------------------------------------------------------- what it is to hear


def reached(case: Case) -> set[int]:
    """Who hears from a rank on the victim's host that it is stopped, and not through the victim."""
    hosts = {name: case.hosts[name] for name in case.names}
    links = {
        frozenset((name, case.names[peer]))
        for index, name in enumerate(case.names)
        for peer in neighbours_of([*hosts.values()], index)
    }
    found = {name for name, host in hosts.items() if host == hosts[case.victim]} - {case.victim}
    while more := {other for link in links for other in link if link & found} - found - {case.victim}:
        found |= more
    return found


def seconds_to_hear(case: Case, rank: int) -> float:
    """How long it may take at most until a rank knows."""
    told = case.victim in case.names and rank in (case.names if case.members else range(len(case.hosts)))
    if case.how == "raise" and case.step in ("connect", "accept"):
        return 33.0  # for which others try to connect to it
    if case.where in ("collective", "model"):
        return 15.0  # from when gloo reports that the connection has closed, which it may leave to others
    if case.how == "stop":
        return (6.0 if case.step else 4.0) if case.step or (told and rank in reached(case)) else WAITS + 6.0
    if case.step == "first" or (case.step and len({*case.hosts}) > 1):
        return 5.0  # gloo tells ranks of other hosts, or all while none knows the processes; it is asked now and then
    return {"cut": 1.0}.get(case.how, 0.5)


def check(crowd: Workers, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "struck"
    limit = 30.0 if case.members else 10.0  # of gloo: a channel over a smaller group may take a while to open
    outcomes = crowd.outcomes(len(case.hosts), suffer, case, str(path), timeout=limit, deadline=60.0)
    assert path.exists(), (case, outcomes)
    struck = float(path.read_text())
    for rank, outcome in enumerate(outcomes):
        if (case.how == "cut" and rank not in case.names) or (case.how != "cut" and rank == case.victim):
            continue
        assert outcome.value is not None, (case, rank, outcome)
        text, start, end = outcome.value
        if case.how == "raise" and case.step not in ("", "first"):  # which is said where ranks meet next
            assert text.startswith("UnsupportedError: The ranks cannot connect to each other"), (case, rank, text)
            assert re.search(rf" rank {case.victim}( cannot listen)?: KeyError: 'a hole'[;.]", text), (case, rank, text)
        elif case.how == "cut":
            a, b = sorted((case.victim, case.peer))
            assert f"the link between ranks {a} and {b} broke" in text, (case, rank, text)
        else:
            assert text.startswith("PeerFailedError: "), (case, rank, text)
            says = "(failed|did not answer|'s process is gone)"
            named = [rank for rank, _ in re.findall(rf"[Rr]ank (\d+)(?: \(on \w+\))? ?{says}", text)]
            named += re.findall(r"The process of rank (\d+) is gone", text)
            assert {*map(int, named)} == {case.victim}, (case, rank, text)
            if "the link between ranks" in text:  # seen from another host: its children keep its connections open
                assert (case.how, bool(case.loads), len({*case.hosts}) > 1) == ("kill", True, True), (case, rank, text)
        if case.how == "raise" and not case.step:
            assert text.endswith(f"Rank {case.victim}: KeyError: 'a hole'"), (case, rank, text)
        seconds = end - max(start, struck)
        assert seconds < seconds_to_hear(case, rank), (case, rank, text, seconds)


# ---------------------------------------------------------------- which faults there are


def can_be(case: Case) -> bool:
    """Whether there is such a fault, of which somebody is told."""
    if case.where in ("collective", "model") and case.how in ("stop", "cut"):
        return False  # gloo reports neither
    if case.where == "set-up" and case.how == "cut":
        return False  # there is no connection yet
    if case.where == "set-up" and case.how == "stop" and (case.step == "first" or len({*case.hosts}) > 1):
        return False  # not all can know
    layout = Layout(case.hosts, case.victim)
    has = {"listen": layout.children, "accept": layout.children, "connect": case.victim}
    return bool(has.get(case.step, True))


def draw(seed: int) -> Case:
    """Return a random fault: every fourth is at few ranks, which load data."""
    rng = random.Random(seed)
    world_size, loads = (SMALL, rng.choice(("idle", "busy"))) if seed % 4 == 3 else (WORLD_SIZE, "")
    number = rng.choice([each for each in (1, 2, 4, world_size) if each <= world_size])
    hosts = [chr(ord("a") + rank * number // world_size) for rank in range(world_size)]
    if rng.random() < 0.3:
        rng.shuffle(hosts)
    while not can_be(case := draw_at(rng, "".join(hosts), loads)):
        pass
    return case


def draw_at(rng: random.Random, hosts: str, loads: str) -> Case:
    where, members = rng.choice(PLACES), ()
    if where == "sub-group":
        members = tuple(sorted(rng.sample(range(len(hosts)), rng.randint(2, len(hosts) - 1))))
    names = members or tuple(range(len(hosts)))
    among = [hosts[name] for name in names]
    index = rng.choice(rng.choice([*kinds(among).values()]))
    return Case(
        hosts=hosts,
        victim=names[index],
        how=rng.choice(HOW),
        where=where,
        peer=names[rng.choice(neighbours_of(among, index))],
        members=members,
        step=rng.choice(STEPS) if where == "set-up" else "",
        loads=loads,
        delay=rng.choice((0.0, 0.01, 0.1, 0.3)),
    )


EARLY = [
    Case(ONE, 1, "kill", "set-up", 0, step="connect"),
    Case(ONE, 0, "stop", "set-up", 8, step="listen"),
    Case(APART, 1, "kill", "set-up", 9, step="listen"),
    Case(BLOCKS, 0, "kill", "set-up", 12, step="first", delay=0.01),  # others reach for its store
]
FEW_RANKS = [Case("aaa", 1, how, where, 0) for where in ("beat", "gather", "collective") for how in ("kill", "raise")]


@pytest.mark.parametrize("case", [*EARLY, *FEW_RANKS], ids=str)
def test_common_faults(crowd: Workers, tmp_path: Path, case: Case) -> None:
    check(crowd, tmp_path, case)


@pytest.mark.parametrize("seed", range(FEW))
def test_faults(crowd: Workers, tmp_path: Path, seed: int) -> None:
    check(crowd, tmp_path, draw(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_random_faults(crowd: Workers, tmp_path: Path, seed: int) -> None:
    check(crowd, tmp_path, draw(seed))
