"""Every private name of Lightning Fabric that this package uses.

Seen in lightning 2.6.6. `tests/fabric/test_compat.py` fails when one disappears.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.strategies import Strategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.fabric.wrappers import _FabricOptimizer as FabricOptimizer
from lightning.fabric.wrappers import _unwrap_objects as unwrap_objects

from torch_join.integration import check_names

__all__ = ["FabricOptimizer", "MultiProcessingLauncher", "convert_state", "unwrap_objects"]


def convert_state(
    strategy: Any, state: dict[str, Any], only: Mapping[str, Callable[[str, Any], bool]]
) -> dict[str, Any]:
    """Return the contents of a checkpoint that pass a filter, with state dicts in place of objects."""
    found: dict[str, Any] = strategy._convert_stateful_objects_in_state(state, filter=only)
    return found


check_names("lightning.fabric", "2.6.6", {Strategy: "_convert_stateful_objects_in_state"})
