"""A second backward through one forward of a DDP model, which DDP does not average: the ranks would drift apart.

DDP's reducer is prepared by a forward, and averages in the next backward. Gradients from a second backward through the
same outputs silently stay local. That is harmless if no optimizer steps with them (the loss of another model leaves
gradients here that user code clears). So a step with such a gradient raises. A backward that does not go through the
outputs (of an L2 term, for example) adds the same gradients on all ranks.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_join._base.errors import JoinError
from torch_join._compat import ddp as _compat
from torch_join._participants.hook import untraced


class SecondBackward:
    """Watches the outputs of one model's forwards.

    Args:
        parameters: The model's parameters.

    Attributes:
        awaits_first: Whether DDP averages in the next backward that reaches the parameters. It averages in the first
            backward after a forward that syncs, even if this backward goes through a later forward under `no_sync`,
            because the model was frozen in the forward that syncs, or because that forward had no backward.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._first = self._last = -1  # the backwards that went through the last forward's outputs
        self.awaits_first = self._is_under_way = False
        self._thread = 0  # the thread of the last forward
        self._touched: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = []  # touched parameters and gradients
        self._waits: RemovableHandle | None = None
        self._found: tuple[Tensor, Any] | None = None  # a parameter that the last first backward reached, and its node

    @property
    def broke_off(self) -> bool:
        """Whether a first backward has started but not ended; false in a thread that only reads batches."""
        is_here = self._thread == threading.get_ident()
        return self._is_under_way and is_here and self._first != _compat.backward_in_progress()

    def remove(self) -> None:
        """Remove the hooks, and the references to them."""
        self._touched.clear()
        self._found = None
        if self._waits is not None:
            self._waits.remove()
            self._waits = None

    def forward(self, outputs: Sequence[Tensor], first: Callable[[], None] = lambda: None) -> None:
        """Note a forward that will sync.

        Args:
            outputs: The outputs that a backward can start from.
            first: Called when the first backward starts; the outputs keep it alive.
        """
        if self._touched or self._waits is not None:
            self.remove()  # DDP will average existing gradients with the coming ones
        self._first = self._last = -1
        self.awaits_first, self._is_under_way, self._thread = True, False, threading.get_ident()
        for output in outputs:
            output.register_hook(partial(self._passes, first))  # type: ignore[no-untyped-call]

    def _passes(self, first: Callable[[], None], _: Tensor) -> None:
        task = _compat.backward_in_progress()
        if task == self._last:
            return
        self._last = task
        if self._first == -1:
            # A gradient penalty's `autograd.grad` adds to no gradient.
            if self._adds():
                self._first = task
                first()
                self._is_under_way = True
                _compat.after_backward(self._end_first)
        elif touched := [p for p in self._parameters if _compat.will_accumulate(p)]:
            _compat.after_backward(lambda: self._wait(touched))

    def _end_first(self) -> None:
        self._is_under_way = self.awaits_first = False  # `awaits_first` too, if nothing noticed the start

    def _adds(self) -> bool:
        """Whether the current backward adds to any gradient; looks first at the one that the last backward reached."""
        if self._found is not None and self._found[0].requires_grad and _compat.will_run(self._found[1]):
            return True
        added = next(filter(_compat.will_accumulate, self._parameters), None)
        self._found = None if added is None else (added, _compat.accumulator(added))
        return added is not None

    def _wait(self, touched: Sequence[Tensor]) -> None:
        self._touched += [(weakref.ref(p), weakref.ref(p.grad)) for p in touched if p.grad is not None]
        if self._waits is None:
            self._waits = register_optimizer_step_pre_hook(untraced(self._check))

    def _check(self, optimizer: Any, *_: Any) -> None:
        steps = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for weak, gradient in self._touched:
            p = weak()
            if p is None or id(p) not in steps or p.grad is None or p.grad is not gradient() or not bool(p.grad.any()):
                continue
            self.remove()
            raise JoinError(
                f"{type(optimizer).__name__} steps with a gradient (of a parameter of shape {tuple(p.shape)}) from"
                " two backwards through one forward of a DistributedDataParallel model. DDP averages only the first"
                " backward, even without Join, so the ranks would drift apart. Run a single backward, (loss1 +"
                " loss2).backward(), or two forwards."
            )
