"""The emulated device for Lightning and Accelerate, where this process has it; otherwise the CPU."""

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator

from tests.emulator import BACKEND, DEVICE, on_stream, place


class _Accelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None:
        torch.get_device_module(DEVICE).set_device(device)

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(DEVICE, index) for index in (range(devices) if isinstance(devices, int) else devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return DEVICE


class _Shared(CUDAAccelerator):
    """GPUs of which each may be several ranks'."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return [*range(devices)] if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", index % torch.cuda.device_count()) for index in devices]


def lightning_accelerator() -> Any:
    """Return what a `Trainer` takes for its `accelerator`."""
    if place().type == "cuda":
        return _Shared()
    if place().type != DEVICE:
        return place().type
    # Lightning wraps models in a side stream of CUDA's.
    torch.cuda.Stream = torch.Stream  # type: ignore[assignment, misc]
    torch.cuda.stream = on_stream  # type: ignore[assignment]
    return _Accelerator()


def accelerate_options() -> dict[str, Any]:
    """Return what an `Accelerator` takes; there must be none in this process."""
    if place().type != DEVICE:
        return {"cpu": place().type == "cpu"}
    PartialState(cpu=True)
    kind = DistributedType.MULTI_GPU if dist.is_initialized() else DistributedType.NO
    PartialState._shared_state.update(device=place(), backend=BACKEND, distributed_type=kind)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    return {}
