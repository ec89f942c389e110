"""A unit of `fully_shard`: an `FSDPParamGroup`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_join._base.attributes import replace, setting
from torch_join._base.weighting import weighted
from torch_join._compat import fsdp as _compat
from torch_join._shadow._sharded.unit import PART, SHARD, WHOLE, Gather, Observer, Reduction, Weigh, out_of_step, scaled
from torch_join._shadow.lost_hooks import noticed

_GATHERED = "_unsharded_param", "_sharded_post_forward_param"  # present only at times
# The methods of a group that `AnnouncedGroup` replaces by its own of the same name.
_REPLACED = (
    *("unshard", "pre_backward", "post_backward", "finalize_backward"),
    *("_to_sharded", "_to_sharded_post_forward", "_record_post_forward"),
)


def _state(group: Any) -> str:
    return WHOLE if group.is_unsharded else SHARD if group.is_sharded else PART


def _is_pending(group: Any) -> bool:
    """Whether a group has been gathered for a module that has not run yet."""
    return group._all_gather_result is not None


class AnnouncedGroup:
    """Replaces an `FSDPParamGroup`'s methods on an active rank: each one announces its action, then calls FSDP's.

    It is also the object by which the group gathers, an FSDP hook with `allocate` and `__call__`. So a gather is
    announced as soon as it is certain, before the copying, which takes time.

    Args:
        group: The `FSDPParamGroup`.
        index: The unit's index.
        observer: Receives the announcements.

    Attributes:
        others_differ: Whether joined ranks hold more of the unit than their shards.
        target: The state after the last gather; joined ranks are in it, unless it is a shard.
    """

    def __init__(self, group: Any, index: int, observer: Observer) -> None:
        self._group, self._index, self._observer = group, index, observer
        self._comm = _compat.gathers_by(group)  # FSDP's own, or the user's
        self._own = SimpleNamespace(**{name: getattr(group, name) for name in _REPLACED})
        self._open = ExitStack()  # around the current gather
        self._reduces = False
        self.record()

    def record(self) -> None:
        """Record the unit's state, which joined ranks share."""
        self.others_differ, self.target = not self._group.is_sharded, _state(self._group)

    def replace(self) -> Callable[[], None]:
        """Put these methods in place of the group's; return a function that undoes it."""
        comm = {} if self._comm is None else {"_all_gather_comm": self}
        return replace(self._group, **{name: getattr(self, name) for name in _REPLACED}, **comm)

    def unshard(self, *args: Any, **kwargs: Any) -> None:
        """Gather, unless a gather is running or done."""
        try:
            if self._comm is None and _compat.will_gather(self._group):
                self._begin_gather()
            self._own.unshard(*args, **kwargs)
        finally:
            self._open.close()

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the memory to gather into: FSDP calls this when it gathers."""
        self._begin_gather()
        return self._comm.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._comm(*args, **kwargs)

    def _begin_gather(self) -> None:
        # A prefetch sets the phase that it is meant for.
        self.target = after = self._state_after()
        self.others_differ = after != SHARD
        if not self._observer.is_quiet():
            inference = torch.is_inference_mode_enabled()
            gather = Gather(_state(self._group), after, self._group._training_state.name, inference)
            self._open.enter_context(self._observer.around(self._index, "gather", gather))

    def pre_backward(self, *args: Any) -> None:
        """Announce, before FSDP runs it, that a backward reaches the unit."""
        self._observer.before_backward()
        self._own.pre_backward(*args)

    def post_backward(self, *args: Any) -> None:
        """Reduce the unit's gradients."""
        self._observer.before_backward()
        if self._observer.is_quiet():
            self._own.post_backward(*args)
            return
        used, group = self._used(), self._group
        reduction = Reduction(
            used,
            bool(group.all_reduce_grads),
            bool(group.reshard_after_backward),
            divides=_compat.divide_factor(group),
        )
        announced = self._observer.around(self._index, "reduce", reduction) if any(used) else nullcontext()
        with setting(self, _reduces=any(used)), announced:
            self._own.post_backward(*args)

    def _to_sharded(self) -> None:
        """Reshard; announced unless it is part of a reduction."""
        announces = self.others_differ and not self._group.is_sharded and not self._reduces
        with self._observer.around(self._index, "reshard", SHARD) if announces else nullcontext():
            self._own._to_sharded()
        self.others_differ = self.others_differ and _is_pending(self._group)

    def _to_sharded_post_forward(self) -> None:
        """Reshard over fewer ranks; announced if a backward has left the unit whole."""
        announces, self.target = self.target == WHOLE, PART
        with self._observer.around(self._index, "reshard", PART) if announces else nullcontext():
            self._own._to_sharded_post_forward()

    def finalize_backward(self) -> None:
        """Drop the parameters prefetched for a module that did not run; joined ranks hold them too."""
        announces = self.others_differ and _is_pending(self._group)
        with self._observer.around(self._index, "reshard", _state(self._group)) if announces else nullcontext():
            self._own.finalize_backward()
        if announces:
            self.record()

    def _record_post_forward(self) -> None:
        """Record that the unit's forward has run: the next backward prefetches in the order of the forwards.

        An evaluation, in which ranks differ, must not change that order.
        """
        if torch.is_grad_enabled():
            self._own._record_post_forward()

    def _state_after(self) -> str:
        """Return the state after the current phase."""
        group, phase = self._group, self._group._training_state
        if phase == _compat.TrainingState.FORWARD and group._reshard_after_forward:
            return PART if group._use_post_forward_mesh else SHARD
        return SHARD if phase == _compat.TrainingState.PRE_BACKWARD and group.reshard_after_backward else WHOLE

    def _used(self) -> list[bool]:
        """Return which parameters have a gradient to reduce, as FSDP decides it."""
        group = self._group
        if not group.reduce_grads:
            return []
        return [
            hasattr(p, "_unsharded_param")
            and (_unsynced(p) is not None or (_compat.reduces_unused(group) and p._unsharded_param.requires_grad))
            for p in group.fsdp_params
        ]


