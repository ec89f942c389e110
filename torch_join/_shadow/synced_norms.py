"""The buffers of SyncBatchNorm, which active ranks keep equal even if each keeps its own copy of other buffers."""

from typing import Any

from torch import nn

from torch_join._compat import ddp as _compat

_BYTES = 1 << 20  # of one broadcast, at most


def has_synced_norms(model: nn.Module) -> bool:
    """Whether a model holds a `SyncBatchNorm`."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def sync_norms(model: nn.Module, src: int, group: Any) -> None:
    """Copy these buffers from rank `src` of `group` to its other ranks; all of them call this."""
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    if buffers := [buffer.data for norm in norms for buffer in norm.buffers(recurse=False)]:
        _compat.broadcast_coalesced(group, buffers, _BYTES, src)
