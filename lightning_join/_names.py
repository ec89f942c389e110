"""The names under which strategies are registered, with the Trainer and with Fabric."""

from collections.abc import Iterator
from typing import Any

_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_ENGINES: dict[str, dict[str, Any]] = {
    "": {},
    "_stage_1": {"stage": 1},
    "_stage_2": {"stage": 2},
    "_stage_3": {"stage": 3},
    "_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


def names(of_fabric: bool) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield for each name its class, the name, a description, and the arguments of the class."""
    what = "on uneven dataloaders"
    for suffix, method in _START_METHODS.items():
        options = {"start_method": method}
        described = f"DDP {what}, with `start_method` '{method}'"
        yield "DDPJoinStrategy", f"ddp_join{suffix}", described, options
        for finds in (False, True):
            name = f"ddp_join{suffix}_find_unused_parameters_{str(finds).lower()}"
            more = {**options, "find_unused_parameters": finds}
            yield "DDPJoinStrategy", name, f"{described}, unused parameters: {finds}", more
        if not of_fabric:
            yield "FSDPJoinStrategy", f"fsdp_join{suffix}", f"FSDP {what}, with `start_method` '{method}'", options
    if of_fabric:
        yield "FSDPJoinStrategy", "fsdp_join", f"FSDP {what}", {}
    yield "ModelParallelJoinStrategy", "model_parallel_join", f"fully_shard {what}", {}
    for suffix, options in _ENGINES.items():
        yield "DeepSpeedJoinStrategy", f"deepspeed_join{suffix}", f"DeepSpeed {what}", options
