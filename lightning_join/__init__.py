"""`Trainer(strategy="ddp_join")`: Lightning on uneven dataloaders, exactly.

Importing this package registers the strategies; it has no other effect.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_join._callback import JoinCallback
from lightning_join._monitor import JoinMonitor
from lightning_join._strategy import DDPJoinStrategy

__version__ = "0.1.0"

__all__ = ["DDPJoinStrategy", "JoinCallback", "JoinMonitor"]

DDPJoinStrategy.register_strategies(StrategyRegistry)
