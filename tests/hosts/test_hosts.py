"""Hosts that are namespaces of Linux: each has a network, a name and processes of its own. They need root, and `ip`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hosts.training import KINDS

NAMES = [f"tj{os.getpid()}{letter}" for letter in "abc"]  # of the hosts' namespaces, and of the ends of their cables
SWITCH = f"tj{os.getpid()}s"  # the namespace of the switch at the other ends
WITHIN = 60  # seconds


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def remove() -> None:
    for name in (*NAMES, SWITCH):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10, check=False)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def make_switch() -> None:
    ip("netns", "add", SWITCH)
    ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
    ip("-n", SWITCH, "link", "set", "switch", "up")


def can_make_hosts() -> bool:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    remove()
    try:
        make_switch()
    except (subprocess.SubprocessError, OSError):
        return False
    finally:
        remove()
    return True


pytestmark = pytest.mark.skipif(
    not can_make_hosts(), reason="namespaces with a network of their own need root, and `ip`"
)


@pytest.fixture
def addresses(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Make hosts, two by default, that are connected by IPv4, or by IPv6 alone; return their addresses."""
    version, count = request.param if isinstance(request.param, tuple) else (request.param, 2)
    found = [f"10.77.0.{number}" if version == 4 else f"fd77::{number}" for number in range(1, count + 1)]
    more = ["24"] if version == 4 else ["64", "nodad"]
    try:
        make_switch()
        for number, (name, address) in enumerate(zip(NAMES, found, strict=False), start=1):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", f"{name}s")
            ip("link", "set", name, "netns", name, "name", "eth0")
            ip("link", "set", f"{name}s", "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", f"{name}s", "master", "switch", "up")
            Path(f"/etc/netns/{name}").mkdir(parents=True)
            Path(f"/etc/netns/{name}/hosts").write_text(f"127.0.0.1 localhost\n{address} node{number}\n")
            try:
                ip("-n", name, "address", "add", f"{address}/{more[0]}", "dev", "eth0", *more[1:])
            except subprocess.CalledProcessError:
                pytest.skip(f"no IPv{version} in namespaces here")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield found
    finally:
        remove()


def begin(
    addresses: list[str], kind: str = "plain", does: str = "", interface: str = ""
) -> list[subprocess.Popen[str]]:
    """Begin a rank on each host."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = {
        "WORLD_SIZE": str(len(addresses)),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": "29511",
    }
    job |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    started = []
    for rank, name in enumerate(NAMES[: len(addresses)]):
        # As torchrun says it, which Lightning, Accelerate and transformers look for.
        mine = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        mine |= {"TORCHELASTIC_RUN_ID": "none", "CUDA_VISIBLE_DEVICES": ""}
        program = f"hostname node{rank + 1}; exec {sys.executable} -m tests.hosts.training {kind} '{does}'"
        command = ["ip", "netns", "exec", name, "unshare", "-u", "bash", "-c", program]
        started.append(subprocess.Popen(command, env={**os.environ, **job, **mine}, **pipes))
    return started


def train(addresses: list[str], kind: str = "plain", does: str = "", interface: str = "") -> list[Any]:
    """Return what one rank on each host prints, `None` of one that was killed."""
    started = begin(addresses, kind, does, interface)
    try:
        said = [process.communicate(timeout=WITHIN) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(out or does == "killed" for out, _ in said), [error[-2000:] for _, error in said]
    return [json.loads(out.splitlines()[-1]) if out else None for out, _ in said]


def alone(ranks: int = 2) -> list[float]:
    """Return the parameters after the same steps in one process."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3 * ranks - 1):
        optimizer.zero_grad()
        for rank in range(ranks):
            if step < 2 + 3 * rank:
                batch = torch.full((2, 1), 1.0 + rank + step, dtype=torch.float64)
                (net(batch).square().mean() / ranks).backward()
        optimizer.step()
    return [float(parameter.detach()) for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("addresses", "interface"),
    [(6, "eth0"), *(pytest.param(*case, marks=pytest.mark.long) for case in [(4, ""), (4, "eth0"), (6, "")])],
    indirect=["addresses"],
)
def test_it_is_exact_on_two_hosts(addresses: list[str], interface: str) -> None:
    found = train(addresses, interface=interface)
    assert found[0]["parameters"] == found[1]["parameters"] == pytest.approx(alone(), abs=1e-12)
    assert max(each["entered"] for each in found) < 5


@pytest.mark.parametrize("addresses", [4], indirect=True)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "Lightning" else pytest.mark.long) for kind in KINDS]
)
def test_each_front_end_is_exact_on_two_hosts(addresses: list[str], kind: str) -> None:
    found = train(addresses, kind, interface="eth0")
    assert found[0]["parameters"] == found[1]["parameters"] == pytest.approx(alone(), abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("addresses", [(4, 3)], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_each_front_end_is_exact_on_three_hosts(addresses: list[str], kind: str) -> None:
    for found in train(addresses, kind, interface="eth0"):
        assert found["parameters"] == pytest.approx(alone(3), abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("addresses", [(6, 3)], indirect=True)
def test_of_three_hosts_the_one_that_is_killed_is_named_on_both_others(addresses: list[str]) -> None:
    first, _, last = train(addresses, does="killed")
    for rank, message in ((0, first), (2, last)):
        assert message.startswith(f"PeerFailedError: Rank 1 (on node2) failed, so rank {rank} cannot continue.")


@pytest.mark.parametrize("addresses", [4], indirect=True)
def test_a_rank_that_is_killed_is_named_with_its_host(addresses: list[str]) -> None:
    message, _ = train(addresses, does="killed")
    assert message.startswith("PeerFailedError: Rank 1 (on node2) failed, so rank 0 cannot continue.")


@pytest.mark.parametrize("addresses", [4], indirect=True)
@pytest.mark.parametrize("gone", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_host_that_vanishes_while_ranks_connect_is_named(addresses: list[str], gone: int) -> None:
    """That of rank 0 also has the job's store."""
    started = begin(addresses, does="waits", interface="eth0")
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ip("-n", NAMES[gone], "link", "set", "eth0", "down")
        out, _ = started[1 - gone].communicate(timeout=WITHIN)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    message = json.loads(out.splitlines()[-1])
    assert message.startswith(f"JoinTimeoutError: Rank {1 - gone} waited 5 s for rank {gone} to start its `with`")
