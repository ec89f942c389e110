"""The private names of torchmetrics on which metrics in a join rely (seen in torchmetrics 1.0.3 to 1.9.0).

torchmetrics itself is never imported: a metric is recognized by its attributes.
`tests/core/_participants/test_metrics.py` fails when one of these names is gone.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from torch_join._base.errors import UnsupportedError

# The method that gathers and reduces a metric's states; `sync` has saved the rank's own states before.
SYNC_METHOD = "_sync_dist"
# Metrics around other metrics that have no state themselves and only pass calls on.
_PASSING_ON = {
    "BinaryTargetTransformer",
    "ClasswiseWrapper",
    "CompositionalMetric",
    "LambdaInputTransformer",
    "MultioutputWrapper",
    "MultitaskWrapper",
}


def is_metric(thing: Any) -> bool:
    """Whether `thing` is a torchmetrics metric (not a collection)."""
    return isinstance(thing, nn.Module) and hasattr(thing, "dist_sync_fn") and hasattr(thing, "_reductions")


def parts(metric: Any) -> list[Any]:
    """Return the metrics that `metric` is made of."""
    return [module for module in metric.modules() if module is not metric and is_metric(module)]


def is_passing_on(metric: Any) -> bool:
    """Whether a metric around other metrics is one of torchmetrics' own that only pass calls on."""
    return type(metric).__name__ in _PASSING_ON and type(metric).__module__.startswith("torchmetrics.")


def has_own_sync(metric: Any) -> bool:
    """Whether the class of `metric` gathers its states in its own way."""
    owner = next(cls for cls in type(metric).__mro__ if SYNC_METHOD in vars(cls))
    return owner.__module__ != "torchmetrics.metric"


def is_own_gather(function: Any) -> bool:
    """Whether `function`, which gathers one tensor, is torchmetrics' own."""
    return function is None or getattr(function, "__module__", "") == "torchmetrics.utilities.distributed"


def reductions(metric: Any) -> dict[str, Callable[..., Any] | None]:
    """Return the functions that reduce the states of `metric`, by the states' names."""
    return dict(metric._reductions)


class State(NamedTuple):
    """One state of a metric: a tensor, or a list of tensors."""

    listed: bool
    tensors: list[Tensor]


def own_states(metric: Any) -> dict[str, State]:
    """Return this rank's own states, also while `metric` holds the synced ones.

    Raises:
        UnsupportedError: A state holds an object that is not a tensor.
    """
    saved = metric._cache if metric._is_synced and metric._cache is not None else {}
    found: dict[str, State] = {}
    for name, reduction in reductions(metric).items():
        value = saved[name] if name in saved else getattr(metric, name)
        tensors = [value] if isinstance(value, Tensor) else list(value)
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise UnsupportedError(
                f"{type(metric).__name__} has a state {name!r} that is not a tensor, which cannot be synced on uneven"
                " inputs. Compute the metric on each rank (sync_on_compute=False)."
            )
        if len(tensors) > 1 and _concatenates(reduction):
            tensors = [reduction(tensors)]
        found[name] = State(not isinstance(value, Tensor), tensors)
    return found


def update_count(metric: Any) -> int:
    """Return how often `metric` has been updated since its last reset."""
    return int(metric._update_count)


def set_update_count(metric: Any, count: int) -> None:
    """Set how often `metric` has been updated."""
    metric._update_count = count


def will_sync(metric: Any) -> bool:
    """Whether `compute` will sync, or did when it was last called."""
    return metric._to_sync and bool(metric.distributed_available_fn())


def syncing(frame: FrameType | None) -> Any:
    """Return the metric, or the collection, whose sync gathers states at `frame`, if there is one.

    Sums over this step's batch (`dist_sync_on_step=True`) and concatenated lists are ignored: the zeros, or missing
    rows, of joined ranks do not change them.
    """
    found: Any = None
    is_neutral = False
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torchmetrics."):
            names = frame.f_code.co_varnames + frame.f_code.co_freevars
            one: Any = frame.f_locals.get("self") if "self" in names else None
            if found is None and is_metric(one):
                kinds = {getattr(each, "__name__", "") for each in reductions(one).values()}
                is_neutral = kinds <= {"dim_zero_sum", "dim_zero_cat"} and not one._should_unsync
            if is_metric(one) or (found is not None and callable(getattr(one, "compute", None))):
                found = one
        frame = frame.f_back
    return None if is_neutral else found


def forget_value(metric: Any) -> None:
    """Make the next `compute` of `metric` compute (and sync) anew."""
    metric._computed = None


@contextmanager
def unchanged(metric: Any) -> Iterator[None]:
    """Restore the state of `metric` afterwards."""
    bookkeeping = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
    state = {**{name: _copied(getattr(metric, name)) for name in reductions(metric)}, **bookkeeping}
    try:
        yield
    finally:
        for name, value in state.items():
            setattr(metric, name, value)


def _copied(state: Any) -> Any:
    if isinstance(state, list):
        return [*map(_copied, state)]
    return state.detach().clone() if isinstance(state, Tensor) else copy.deepcopy(state)


@functools.cache
def link_collections() -> None:
    """Make each later update of a collection share the state that several of its metrics have in common.

    Older torchmetrics update the first of these metrics, and share its state only when the collection computes. But a
    joined rank sends its states without that, and the other metrics keep results computed before the update.
    """
    torchmetrics: Any = sys.modules["torchmetrics"]
    kind, both = torchmetrics.MetricCollection, {name: torchmetrics.SumMetric() for name in "ab"}
    tried = kind(both)
    tried.update(1.0)
    tried.update(1.0)
    if update_count(both["a"]) == update_count(both["b"]):
        return
    own = kind.update

    @functools.wraps(own)
    def update(collection: Any, *args: Any, **kwargs: Any) -> None:
        own(collection, *args, **kwargs)
        if collection._groups_checked:
            collection._compute_groups_create_state_ref()
            for metric in collection._modules.values():
                forget_value(metric)

    kind.update = update


def _concatenates(reduction: Callable[..., Any] | None) -> TypeGuard[Callable[..., Any]]:
    """Whether a reduction is torchmetrics' own for "cat"."""
    name = getattr(reduction, "__name__", ""), getattr(reduction, "__module__", "")
    return name == ("dim_zero_cat", "torchmetrics.utilities.data")
