"""Accelerate on uneven dataloaders: a replacement for `accelerator.join_uneven_inputs`.

Start reading at `_context.py`: it imports the other modules, and none of them imports it.
"""

from torch_join import (
    EarlyTerminationError,
    JoinError,
    JoinTimeoutError,
    JoinTypeError,
    JoinValueError,
    PeerFailedError,
    UnsupportedError,
)
from torch_join.integration import naming_missing as _naming_missing

with _naming_missing("1.5 to 1.15", "accelerate"):
    from accelerate_join._accelerator import gather_in_order
    from accelerate_join._context import Accelerator, join_batches, join_uneven_inputs

__all__ = [
    "Accelerator",
    "EarlyTerminationError",
    "JoinError",
    "JoinTimeoutError",
    "JoinTypeError",
    "JoinValueError",
    "PeerFailedError",
    "UnsupportedError",
    "gather_in_order",
    "join_batches",
    "join_uneven_inputs",
]

__version__ = "0.2.0"
