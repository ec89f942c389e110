"""`Trainer(strategy="ddp_join")` and `Fabric(strategy="ddp_join")`: Lightning on uneven dataloaders, exactly.

Importing this package only registers the strategies. The Fabric strategies are in `fabric.py`, which is imported when
one of them is created.

Start reading at `_strategy.py`, which uses the folders, and `_strategy_protocol.py`, the only module of the strategy
that the folders import. `_reading` (dataloaders), `_logging` and `_training` do not import each other; `_loops` imports
all three, and the strategy all four. `_base_strategy.py` has the common part of the strategies; `_callback.py` and
`_monitor` import the strategies. From `torch_join`, only the public names and `integration` are imported.
"""

from functools import partial as _partial
from typing import Any as _Any

from lightning.fabric.strategies import STRATEGY_REGISTRY as _OF_FABRIC
from lightning.pytorch.strategies import StrategyRegistry

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

with _naming_missing("2.5.1 to 2.6.6", "lightning.pytorch", "lightning.fabric"):
    from lightning_join._callback import JoinCallback
    from lightning_join._monitor import JoinMonitor
    from lightning_join._names import names as _names
    from lightning_join._predicting.gather import gather_in_order, gather_predictions
    from lightning_join._predicting.writer import JoinPredictionWriter, read_predictions
    from lightning_join._sharded import DeepSpeedJoinStrategy, FSDPJoinStrategy, ModelParallelJoinStrategy
    from lightning_join._strategy import DDPJoinStrategy

__version__ = "0.2.0"

__all__ = [
    "DDPJoinStrategy",
    "DeepSpeedJoinStrategy",
    "EarlyTerminationError",
    "FSDPJoinStrategy",
    "JoinCallback",
    "JoinError",
    "JoinMonitor",
    "JoinPredictionWriter",
    "JoinTimeoutError",
    "JoinTypeError",
    "JoinValueError",
    "ModelParallelJoinStrategy",
    "PeerFailedError",
    "UnsupportedError",
    "gather_in_order",
    "gather_predictions",
    "read_predictions",
]


def _of_fabric(kind: str, **options: _Any) -> _Any:
    """Return a Fabric strategy."""
    from lightning_join import fabric

    return getattr(fabric, kind)(**options)


for _kind, _name, _description, _options in _names(of_fabric=False):
    StrategyRegistry.register(_name, globals()[_kind], _description, **_options)
for _kind, _name, _description, _options in _names(of_fabric=True):
    _OF_FABRIC.register(_name, _partial(_of_fabric, _kind), _description, **_options)
