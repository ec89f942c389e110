"""Checks of the installed packages: versions, against those that the tests ran with (docs/versions.md), and names."""

import importlib.metadata
import importlib.util
import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_join import __version__
from torch_join._doctor.check import Check, Finding, Job

# A copy of the table, written by `scripts/versions`: by package, the lowest version, and the tested ones.
TESTED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "tested.json").read_text())


def find_versions(_: Job) -> dict[str, str]:
    """Return the installed versions of the packages in the table."""
    found = {"torch_join": __version__, "python": platform.python_version()}
    for package in TESTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def judge_versions(ranks: Sequence[Mapping[str, str]]) -> Finding:
    """Report how each version compares with the tested ones, and differences between ranks."""
    texts, remedies, standings = [], [], {}
    for name in dict.fromkeys(name for each in ranks for name in each):
        versions = sorted({each.get(name, "none") for each in ranks})
        standing = standings[name] = "differs between ranks" if len(versions) > 1 else _standing_of(name, versions[0])
        texts.append(f"{name} {', '.join(versions)}" + (f" ({standing})" if standing else ""))
        if len(versions) > 1:
            remedies.append(f"Install one version of {name} on all hosts.")
        elif standing == "older than supported":
            remedies.append(f"Upgrade {name}: at least {TESTED[name]['lowest']} is needed.")
        elif standing == "newer than any tested":
            remedies.append(f"The newest {name} that was tested is {TESTED[name]['tested'][-1]}.")
    is_old = "older than supported" in map(standings.get, ["python", "torch"])
    verdict = "failed" if is_old or standings["torch_join"] else "warning" if remedies else "ok"
    data = {"ranks": [*ranks], "standings": standings}
    return Finding("versions", verdict, ", ".join(texts), " ".join(remedies), data)  # type: ignore[arg-type]


def _standing_of(package: str, version: str) -> str:
    """Return how a version compares with the tested ones; nothing for a package that is not in the table."""
    if package not in TESTED:
        return ""
    digits = 2 if package == "python" else None  # Python's patch releases change nothing here
    number, ran = _number(version)[:digits], sorted(_number(tested)[:digits] for tested in TESTED[package]["tested"])
    if number < _number(TESTED[package]["lowest"]):
        return "older than supported"
    if number in ran:
        return "as tested"
    return "between tested versions" if number < ran[-1] else "newer than any tested"


def _number(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without any suffix."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:  # 2.6 and 2.6.0 are equal
        numbers.pop()
    return tuple(numbers)


VERSIONS = Check("versions", find_versions, judge_versions, seconds=10.0)


# ------------------------------------------------------------ private names of the frameworks

# By framework, the modules that rely on its names; each compat module checks its own on import.
MODULES = {
    "torch": ["torch_join.integration", "torch_join._compat.fsdp"],
    "lightning": ["lightning_join", "lightning_join.fabric"],
    "pytorch_lightning": ["pytorch_lightning_join"],
    "accelerate": ["accelerate_join"],
    "transformers": ["accelerate_join.transformers"],
    "deepspeed": ["torch_join._compat.deepspeed"],
}
NEEDS = {"transformers": "accelerate"}  # not installed with every transformers


def import_all(job: Job) -> dict[str, str]:
    """Return, by installed framework, the error of its import, or an empty string.

    Imports take seconds, so the ranks of a host share them.
    """
    found = {}
    for framework in [*MODULES][job.local_rank :: job.local_world_size]:
        if all(map(importlib.util.find_spec, [framework, NEEDS.get(framework, framework)])):
            found[framework] = _problem(MODULES[framework])
    return found


def _problem(modules: Sequence[str]) -> str:
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def judge_names(by_rank: Sequence[dict[str, str]]) -> Finding:
    """Report which frameworks lack a name."""
    problems = [f"rank {rank}: {text}" for rank, each in enumerate(by_rank) for text in each.values() if text]
    data = {"ranks": [*by_rank]}
    if problems:
        remedy = "Install the versions of the check 'versions', or a newer torch_join. Other packages are not affected."
        is_torch = any(each.get("torch") for each in by_rank)  # other frameworks may not be used
        return Finding("names", "failed" if is_torch else "warning", "; ".join(problems), remedy, data)
    frameworks = sorted({name for each in by_rank for name in each})
    return Finding("names", "ok", f"all that is relied on is there: {', '.join(frameworks)}", data=data)


NAMES = Check("names", import_all, judge_names, seconds=60.0)
