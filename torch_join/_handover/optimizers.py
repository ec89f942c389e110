"""The handover of an optimizer, and of the optimizers that it wraps (as Lookahead and SAM do).

For each optimizer this copies the hyperparameters of every group, the parameters (such as fp32 master weights, which no
model holds), and the state of every parameter, but not of a sharded optimizer (ZeroRedundancyOptimizer), since each
rank owns a shard. If a class has its own state dict, the contents of that are copied too.

Tensors and containers keep their identity, since other objects may hold them. torch's `load_state_dict` replaces them
and casts the tensors, so the loaded values are copied into the old ones afterwards.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_join._base.errors import JoinValueError
from torch_join._base.pytree import Captured, Place
from torch_join._compat import optimizer_state as _compat_state
from torch_join._handover.state import Capture, Restore, has_state

_CONTAINERS = ("state", "param_groups")


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer, torch's or a similar object."""
    return isinstance(value, Optimizer) or (has_groups(value) and has_state(value))


def has_groups(value: Any) -> bool:
    """Whether `value` has parameter groups; a mock, which has an attribute of every name, does not."""
    return isinstance(getattr(value, "param_groups", None), (list, tuple))


def with_wrapped(optimizer: Any) -> list[Any]:
    """Return `optimizer` and, recursively, the optimizers in its attributes, but not those inside a sharded one."""
    found = [optimizer]
    for one in found:  # the list grows meanwhile
        held = () if _compat_state.is_sharded(one) else list(vars(one).values())
        for value in held:
            items = value if isinstance(value, (list, tuple)) else value.values() if type(value) is dict else (value,)
            found += [item for item in items if is_optimizer(item) and not any(item is known for known in found)]
    return found


def capture_optimizer(optimizer: Any, capture: Capture, name: str) -> Captured:
    """Capture an optimizer and those that it wraps."""
    found = with_wrapped(optimizer)
    for one in found:
        capture.places |= {id(p): place for place, p in _places(one)}
    hints = {"sizes": [_sizes(one) for one in found], "stepped": [_compat_state.was_stepped(one) for one in found]}
    return Captured([_capture(one, capture, name) for one in found], hints)


def _capture(optimizer: Any, capture: Capture, name: str) -> dict[str, Any]:
    groups = [
        [
            capture.tree({k: v for k, v in group.items() if k != "params"}, f"{name}: param_groups[{index}]")
            for index, group in enumerate(groups)
        ]
        for groups in _group_lists(optimizer)
    ]
    parameters = {place: p for place, p in _places(optimizer) if id(p) not in capture.local}
    has_own = not _compat_state.is_sharded(optimizer) and _compat_state.has_own_state(optimizer)
    return {
        "groups": groups,
        "parameters": {place: capture.tensor(p, f"{name}: {place}") for place, p in parameters.items()},
        "requires_grad": {place: p.requires_grad for place, p in parameters.items()},
        "state": {
            shared: capture.tree(_plain(optimizer.state[key]), f"{name}: state[{shared}]")
            for shared, key, _ in _states(optimizer, capture.local)
            if key in optimizer.state
        },
        "own": capture.tree(optimizer.state_dict(), f"{name}.state_dict()") if has_own else None,
    }


def restore_optimizer(captured: Captured, optimizer: Any, restore: Restore, name: str) -> None:
    """Restore an optimizer, and those that it wraps, from captured values."""
    found = with_wrapped(optimizer)
    if len(found) != len(captured.hints["sizes"]):
        raise JoinValueError(
            f"{name} wraps {len(found) - 1} optimizers here and {len(captured.hints['sizes']) - 1} on the source rank."
        )
    for one, sizes in zip(found, captured.hints["sizes"], strict=True):
        if _sizes(one) != sizes:
            raise JoinValueError(
                f"{name} has groups of {_sizes(one)} parameters here, but of {sizes} on the source rank."
            )
    actions: list[Callable[[], Any]] = []
    for one, state in zip(found, captured.state, strict=True):
        restore.places |= dict(_places(one))
        _restore(state, one, restore, name, actions)
    # After the tensors themselves, so that the state dicts share them and need no extra memory.
    loads = [
        (one, restore.value(state["own"], one.state_dict(), f"{name}.state_dict()", reuse=False))
        for one, state in zip(found, captured.state, strict=True)
        if state["own"] is not None
    ]

    def act() -> None:
        for action in actions:
            action()
        if loads:  # some classes can load only once their state has the right form; then the values are set again
            _load(found, loads)
            for action in actions:
                action()
        for one, stepped in zip(found, captured.hints["stepped"], strict=True):
            if stepped:
                _compat_state.mark_stepped(one)

    restore.later(act)


