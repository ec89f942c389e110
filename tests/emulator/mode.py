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
_RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm}
_FILLS = {getattr(Tensor, name) for name in ("bernoulli_", "exponential_", "normal_", "random_", "uniform_")}


class OnDevice(TorchFunctionMode):
    """As `torch.set_default_device`, but for what the packages themselves make: that has to name its device.

    Random numbers are those that a CPU would draw: a program that is compared was run on one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            return _fill(func, args, kwargs)
        if func not in _CONSTRUCTORS or kwargs.get("device") is not None or _called_by_a_package():
            return func(*args, **kwargs)
        if func in _RANDOM or kwargs.get("generator") is not None:
            return func(*args, **kwargs).to(self._device)
        return func(*args, **{**kwargs, "device": self._device})


def _fill(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fill a tensor, which comes first or is named so, with what a CPU would."""
    filled, *others = args or (kwargs["tensor"],)
    if not isinstance(filled, Tensor) or filled.device.type == "cpu":
        return func(*args, **kwargs)
    with torch.no_grad():
        drawn = filled.detach().cpu()
        func(drawn, *others, **{name: value for name, value in kwargs.items() if name != "tensor"})
        return filled.copy_(drawn)


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
