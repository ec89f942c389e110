"""The doctor's checks where something is broken: each says what, on which rank, and what to do; the others go on."""

import contextlib
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.inside import connects_within, on_host, reaching_nothing
from tests.support.workers import Workers
from torch_join import Join, __version__
from torch_join._doctor import connections, training, versions
from torch_join._doctor.check import Finding, Job
from torch_join._doctor.run import run

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [connections.STORE, versions.VERSIONS, connections.BACKEND, connections.LINKS, training.EPOCH, training.COST]


def run_checks(rank: int, path: str, broken: str, seconds: dict[str, float]) -> list[Finding]:
    job = Job(rank, 3, rank, 3, dist.FileStore(path, 3))
    checks = [replace(check, seconds=seconds.get(check.name, check.seconds)) for check in CHECKS]
    with BROKEN[broken](rank):
        findings = [] if broken == "is not there" and rank == 2 else [*run(job, checks)]
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()  # which may have broken
    return findings


@contextlib.contextmanager
def raise_on_rank_1(rank: int) -> Iterator[None]:
    def fail(_: Any) -> Any:
        raise ValueError("no loss here")

    with mock.patch.object(training, "loss_of", fail) if rank == 1 else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def listen_nowhere(rank: int) -> Iterator[None]:
    variable = {"GLOO_SOCKET_IFNAME": "nowhere"} if rank == 0 else {}
    with on_host("abc"[rank]), mock.patch.dict(os.environ, variable):
        yield


@contextlib.contextmanager
def reach_nobody(rank: int) -> Iterator[None]:
    refused = reaching_nothing() if rank == 1 else contextlib.nullcontext()
    with connects_within(1.0), on_host("abc"[rank]), refused:
        yield


def other_weighting(_: int) -> AbstractContextManager[Any]:
    return mock.patch.object(training, "Join", partial(Join, weighting="active"))


def old_torch(rank: int) -> AbstractContextManager[Any]:
    return mock.patch.dict(versions.TESTED, torch={"lowest": "99.1", "tested": ["99.1.0"]})


BROKEN: dict[str, Callable[[int], AbstractContextManager[Any]]] = {
    "": lambda _: contextlib.nullcontext(),
    "is not there": lambda _: contextlib.nullcontext(),
    "versions": old_torch,
    "interface": listen_nowhere,
    "network": reach_nobody,
    "raises": raise_on_rank_1,
    "wrong": other_weighting,
}
CASES = {
    # what is broken: the check that says so, parts of what it says, and which are not run
    "is not there": ("store", ["rank 2 did not answer in time"], ["versions", "backend", "links", "epoch", "cost"]),
    "versions": ("versions", ["(older than supported)"], []),
    "interface": ("links", ["rank 0 cannot listen: ", "does not exist or has no address"], ["epoch", "cost"]),
    "network": ("links", ["rank 1: it cannot reach its parent in the tree, at ", "no network"], ["epoch", "cost"]),
    "raises": ("epoch", ["rank 1: ValueError: no loss here"], ["cost"]),
    "wrong": ("epoch", ["ranks with 0, 3, 5 batches differ by at most "], []),
}
SECONDS = {"is not there": {"store": 1.0}}


@pytest.mark.parametrize("broken", CASES)
def test_what_is_broken_is_named(broken: str, workers: Workers, tmp_path: Path) -> None:
    name, texts, not_run = CASES[broken]
    findings, *others = workers.run(
        3, run_checks, str(tmp_path / "store"), broken, SECONDS.get(broken, {}), timeout=5.0
    )
    found = {finding.name: finding for finding in findings}
    assert found[name].verdict == "failed"
    assert [text for text in texts if text not in found[name].text] == [], found[name].text
    assert found[name].remedy
    assert [each.name for each in findings if each.verdict == "not run"] == not_run
    failed = [each.name for each in findings if each.verdict == "failed"]
    assert failed == [name]
    assert all(other in ([], findings) for other in others)


def test_nothing_is_broken_between_hosts(workers: Workers, tmp_path: Path) -> None:
    with_hosts = workers.run(3, run_on_hosts, str(tmp_path / "store"))
    links = {finding.name: finding for finding in with_hosts[0]}["links"]
    assert links.verdict == "ok"
    assert links.text.startswith("all 3 ranks are connected")


def run_on_hosts(rank: int, path: str) -> list[Finding]:
    with on_host("abc"[rank]):
        return run_checks(rank, path, "", {})


# ---------------------------------------------------------------- what is judged by one rank


