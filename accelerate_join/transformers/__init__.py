"""`transformers.Trainer` on uneven dataloaders.

Begin with: `_mixin.py`; what ranks do together is in `_run.py`.
"""

from transformers import Trainer

from accelerate_join.transformers._mixin import JoinTrainerMixin
from accelerate_join.transformers._monitor import JoinMonitor

__all__ = ["JoinMonitor", "JoinTrainer", "JoinTrainerMixin"]


class JoinTrainer(JoinTrainerMixin, Trainer):
    """`transformers.Trainer`, exact where ranks have different numbers of batches: see `JoinTrainerMixin`."""
