"""An accelerator's rules without an accelerator: the device "fakegpu" and the backend "fakenccl".

`device.cpp` and `backend.cpp` say which rules. `install` makes them known to this process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.emulator.build import build, compiler, load
from tests.emulator.mode import send_copies

__all__ = ["BACKEND", "DEVICE", "build", "compiler", "install", "installed", "on_stream", "place", "set_timeout", "use"]

DEVICE, BACKEND = "fakegpu", "fakenccl"

_extension: ModuleType | None = None
_place = torch.device("cpu")


def place() -> torch.device:
    """Return the device on which the tests of this process train."""
    return _place


def use(device: str, rank: int) -> str:
    """Have the tests of this process train on a kind of device, real or emulated; return the backend of their groups.

    Where there are fewer devices than ranks, ranks share them: gloo can, and NCCL from 2.30 on if it is told to.
    """
    global _place
    if device == "cpu":
        return "gloo"
    if device == DEVICE:
        install()
    module = torch.get_device_module(device)
    _place = torch.device(device, rank % module.device_count())
    module.set_device(_place)
    send_copies()
    return BACKEND if device == DEVICE else os.environ.get("TORCH_JOIN_TEST_BACKEND", "nccl")


def installed() -> ModuleType:
    """Return the extension: `counts()`, `contexts()`, `current_device()`, `abandon()`, `take_races()`."""
    assert _extension is not None
    return _extension


def install() -> None:
    """Register the device and the backend with torch, once in a process."""
    global _extension
    if _extension is not None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _extension = extension = load(build())
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    dist.Backend.register_backend(BACKEND, _create_backend, extended_api=True, devices=[DEVICE])


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives; torch's own way knows NCCL and gloo only."""
    installed().set_timeout(group._get_backend(torch.device(DEVICE)), timeout)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Let what is inside run on a stream, which older torch (2.6) does not take for a context."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream or before)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _create_backend(options: Any, _: Any) -> Any:
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=options.timeout)
    store = dist.PrefixStore("fakenccl", store)
    return installed().create_backend(gloo, store, rank, size, options.timeout, str(options.group_id))


def _device_module(extension: ModuleType) -> ModuleType:
    """What `torch.cuda` is for CUDA."""
    module: Any = ModuleType(f"torch.{DEVICE}")

    class device:  # noqa: N801  its name in torch.cuda
        def __init__(self, device: Any) -> None:
            self._index = _index(device)

        def __enter__(self) -> None:
            self._before = extension.current_device()
            if self._index >= 0:
                extension.set_device(self._index)

        def __exit__(self, *_: object) -> None:
            extension.set_device(self._before)

    module.device = module._DeviceGuard = device
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.empty_cache = lambda: None
    module.device_count, module.current_device = extension.device_count, extension.current_device
    module.set_device = lambda device: extension.set_device(_index(device))
    module.synchronize = lambda device=None: extension.synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.memory_allocated = module.max_memory_allocated = lambda device=None: 0
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = on_stream
    return module


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return -1 if index is None else index
