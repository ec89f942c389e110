"""Exact training on uneven inputs: the core, which needs only torch.

Start reading at `join.py`. It builds on subpackages, each of which imports only those before it in this list: `_base`,
`_compat`, `_control`, `_monitor`, `_schedule`, `_shadow`, `_collectives`, `_handover`, `_participants`, `_tail`,
`_lockstep`. Framework adapters import `integration` in addition to the names of this module.
`_doctor` is `python -m torch_join doctor`.
"""

from torch_join._base.errors import (
    EarlyTerminationError,
    JoinDataWarning,
    JoinDriftWarning,
    JoinError,
    JoinPerformanceWarning,
    JoinTimeoutError,
    JoinTypeError,
    JoinValueError,
    JoinWarning,
    PeerFailedError,
    UnsupportedError,
)
from torch_join._base.names import TORCH as _TORCH
from torch_join._base.names import naming_missing as _naming_missing

with _naming_missing(_TORCH, "torch"):
    from torch_join._base.sampler import UnpaddedDistributedSampler
    from torch_join._base.weighting import Weighting
    from torch_join._monitor.monitor import JoinMonitor
    from torch_join._participants._torch.public import JoinableMetric, JoinableModel, JoinableOptimizer, JoinableState
    from torch_join._tail.reader import windows
    from torch_join.join import Join

__version__ = "0.2.0"

__all__ = [
    "EarlyTerminationError",
    "Join",
    "JoinDataWarning",
    "JoinDriftWarning",
    "JoinError",
    "JoinMonitor",
    "JoinPerformanceWarning",
    "JoinTimeoutError",
    "JoinTypeError",
    "JoinValueError",
    "JoinWarning",
    "JoinableMetric",
    "JoinableModel",
    "JoinableOptimizer",
    "JoinableState",
    "PeerFailedError",
    "UnpaddedDistributedSampler",
    "UnsupportedError",
    "Weighting",
    "windows",
]