TABLE = {"torch": {"lowest": "2.6", "tested": ["2.6.0", "2.13.0", "2.14.1"]}}


@pytest.mark.parametrize(
    ("version", "standing", "verdict"),
    [
        ("2.5.1", "older than supported", "failed"),
        ("2.6", "as tested", "ok"),
        ("2.13.0+cpu", "as tested", "ok"),
        ("2.9.1", "between tested versions", "ok"),
        ("2.14.2", "newer than any tested", "warning"),
        ("2.15.0.dev20261101+cu130", "newer than any tested", "warning"),
    ],
)
def test_versions(version: str, standing: str, verdict: str) -> None:
    with mock.patch.dict(versions.TESTED, TABLE, clear=True):
        finding = versions.judge_versions([{"torch_join": __version__, "torch": version}] * 2)
    assert f"torch {version} ({standing})" in finding.text
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict != "ok")


@pytest.mark.parametrize(
    ("package", "version", "verdict"),
    [("lightning", "1.0", "warning"), ("python", "3.13.99", "ok"), ("python", "3.9.1", "failed")],
)
def test_versions_of_other_packages(package: str, version: str, verdict: str) -> None:
    assert versions.judge_versions([{"torch_join": __version__, package: version}]).verdict == verdict


@pytest.mark.parametrize(("package", "verdict"), [("torch_join", "failed"), ("torch", "warning")])
def test_versions_that_differ_between_ranks(package: str, verdict: str) -> None:
    said = {"torch_join": __version__, "torch": "2.13.0"}
    finding = versions.judge_versions([said, {**said, package: "2.6.0"}])
    assert f"{package} " in finding.text
    assert "(differs between ranks)" in finding.text
    assert (finding.verdict, finding.remedy) == (verdict, f"Install one version of {package} on all hosts.")


def test_the_doctor_knows_what_the_docs_say_was_tested() -> None:
    loader = SourceFileLoader("scripts_versions", str(ROOT / "scripts" / "versions"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = script  # its classes ask for it
    loader.exec_module(script)
    said = script.tested_of((ROOT / "docs" / "versions.md").read_text())
    assert said == versions.TESTED, "scripts/versions --copy"
    assert said["torch"]["lowest"] == "2.6"
    assert {"2.6.0", "2.14.1"} <= {*said["torch"]["tested"]}
    assert said["deepspeed"] == {"lowest": "0.19", "tested": ["0.19.8"]}
    json.dumps(said)


def test_another_program_listens_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        finding = connections.STORE.run(Job())
        assert f"127.0.0.1:{other.getsockname()[1]}: another program listens there (EADDRINUSE)" in finding.text
    assert finding.verdict == "failed"
    assert "choose another MASTER_PORT, on all ranks" in finding.text


def test_names_that_have_gone(tmp_path: Path) -> None:
    for package in ("lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    program = (
        "import json; from torch_join._doctor.versions import Job, import_all; print(json.dumps(import_all(Job())))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": path}
    said = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert [name for name, problem in said.items() if not problem] == ["torch"]
    finding = versions.judge_names([said, {}])
    assert finding.verdict == "warning"  # it may be installed, and not used
    assert "rank 0: " in finding.text
    assert "accelerate" in finding.text


def test_the_ranks_of_a_host_share_the_frameworks() -> None:
    with mock.patch.object(versions, "MODULES", {"json": ["json"], "math": ["math"], "not_there": []}):
        said = [versions.import_all(Job(local_rank=rank, local_world_size=2)) for rank in range(2)]
    assert said == [{"json": ""}, {"math": ""}]


@pytest.mark.parametrize("difference", [2e-10, math.inf, math.nan])
def test_a_difference_that_rounding_does_not_explain(difference: float) -> None:
    said = {"batches": 3, "difference": f"{difference:.1e}", "bound": 1e-10}
    finding = training.judge_epoch([{**said, "difference": "0.0e+00"}, said])
    assert finding.verdict == "failed"
    json.loads(json.dumps(vars(finding), allow_nan=False))


@pytest.mark.parametrize(("ratio", "verdict"), [(1.1, "ok"), (1.3, "warning")])
def test_a_step_that_costs_more(ratio: float, verdict: str) -> None:
    finding = training.judge_cost([[(10.0, 1.0), (20.0, 20 * ratio)], [(9.0, 10 * ratio), (20.0, 1.0)]])
    assert finding.verdict == verdict
    assert finding.data["ratio"] == pytest.approx(ratio)  # of the slowest rank, in each pair