class ParamGroupUnit:
    """The parameters that `fully_shard` gathers at once, on this rank: a `Unit`.

    Args:
        group: The `FSDPParamGroup`.
        name: The name of its module.
        init: Makes FSDP initialize the model, if not done yet.

    Raises:
        UnsupportedError: FSDP cannot run on its device.
    """

    def __init__(self, group: Any, name: str, init: Callable[[], None]) -> None:
        _compat.check_runs(group, name)
        self.name = name
        self._group = group
        self._init = init
        self._announced: AnnouncedGroup | None = None

    @property
    def holders(self) -> Sequence[Tensor]:
        return [p.sharded_param for p in self._group.fsdp_params]

    shards = holders

    @property
    def registered(self) -> Sequence[Tensor]:
        """See `Unit`; complete even if a forward without a backward leaves the root whole or a unit partly sharded."""
        return [
            tensor
            for p in self._group.fsdp_params
            for tensor in (p.sharded_param, *(getattr(p, name, None) for name in _GATHERED))
            if tensor is not None
        ]

    @property
    def synchronizes(self) -> bool:
        return bool(self._group.reduce_grads)

    # See `Unit`.
    is_bypassed = False
    place = (-1, 0)

    @property
    def unsynced(self) -> list[Tensor | None]:
        return [_unsynced(p) for p in self._group.fsdp_params]

    def hold(self, unsynced: Sequence[bool]) -> None:
        # After the first backward of a module that runs twice, FSDP reduces the gradients so far.
        group = self._group
        if any(unsynced) and not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            self._init()
            type(group).unshard(group)  # on one rank, there is nothing to gather
            group.wait_for_unshard()
            group._to_sharded()
        for p, is_held in zip(group.fsdp_params, unsynced, strict=True):
            if is_held and _unsynced(p) is None:
                with torch.no_grad():
                    p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
                p.to_accumulated_grad_if_needed()  # in the dtype of the other ranks

    def reach_joined_state(self) -> None:
        if self._announced is not None and self._announced.others_differ and _is_pending(self._group):
            self._group.wait_for_unshard()
            self._become(self._announced.target)
        self._drop_pending()
        self._group._post_forward_indices.clear()
        if (order := getattr(self._group.comm_ctx, "post_forward_order", None)) is not None:  # set by the first forward
            order.clear()
        if self._announced is not None:
            self._announced.record()

    def _drop_pending(self) -> None:
        if _is_pending(self._group):
            type(self._group).finalize_backward(self._group)

    # ------------------------------------------------------------ on an active rank

    def watch(self, index: int, observer: Observer) -> Callable[[], None]:
        self._announced = AnnouncedGroup(self._group, index, observer)
        return self._announced.replace()

    def scale(self, factor: Callable[[], float], weigh: Weigh = weighted) -> Callable[[], None]:
        group, known = self._group, set()
        wait = group.wait_for_unshard

        def hook() -> None:
            for p in group.fsdp_params:
                whole = getattr(p, "_unsharded_param", None)  # set by the first gather
                if whole is not None and whole.requires_grad and id(p) not in known:
                    known.add(id(p))
                    changes, end = noticed(whole, partial(scaled, factor, weigh), lambda: factor() != 1.0)
                    cleanup.callback(whole.register_hook(changes).remove)
                    cleanup.callback(end)

        def waiting() -> None:
            wait()
            hook()

        cleanup = ExitStack()
        cleanup.callback(replace(group, wait_for_unshard=waiting))
        hook()
        return cleanup.close

    # ------------------------------------------------------------ on a joined rank

    def gather(self, gather: Gather) -> None:
        self._init()
        self._drop_pending()
        group = self._group
        if (state := _state(group)) != gather.before:
            raise out_of_step(self.name, state, gather.before)
        with group.use_training_state(_compat.TrainingState[gather.phase]):
            self._wait_for_optimizer()
            group.unshard()
            group.wait_for_unshard()
            self._free_gathered()
            self._become(gather.after)

    def _become(self, state: str) -> None:
        if state == PART:
            self._group._to_sharded_post_forward()
        elif state == SHARD:
            self._group._to_sharded()

    def _free_gathered(self) -> None:
        """Free parameters that were gathered and copied out, as a root's forward does at its end: no copy follows."""
        context = self._group.comm_ctx
        if (state := context.all_gather_state) is not None:
            self._group._wait_all_gather_streams_on_event(state.event)
            context.all_gather_state = None

    def _wait_for_optimizer(self) -> None:
        """Make FSDP's streams wait, as a root's forward does, for changes to the shards."""
        context = self._group.comm_ctx
        current = context.device_handle.current_stream()
        context.all_gather_copy_in_stream.wait_stream(current)
        context.all_gather_stream.wait_stream(current)

    def reshard(self, after: str) -> None:
        self._drop_pending()
        self._become(after)

    def reduce(self, reduction: Reduction) -> None:
        self._init()
        group = self._group
        self.hold(reduction.used)
        flags: dict[str, Any] = {"reduce_grads": True, "all_reduce_grads": reduction.all_reduces}
        flags["reshard_after_backward"] = reduction.reshards
        if reduction.divides != _compat.divide_factor(group):
            group.gradient_divide_factor = reduction.divides  # kept, as on active ranks
        with setting(group, **flags):
            type(group).post_backward(group)
        group._training_state = _compat.TrainingState.IDLE
        group.finalize_backward()
        for state in _compat.take_reductions(group.comm_ctx):
            if state.event is not None:
                group.device_handle.current_stream().wait_event(state.event)


def _unsynced(param: Any) -> Tensor | None:
    accumulated, whole = param.unsharded_accumulated_grad, getattr(param, "_unsharded_param", None)
    found: Tensor | None = accumulated if accumulated is not None or whole is None else whole.grad
    return found
