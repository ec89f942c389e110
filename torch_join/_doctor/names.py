"""Whether the private names that this package relies on are there, in the frameworks that are installed.

Each compat module checks its own as it is imported. That is done in another process, since an import may print, warn,
or change something.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from torch_join._doctor.check import Check
from torch_join._doctor.job import Job
from torch_join._doctor.report import Finding

# By framework, what relies on names of it.
MODULES = {
    "torch": ["torch_join.integration", "torch_join._compat.fsdp"],
    "lightning": ["lightning_join", "lightning_join.fabric"],
    "pytorch_lightning": ["pytorch_lightning_join"],
    "accelerate": ["accelerate_join"],
    "transformers": ["accelerate_join.transformers"],
    "deepspeed": ["torch_join._compat.deepspeed"],
}
NEEDS = {"transformers": "accelerate"}  # which is not there with each transformers
_SECONDS = 60.0


def start() -> "subprocess.Popen[str]":
    """Begin to import all, in a process of its own: that takes seconds, in which other checks run."""
    # Not `-m torch_join._doctor.names`: the package would import it first.
    code = "from torch_join._doctor.names import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def import_all(job: Job) -> dict[str, str] | None:
    """Return, by framework that is installed, what its import raised, or nothing; the first rank of each host does."""
    if job.local_rank > 0:
        return None
    process = job.importing or start()
    try:
        out, errors = process.communicate(timeout=_SECONDS)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {errors.strip()[-1000:]}")
    found: dict[str, str] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    """Import, and print what came of it as one line of JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    found = {}
    for framework, modules in MODULES.items():
        if all(map(importlib.util.find_spec, [framework, *filter(None, [NEEDS.get(framework)])])):
            found[framework] = _problem(modules)
    sys.stdout.flush()
    os.write(kept, f"\n{json.dumps(found)}\n".encode())


def _problem(modules: Sequence[str]) -> str:
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def judge_names(said: Sequence[Any]) -> Finding:
    """Report which frameworks lack something."""
    found = {rank: each for rank, each in enumerate(said) if each is not None}
    problems = [
        f"rank {rank}: {problem}" for rank, each in found.items() for problem in dict.fromkeys(each.values()) if problem
    ]
    data = {"ranks": {str(rank): each for rank, each in found.items()}}
    if problems:
        remedy = "Install versions of the check 'versions', or a newer torch_join. Other packages work all the same."
        is_torch = any(each.get("torch") for each in found.values())  # the others may not be used
        return Finding("names", "failed" if is_torch else "warning", "; ".join(problems), remedy, data)
    frameworks = sorted({name for each in found.values() for name in each})
    return Finding("names", "ok", f"all that is relied on is there: {', '.join(frameworks)}", data=data)


CHECK = Check("names", import_all, judge_names, seconds=_SECONDS + 5.0)
