"""Runs programs that name no device on the emulated one."""

import sys
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_PACKAGES = ("torch_join", "lightning_join", "accelerate_join")
# A name of the module: torch.compile, which follows the mode's function, does not find what the mode itself has.
_CONSTRUCTORS = _device_constructors()  # type: ignore[no-untyped-call]


class OnDevice(TorchFunctionMode):
    """As `torch.set_default_device`, but for what the packages themselves make: that has to name its device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CONSTRUCTORS or kwargs.get("device") is not None or _called_by_a_package():
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:  # a CPU's: the numbers are to be those of a CPU
            return func(*args, **kwargs).to(self._device)
        return func(*args, **{**kwargs, "device": self._device})


def _called_by_a_package() -> bool:
    if torch.compiler.is_compiling():  # models only
        return False
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.split(".")[0] in _PACKAGES


def send_copies() -> None:
    """Send this process's tensors to others as CPU tensors: those have no such device."""
    reducer = ForkingPickler._extra_reducers[Tensor]  # type: ignore[attr-defined]

    def reduce(tensor: Tensor) -> Any:
        return reducer(tensor.detach().cpu() if tensor.device.type != "cpu" else tensor)

    ForkingPickler.register(Tensor, reduce)
    ForkingPickler.register(torch.nn.Parameter, reduce)
