"""How each kind of object is captured on the source and restored on the other ranks.

model        parameters, buffers (also those outside the state dict), extra state, frozen and training flags
optimizer    see `optimizers.py`
LR scheduler, GradScaler, anything else    the contents of its `state_dict`
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from torch_join._base.errors import JoinTypeError, JoinValueError
from torch_join._base.pytree import Captured
from torch_join._compat import ddp as _compat
from torch_join._compat import optimizer_state as _compat_state
from torch_join._handover.optimizers import capture_optimizer, is_optimizer, restore_optimizer
from torch_join._handover.state import MISSING, Capture, Restore, has_state

_ACCEPTED = (
    "a model (torch.nn.Module, DistributedDataParallel), an optimizer, an LR scheduler, a GradScaler, or"
    " anything with state_dict and load_state_dict"
)


class Kind(NamedTuple):
    """How objects of one kind are handed over.

    Attributes:
        name: The kind.
        capture: Turns such an object into `Captured`; the string is its name in errors.
        restore: Loads that into another rank's object.
    """

    name: str
    capture: Callable[[Any, Capture, str], Captured]
    restore: Callable[[Captured, Any, Restore, str], None]


def kind_of(value: Any) -> Kind:
    """Return how `value` is handed over.

    Raises:
        JoinTypeError: It is of no kind that can be handed over.
    """
    for kind, accepts in KINDS.items():
        if accepts(value):
            return kind
    raise JoinTypeError(f"A {type(value).__name__} has no state to hand over. Pass {_ACCEPTED}.")


def named(objects: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return objects in the order of their handover, with their names in errors, such as "optimizer 1 (Adam)"."""
    places = {kind: place for place, kind in enumerate(KINDS)}  # objects come before those that depend on them
    ordered = sorted(objects, key=lambda value: places[kind_of(value)])
    kinds = [kind_of(value).name for value in ordered]
    return [
        (f"{kind} {kinds[:index].count(kind)} ({type(value).__name__})", value)
        for index, (kind, value) in enumerate(zip(kinds, ordered, strict=True))
    ]


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def ignored_parameters(objects: Sequence[Any]) -> dict[str, Tensor]:
    """Return the parameters that the DDP models among `objects` ignore, by name."""
    models = [model for model in objects if isinstance(model, DistributedDataParallel)]
    return {
        f"model {index} ({type(model.module).__name__}): {name}": p
        for index, model in enumerate(models)
        for name, p in model.module.named_parameters(remove_duplicate=False)
        if name in model.parameters_to_ignore
    }


