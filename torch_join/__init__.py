"""Training on uneven inputs that just works, and trains exactly: the core, on torch alone."""

from torch_join._channel import Channel
from torch_join._codec import closed
from torch_join._errors import (
    EarlyTerminationError,
    JoinError,
    JoinTimeoutError,
    JoinTypeError,
    JoinValueError,
    PeerFailedError,
    UnsupportedError,
    name_ranks,
)
from torch_join._failures import telling_failures
from torch_join._hyperparameters import take_hyperparameters
from torch_join._join import Join
from torch_join._lockstep import LockstepJoin
from torch_join._mirror import Changes, StepMirror
from torch_join._rendezvous import open_channel
from torch_join._sampler import UnpaddedDistributedSampler
from torch_join._shadow import ModelShadow
from torch_join._step_server import StepServer
from torch_join._weighting import Weighting, resolve_weighting
from torch_join.joinables import JoinableMetric, JoinableModel, JoinableOptimizer, JoinableState, ModuleMetrics, Part

__version__ = "0.1.0"

__all__ = [
    "Changes",
    "Channel",
    "EarlyTerminationError",
    "Join",
    "JoinError",
    "JoinTimeoutError",
    "JoinTypeError",
    "JoinValueError",
    "JoinableMetric",
    "JoinableModel",
    "JoinableOptimizer",
    "JoinableState",
    "LockstepJoin",
    "ModelShadow",
    "ModuleMetrics",
    "Part",
    "PeerFailedError",
    "StepMirror",
    "StepServer",
    "UnpaddedDistributedSampler",
    "UnsupportedError",
    "Weighting",
    "closed",
    "name_ranks",
    "open_channel",
    "resolve_weighting",
    "take_hyperparameters",
    "telling_failures",
]
