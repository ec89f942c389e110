"""torchmetrics' metrics: what they sync comes from the ranks that have something to say, and no others.

A zero contribution is wrong for states that are reduced by max, min or mean, or concatenated, so a rank
that has nothing to contribute contributes nothing. A metric keeps its states where they are: they are
sharded by nature and never handed over.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_join._base import compat_metrics as _compat_metrics
from torch_join._base.errors import JoinTypeError, JoinValueError, UnsupportedError
from torch_join.joinables._metrics.exchange import Exchange
from torch_join.joinables._torch.joinable import WrappingJoinable
from torch_join.joinables.part import Part

if TYPE_CHECKING:
    from torch_join.join import Join

_SYNC, _RESET = "sync", "reset"


def holds_metrics(thing: Any) -> bool:
    """Whether `thing` is a metric of torchmetrics, or computes something with some (a `MetricCollection`)."""
    if not isinstance(thing, nn.Module) or not callable(getattr(thing, "compute", None)):
        return False
    return any(_compat_metrics.is_metric(module) for module in thing.modules())


class MetricPart(Part):
    """A metric of torchmetrics, or a `MetricCollection`.

    Where a metric syncs in its forward (`dist_sync_on_step=True`) the active ranks contribute this step's
    batch. Where it syncs in `compute()`, every rank that has updated it contributes what it has
    accumulated, also one that has joined. A `reset()` in the tail resets the joined ranks' as well.

    Raises:
        UnsupportedError: It syncs over another process group, has a `dist_sync_fn` or `_sync_dist` of its
            own, or is a wrapper with a state of its own (`MinMaxMetric`, `Running`, `BootStrapper`,
            `MetricTracker`).

    Limits:
        A copy made inside the `with` (`clone`) is not known to Join, and after the `with` torchmetrics syncs
        as ever. After a plain `for` loop `compute()` belongs outside of the `with`: inside, it raises if other
        ranks are still in theirs. Inside one it needs a model, or a `dist_sync_on_step`, that meets.
    """

    kinds: ClassVar[dict[str, Any]] = {_SYNC: tuple[int, bool], _RESET: int}

    def __init__(self, join: "Join", index: int, thing: nn.Module) -> None:
        super().__init__(join, index)
        self._metrics: list[Any] = [module for module in thing.modules() if _compat_metrics.is_metric(module)]
        if hasattr(thing, "increment"):
            raise UnsupportedError(
                f"{type(thing).__name__} makes new metrics as it goes, which Join cannot know of. Give Join the metric"
                " of each epoch instead."
            )
        for metric in self._metrics:
            _check(metric, metric.process_group, join)
        self._forwards = 0  # how many are on the stack
        self._hidden: list[Any] = []  # whose `compute` runs, although not updated on this rank

    def enter(self) -> None:
        if any(isinstance(vars(metric).get("reset"), _Override) for metric in self._metrics):
            raise JoinValueError("A metric was given to Join twice: give it alone or in its collection.")
        for position, metric in enumerate(self._metrics):
            self._override(metric, "forward", self._forward)
            self._override(metric, "reset", partial(self._reset, position))
            if not _compat_metrics.parts(metric):
                self._override(metric, "compute", self._compute)
                self._override(metric, _compat_metrics.SYNC_METHOD, partial(self._sync, position))

    def answer(self, kind: str, payload: Any) -> None:
        if kind == _RESET:
            self._metrics[payload].reset()
            return
        position, in_forward = payload
        metric = self._metrics[position]
        Exchange(self.join, metric, not in_forward and _compat_metrics.update_count(metric) > 0)
        # All joined ranks have taken part, so all have read up to here.
        self.join._channel.forget(delete=self.join.rank == self.join.joined_ranks[0])

    def close(self, words: Any, source: int) -> None:
        # Ranks have computed at different steps. A value that only some still have would keep these out
        # of the next sync.
        for metric in self._metrics:
            _compat_metrics.forget_value(metric)

    # ------------------------------------------------------------ what replaces a metric's methods

    def _forward(self, metric: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._leads_plain_loops(metric):
            self.join.before_forward(0)
        self._forwards += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._forwards -= 1

    def _reset(self, position: int, metric: Any, reset: Callable[[], None]) -> None:
        if self._forwards == 0:  # a forward resets too, and puts the state back
            self.announce(_RESET, position)
        reset()

    def _compute(self, metric: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _compat_metrics.update_count(metric) > 0 or not _compat_metrics.will_sync(metric):
            return compute(*args, **kwargs)
        # Not updated on this rank, but perhaps on others: torchmetrics would warn of what is no mistake.
        self._hidden.append(metric)
        _compat_metrics.set_update_count(metric, 1)
        try:
            return compute(*args, **kwargs)
        finally:
            _compat_metrics.set_update_count(metric, 0)
            self._hidden.pop()

    def _sync(
        self,
        position: int,
        metric: Any,
        sync_dist: Callable[..., None],
        dist_sync_fn: Any = None,
        process_group: Any = None,
    ) -> None:
        _check(metric, process_group or metric.process_group, self.join, dist_sync_fn)
        self.announce(_SYNC, (position, self._forwards > 0))
        hidden = any(metric is one for one in self._hidden)
        contributions = Exchange(self.join, metric, _compat_metrics.update_count(metric) > 0 and not hidden).results()
        if not contributions:
            if hidden and self.join.rank == 0:
                warnings.warn(
                    f"{type(metric).__name__}.compute was called before any rank has updated the metric.", stacklevel=2
                )
            sync_dist(lambda tensor, group=None: [tensor])
            return
        # torchmetrics asks once per tensor: give it one per state, and answer with all that is there.
        answers: list[tuple[Tensor, list[Tensor]]] = []
        for name in _compat_metrics.reductions(metric):
            found = [contribution[name] for contribution in contributions]
            tensors = [tensor for state in found for tensor in state.tensors]
            stand_in = torch.empty(0, device=metric.device)
            answers.append((stand_in, tensors))
            setattr(metric, name, [stand_in][: len(tensors)] if any(state.listed for state in found) else stand_in)

        def gather(asked: Tensor, group: Any = None) -> list[Tensor]:
            return next((tensors for stand_in, tensors in answers if stand_in is asked), [asked])

        sync_dist(gather)

    def _override(self, metric: Any, name: str, function: Callable[..., Any]) -> None:
        missing = object()
        before = vars(metric).get(name, missing)
        vars(metric)[name] = _Override(metric, name, partial(function, metric, getattr(metric, name)))

        def restore() -> None:
            if before is missing:
                del vars(metric)[name]
            else:
                vars(metric)[name] = before

        self._undo.append(restore)

    def _leads_plain_loops(self, metric: Any) -> bool:
        """Whether the forward of `metric` is where ranks in a plain loop meet, for lack of a model's."""
        join = self.join
        if join._in_loop or join._has_model or join._first_custom or not metric.dist_sync_on_step:
            return False
        parts = [part for part in join._parts if isinstance(part, MetricPart)]
        return metric is next(one for part in parts for one in part._metrics if one.dist_sync_on_step)


