"""A unit of `fully_shard`: an `FSDPParamGroup`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_join._base.weighting import weighted
from torch_join._shadow._sharded import compat as _compat
from torch_join._shadow._sharded.gather import AnnouncedGather
from torch_join._shadow._sharded.unit import (
    PART,
    SHARD,
    WHOLE,
    Gather,
    Observer,
    Reduction,
    Weigh,
    out_of_step,
    scaled,
    undo_all,
)
from torch_join._shadow.lost_hooks import noticed


class ParamGroupUnit:
    """What `fully_shard` gathers at once, on this rank.

    Args:
        group: The `FSDPParamGroup`.
        name: Its module's.
        init: Has FSDP initialize the model, if it has not yet.

    Raises:
        UnsupportedError: FSDP cannot run on its device.
    """

    def __init__(self, group: Any, name: str, init: Callable[[], None]) -> None:
        _compat.check_runs(group, name)
        self.name = name
        self._group = group
        self._init = init
        self._others_differ = not group.is_sharded  # joined ranks hold more than their shards of it
        self._target = SHARD  # the state that the last gather leads to
        self._reducing = False

    @property
    def parameters(self) -> Sequence[Tensor]:
        """See `Unit`."""
        return [p.sharded_param for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    @property
    def holders(self) -> Sequence[Tensor]:
        """See `Unit`."""
        return [p.sharded_param for p in self._group.fsdp_params]

    @property
    def registered(self) -> Sequence[Tensor]:
        """See `Unit`: also where a forward without a backward has left the root whole."""
        return [
            tensor
            for p in self._group.fsdp_params
            for tensor in (p.sharded_param, getattr(p, "_unsharded_param", None))
            if tensor is not None
        ]

    @property
    def synchronizes(self) -> bool:
        """See `Unit`."""
        return bool(self._group.reduce_grads)

    # See `Unit`.
    is_replicated = is_bypassed = False
    place = (-1, 0)

    @property
    def has_unsynced(self) -> bool:
        """See `Unit`."""
        return any(hasattr(p, "_unsharded_param") and _has_own(p) for p in self._group.fsdp_params)

    @property
    def _state(self) -> str:
        return WHOLE if self._group.is_unsharded else SHARD if self._group.is_sharded else PART

    @property
    def _is_pending(self) -> bool:
        """Whether it has been gathered for a module that has not run yet."""
        return self._group._all_gather_result is not None

    def settle(self) -> None:
        """See `Unit`."""
        if self._is_pending and self._others_differ:
            self._group.wait_for_unshard()
            self._become(self._target)
        self._drop_pending()
        self._group._post_forward_indices.clear()
        self._group.comm_ctx.post_forward_order.clear()

    def _drop_pending(self) -> None:
        if self._is_pending:
            type(self._group).finalize_backward(self._group)

    # ------------------------------------------------------------ on an active rank

    def watch(self, index: int, observer: Observer) -> Callable[[], None]:
        """See `Unit`."""
        group = self._group
        comm, post_backward, to_sharded = _compat.gathers_by(group), group.post_backward, group._to_sharded
        pre_backward, finalize, record = group.pre_backward, group.finalize_backward, group._record_post_forward

        def gathering() -> Any:
            # A prefetch pretends to be in the phase that it is for.
            self._target = after = self._after()
            self._others_differ = after != SHARD
            if observer.is_quiet():
                return None
            return observer.around(index, "gather", Gather(self._state, after, group._training_state.name))

        def beginning(*args: Any) -> None:
            observer.before_backward()
            pre_backward(*args)

        def reducing(*args: Any) -> None:
            observer.before_backward()
            if observer.is_quiet():
                post_backward(*args)
                return
            used = self._used()
            reduction = Reduction(used, bool(group.all_reduce_grads), bool(group.reshard_after_backward))
            self._reducing = any(used)
            try:
                with observer.around(index, "reduce", reduction) if self._reducing else nullcontext():
                    post_backward(*args)
            finally:
                self._reducing = False

        def resharding() -> None:
            if self._others_differ and not group.is_sharded and not self._reducing:
                with observer.around(index, "reshard", None):
                    to_sharded()
            else:
                to_sharded()
            self._others_differ = self._others_differ and self._is_pending

        def finalizing() -> None:
            # FSDP throws away what was prefetched for a module that did not run; joined ranks hold it.
            tells = self._others_differ and self._is_pending
            with observer.around(index, "reshard", None) if tells else nullcontext():
                finalize()
            self._others_differ = self._others_differ and not tells

        def recording() -> None:
            # The next backward gathers ahead in the order recorded since the last one. Of evaluation, in which ranks
            # differ, nothing must be left in it.
            if torch.is_grad_enabled():
                record()

        will_gather = None if comm is not None else partial(_compat.will_gather, group)
        gather = AnnouncedGather(comm, group.unshard, gathering, will_gather)
        replaced = {"unshard": gather.unshard, "pre_backward": beginning, "post_backward": reducing}
        replaced |= {"_to_sharded": resharding, "finalize_backward": finalizing, "_record_post_forward": recording}
        vars(group).update(replaced)
        if comm is not None:
            group._all_gather_comm = gather

        def undo() -> None:
            if comm is not None:
                group._all_gather_comm = comm
            for name in replaced:
                delattr(group, name)

        return undo

    def _after(self) -> str:
        """Return the state after the current phase."""
        group, phase = self._group, self._group._training_state
        if phase == _compat.TrainingState.FORWARD and group._reshard_after_forward:
            return PART if group._use_post_forward_mesh else SHARD
        return SHARD if phase == _compat.TrainingState.PRE_BACKWARD and group.reshard_after_backward else WHOLE

    def _used(self) -> list[bool]:
        """Return which parameters have something to reduce, as FSDP decides it."""
        group = self._group
        if not group.reduce_grads:
            return []
        return [
            hasattr(p, "_unsharded_param")
            and (_has_own(p) or (_compat.reduces_unused(group) and p._unsharded_param.requires_grad))
            for p in group.fsdp_params
        ]

    def scale(self, factor: Callable[[], float], weigh: Weigh = weighted) -> Callable[[], None]:
        """See `Unit`."""
        group, known = self._group, set()
        ends: list[Callable[[], None]] = []
        wait = group.wait_for_unshard

        def hook() -> None:
            for p in group.fsdp_params:
                whole = getattr(p, "_unsharded_param", None)  # there after the first gather
                if whole is not None and whole.requires_grad and id(p) not in known:
                    known.add(id(p))
                    changes, end = noticed(whole, partial(scaled, factor, weigh), lambda: factor() != 1.0)
                    ends.extend((whole.register_hook(changes).remove, end))

        def waiting() -> None:
            wait()
            hook()

        def undo() -> None:
            del group.wait_for_unshard
            undo_all(ends)()

        hook()
        group.wait_for_unshard = waiting
        return undo

    # ------------------------------------------------------------ on a joined rank

    def gather(self, gather: Gather) -> None:
        """See `Unit`."""
        self._init()
        self._drop_pending()
        group = self._group
        if self._state != gather.before:
            raise out_of_step(self.name, self._state, gather.before)
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
        """Free what has been gathered, and copied out, as a root's forward does at its end: no copy follows here."""
        context = self._group.comm_ctx
        if (state := context.all_gather_state) is not None:
            self._group._wait_all_gather_streams_on_event(state.event)
            context.all_gather_state = None

    def _wait_for_optimizer(self) -> None:
        """Have FSDP's streams wait, as a root's forward does, for what may have changed the shards."""
        context = self._group.comm_ctx
        current = context.device_handle.current_stream()
        context.all_gather_copy_in_stream.wait_stream(current)
        context.all_gather_stream.wait_stream(current)

    def reshard(self) -> None:
        """See `Unit`."""
        self._drop_pending()
        self._group._to_sharded()

    def reduce(self, reduction: Reduction) -> None:
        """See `Unit`."""
        self._init()
        group = self._group
        if not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):  # nothing to gather, on one rank
            group.unshard()
            group.wait_for_unshard()
            group._to_sharded()
        for p, is_used in zip(group.fsdp_params, reduction.used, strict=True):
            if is_used and not _has_own(p):
                with torch.no_grad():
                    p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
        flags = {"reduce_grads": True, "all_reduce_grads": reduction.all_reduces}
        flags["reshard_after_backward"] = reduction.reshards
        before = {name: getattr(group, name) for name in flags}
        vars(group).update(flags)
        try:
            type(group).post_backward(group)
        finally:
            vars(group).update(before)
        group._training_state = _compat.TrainingState.IDLE
        group.finalize_backward()
        for state in _compat.take_reductions(group.comm_ctx):
            if state.event is not None:
                group.device_handle.current_stream().wait_event(state.event)


def _has_own(param: Any) -> bool:
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
