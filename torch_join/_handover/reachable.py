"""Finds values attached to the objects passed to `Join` that need not be in any state dict.

These are attributes of modules, optimizers (and the state of optimizers that they wrap), schedulers and other objects
with a state. Their meaning is unknown, so a value counts as a replica only if it was equal on all ranks.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.specs import flaw
from torch_join._compat.metrics import is_metric
from torch_join._compat.optimizer_state import computed_names, is_sharded
from torch_join._handover.optimizers import is_optimizer, with_wrapped
from torch_join._handover.state import has_state

_PLAIN = (bool, int, float, complex, str, type(None))
DEPTH = 4
_ITEMS = 256  # of one container
_VALUES = 2**12  # of one attribute: more is a dataset too, and each value needs a name
_ELEMENTS = 2**24  # of one tensor: more is a dataset
_OF_MODULES = frozenset(vars(nn.Module()))


def reachable(thing: Any, name: str, local: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each such value, and the value, which is a tensor or a plain one.

    Args:
        thing: An object passed to `Join`.
        name: Its name.
        local: The `id` of each parameter whose state each rank keeps for itself.
    """
    if isinstance(thing, nn.Module):
        yield from _of_module(thing, name)
    elif is_optimizer(thing):
        for index, one in enumerate(with_wrapped(thing)):
            if not is_sharded(one):
                own = f"{name}: optimizer {index} in it ({type(one).__name__})" if index else name
                yield from _of_object(one, own, {"param_groups", "state"})
                parameters = [p for group in one.param_groups for p in group["params"]]
                entries = [None if id(p) in local else getattr(one, "state", {}).get(p) for p in parameters]
                state = {place: entry for place, entry in enumerate(entries) if entry}
                yield from values_in(state, f"{own}: .state", DEPTH)
    elif hasattr(thing, "__dict__"):
        yield from _of_object(thing, name, set())


def _of_module(model: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    apart = {id(part) for module in inner.modules() if is_metric(module) for part in module.modules()}
    for path, module in inner.named_modules():
        if id(module) not in apart:
            yield from _of_object(module, f"{name}: {path}" if path else name, _OF_MODULES | computed_names(module))


def _of_object(thing: Any, name: str, hidden: Iterable[str]) -> Iterator[tuple[str, Any]]:
    is_torchs = type(thing).__module__.startswith("torch.")  # its state dict is complete
    # A default in its class counts as well: loading a state sets it on the instance.
    defaults = {
        key: value
        for base in reversed(type(thing).__mro__)
        if not base.__module__.startswith("torch.")
        for key, value in vars(base).items()
        if isinstance(value, _PLAIN) and not key.startswith("__")
    }
    for key, value in (defaults | vars(thing)).items():
        if key not in hidden and not (is_torchs and key.startswith("_")):
            found = list(islice(values_in(value, f"{name}: .{key}", DEPTH), _VALUES + 1))
            yield from found if len(found) <= _VALUES else ()


def values_in(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the names and values inside a value of any type, down to a depth."""
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, Tensor):
        if flaw(value) is None and value.numel() <= _ELEMENTS:
            yield name, value
    elif depth and isinstance(value, (torch.device, torch.dtype)):
        yield name, str(value)
    elif depth and isinstance(value, (set, frozenset)):
        yield f"len({name})", len(value)
        if all(isinstance(item, _PLAIN) for item in value):
            yield name, str(sorted(map(repr, value)))
    elif depth and isinstance(value, Mapping):
        for index, (key, item) in enumerate(list(value.items())[:_ITEMS]):
            label = repr(key) if isinstance(key, _PLAIN) else f"entry {index}"
            yield from values_in(item, f"{name}[{label}]", depth - 1)
    elif depth and isinstance(value, (list, tuple, deque)):
        yield f"len({name})", len(value)
        for index, item in enumerate(list(value)[:_ITEMS]):
            yield from values_in(item, f"{name}[{index}]", depth - 1)
    elif depth and isinstance(value, nn.Module):  # not a submodule: it is in a list, or held by another object
        if not is_metric(value):
            yield from ((f"{name}.{key}", p) for key, p in value.named_parameters() if flaw(p) is None)
    # Each rank has its own position in a loader or a sampler.
    elif depth and has_state(value) and not (is_optimizer(value) or hasattr(value, "__iter__")):
        yield from values_in(value.state_dict(), f"{name}.state_dict()", depth - 1)
    elif (memory := _memory(value)) is not None and memory.nbytes <= _ELEMENTS and "O" not in memory.format:
        data = memory.tobytes() + b"."  # `frombuffer` refuses empty data
        yield name, torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _memory(value: Any) -> memoryview | None:
    """Return the contents of bytes and of arrays, including those of numpy, which may not be installed."""
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