class _Override:
    """Stands in for a method of one metric; in a copy of the metric it becomes the copy's own method again."""

    def __init__(self, metric: Any, name: str, function: Callable[..., Any]) -> None:
        self._metric, self._name = metric, name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._metric, self._name)


class JoinableMetric(WrappingJoinable):
    """A metric of torchmetrics, or a `MetricCollection`, as a `Joinable`.

    `Join([JoinableMetric(metric)])` of this package is the same as `Join([metric])`. In torch's, too, what is
    synced in a step (`dist_sync_on_step=True`, or a `compute()`) comes from the active ranks, or from all
    that have updated it, and from no others; a `reset()` resets it on the joined ranks as well.

    Args:
        metric: The metric.

    Raises:
        JoinTypeError: It is not a metric of torchmetrics.

    Limits:
        In torch's `Join` a rank leaves its loop alone, so that there `compute()` belongs into a step or after
        the `with`, where torchmetrics syncs as ever; between the two it would wait for ranks that are not
        there. Without a model before it one of its metrics has `dist_sync_on_step=True`, and the first of
        these is called once per step. Joinables that are not of this package come before it.
    """

    def __init__(self, metric: nn.Module) -> None:
        if not holds_metrics(metric):
            raise JoinTypeError(f"JoinableMetric takes a metric of torchmetrics, not {type(metric).__name__}.")
        self._metrics: list[Any] = [module for module in metric.modules() if _compat_metrics.is_metric(module)]
        super().__init__(metric, self._metrics[0].process_group, self._metrics[0].device)

    def make_part(self, join: Any, index: int) -> Part:
        return MetricPart(join, index, self.wrapped)

    def leads(self) -> bool:
        return any(metric.dist_sync_on_step for metric in self._metrics)

    def is_done(self, kind: str, payload: Any) -> bool:
        return False  # until the next step begins

    def is_replicated(self) -> bool:
        return False


# ---------------------------------------------------------------- checks


def _check(metric: Any, group: Any, join: "Join", gather: Any = None) -> None:
    name = type(metric).__name__
    if _compat_metrics.parts(metric):
        if not _compat_metrics.is_passing_on(metric):
            raise UnsupportedError(
                f"{name} keeps a state of its own besides its metrics', which ranks that have joined cannot follow."
                " Give Join the metrics that it is made of, and compute the rest outside."
            )
        return
    if not all(_compat_metrics.is_own_gather(function) for function in (metric.dist_sync_fn, gather)):
        raise UnsupportedError(
            f"{name} has a dist_sync_fn of its own, in which ranks that have joined cannot take part. Leave it out:"
            " Join brings one for uneven inputs."
        )
    if _compat_metrics.has_own_sync(metric):
        raise UnsupportedError(
            f"{name} syncs in a way of its own (it overrides {_compat_metrics.SYNC_METHOD}), in which ranks that have"
            " joined cannot take part. Do not give it to Join, and compute it after the `with`."
        )
    if (group or dist.group.WORLD) != join.group:
        raise UnsupportedError(
            f"{name} syncs over another process group than Join's. Create it with process_group=<the group of the"
            " other joinables>."
        )
