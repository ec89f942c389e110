"""The names under which strategies are registered, with the Trainer and with Fabric."""

from collections.abc import Iterator
from typing import Any


def start_methods(name: str) -> list[tuple[str, str]]:
    """Return the names under which a strategy is registered, and how each starts its processes."""
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    return [(name + suffix, method) for suffix, method in methods.items()]


def ddp_names(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Go through the names of a strategy that trains by DDP, and what each is called with."""
    for called, start_method in start_methods(name):
        options = {"start_method": start_method}
        yield called, {"description": f"DDP on uneven dataloaders, with `start_method` '{start_method}'", **options}
        for finds in (False, True):
            described = f"DDP on uneven dataloaders, with `start_method` '{start_method}', unused parameters: {finds}"
            yield (
                f"{called}_find_unused_parameters_{str(finds).lower()}",
                {"description": described, **options, "find_unused_parameters": finds},
            )
