"""A unit of `FullyShardedDataParallel`: a `FlatParamHandle`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.attributes import replace, setting
from torch_join._base.weighting import weighted
from torch_join._compat import fsdp as _compat
from torch_join._compat.ddp import local_part
from torch_join._compat.fsdp import Fsdp1State, HandleTrainingState
from torch_join._shadow._sharded.unit import SHARD, WHOLE, Gather, Observer, Reduction, Weigh, out_of_step, scaled


class FlatParamUnit:
    """The parameters that `FullyShardedDataParallel` gathers at once, on this rank: a `Unit`.

    Args:
        fsdp: The wrapper.
        name: The name of its module.
        init: Makes FSDP initialize the model, if not done yet.
    """

    def __init__(self, fsdp: Any, name: str, init: Callable[[], None]) -> None:
        self.name = name
        self._fsdp = fsdp
        self._handle = fsdp._handle
        self._init = init
        self._others_differ = True  # joined ranks may hold more of the unit than their shards

    @property
    def shards(self) -> Sequence[Tensor]:
        flat = self._handle.flat_param
        return flat._params if self._handle._use_orig_params else [flat]

    @property
    def holders(self) -> Sequence[Any]:
        """See `Unit`: its gradient is one tensor, with the parameters' gradients as views."""
        return [self]

    @property
    def registered(self) -> Sequence[Tensor]:
        """See `Unit`; includes views of the whole that a forward without a backward has left in their place."""
        flat = self._handle.flat_param
        views = [view for view in flat._tensors or () if view is not None]
        return [flat, *(flat._params or ()), *(flat._shared_params or ()), *views]

    @property
    def synchronizes(self) -> bool:
        return bool(self._fsdp._sync_gradients)

    @property
    def unsynced(self) -> list[Tensor | None]:
        flat = self._handle.flat_param
        sharded = self._handle.uses_sharded_strategy
        is_whole = sharded and flat.grad is not None and flat.grad.size() == flat._unpadded_unsharded_size
        return [flat.grad if is_whole else None]

    def hold(self, unsynced: Sequence[bool]) -> None:
        """Do nothing: FSDP1 reduces once in each backward that reaches the unit, with or without a gradient."""

    @property
    def _is_whole(self) -> bool:
        return not self._handle.needs_unshard()

    @property
    def place(self) -> tuple[int, int]:
        index = self._handle._pre_forward_order_index
        return -1 if index is None else index, self._fsdp._exec_order_data._iter

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._init()
        handle, known = self._handle, self._fsdp._exec_order_data
        index, known._iter = place
        if handle._pre_forward_order_index is not None:
            known.handles_pre_forward_order.remove(handle)
        handle._pre_forward_order_index = None if index < 0 else index
        if index >= 0:
            known.handles_pre_forward_order.insert(index, handle)

    def reach_joined_state(self) -> None:
        """See `Unit`: parameters prefetched for a module that did not run are whole, but joined ranks hold shards."""
        if not self._others_differ:
            self.reshard()
        self._handle._post_forward_index = None
        self._fsdp._exec_order_data.handles_post_forward_order.clear()

    # ------------------------------------------------------------ on an active rank

    def watch(self, index: int, observer: Observer) -> Callable[[], None]:
        handle, fsdp = self._handle, self._fsdp
        gather, reshard, prepare = handle._all_gather_flat_param, handle.reshard, handle.prepare_gradient_for_backward

        def gathering(padded: Tensor) -> Tensor:
            phase = handle._training_state
            forward, backward = phase == HandleTrainingState.FORWARD, phase == HandleTrainingState.BACKWARD_PRE
            frees = forward and not fsdp._is_root and _compat.reshards_after_forward(handle)
            frees = frees or (backward and _compat.runtime._should_free_in_backward(fsdp, handle))
            self._others_differ = not frees
            if observer.is_quiet():
                return gather(padded)  # type: ignore[no-any-return]
            after, inference = SHARD if frees else WHOLE, torch.is_inference_mode_enabled()
            with observer.around(index, "gather", Gather(SHARD, after, phase.name, inference, padded.dtype)):
                return gather(padded)  # type: ignore[no-any-return]

        def resharding(free: bool) -> None:
            # Joined ranks reshard in a reduction by themselves.
            reduces = (
                handle._training_state == HandleTrainingState.BACKWARD_POST
                and fsdp._sync_gradients
                and handle.flat_param.requires_grad
            )
            announces = free and self._others_differ and self._is_whole and not reduces
            with observer.around(index, "reshard", SHARD) if announces else nullcontext():
                reshard(free)
            if free:
                self._others_differ = False

        def beginning() -> None:
            observer.before_backward()  # `prepare` hides the sharded gradient
            prepare()

        def reducing(run: Callable[[], Any]) -> Any:
            observer.before_backward()
            if observer.is_quiet():
                return run()
            trained = [p.requires_grad for p in self.shards]
            with observer.around(index, "reduce", Reduction(trained, True, True, handle.flat_param.grad.dtype)):
                return run()

        methods = {"_all_gather_flat_param": gathering, "prepare_gradient_for_backward": beginning}
        cleanup = ExitStack()
        cleanup.callback(replace(handle, reshard=resharding, **methods))
        cleanup.callback(_compat.announce_reductions(handle, reducing))
        return cleanup.close

    def scale(self, factor: Callable[[], float], weigh: Weigh = weighted) -> Callable[[], None]:
        flat = self._handle.flat_param
        # torch registers no hook on a frozen parameter, but it may be trained later.
        with setting(flat, requires_grad=True):
            handle = flat.register_hook(partial(scaled, factor, weigh))
        return lambda: handle.remove()

    # ------------------------------------------------------------ on a joined rank

    def gather(self, gather: Gather) -> None:
        self._init()
        self.reach_joined_state()
        handle, fsdp = self._handle, self._fsdp
        if self._is_whole:
            raise out_of_step(self.name, WHOLE, gather.before)
        if gather.after == WHOLE:
            phase = HandleTrainingState[gather.phase]
            handle._training_state = phase
            stream = fsdp._device_handle.current_stream()
            with torch.no_grad():  # else views of the whole would stay in place of the parameters for a backward
                _compat.runtime._unshard(fsdp, handle, stream, stream)
                if phase in (HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_PRE):
                    _compat.runtime._reshard(fsdp, handle, False)
            handle._training_state = HandleTrainingState.IDLE
            return
        if handle._use_orig_params and not handle._skip_writeback_check:
            handle._writeback_orig_params()
        with torch.no_grad():
            shard = handle.flat_param._local_shard.to(device=handle.device, dtype=gather.dtype)
            whole = torch.empty(shard.numel() * handle.world_size, dtype=shard.dtype, device=shard.device)
            if shard.is_cpu:
                dist.all_gather(list(whole.chunk(handle.world_size)), shard, group=handle.process_group)
            else:
                _compat.all_gather_single(whole, shard, handle.process_group)

    def reshard(self, after: str = SHARD) -> None:
        if self._handle.uses_sharded_strategy and self._is_whole:
            _compat.runtime._reshard(self._fsdp, self._handle, True)

    def reduce(self, reduction: Reduction) -> None:
        self._init()
        self.reshard()
        runtime, fsdp, handle = _compat.runtime, self._fsdp, self._handle
        flat = handle.flat_param
        for p, is_trained in zip(self.shards, reduction.used, strict=True):
            p.requires_grad_(is_trained)  # FSDP makes gradients only for these
        handle._reset_flat_param_grad_info_if_needed()
        with torch.no_grad():
            self._give_gradient(reduction.dtype)
            if handle._offload_params and flat._cpu_grad is None:
                flat._cpu_grad = torch.zeros_like(flat._local_shard, device="cpu")
            fsdp.training_state = Fsdp1State.FORWARD_BACKWARD
            handle._training_state = HandleTrainingState.BACKWARD_POST
            flat._post_backward_called = True
            current = fsdp._device_handle.current_stream()
            fsdp._post_backward_stream.wait_stream(current)
            with fsdp._device_handle.stream(fsdp._post_backward_stream):
                runtime._reduce_grad(fsdp, handle)
            current.wait_stream(fsdp._post_backward_stream)
            if fsdp._all_reduce_stream is not current:
                current.wait_stream(fsdp._all_reduce_stream)
            if fsdp.cpu_offload.offload_params:
                current.synchronize()
            if not handle._has_optim_in_backward:
                handle.prepare_gradient_for_optim()
            flat._post_backward_called = False
            fsdp.training_state = Fsdp1State.IDLE
            handle._training_state = HandleTrainingState.IDLE

    def _give_gradient(self, dtype: torch.dtype | None) -> None:
        """Put zeros in place of the whole gradient of a backward, unless this rank has accumulated one."""
        handle = self._handle
        flat = handle.flat_param
        whole = flat._unpadded_unsharded_size
        if flat.grad is not None and flat.grad.size() == whole:
            if flat.grad.dtype != dtype:
                flat.grad.data = flat.grad.to(dtype)
            return
        handle._training_state = HandleTrainingState.IDLE
        type(handle).prepare_gradient_for_backward(handle)  # it hides the sharded gradient
        local, flat.data = flat.data, torch.zeros(whole, dtype=dtype, device=handle.device)
        flat.grad = flat.data
        flat.data = local

    # ------------------------------------------------------------ gradients, as a holder of one

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The trainable parameters, whose gradients are parts of this one."""
        return [p for p in self.shards if p.requires_grad]

    @property
    def grad(self) -> Tensor | None:
        """The gradient that the next backward accumulates into: the shard's, or the whole one without a sync."""
        handle, flat = self._handle, self._handle.flat_param
        if handle._training_state != HandleTrainingState.BACKWARD_POST:  # a reduction's gradient is in no view yet
            handle._reset_flat_param_grad_info_if_needed()
            is_sharded = handle.uses_sharded_strategy and (flat.grad is None or flat.grad.size() == flat.size())
            if handle._use_orig_params and is_sharded and not hasattr(flat, "_saved_grad_shard"):
                # FSDP copies gradients that replaced its views only before the next gather, which is too late here.
                handle._writeback_orig_params()
        return flat.grad  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        handle, flat = self._handle, self._handle.flat_param
        if gradient is None:
            for tensor in (flat, *(flat._params or ())):
                tensor.grad = None
        elif not (handle.uses_sharded_strategy and self._is_whole):  # else the next reduction makes one
            flat.grad = gradient
            if handle._use_orig_params:
                handle._use_sharded_grad_views()

    @property
    def is_bypassed(self) -> bool:
        """See `Unit`: the optimizer uses the original parameters' gradients, which were views of the flat one."""
        handle, flat = self._handle, self._handle.flat_param
        if not handle._use_orig_params or (gradient := self.grad) is None:
            return False
        address = gradient.untyped_storage().data_ptr()
        for p, info, has_none in zip(flat._params, flat._shard_param_infos, flat._is_grad_none_mask, strict=True):
            if not p.requires_grad or not info.in_shard or has_none:
                continue
            if p.grad is None:
                return True
            if p.grad.untyped_storage().data_ptr() != address:  # FSDP may have copied it, and keeps it until a gather
                known = gradient.flatten()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                if not torch.equal(p.grad.flatten(), known):
                    return True
        return False

    def zeros(self) -> Tensor:
        """Return a zero gradient of the shard."""
        return torch.zeros_like(local_part(self._handle.flat_param))

    @property
    def shape(self) -> torch.Size:
        """The shape of the shard."""
        return local_part(self._handle.flat_param).shape