def _restore(
    captured: dict[str, Any], optimizer: Any, restore: Restore, name: str, actions: list[Callable[[], Any]]
) -> None:
    for trees, groups in zip(captured["groups"], _group_lists(optimizer), strict=True):
        for index, (tree, group) in enumerate(zip(trees, groups, strict=True)):
            values = restore.value(tree, group, f"{name}: param_groups[{index}]")
            actions.append(lambda g=group, v=values: _replace(g, {"params": g["params"], **v}))  # type: ignore[misc]
    parameters = dict(_places(optimizer))
    for place, slot in captured["parameters"].items():
        restore.parameter(slot, parameters[place], captured["requires_grad"][place], f"{name}: {place}")
    states = captured["state"]
    own = {shared: (key, device) for shared, key, device in _states(optimizer, restore.local)}
    for shared, (key, _) in own.items():
        if shared not in states and key in optimizer.state:
            actions.append(lambda key=key: optimizer.state.pop(key, None))  # type: ignore[misc]
    for shared, tree in states.items():
        key, device = own.get(shared, (shared, None))
        entry = optimizer.state.get(key, {})
        values = restore.value(tree, entry, f"{name}: state[{shared}]", device)
        actions.append(lambda key=key, e=entry, v=values: optimizer.state.__setitem__(key, _replace(e, v)))  # type: ignore[misc]


def _load(optimizers: list[Any], loads: list[tuple[Any, Any]]) -> None:
    """Load state dicts, and put the old containers back in place of new ones, since other objects may hold them."""
    before = [{name: vars(one)[name] for name in _CONTAINERS if name in vars(one)} for one in optimizers]
    for one, state in loads:
        one.load_state_dict(state)
    new = [
        (vars(one)[name], old)
        for one, olds in zip(optimizers, before, strict=True)
        for name, old in olds.items()
        if vars(one).get(name, old) is not old
    ]
    for one in optimizers:
        for name, value in list(vars(one).items()):
            for container, old in new:
                if value is container:
                    vars(one)[name] = old


def _sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _places(optimizer: Any) -> Iterator[tuple[Place, Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield Place(index, position), parameter


def _group_lists(optimizer: Any) -> list[list[dict[str, Any]]]:
    # A sharded optimizer copies hyperparameters between its own groups and the inner ones at each step.
    inner = [optimizer.optim.param_groups] if _compat_state.is_sharded(optimizer) else []
    return [optimizer.param_groups, *inner]


def _states(optimizer: Any, local: frozenset[int]) -> Iterator[tuple[Any, Any, torch.device | None]]:
    """Yield, for every possible entry of `state`, a name that all ranks share, the key, and the device."""
    if _compat_state.is_sharded(optimizer) or not isinstance(getattr(optimizer, "state", None), dict):
        return
    for place, parameter in _places(optimizer):
        if id(parameter) not in local:
            yield place, parameter, parameter.device
    for key in list(optimizer.state):
        if not isinstance(key, Tensor):
            yield key, key, None


def _plain(entry: Any) -> Any:
    return dict(entry) if isinstance(entry, dict) else entry


def _replace(entries: Any, values: Any) -> Any:
    if not (isinstance(entries, dict) and isinstance(values, dict)):
        return values
    entries.clear()
    entries.update(values)
    return entries
