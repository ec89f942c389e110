"""`Trainer(strategy="ddp_join")`: Lightning on uneven dataloaders, exactly.

Importing this package registers the strategies; it has no other effect.

Begin with `_strategy.py`, which builds what the folders hold, and with `_protocol.py`, which is all that they know of
it. `_reading` (dataloaders), `_logging` and `_training` do not import each other; `_loops` imports all three, the
strategy all four. What the strategies have in common is `_joining.py`.
`_callback.py` and `_monitor` import them. Of `torch_join` only the public names and
`integration` are imported.
"""

from lightning.pytorch.strategies import StrategyRegistry

from torch_join.integration import naming_missing as _naming_missing

with _naming_missing("2.6.6", "lightning.pytorch", "lightning.fabric"):
    from lightning_join._callback import JoinCallback
    from lightning_join._monitor.monitor import JoinMonitor
    from lightning_join._sharded import FSDPJoinStrategy, ModelParallelJoinStrategy
    from lightning_join._strategy import DDPJoinStrategy

__version__ = "0.1.0"

__all__ = ["DDPJoinStrategy", "FSDPJoinStrategy", "JoinCallback", "JoinMonitor", "ModelParallelJoinStrategy"]

for _strategy in (DDPJoinStrategy, FSDPJoinStrategy, ModelParallelJoinStrategy):
    _strategy.register_strategies(StrategyRegistry)
