"""Accelerate on uneven dataloaders: the replacement for `accelerator.join_uneven_inputs`."""

from accelerate_join._accelerator import Accelerator
from accelerate_join._batches import join_batches
from accelerate_join._context import join_uneven_inputs
from torch_join import JoinError

__all__ = ["Accelerator", "JoinError", "join_batches", "join_uneven_inputs"]

__version__ = "0.1.0"
