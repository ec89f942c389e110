"""Checks that the installed frameworks have the private names that this package relies on.

Each compat module checks its own names on import.
"""

import importlib
import importlib.util
from collections.abc import Sequence

from torch_join._doctor.check import Check, Finding, Job

# By framework, the modules that rely on its names.
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


def judge_names(said: Sequence[dict[str, str]]) -> Finding:
    """Report which frameworks lack a name."""
    problems = [f"rank {rank}: {text}" for rank, each in enumerate(said) for text in each.values() if text]
    data = {"ranks": [*said]}
    if problems:
        remedy = "Install the versions of the check 'versions', or a newer torch_join. Other packages are not affected."
        is_torch = any(each.get("torch") for each in said)  # other frameworks may not be used
        return Finding("names", "failed" if is_torch else "warning", "; ".join(problems), remedy, data)
    frameworks = sorted({name for each in said for name in each})
    return Finding("names", "ok", f"all that is relied on is there: {', '.join(frameworks)}", data=data)


CHECK = Check("names", import_all, judge_names, seconds=60.0)
