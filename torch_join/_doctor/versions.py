"""The versions that are installed, against those that the tests ran with (docs/versions.md)."""

import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_join import __version__
from torch_join._doctor.check import Check
from torch_join._doctor.job import Job
from torch_join._doctor.report import Finding

# A copy of what the table says, which `scripts/versions` writes: by package, the lowest version, and those that ran.
TESTED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "tested.json").read_text())


def find_versions(_: Job | None = None) -> dict[str, str]:
    """Return the versions of what is installed, of the packages that the table has."""
    found = {"torch_join": __version__, "python": platform.python_version()}
    for package in TESTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def standing_of(version: str, lowest: str, tested: Sequence[str]) -> str:
    """Say how a version stands to those that were tested."""
    number, ran = _number(version), sorted(map(_number, tested))
    if number < _number(lowest):
        return "older than supported"
    if number in ran:
        return "as tested"
    return "between tested versions" if number < ran[-1] else "newer than any tested"


def _number(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what else a version may say."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:  # 2.6 and 2.6.0 are one
        numbers.pop()
    return tuple(numbers)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def judge_versions(ranks: Sequence[Mapping[str, str] | None]) -> Finding:
    """Report how the versions stand, and where ranks have different ones."""
    said = [each for each in ranks if each is not None]
    standings, remedies, texts = {}, [], []
    for name in dict.fromkeys(name for each in said for name in each):
        versions = sorted({each.get(name, "none") for each in said})
        if len(versions) > 1:
            standings[name] = "differs"
            texts.append(f"{name} {', '.join(versions)} (differs between ranks)")
            remedies.append(f"Install one version of {name} on all hosts.")
        elif name in TESTED:
            tested = TESTED[name]["tested"]
            if name == "python":  # whose patch releases change nothing here
                standing = standing_of(_minor(versions[0]), TESTED[name]["lowest"], [*map(_minor, tested)])
            else:
                standing = standing_of(versions[0], **TESTED[name])
            standings[name] = standing
            texts.append(f"{name} {versions[0]} ({standing})")
            if standing == "older than supported":
                remedies.append(f"Upgrade {name}: at least {TESTED[name]['lowest']} is needed.")
            elif standing == "newer than any tested":
                remedies.append(f"The newest {name} that was tested is {TESTED[name]['tested'][-1]}.")
        else:
            texts.append(f"{name} {versions[0]}")
    failed = (
        "older than supported" in map(standings.get, ["python", "torch"]) or standings.get("torch_join") == "differs"
    )
    warns = {"newer than any tested", "older than supported", "differs"} & {*standings.values()}
    data = {"ranks": [*ranks], "standings": standings}
    verdict = "failed" if failed else "warning" if warns else "ok"
    return Finding("versions", verdict, ", ".join(texts), " ".join(remedies), data)  # type: ignore[arg-type]


CHECK = Check("versions", find_versions, judge_versions, seconds=10.0)
