"""Accelerate's operations inside the context: gathers, logs and saves, and the processes that run them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import accelerate

from accelerate_join import _compat, _positions
from accelerate_join._active import ActiveOperations
from accelerate_join._prepared import Progress
from torch_join import JoinDataWarning, JoinError, UnsupportedError
from torch_join.integration import (
    LoopDriver,
    holds_parts,
    is_closed,
    is_communication_error,
    is_engine,
    own_loops,
    telling_failures,
)

_CALL, _SAVE = "call", "save_state"
_CALLED = ("log", "load_state", "save_state", "save_model", "get_state_dict")


class Operations(ActiveOperations):
    """Accelerate's operations, on active and on joined ranks.

    Args:
        accelerator: The accelerator.
        progress: The accelerator's progress, which is part of a checkpoint.
    """

    kinds: ClassVar[dict[str, Any]] = {
        **ActiveOperations.kinds,
        _CALL: tuple[str, int | None, tuple[Any, ...], dict[str, Any]],
        _SAVE: tuple[tuple[Any, ...], dict[str, Any], bool, tuple[list[int], int], bool, Any, Any],
    }

    driver: LoopDriver

    def __init__(self, accelerator: accelerate.Accelerator, progress: Progress, driver: LoopDriver, index: int) -> None:
        super().__init__(accelerator.device, driver, index)
        driver.tail_log.follows_asides = True
        self._accelerator, self.progress = accelerator, progress
        self._type = type(accelerator)

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """In this context, an error of a broken collective names the failed rank and the cause."""
        try:
            yield
        except Exception as error:
            if not is_communication_error(error):
                raise
            with telling_failures(self.tail_log.channel):
                raise

    # ------------------------------------------------------------ operations

    @property
    def active(self) -> Sequence[int]:
        return self.driver.find_active()

    def are_over(self) -> bool:
        return own_loops.finish(self._accelerator)

    def before_gather(self, name: str) -> None:
        self.driver.before_collective(name)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint on all ranks, including joined ones."""
        with self._together(_CALL, ("load_state", None, args, kwargs)):
            self._call("load_state", args, kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log on the main process, with the lowest active rank's values if the main process has joined."""
        if self.driver.find_main_joined():
            self.announce_open(_CALL, ("log", None, args, kwargs))
        elif (placeholders := self.driver.placeholders) is not None:
            if (values := placeholders.logged_values((args, kwargs))) is None:
                return
            args, kwargs = values
        self._call("log", args, kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process, or on the lowest active rank if the main process has joined."""
        if self.driver.placeholders is not None and 0 not in self.active:
            if self.members.rank == self.active[0]:
                print(*args, **kwargs)
            return
        with self.acting_for_main_process():
            self._type.print(self._accelerator, *args, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Let each rank write its part of a checkpoint, with the active ranks' state.

        A joined rank writes only the files that every rank writes. States are handed over only if a joined rank writes
        them.
        """
        loader, in_tail = self.progress.find_loader(), self.tail_log.meet()
        if (placeholders := self.driver.placeholders) is not None:
            placeholders.bring_buffers()
        _positions.refuse_unsaved(self._accelerator, loader if self.driver.in_loop else None)
        if self.driver.in_loop and self.driver.is_mid_window() is not False:
            JoinDataWarning.warn(
                f"save_state was called at step {self.driver.step_number}, within an accumulation window. Accelerate's"
                " checkpoints hold no gradients, so a resumed run loses this window. Save after the optimizer's step."
            )
        when = _positions.epochs(self._accelerator), self.driver.step_number if self.driver.in_loop else -1
        is_last = self.driver.in_loop and loader is not None and self.driver.find_last_step()
        if not in_tail:
            return self._save(args, kwargs, False, when, is_last)
        args, kwargs = tuple(map(_as_text, args)), {name: _as_text(arg) for name, arg in kwargs.items()}
        everywhere = self._accelerator.project_configuration.save_on_each_node or self.driver.find_main_joined()
        scaler = self._accelerator.scaler
        states = self.progress.state_dict(), None if scaler is None else scaler.state_dict()
        payload = args, kwargs, everywhere, when, is_last, *states
        if everywhere or not self._saves_alone(payload):
            with self._together(_SAVE, payload):
                return self._save(args, kwargs, everywhere, when, is_last)
        self.driver.tail_log.announce_aside(self.index, _SAVE, payload)
        with self.driver.tail_log.together():
            return self._save(args, kwargs, everywhere, when, is_last)

    def _saves_alone(self, payload: Any) -> bool:
        """Whether a script may let only the main process save a checkpoint, as it may without the context."""
        waits = self._accelerator.project_configuration.automatic_checkpoint_naming
        is_sharded = any(holds_parts(model) or is_engine(model) for model in _compat.models(self._accelerator))
        return not waits and not is_sharded and is_closed(payload)

    def save_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model's weights: all ranks save a sharded model, the main process or its stand-in any other."""
        if holds_parts(model):
            self._call_with(model, "save_model", args, kwargs)
            return
        if (placeholders := self.driver.placeholders) is not None:
            placeholders.bring_buffers()
        with self.acting_for_main_process():
            self._call("save_model", (model, *args), kwargs)

    def get_state_dict(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a model's weights; all ranks assemble those of a sharded model for the main process.

        Raises:
            UnsupportedError: The main process has joined, so no active rank would get the weights.
        """
        if holds_parts(model) and self.driver.find_main_joined():
            raise UnsupportedError(
                "get_state_dict of a sharded model returns the state only on the main process (rank 0), which has"
                " finished. Call save_model or save_state, in which rank 0 takes part, or get_state_dict after the"
                " loop."
            )
        return self._call_with(model, "get_state_dict", args, kwargs)

    def _call_with(self, model: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method on all ranks, if it needs all shards of a model."""
        if not (holds_parts(model) and self.tail_log.meet()):
            return self._call(name, (model, *args), kwargs)
        place = next((place for place, each in enumerate(_compat.models(self._accelerator)) if each is model), None)
        if place is None:
            raise JoinError(
                f"{name} was called with a sharded {type(model).__name__} that accelerator.prepare did not return, so"
                " finished ranks cannot identify the model. Pass the prepared model."
            )
        with self._together(_CALL, (name, place, args, kwargs)):
            return self._call(name, (model, *args), kwargs)

    def _together(self, kind: str = "", payload: Any = None) -> AbstractContextManager[None]:
        """Wrap a call that all ranks make and an active rank announces as `kind`; calls inside it are not announced."""
        return self.driver.tail_log.together(partial(self.announce_open, kind, payload))

    def acting_for_main_process(self) -> AbstractContextManager[None]:
        """In this context, the lowest active rank acts as the main process if that has joined."""
        return _compat.acting_for_main() if self.driver.find_acting_main() else nullcontext()

    # ------------------------------------------------------------ on a joined rank

    def mirror(self, kind: str, payload: Any) -> None:
        if kind in ActiveOperations.kinds:
            super().mirror(kind, payload)
        elif kind == _SAVE:
            with self._together():
                self._save(*payload)
        else:
            name, place, args, kwargs = payload
            model = () if place is None else (_compat.models(self._accelerator)[place],)
            with nullcontext() if name == "log" else self._together():
                self._call(name, (*model, *args), kwargs)

    # ------------------------------------------------------------ on both

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in _CALLED:
            raise JoinError(f"A finished rank received a call to {name[:60]!r}, which active ranks never announce.")
        loads = name == "load_state"
        with _positions.loading_places(self._accelerator, kwargs.get("load_kwargs")) if loads else nullcontext():
            return getattr(self._type, name)(self._accelerator, *args, **kwargs)

    def _save(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        everywhere: bool,
        when: _positions.When,
        is_last: bool,
        progress: Any = None,
        scaler: Any = None,
    ) -> Any:
        if everywhere:
            self.driver.tail.hand_over_states()
        elif progress is not None:
            self.progress.load_state_dict(progress)
            if scaler is not None:
                self._accelerator.scaler.load_state_dict(scaler)
        last, members = self.progress.find_loader() if is_last else None, self.members
        placeholders = self.driver.placeholders
        is_active = not (members.serves or (placeholders is not None and placeholders.losses.joined))
        leads = is_active and members.rank == self.active[0]
        with _positions.saving_places(self._accelerator, when, last, leads, is_active):
            return self._call("save_state", args, kwargs)


def _as_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path
