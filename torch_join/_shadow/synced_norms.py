"""The buffers of SyncBatchNorm, the same on all ranks that have a batch, also where each keeps its own of others."""

from typing import Any

from torch import nn

from torch_join._compat import ddp as _compat

_BYTES = 1 << 20  # of one broadcast, at most


def has_synced_norms(model: nn.Module) -> bool:
    """Whether a model holds a `SyncBatchNorm`."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def sync_norms(model: nn.Module, src: int, group: Any) -> None:
    """Give all ranks of `group` what rank `src` of it holds of these buffers; all call this."""
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    if buffers := [buffer.data for norm in norms for buffer in norm.buffers(recurse=False)]:
        _compat.broadcast_coalesced(group, buffers, _BYTES, src)
