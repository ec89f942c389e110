"""The names under which strategies are registered, with the Trainer and with Fabric."""

from collections.abc import Iterator
from typing import Any


def start_methods(name: str) -> list[tuple[str, str]]:
    """Return the names under which a strategy is registered, and how each starts its processes."""
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    return [(name + suffix, method) for suffix, method in methods.items()]


ENGINES: dict[str, dict[str, Any]] = {  # the names of strategies of DeepSpeed engines, and what each is called with
    "deepspeed_join": {},
    "deepspeed_join_stage_1": {"stage": 1},
    "deepspeed_join_stage_2": {"stage": 2},
    "deepspeed_join_stage_3": {"stage": 3},
    "deepspeed_join_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "deepspeed_join_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


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
