"""Operations that Fabric runs on one rank only, which may have joined."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lightning_join._compat_fabric import convert_state
from torch_join import UnsupportedError
from torch_join.integration import LoopDriver, Participant, is_closed, is_engine, is_sharded_model

_LOG, _SAVE = "log", "save"


class Operations(Participant):
    """The operations that rank 0 runs for all ranks (saving and logging), on active and joined ranks.

    Args:
        strategy: The `Joins` strategy of these operations.
    """

    kinds: ClassVar[dict[str, Any]] = {
        _LOG: tuple[dict[str, Any], int | None],
        _SAVE: tuple[str, dict[str, Any], dict[str, int], Any],
    }

    driver: LoopDriver

    def __init__(self, strategy: Any, driver: LoopDriver, index: int) -> None:
        super().__init__(driver, index)
        self._strategy = strategy
        driver.tail_log.follows_asides = True

    def holds_parts(self, state: dict[str, Any]) -> bool:
        """Whether each rank holds a part of the state to save."""
        return any(
            is_sharded_model(value) or is_engine(value)
            if isinstance(value, nn.Module)
            else hasattr(value, "consolidate_state_dict")
            for value in state.values()
        )

    def log(self, metrics: dict[str, Any], step: int | None) -> None:
        """Make rank 0, which has joined, log the lowest active rank's values; other ranks need not call this."""
        if is_closed((metrics, step)):
            self.driver.tail_log.announce_aside(self.index, _LOG, (metrics, step))
        else:
            self.announce_open(_LOG, (metrics, step))

    def save(self, path: Any, state: dict[str, Any], storage_options: Any, only: Mapping[str, Any] | None) -> None:
        """Save a checkpoint; all active ranks call this.

        Joined ranks also save if rank 0 has joined, or if each rank holds a part of a model. They save their own
        objects, with the active ranks' state. Objects that were not set up come from the lowest active rank.

        Raises:
            UnsupportedError: A filter was passed for the state of a sharded object.
        """
        places = {id(thing): index for index, thing in enumerate(self.driver.given)}
        if only and self.holds_parts(state):
            raise UnsupportedError(
                "fabric.save(filter=...) was called with a sharded model while some rank has finished, but that rank"
                " must save its part and has no filter. Save without a filter, or after the loop."
            )
        # By key, the place of an object that each rank has in the list of joinables.
        own = {k: places[id(v)] for k, v in state.items() if id(v) in places and k not in (only or {})}
        rest = convert_state(self._strategy, {k: v for k, v in state.items() if k not in own}, only or {})
        sent = {key: rest.get(key) for key in state if key in own or key in rest}
        payload = str(Path(path)), sent, own, storage_options
        with self.driver.tail_log.together(partial(self.announce_open, _SAVE, payload)):
            self._save(path, sent, own, storage_options)

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == _LOG:
            self._strategy.log_own(*payload)
            return
        with self.driver.tail_log.together():
            self._save(*payload)

    def _save(self, path: Any, sent: dict[str, Any], own: dict[str, int], storage_options: Any) -> None:
        self.driver.tail.hand_over_states()
        state = {key: self.driver.given[own[key]] if key in own else value for key, value in sent.items()}
        self._strategy.save_own(path, state, storage_options)
