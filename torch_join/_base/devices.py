"""Which device a rank works on; and reading from devices with few waits."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_devices: WeakKeyDictionary[dist.ProcessGroup, torch.device] = WeakKeyDictionary()


def use_device(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Record the device that this rank uses for a group, which need not be the current one.

    Messages between ranks contain only types of devices, since each rank has its own device. Without this record, all
    ranks of a machine that have not called `torch.cuda.set_device` would use the first device.
    """
    if dist.is_initialized():
        _devices[group or cast(dist.ProcessGroup, dist.group.WORLD)] = device


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that this rank uses for a group: the CPU unless another one was recorded."""
    known = _devices.get(group or cast(dist.ProcessGroup, dist.group.WORLD)) if dist.is_initialized() else None
    return known or torch.device("cpu")


def current_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that this rank uses for a group: the current one unless another one was recorded."""
    known, accelerator = device_of(group), torch.accelerator.current_accelerator()
    if known.type != "cpu" or accelerator is None:
        return known
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def on_device(group: dist.ProcessGroup | None) -> AbstractContextManager[Any]:
    """Make the device that this rank uses for a group the current one inside."""
    device = device_of(group)
    if device.type == "cpu":
        return nullcontext()
    if hasattr(torch.accelerator, "device_index"):
        return torch.accelerator.device_index(device.index)
    return cast(AbstractContextManager[Any], torch.get_device_module(device).device(device.index))  # older torch (2.6)


def read(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the elements of each tensor, with only one transfer for each device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(index)
    found: list[list[Any]] = [[] for _ in tensors]
    for indices in alike.values():
        values = iter(torch.cat([tensors[index].reshape(-1) for index in indices]).tolist())
        for index in indices:
            found[index] = list(islice(values, tensors[index].numel()))
    return found
