"""`transformers.Trainer` on uneven dataloaders.

Start reading at `_mixin.py`; `_run.py` has the operations that ranks run together.
"""

from transformers import Trainer

from accelerate_join.transformers._mixin import JoinTrainerMixin
from accelerate_join.transformers._monitor import JoinMonitor

__all__ = ["JoinMonitor", "JoinTrainer", "JoinTrainerMixin"]


class JoinTrainer(JoinTrainerMixin, Trainer):
    """A `transformers.Trainer` that is exact on uneven dataloaders: see `JoinTrainerMixin`."""
