"""Every private name of FSDP that joined ranks need to follow it (seen in torch 2.13.0).

`tests/core/_shadow/test_sharded_compat.py` fails when one of them is gone. Importing FSDP takes long, so this module is
imported only for a sharded model.
"""

# Some of these imports are for other modules.
# ruff: noqa: F401
# mypy: implicit-reexport

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils, _runtime_utils
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad

from torch_join._base.attributes import replace
from torch_join._base.errors import UnsupportedError
from torch_join._base.names import TORCH, check_names, naming_missing

with naming_missing(TORCH, "torch"):
    from torch.distributed.fsdp._common_utils import TrainingState as Fsdp1State
    from torch.distributed.fsdp._common_utils import _FSDPState
    from torch.distributed.fsdp._exec_order_utils import _ExecOrderData
    from torch.distributed.fsdp._flat_param import (
        RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
        FlatParameter,
        FlatParamHandle,
        HandleTrainingState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

runtime: Any = _runtime_utils
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


# ------------------------------------------------------------ fully_shard


def param_groups(module: FSDPModule) -> list[Any]:
    """Return the groups that `module` gathers at once: usually one, or one for each mesh."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.12


def check_runs(group: Any, name: str) -> None:
    """Check that FSDP can run a group on its device.

    Args:
        group: The group.
        name: The name of its module.

    Raises:
        UnsupportedError: FSDP cannot.
    """
    if group.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise UnsupportedError(
            f"{name or 'The model'} is sharded by fully_shard on the CPU, which torch {torch.__version__} does not"
            " support (it waits for events, which CPUs lack). Use a newer torch, an accelerator, or"
            " FullyShardedDataParallel."
        )


def gathers_by(group: Any) -> Any:
    """Return the object that a group uses to gather; `None` before torch 2.9."""
    return getattr(group, "_all_gather_comm", None)


def will_gather(group: Any) -> bool:
    """Whether a group's `unshard` will gather, by its own rules."""
    skips = group._training_state == TrainingState.PRE_BACKWARD and not group.unshard_in_backward
    return group._all_gather_result is None and not group.is_unsharded and not skips


def reduces_unused(group: Any) -> bool:
    """Whether a group reduces zeros for parameters that no backward has reached (an option since torch 2.10)."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def take_reductions(context: Any) -> list[Any]:
    """Return FSDP's records of reductions that have not finished, and remove them from FSDP."""
    if hasattr(context, "reduce_scatter_states"):
        states = [*context.reduce_scatter_states]
        context.reduce_scatter_states.clear()
        return states
    state, context.reduce_scatter_state = context.reduce_scatter_state, None  # just one before torch 2.12
    return [] if state is None else [state]


# ------------------------------------------------------------ both


def init_roots(model: nn.Module) -> None:
    """Make FSDP initialize each outermost sharded module of `model`, as before a first forward."""
    for root in roots(model):
        if isinstance(root, FSDPModule):
            root._get_fsdp_state()._lazy_init()
        else:
            runtime._lazy_init(root, root)


def roots(module: nn.Module) -> list[nn.Module]:
    """Return the outermost sharded modules."""
    if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
        return [module]
    return [root for child in module.children() for root in roots(child)]


# ------------------------------------------------------------ FullyShardedDataParallel


def reshards_after_forward(handle: Any) -> bool:
    """Whether a flat parameter is resharded between forward and backward."""
    return handle._sharding_strategy in RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES


_announced: dict[int, Callable[[Callable[[], Any]], Any]] = {}
_undo: list[Callable[[], None]] = []


def announce_reductions(handle: Any, around: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Pass each reduction of a flat parameter's gradient to `around`, which runs it; return a function that ends this.

    FSDP looks up its functions in its module, where they are replaced while any flat parameter is watched. The function
    that records the order in which the next backward prefetches is replaced, too: ranks differ in evaluation, which
    must not change that order.
    """
    if not _announced:
        _undo.append(replace(_ExecOrderData, record_post_forward=_recording(_ExecOrderData.record_post_forward)))
        _undo.append(replace(runtime, _reduce_grad=_announcing(runtime._reduce_grad)))
    _announced[id(handle)] = around

    def undo() -> None:
        del _announced[id(handle)]
        while _undo and not _announced:
            _undo.pop()()

    return undo


def _announcing(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def reduce(state: Any, handle: Any) -> Any:
        around = _announced.get(id(handle))
        return own(state, handle) if around is None else around(lambda: own(state, handle))

    return reduce


def _recording(own: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def record(order: Any, handle: Any) -> None:
        if torch.is_grad_enabled() or id(handle) not in _announced:
            own(order, handle)

    return record


def group_sizes(model: nn.Module) -> list[int]:
    """Return the number of ranks over which each `FullyShardedDataParallel` in `model` averages gradients."""
    return [
        group.size() * (1 if (between := getattr(module, "_inter_node_pg", None)) is None else between.size())
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel) and (group := module.process_group) is not None
    ]


def meshes(model: nn.Module) -> list[Any]:
    """Return the meshes over which `fully_shard` has sharded parts of `model`, without other dimensions."""
    sharded = (module for module in model.modules() if isinstance(module, FSDPModule))
    found = [group.mesh_info.mesh for module in sharded for group in param_groups(module)]
    return list({id(mesh): mesh for mesh in found}.values())


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that `mesh` was taken from, or itself."""
    own = getattr(mesh, "_get_root_mesh", None)
    return device_mesh._mesh_resources.get_root_mesh(mesh) if own is None else own()  # older torch


# ------------------------------------------------------------ clipping


def wrap_clipping(norm: Callable[..., Any], scale: Callable[..., Any]) -> tuple[Any, Any, Callable[[], None]]:
    """Put `norm` and `scale` in place of the two halves of `torch.nn.utils.clip_grad_norm_`.

    The function looks them up in its module, so this also affects code that has imported it before.

    Returns:
        The halves themselves, and a function that restores them.
    """
    own = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    return (*own, replace(clip_grad, _get_total_norm=norm, _clip_grads_with_norm_=scale))


def clip_by_whole_norms() -> Callable[[], None]:
    """Make `clip_grad_norm_` add its epsilon to the whole norm; older torch adds it to each rank's part.

    Returns:
        A function that undoes this.
    """
    own = clip_grad._get_total_norm
    return wrap_clipping(lambda *args: replicated(own(*args)), clip_grad._clip_grads_with_norm_)[2]


def replicated(norm: Any) -> Any:
    """Return a norm that all ranks hold. A norm of shards is partial, and reading it takes a sum over all ranks."""
    if not isinstance(norm, DTensor) or all(placement.is_replicate() for placement in norm.placements):
        return norm
    return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)


check_names(
    "torch",
    TORCH,
    {
        clip_grad: "_clip_grads_with_norm_ _get_total_norm",
        FSDPModule: "_get_fsdp_state",
        FSDPParam: "sharded_param to_accumulated_grad_if_needed unsharded_accumulated_grad _unsharded_param",
        FSDPParamGroup: (
            "finalize_backward fsdp_params mesh_info post_backward pre_backward unshard unshard_in_backward"
            " wait_for_unshard _all_gather_result _post_forward_indices _record_post_forward"
            " _reshard_after_forward _to_sharded _to_sharded_post_forward _use_post_forward_mesh"
            " _wait_all_gather_streams_on_event"
        ),
        FSDPState: "_lazy_init",
        FlatParameter: "_local_shard _params _shared_params _tensors _unpadded_unsharded_size",
        FlatParamHandle: (
            "needs_unshard prepare_gradient_for_backward reshard uses_sharded_strategy _all_gather_flat_param"
            " _post_forward_index _pre_forward_order_index _sharding_strategy _skip_writeback_check _training_state"
            " _use_orig_params _writeback_orig_params"
        ),
        _ExecOrderData: "handles_post_forward_order record_post_forward _iter",
        _FSDPState: "process_group _comm_hook _device_handle _handle _is_root",
        _init_utils: "_exec_order_data",
        runtime: "_lazy_init _reduce_grad _reshard _should_free_in_backward _unshard",
    },
)


def divide_factor(group: Any) -> float | None:
    """Return the divisor of a `fully_shard` unit's gradient sum, if the user has chosen one."""
    return getattr(group, "gradient_divide_factor", None)