def _named_tensors(model: nn.Module, local: frozenset[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ignored: Any = ()
    keeps_buffers = False
    if isinstance(model, DistributedDataParallel):
        ignored, keeps_buffers = model.parameters_to_ignore, not model.broadcast_buffers
    # Under all its names: one tensor on the source may be two tensors elsewhere.
    parameters: Any = _inner(model).named_parameters(remove_duplicate=False)
    buffers = () if keeps_buffers else _inner(model).named_buffers(remove_duplicate=False)
    return {n: p for n, p in parameters if id(p) not in local}, {n: b for n, b in buffers if n not in ignored}


def _extra_states(model: nn.Module) -> dict[str, nn.Module]:
    default = nn.Module.get_extra_state
    return {name: m for name, m in _inner(model).named_modules() if type(m).get_extra_state is not default}


def _capture_model(model: nn.Module, capture: Capture, name: str) -> Captured:
    parameters, buffers = _named_tensors(model, capture.local)
    persistent = [key for key in buffers if _compat.is_persistent(*_owner(model, key))]
    return Captured(
        {
            "parameters": {key: capture.tensor(p, f"{name}: {key}") for key, p in parameters.items()},
            "buffers": {key: capture.tensor(b, f"{name}: {key}") for key, b in buffers.items()},
            "extra": {
                key: capture.tree(module.get_extra_state(), f"{name}: {key}.get_extra_state()")
                for key, module in _extra_states(model).items()
            },
            "requires_grad": {key: p.requires_grad for key, p in parameters.items()},
            "training": {key: module.training for key, module in model.named_modules()},
        },
        {"persistent": persistent},
    )


def _restore_model(captured: Captured, model: nn.Module, restore: Restore, name: str) -> None:
    parameters, buffers = _named_tensors(model, restore.local)
    state = captured.state
    if state["parameters"].keys() != parameters.keys():
        names = sorted(state["parameters"].keys() ^ parameters.keys())
        raise JoinValueError(f"{name} has different parameters here and on the source rank: {names}.")
    for key, slot in state["parameters"].items():
        restore.parameter(slot, parameters[key], state["requires_grad"][key], f"{name}: {key}")
    restore.later(lambda: _set_training(model, state["training"]))
    device = next(iter(parameters.values())).device if parameters else None
    for key in buffers.keys() - state["buffers"].keys():
        restore.later(partial(setattr, *_owner(model, key), None))
    for key, slot in state["buffers"].items():
        buffer = restore.tensor(slot, buffers.get(key, MISSING), device)
        if buffer is not buffers.get(key):
            persistent = key in captured.hints["persistent"]
            restore.later(partial(set_own, *_owner(model, key), buffer, persistent))
    modules = _extra_states(model)
    for key, tree in state["extra"].items():
        value = restore.value(tree, modules[key].get_extra_state(), f"{name}: {key}", device, reuse=False)
        restore.later(partial(modules[key].set_extra_state, value))


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, own = key.rpartition(".")
    return _inner(model).get_submodule(path), own


def set_own(module: nn.Module, name: str, buffer: Tensor, persistent: bool) -> None:
    """Set a buffer of a module, or register it if there is none."""
    if hasattr(module, name):
        setattr(module, name, buffer)
    else:
        module.register_buffer(name, buffer, persistent)


def _set_training(model: nn.Module, training: dict[str, bool]) -> None:
    for key, module in model.named_modules():
        module.training = training.get(key, module.training)


def _capture_state(value: Any, capture: Capture, name: str) -> Captured:
    return Captured(capture.tree(value.state_dict(), f"{name}.state_dict()"))


def _restore_state(captured: Captured, value: Any, restore: Restore, name: str) -> None:
    # The contents of a `state_dict` may be shared with anything, so its tensors are not written to.
    state = restore.value(captured.state, value.state_dict(), f"{name}.state_dict()", reuse=False)
    restore.later(lambda: value.load_state_dict(state))


def _capture_scaler(scaler: GradScaler, capture: Capture, name: str) -> Captured:
    state = _capture_state(scaler, capture, name).state
    return Captured(state, {"enabled": scaler.is_enabled(), "device": _compat_state.scale_device(scaler)})


def _restore_scaler(captured: Captured, scaler: GradScaler, restore: Restore, name: str) -> None:
    if scaler.is_enabled() != captured.hints["enabled"]:
        raise JoinValueError(f"{name} is enabled on only one of this rank and the source rank.")
    _restore_state(captured, scaler, restore, name)
    if captured.hints["device"] is not None and _compat_state.scale_device(scaler) is None:
        # It makes its tensors at first use; without them `update` would raise here and not on the source.
        restore.later(lambda: scaler.scale(torch.zeros((), device=captured.hints["device"])))


# In the order in which they are handed over.
KINDS: dict[Kind, Callable[[Any], bool]] = {
    Kind("model", _capture_model, _restore_model): lambda value: isinstance(value, nn.Module),
    Kind("optimizer", capture_optimizer, restore_optimizer): is_optimizer,
    Kind("LR scheduler", _capture_state, _restore_state): lambda value: isinstance(value, LRScheduler),
    Kind("GradScaler", _capture_scaler, _restore_scaler): lambda value: isinstance(value, GradScaler),
    Kind("other", _capture_state, _restore_state): has_state,
}
