"""Fabric's own methods that never reach its strategy: where that is one of ours, they ask it first.

They are replaced in Fabric's class, so that it makes no difference which import has come first, and that a script need
not know of another class. With any other strategy each is what it was.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any, cast

from lightning.fabric import Fabric
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars

from lightning_join import _compat_fabric as _compat
from lightning_join._fabric.joins import Joins
from lightning_join._fabric.operations import Operations
from torch_join import UnsupportedError


def ask_strategies() -> None:
    """Replace them."""
    for name in ("setup", "setup_module", "setup_dataloaders"):
        setattr(Fabric, name, _asking(getattr(Fabric, name)))
    for name, instead in {"print": _print, "log_dict": _log_dict, "call": _call, "rank_zero_first": _refuse}.items():
        setattr(Fabric, name, _asking(getattr(Fabric, name), instead))


def pass_on_zero_grad() -> None:
    """Have an optimizer that was set up pass `zero_grad` on to the one inside, and not to that one's class.

    Else whoever listens to that object does not hear of it.
    """
    setattr(_compat.FabricOptimizer, "zero_grad", _zero_grad)  # noqa: B010  it has none of its own


def _asking(own: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
    @wraps(own)
    def method(fabric: Fabric, /, *args: Any, **kwargs: Any) -> Any:
        strategy, tail = cast(object, fabric.strategy), None
        if isinstance(strategy, Joins):
            strategy.fabric = fabric
            tail = None if instead is None else strategy.find_tail() or strategy.find_placeholders()
        return own(fabric, *args, **kwargs) if tail is None else cast(Any, instead)(tail, own, fabric, *args, **kwargs)

    return method


def _zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
    optimizer.optimizer.zero_grad(*args, **kwargs)


def _print(tail: Operations, own: Callable[..., Any], fabric: Fabric, /, *args: Any, **kwargs: Any) -> None:
    active, runs_placeholders = tail.driver.find_active(), tail.driver.placeholders is not None
    if tail.driver.find_acting_main() or (runs_placeholders and 0 not in active and tail.members.rank == active[0]):
        print(*args, **kwargs)
    elif 0 in active or not runs_placeholders:
        own(fabric, *args, **kwargs)


def _log_dict(
    tail: Operations, own: Callable[..., Any], fabric: Fabric, metrics: Mapping[str, Any], step: int | None = None
) -> None:
    if tail.driver.find_main_joined():
        tail.log(dict(convert_tensors_to_scalars(metrics)), step)
    elif (placeholders := tail.driver.placeholders) is not None:
        if (values := placeholders.logged_values(dict(convert_tensors_to_scalars(metrics)))) is None:
            return
        metrics = values
    own(fabric, metrics, step)


def _call(tail: Operations, own: Callable[..., Any], fabric: Fabric, /, *args: Any, **kwargs: Any) -> None:
    with _compat.acting_for_main() if tail.driver.find_acting_main() else nullcontext():
        own(fabric, *args, **kwargs)


def _refuse(tail: Operations, own: Callable[..., Any], fabric: Fabric, /, *args: Any, **kwargs: Any) -> Any:
    if tail.driver.placeholders is not None:
        return own(fabric, *args, **kwargs)
    raise UnsupportedError(
        "fabric.rank_zero_first was called in a step in which some rank has no batch; it makes a process group, for"
        " which all ranks are needed. Do this before the loop."
    )
