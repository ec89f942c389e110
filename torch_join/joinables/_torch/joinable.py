"""What the public joinables have in common: our `Join` unwraps them, torch's `Join` runs their hooks."""

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from torch_join._base.errors import JoinValueError, UnsupportedError
from torch_join._base.weighting import Weighting, check_sees_batches, resolve_weighting
from torch_join.joinables._torch.driver import HookDriver
from torch_join.joinables.arguments import refuse_misspelt
from torch_join.joinables.kinds import holds_shards
from torch_join.joinables.part import Driver, Part

# The joinables of one torch `Join`, while it is being built.
_building: weakref.WeakSet[HookDriver] = weakref.WeakSet()


class WrappingJoinable(Joinable):
    """A `Joinable` for something else, usable in torch's `Join` and in ours.

    Nothing is installed before torch takes it in, with `enable=True`. What is installed then goes at the
    end of the context, or with the `Join` object (after an exception, when torch calls nobody), at the
    latest when the joinable is given to another one.
    """

    is_model = False

    def __init__(self, wrapped: Any, group: Any, device: torch.device) -> None:
        self.wrapped = wrapped
        self._group = group
        self._device = device
        self._hook: weakref.ref[_Hook] | None = None
        self._driver: HookDriver | None = None
        self._weighting: Weighting = "world"
        super().__init__()

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that tell who has joined."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self._group or dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that torch's `Join` runs; `divide_by_initial_world_size` and `weighting` are read.

        Raises:
            UnsupportedError: What it is for is sharded; or the weighting counts batches, which nobody sees here.
        """
        if holds_shards(self.wrapped):
            raise UnsupportedError(
                f"{type(self.wrapped).__name__} holds shards of a model, of which a rank that has joined still owns a"
                " part; torch's own Join cannot have it follow. Give the model and its optimizer to torch_join.Join."
            )
        for name in kwargs:
            refuse_misspelt(name)
        self._weighting = resolve_weighting(kwargs.get("weighting"), kwargs.get("divide_by_initial_world_size"))
        check_sees_batches(self._weighting)
        hook = _Hook(self)
        self._hook = weakref.ref(hook)
        return hook

    # torch sets it when a `Join` of torch takes this in, after it has asked for the hook.
    @property
    def _join_config(self) -> Any:
        return self._config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._config = config
        self.configured(config.enable, config.enable and config.is_first_joinable)

    def configured(self, enable: bool, is_first: bool) -> None:
        """Install what lets this rank notice what happens in a step; torch's `Join` is being built."""
        driver = None if is_first or not enable else _being_built(self.join_process_group)
        if self._driver is not None and self._driver is not driver:
            self._driver.close()  # of a Join that an exception has ended
        self._driver = None
        hook = self._hook() if enable and self._hook is not None else None
        if hook is None:
            return
        if driver is not None and self in driver.joinables:
            raise JoinValueError(f"{self} was given to Join twice.")
        if is_first and not self.leads():
            raise self.misplaced("a JoinableModel, or whatever announces each step, must come before it")
        if driver is None:
            driver = HookDriver(self.join_process_group, self if is_first else None, self._weighting)
        if is_first:
            _building.clear()
            _building.add(driver)
        self._driver = hook.driver = driver
        weakref.finalize(hook, driver.close).atexit = False
        driver.add(self)

    def misplaced(self, rule: str) -> JoinValueError:
        """Return the error of a list in the wrong order."""
        return JoinValueError(
            f"{self} cannot stand where it does in the list of torch's Join, which runs the hooks of a step in its"
            f" order and counts the active ranks when the first one says so: {rule}. Or use torch_join.Join, which"
            " takes any order."
        )

    def make_part(self, driver: Driver, index: int) -> Part | None:
        """Return what takes part in each step, if anything does."""
        return None

    def leads(self) -> bool:
        """Whether a step begins with it, so that it may be the first in the list of torch's `Join`."""
        return False

    def is_done(self, kind: str, payload: Any) -> bool:
        """Whether nothing more comes in a step after what was announced."""
        return True

    def is_replicated(self) -> bool:
        """Whether its state is handed over."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.wrapped).__name__})"


class _Hook(JoinHook):
    """Its life is that of torch's `Join` object."""

    def __init__(self, joinable: WrappingJoinable) -> None:
        self._joinable = joinable
        self.driver: HookDriver | None = None

    def main_hook(self) -> None:
        cast(HookDriver, self.driver).serve(self._joinable)

    def post_hook(self, is_last_joiner: bool) -> None:
        cast(HookDriver, self.driver).finish(is_last_joiner)


def unwrap(thing: Any) -> Any:
    """Return what a joinable of this package was made of, and anything else as it is."""
    return thing.wrapped if isinstance(thing, WrappingJoinable) else thing


def _being_built(group: Any) -> HookDriver | None:
    return next((driver for driver in _building if driver.members.group == group and not driver.started), None)
