"""Fabric's methods that never call its strategy: with a strategy of this package, they ask it first.

They are replaced in the `Fabric` class itself, so that the order of imports does not matter, and scripts need no other
class. With any other strategy, they are unchanged.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any, cast

from lightning.fabric import Fabric
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_join import _compat_fabric as _compat
from lightning_join._fabric.joins import Joins
from lightning_join._fabric.operations import Operations
from torch_join import JoinValueError, UnsupportedError
from torch_join.integration import setting


def ask_strategies() -> None:
    """Replace Fabric's methods."""
    for name in ("setup", "setup_module", "setup_dataloaders"):
        setattr(Fabric, name, _asking(getattr(Fabric, name)))
    for name, variant in {"print": _print, "log_dict": _log_dict, "call": _call, "rank_zero_first": _refuse}.items():
        setattr(Fabric, name, _asking(getattr(Fabric, name), variant))


def pass_on_zero_grad() -> None:
    """Make Fabric's optimizer wrapper call `zero_grad` of the inner object instead of its class.

    Otherwise, replacements of the inner object's method would not be called.
    """
    wrapper: Any = _compat.FabricOptimizer  # which does not define the method
    wrapper.zero_grad = lambda optimizer, *args, **kwargs: optimizer.optimizer.zero_grad(*args, **kwargs)


def _asking(own: Callable[..., Any], variant: Callable[..., Any] | None = None) -> Callable[..., Any]:
    @wraps(own)
    def method(fabric: Fabric, /, *args: Any, **kwargs: Any) -> Any:
        strategy, tail = cast(object, fabric.strategy), None
        if isinstance(strategy, Joins):
            strategy.fabric = fabric
            if own.__name__ == "setup_dataloaders" and kwargs.pop("own_shards", False):
                if kwargs.get("use_distributed_sampler"):
                    raise JoinValueError(
                        "own_shards=True cannot be combined with use_distributed_sampler=True. Remove one of them."
                    )
                kwargs["use_distributed_sampler"] = False
            tail = None if variant is None else strategy.find_tail() or strategy.find_placeholders()
        return own(fabric, *args, **kwargs) if tail is None else cast(Any, variant)(tail, own, fabric, *args, **kwargs)

    return method


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
    with setting(rank_zero_only, rank=0) if tail.driver.find_acting_main() else nullcontext():
        own(fabric, *args, **kwargs)


def _refuse(tail: Operations, own: Callable[..., Any], fabric: Fabric, /, *args: Any, **kwargs: Any) -> Any:
    if tail.driver.placeholders is not None:
        return own(fabric, *args, **kwargs)
    raise UnsupportedError(
        "fabric.rank_zero_first was called in a step in which some rank has no batch, but it creates a process group,"
        " which needs all ranks. Call it before the loop."
    )
