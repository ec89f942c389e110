"""torchmetrics metrics: only ranks that have something to contribute take part in a sync with their states.

Zeros would be wrong for states that are reduced by max, min or mean, or concatenated, so a rank that has nothing to
contribute sends nothing. Each rank keeps its own states: they are sharded by nature and never handed over.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinDataWarning, JoinValueError, UnsupportedError
from torch_join._base.membership import MeetingPoint
from torch_join._base.specs import raw_bytes
from torch_join._compat import metrics as _compat_metrics
from torch_join._compat.metrics import State, own_states
from torch_join._control.codec import closed
from torch_join._handover.transfer import exchange
from torch_join._participants.hook import Hook
from torch_join._participants.participant import Driver, Participant

_SYNC, _RESET = "sync", "reset"


class MetricParticipant(Participant):
    """A torchmetrics metric, or a `MetricCollection`.

    If a metric syncs in its forward (`dist_sync_on_step=True`), the active ranks contribute this step's batch. If it
    syncs in `compute()`, every rank that has updated it contributes its accumulated states, even a joined rank. A
    `reset()` in the tail also resets the metric on the joined ranks.

    Raises:
        UnsupportedError: The metric syncs over another process group, has a custom `dist_sync_fn` or `_sync_dist`, or
            is a wrapper with its own state (`MinMaxMetric`, `Running`, `BootStrapper`, `MetricTracker`).

    Limits:
        Join does not know copies made inside the `with` (`clone`). After the `with`, torchmetrics syncs as usual. After
        a plain `for` loop, call `compute()` outside the `with`: inside, it raises if other ranks are still in their
        loops. In such a loop, it needs a model, or a metric with `dist_sync_on_step`, at which the ranks meet.
    """

    kinds: ClassVar[dict[str, Any]] = {_SYNC: tuple[int, bool], _RESET: int}

    def __init__(self, driver: Driver, index: int, thing: nn.Module) -> None:
        super().__init__(driver, index)
        self.metrics: list[Any] = [module for module in thing.modules() if _compat_metrics.is_metric(module)]
        if hasattr(thing, "increment"):
            raise UnsupportedError(
                f"{type(thing).__name__} creates new metrics during training, which Join cannot track. Pass each"
                " epoch's metric to Join instead."
            )
        for metric in self.metrics:
            check_metric(metric, metric.process_group, driver)
        self.forwards = 0  # the number of metric forwards on the call stack
        self.hidden: list[Any] = []  # metrics whose `compute` is running, although this rank has not updated them

    def enter(self) -> None:
        if any(isinstance(vars(metric).get("reset"), Hook) for metric in self.metrics):
            raise JoinValueError("A metric was passed to Join twice. Pass either the metric or its collection.")
        if self.metrics:
            _compat_metrics.link_collections()
        for position, metric in enumerate(self.metrics):
            self.follow(position, metric)

    def follow(self, position: int, metric: Any) -> None:
        """Redirect a metric's methods to this participant."""
        self.override(metric, "forward", partial(self.forward, metric))
        # A forward also calls `reset`, but then restores the state.
        self.announce_calls(metric, "reset", _RESET, lambda: position, repeats=lambda: not self.forwards)
        if not _compat_metrics.parts(metric):
            self.override(metric, "compute", partial(self.compute, metric))
            self.override(metric, _compat_metrics.SYNC_METHOD, partial(self.sync, position, metric))

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == _RESET:
            self.metrics[payload].reset()
            return
        position, in_forward = payload
        metric = self.metrics[position]
        exchange_states(self.driver, metric, not in_forward and _compat_metrics.update_count(metric) > 0)

    def close(self, message: Any, source: int) -> None:
        # Ranks have computed at different steps. Ranks that still hold a computed value would skip the next sync.
        for metric in self.metrics:
            _compat_metrics.forget_value(metric)

    # ------------------------------------------------------------ replacements of a metric's methods

    def forward(self, metric: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._leads_plain_loops(metric):
            self.driver.before_forward(float)  # `float()`: a count of 0
        with setting(self, forwards=self.forwards + 1):
            return forward(*args, **kwargs)

    def compute(self, metric: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _compat_metrics.update_count(metric) > 0 or not _compat_metrics.will_sync(metric):
            return compute(*args, **kwargs)
        # Other ranks may have updated the metric. torchmetrics would warn on this rank, although this is no mistake.
        self.hidden.append(metric)
        _compat_metrics.set_update_count(metric, 1)
        try:
            return compute(*args, **kwargs)
        finally:
            _compat_metrics.set_update_count(metric, 0)
            self.hidden.pop()

    def sync(
        self,
        position: int,
        metric: Any,
        sync_dist: Callable[..., None],
        dist_sync_fn: Any = None,
        process_group: Any = None,
    ) -> None:
        check_metric(metric, process_group or metric.process_group, self.driver, dist_sync_fn)
        self.announce(_SYNC, (position, self.forwards > 0))
        hidden = any(metric is one for one in self.hidden)
        has_own = _compat_metrics.update_count(metric) > 0 and not hidden
        contributions = exchange_states(self.driver, metric, has_own)
        if not contributions:
            if hidden and self.members.rank == 0:
                JoinDataWarning.warn(
                    f"{type(metric).__name__}.compute was called before any rank updated the metric. Call update first."
                )
            sync_dist(lambda tensor, group=None: [tensor])
            return
        # torchmetrics gathers once per tensor: give it one tensor per state, and return all contributions for it.
        answers: list[tuple[Tensor, list[Tensor]]] = []
        for name in _compat_metrics.reductions(metric):
            found = [contribution[name] for contribution in contributions]
            tensors = [tensor for state in found for tensor in state.tensors]
            placeholder = torch.empty(0, device=metric.device)
            answers.append((placeholder, tensors))
            setattr(
                metric, name, [placeholder][: len(tensors)] if any(state.listed for state in found) else placeholder
            )

        def gather(asked: Tensor, group: Any = None) -> list[Tensor]:
            return next((tensors for placeholder, tensors in answers if placeholder is asked), [asked])

        sync_dist(gather)

    def _leads_plain_loops(self, metric: Any) -> bool:
        """Whether ranks in a plain loop meet at the forward of `metric`, because there is no model."""
        driver = self.driver
        if driver.meets_at is not MeetingPoint.FORWARD or driver.sees_steps or not metric.dist_sync_on_step:
            return False
        participants = [each for each in self.tail_log.participants if isinstance(each, MetricParticipant)]
        return metric is next(one for each in participants for one in each.metrics if one.dist_sync_on_step)


# ---------------------------------------------------------------- checks


def check_metric(metric: Any, group: Any, driver: Driver, gather: Any = None) -> None:
    name = type(metric).__name__
    if _compat_metrics.parts(metric):
        if not _compat_metrics.is_passing_on(metric):
            raise UnsupportedError(
                f"Besides its inner metrics, {name} keeps state of its own, and finished ranks cannot follow that"
                " state. Pass the inner metrics to Join, and compute the rest outside."
            )
        return
    if not all(_compat_metrics.is_own_gather(function) for function in (metric.dist_sync_fn, gather)):
        raise UnsupportedError(
            f"{name} has its own dist_sync_fn, which finished ranks cannot take part in. Remove dist_sync_fn: Join"
            " provides one for uneven inputs."
        )
    if _compat_metrics.has_own_sync(metric):
        raise UnsupportedError(
            f"{name} overrides {_compat_metrics.SYNC_METHOD}, and finished ranks cannot take part in its syncs. Do"
            " not pass it to Join, and compute it after the `with`."
        )
    if (group or dist.group.WORLD) != driver.members.group:
        raise UnsupportedError(
            f"{name} syncs over a different process group than Join does. Create it with process_group=<the group of"
            " the other joinables>."
        )


# ---------------------------------------------------------------- states, sent as bytes


@closed("state")
class _Spec(NamedTuple):
    """The description of a tensor that is sent as contiguous bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Schema = dict[str, tuple[bool, list[_Spec]]]


def exchange_states(driver: Driver, metric: Any, contributes: bool) -> list[dict[str, State]]:
    """Return the states of each rank that contributes, in order of ranks; this rank's own states keep their graph.

    Every rank calls this. It describes its contribution, if any, and then sends its states as bytes.
    """
    own = own_states(metric) if contributes else {}
    form = {
        name: (state.listed, [_Spec(tuple(t.shape), t.dtype, t.device.type) for t in state.tensors])
        for name, state in own.items()
    }
    schemas: list[_Schema | None] = driver.tail_log.channel.gather(form if contributes else None, of=_Schema | None)

    rows: dict[str, list[Tensor]] = {}
    for kind in sorted({spec.device for schema in schemas for spec in _specs(schema)}):
        device = metric.device if metric.device.type == kind else torch.device(kind)
        raw = [raw_bytes(t)[:, None] for state in own.values() for t in state.tensors if t.device.type == kind]
        sizes = [sum(spec.nbytes for spec in _specs(schema, kind)) for schema in schemas]
        rows[kind] = [torch.empty((size, 1), dtype=torch.uint8, device=device) for size in sizes]
        with torch.no_grad(), driver.tail_log.own_collectives():
            data = torch.cat(raw) if raw else None
            for rank, first, piece in exchange(data, 1, sizes, driver.members.group, None, device):
                rows[kind][rank][first : first + len(piece)] = piece

    def unpack(rank: int, schema: _Schema) -> dict[str, State]:
        sizes = {kind: [spec.nbytes for spec in _specs(schema, kind)] for kind in rows}
        parts = {kind: iter(torch.split(rows[kind][rank][:, 0], sizes[kind])) for kind in rows}
        return {  # copies, since a dtype's elements must be aligned in memory
            name: State(listed, [next(parts[s.device]).clone().view(s.dtype).view(s.shape) for s in specs])
            for name, (listed, specs) in schema.items()
        }

    me = driver.members.rank
    return [own if rank == me else unpack(rank, schema) for rank, schema in enumerate(schemas) if schema is not None]


def _specs(schema: _Schema | None, device: str | None = None) -> list[_Spec]:
    found = [spec for _, specs in (schema or {}).values() for spec in specs]
    return [spec for spec in found if device in (None, spec.device)]
