"""How often an optimizer, or a model, has been asked to clear its gradients."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from torch_join._base.devices import read
from torch_join._compat import ddp as _compat
from torch_join._handover.optimizers import has_groups
from torch_join._participants.hook import Hook


class Clears:
    """The calls of the `zero_grad` of an optimizer or a model, from when this is made until `remove`.

    Attributes:
        calls: How many there were.
        steps: How many of its steps; a model has none.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.calls = self.steps = 0
        self._batch: tuple[int, int] | None = None  # that of the last backward
        # At that batch's first one: how many steps there had been, and how often a parameter had changed, as a step may
        # be a method of another name.
        self._then = 0, 0
        trained = (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"] if p.requires_grad)
        self._watched = next(trained, torch.empty(0))
        self._calls_then = 0  # at the last one
        self._discards = 0  # how often it has cleared what it had not stepped with
        self._spans = 0  # how many batches the gradients are of that are there now
        self._windows = 0  # how often it has stepped with those of several
        self._cleared: list[Tensor] = []  # of a model, by its last call: one that FSDP shards has others at times
        self._before = {"zero_grad": vars(optimizer)["zero_grad"]} if "zero_grad" in vars(optimizer) else {}
        self._zero_grad = self._counted(optimizer.zero_grad)
        # On the object, as LR schedulers do with its `step`: torch has no hook for it.
        optimizer.zero_grad = self._zero_grad
        self._counts = False
        self._remove_hook: Callable[[], None] = lambda: None
        # What derives from torch's optimizers need not have called their constructor.
        with suppress(AttributeError, TypeError):
            self._remove_hook = optimizer.register_step_post_hook(Hook(self._stepped)).remove
            self._counts = True

    def _counted(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._batch is not None:
                self._discards += (self.steps, self._watched._version, self.calls) == (*self._then, self._calls_then)
            self.calls += 1
            if isinstance(self._optimizer, nn.Module):
                self._cleared = [*self._optimizer.parameters()]
            return zero_grad(*args, **kwargs)

        return update_wrapper(Hook(call, copied=zero_grad), zero_grad)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def clears_each_step(self, calls: int, steps: int) -> bool:
        """Whether it has been called for each step since it had these numbers: so that is how gradients are cleared."""
        return self._counts and self.calls - calls >= max(1, self.steps - steps - 1)

    def note_backward(self, batch: tuple[int, int], syncs: bool = True) -> None:
        """Note a backward that adds to the gradients of an optimizer, in this batch of this loop."""
        if batch != self._batch:
            now = self.steps, self._watched._version
            adds = (*now, self.calls) == (*self._then, self._calls_then)
            self._windows += self._spans > 1 and now != self._then
            self._spans = self._spans + 1 if adds else 1
            self._batch, self._then = batch, now
        self._spans += not syncs  # whoever does not sync is to add another batch's
        self._calls_then = self.calls

    def awaits_step(self, holds_others: bool) -> bool | None:
        """Whether gradients are there that an optimizer has yet to step with: an accumulation has begun.

        They are the parameters', or, with `holds_others`, such as FSDP keeps elsewhere until a backward syncs. Not in a
        batch in which the optimizer has stepped. Gradients may also be there to be cleared: of a model that is in the
        way of another one's loss, or of a step that was left out. So the loop must be seen to accumulate over batches,
        and more often than it clears what it has not stepped with. `None` as long as it was seen to do neither.
        """
        if not self._counts or self._batch is None:
            return False
        accumulates = holds_others or self._windows > self._discards or (self._spans > 1 and not self._discards)
        if not accumulates and self._discards:
            return False
        if (self.steps, self._watched._version, self.calls) != (*self._then, self._calls_then):
            return False
        if holds_others:
            return True
        norms = _compat.norms(_compat.values_of([p.grad for p in self.parameters()]))
        # GradScaler leaves out a step with any gradient that is not finite.
        found: list[float] = [norm for (norm,) in read([norm for norm in norms if norm is not None])]
        return 0 < sum(found) < math.inf and (accumulates or None)

    def parameters(self) -> list[Tensor]:
        """Return what is cleared."""
        if isinstance(self._optimizer, nn.Module):
            return self._cleared
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def remove(self) -> None:
        """Give the optimizer its method back."""
        self._remove_hook()
        self._cleared = []
        if vars(self._optimizer).get("zero_grad") is self._zero_grad:
            del vars(self._optimizer)["zero_grad"]
            vars(self._optimizer).update(self._before)


def innermost_optimizer(thing: Any) -> Any:
    """Return `thing` if it is an optimizer, the one inside if it wraps another, and else `None`."""
    found: list[Any] = []
    while has_groups(thing) and not any(thing is one for one in found):
        found.append(thing)
        thing = getattr(thing, "optimizer", None)
    clearing = [one for one in found if callable(getattr(one, "zero_grad", None))]
    return clearing[-1] if clearing else None
