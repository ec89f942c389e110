"""What the public joinables have in common: our `Join` unwraps them, torch's `Join` runs their hooks."""

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from torch_join._base.compat import ConfiguredJoinable
from torch_join._base.errors import JoinValueError
from torch_join._base.weighting import Weighting, resolve_weighting
from torch_join.joinables._torch.steps import Steps
from torch_join.joinables.arguments import refuse_misspelt
from torch_join.joinables.part import Part

# The joinables of one torch `Join`, while it is being built.
_building: weakref.WeakSet[Steps] = weakref.WeakSet()


class WrappingJoinable(ConfiguredJoinable):
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
        self._steps: Steps | None = None
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
        """Return the hook that torch's `Join` runs; `divide_by_initial_world_size` and `weighting` are read."""
        for name in kwargs:
            refuse_misspelt(name)
        self._weighting = resolve_weighting(kwargs.get("weighting"), kwargs.get("divide_by_initial_world_size"))
        hook = _Hook(self)
        self._hook = weakref.ref(hook)
        return hook

    def configured(self, enable: bool, is_first: bool) -> None:
        """Install what lets this rank notice what happens in a step; torch's `Join` is being built."""
        steps = None if is_first or not enable else _being_built(self.join_process_group)
        if self._steps is not None and self._steps is not steps:
            self._steps.close()  # of a Join that an exception has ended
        self._steps = None
        hook = self._hook() if enable and self._hook is not None else None
        if hook is None:
            return
        if steps is not None and self in steps.joinables:
            raise JoinValueError(f"{self} was given to Join twice.")
        if is_first and not self.leads():
            raise self.misplaced("a JoinableModel, or whatever announces each step, must come before it")
        if steps is None:
            steps = Steps(self.join_process_group, self if is_first else None, self._weighting)
        if is_first:
            _building.clear()
            _building.add(steps)
        self._steps = hook.steps = steps
        weakref.finalize(hook, steps.close).atexit = False
        steps.add(self)

    def misplaced(self, rule: str) -> JoinValueError:
        """Return the error of a list in the wrong order."""
        return JoinValueError(
            f"{self} cannot stand where it does in the list of torch's Join, which runs the hooks of a step in its"
            f" order and counts the active ranks when the first one says so: {rule}. Or use torch_join.Join, which"
            " takes any order."
        )

    def make_part(self, join: Any, index: int) -> Part | None:
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
        self.steps: Steps | None = None

    def main_hook(self) -> None:
        cast(Steps, self.steps).serve(self._joinable)

    def post_hook(self, is_last_joiner: bool) -> None:
        cast(Steps, self.steps).finish(is_last_joiner)


def unwrap(thing: Any) -> Any:
    """Return what a joinable of this package was made of, and anything else as it is."""
    return thing.wrapped if isinstance(thing, WrappingJoinable) else thing


def _being_built(group: Any) -> Steps | None:
    return next((steps for steps in _building if steps.group == group and not steps.started), None)
