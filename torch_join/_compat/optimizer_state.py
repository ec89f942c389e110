"""The private names of torch that the handover uses (seen in torch 2.13.0).

`tests/core/_handover/test_handover.py` fails when one of them is gone.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _NormBase


def scale_device(scaler: GradScaler) -> str | None:
    """Return the type of device of the scale of `scaler`; `None` before its first use, which creates the tensors."""
    scale = getattr(scaler, "_scale", None)  # a disabled scaler lacks it
    return None if scale is None else scale.device.type


def was_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether LR schedulers have seen `optimizer` step (they warn if not)."""
    return bool(getattr(optimizer, "_opt_called", False))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Make LR schedulers see `optimizer` as stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms with statistics of this rank's batches."""
    return isinstance(module, _NormBase)


def computed_names(module: nn.Module) -> set[str]:
    """Return the attributes that torch's hooks (`spectral_norm`, `weight_norm`, pruning) set in each forward."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return {str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", "")) for hook in hooks}


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is a `ZeroRedundancyOptimizer`, without importing it (which warns)."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def has_own_state(optimizer: Any) -> bool:
    """Whether the state dict of `optimizer` differs from that of torch's optimizers."""
    plain = torch.optim.Optimizer
    hooks = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (
        any(getattr(type(optimizer), name) is not getattr(plain, name) for name in ("state_dict", "load_state_dict"))
        or not {"state_dict", "load_state_dict"}.isdisjoint(vars(optimizer))
        or any(getattr(optimizer, f"_optimizer_{hook}_hooks", None) for hook in hooks)
    )
