"""Notices when a private name of Fabric's that we rely on goes; the behaviour behind it is tested elsewhere."""

import inspect

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from lightning_join import _compat_fabric as compat


def test_names() -> None:
    assert {*inspect.signature(DDPStrategy._convert_stateful_objects_in_state).parameters} == {
        "self",
        "state",
        "filter",
    }
    assert [*inspect.signature(compat.MultiProcessingLauncher.launch).parameters][:2] == ["self", "function"]
    assert compat.unwrap_objects([1]) == [1]


def test_methods_that_never_ask_a_strategy_are_those_that_are_replaced() -> None:
    import lightning_join.fabric  # noqa: F401

    for name in ("print", "log_dict", "call", "rank_zero_first"):
        own = inspect.unwrap(getattr(Fabric, name))
        assert own is not getattr(Fabric, name)
        assert "_strategy" not in own.__code__.co_names
