"""Counts how often user code has cleared the gradients of an optimizer or a model."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from torch_join._base.devices import read
from torch_join._compat import ddp as _compat
from torch_join._handover.optimizers import has_groups
from torch_join._participants.hook import Hook


class Clears:
    """Counts the calls of `zero_grad` of an optimizer or a model, until `remove`.

    Attributes:
        calls: The number of calls.
        steps: The number of optimizer steps; 0 for a model.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.calls = self.steps = 0
        self._batch: tuple[int, int] | None = None  # the batch of the last backward
        # At this batch's first backward: the number of steps, and a parameter's version, which shows other steps.
        self._then = 0, 0
        trained = (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"] if p.requires_grad)
        self._watched = next(trained, torch.empty(0))
        self._calls_then = 0  # the number of calls at the last backward
        self._discards = 0  # how often user code has cleared gradients without a step
        self._spans = 0  # the number of batches in the current gradients
        self._windows = 0  # how often it has stepped with gradients of several batches
        self._cleared: list[Tensor] = []  # a model's parameters at its last call; FSDP replaces them at times
        self._before = {"zero_grad": vars(optimizer)["zero_grad"]} if "zero_grad" in vars(optimizer) else {}
        self._zero_grad = self._counted(optimizer.zero_grad)
        # Replace the object's method, as LR schedulers do with `step`: torch has no hook for `zero_grad`.
        optimizer.zero_grad = self._zero_grad
        self._remove_hook: Callable[[], None] | None = None  # none: steps are not counted
        # A subclass of `Optimizer` may not have called its base's constructor.
        with suppress(AttributeError, TypeError):
            self._remove_hook = optimizer.register_step_post_hook(Hook(self._stepped)).remove

    def _counted(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._batch is not None:
                self._discards += (self.steps, self._watched._version, self.calls) == (*self._then, self._calls_then)
            self.calls += 1
            if isinstance(self._optimizer, nn.Module):
                self._cleared = [*self._optimizer.parameters()]
            return zero_grad(*args, **kwargs)

        return Hook(call, copied=zero_grad)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def clears_each_step(self, calls: int, steps: int) -> bool:
        """Whether there was a call for each step since these numbers, so that this is how the loop clears gradients."""
        return self._remove_hook is not None and self.calls - calls >= max(1, self.steps - steps - 1)

    def note_backward(self, batch: tuple[int, int], syncs: bool = True) -> None:
        """Note a backward that adds to the optimizer's gradients; `batch` is the loop's number and the step."""
        if batch != self._batch:
            now = self.steps, self._watched._version
            adds = (*now, self.calls) == (*self._then, self._calls_then)
            self._windows += self._spans > 1 and now != self._then
            self._spans = self._spans + 1 if adds else 1
            self._batch, self._then = batch, now
        self._spans += not syncs  # without a sync, another batch will be added
        self._calls_then = self.calls

    def awaits_step(self, holds_others: bool) -> bool | None:
        """Whether gradients wait for an optimizer step: an accumulation has started.

        These are the parameters' gradients or, with `holds_others`, those that FSDP keeps elsewhere until a backward
        syncs. False in a batch in which the optimizer has stepped. Some gradients only wait to be cleared: those of a
        model in the path of another model's loss, or of a skipped step. So this is true only for a loop that has
        accumulated over batches more often than it has cleared gradients without a step; `None` if it has done neither.
        """
        if self._remove_hook is None or self._batch is None:
            return False
        accumulates = holds_others or self._windows > self._discards or (self._spans > 1 and not self._discards)
        if not accumulates and self._discards:
            return False
        if (self.steps, self._watched._version, self.calls) != (*self._then, self._calls_then):
            return False
        if holds_others:
            return True
        norms = _compat.norms(_compat.values_of([p.grad for p in self.parameters()]))
        # GradScaler skips a step with any gradient that is not finite.
        found: list[float] = [norm for (norm,) in read([norm for norm in norms if norm is not None])]
        return 0 < sum(found) < math.inf and (accumulates or None)

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients `zero_grad` clears."""
        if isinstance(self._optimizer, nn.Module):
            return self._cleared
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def remove(self) -> None:
        """Restore the original `zero_grad`."""
        if self._remove_hook is not None:
            self._remove_hook()
        self._cleared = []
        if vars(self._optimizer).get("zero_grad") is self._zero_grad:
            del vars(self._optimizer)["zero_grad"]
            vars(self._optimizer).update(self._before)


def innermost_optimizer(thing: Any) -> Any:
    """Return `thing` if it is an optimizer, or the innermost optimizer that it wraps; else `None`."""
    found: list[Any] = []
    while has_groups(thing) and not any(thing is one for one in found):
        found.append(thing)
        thing = getattr(thing, "optimizer", None)
    clearing = [one for one in found if callable(getattr(one, "zero_grad", None))]
    return clearing[-1] if clearing else None
