"""A function on each rank of a job that is begun as told, with the collectives that it issued."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import emulator
from tests.core.backward import programs
from tests.core.backward.programs import loses_hooks
from tests.support.workers import Workers


@dataclass(frozen=True)
class Job:
    """How a job begins.

    Attributes:
        settings: Environment variables.
        backend: The backend, or backends.
        sets_device: Whether each rank makes its device the current one.
        binds_device: Whether each rank gives its device to the process group.
    """

    settings: tuple[tuple[str, str], ...] = ()
    backend: str = emulator.BACKEND
    sets_device: bool = True
    binds_device: bool = False

    def run(
        self, devices: Workers, world_size: int, folder: Path, function: Callable[..., Any], *args: Any
    ) -> list[Any]:
        """Return what the function returns on each rank, and each rank's collectives (none on real devices)."""
        if devices.device != emulator.DEVICE:
            return [(value, []) for value in devices.run(world_size, function, *args)]
        return devices.run(world_size, _run, self, world_size, str(folder), function, args, store="")


SERIAL = Job((("FAKENCCL_SERIAL", "device"),))
BOTH = Job(backend="cpu:gloo,fakegpu:fakenccl")
BLOCKING = Job((("CUDA_LAUNCH_BLOCKING", "1"),))


def _run(
    rank: int, job: Job, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, list[tuple[str, str]]]:
    settings = {**dict(job.settings), "FAKENCCL_LOG": folder}
    log = Path(folder) / str(os.getpid())
    os.environ.update(settings)
    emulator.installed().set_device(rank if job.sets_device else 0)
    try:
        dist.init_process_group(
            job.backend,
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=25),
            device_id=torch.device(emulator.DEVICE, rank) if job.binds_device else None,
        )
        value = function(rank, *args)
        lines = log.read_text().splitlines() if log.exists() else []
        return value, [tuple(line.split(" ", 1)) for line in lines]  # type: ignore[misc]
    finally:
        for name in settings:
            del os.environ[name]
        emulator.installed().set_device(rank)


def assert_one_order(logs: list[list[tuple[str, str]]]) -> None:
    """Every two ranks have issued the collectives of their common groups in one order."""
    logs = [[(group, what.rsplit(" ", 1)[0]) for group, what in log] for log in logs]
    for mine in logs:
        for its in logs:
            common = {group for group, _ in mine} & {group for group, _ in its}
            assert [each for each in mine if each[0] in common] == [each for each in its if each[0] in common]


def skip_without_functional_gather(devices: Workers) -> None:
    """Skip a program that calls torch's functional all-gather, as `DTensor.full_tensor` does.

    With gloo and a GPU's tensors that ends the process, without this project too (torch 2.13).
    """
    if devices.device == "cuda" and os.environ.get("TORCH_JOIN_TEST_BACKEND") == "gloo":
        pytest.skip("torch's functional all-gather ends the process with gloo and a GPU's tensors")


def skip_where_hooks_are_lost(program: programs.Program) -> None:
    if loses_hooks(program):
        pytest.skip("needs parameter hooks that a checkpoint's rerun keeps")
