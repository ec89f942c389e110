"""A second backward through one forward of a DDP model, which DDP does not average: the ranks would drift apart.

DDP's reducer hears of a forward and averages in the backward that follows. What another backward through the same
graph adds stays local, without a word. That is harmless while nobody steps with it (a loss for another model
leaves gradients here that are cleared), so what raises is an optimizer's step with such a gradient.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_join import _compat
from torch_join._errors import JoinError


class SecondBackward:
    """Watches one model; to cost next to nothing, at its first and last parameter and the first output of a forward.

    Args:
        ddp: The model.
        parameters: Its parameters.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
        self._through = -1  # the last backward that came through the forward's output
        self._fired: dict[int, int] = {}  # in which backward a parameter got a gradient, since that forward
        self._waits: RemovableHandle | None = None
        # With static_graph a parameter may get several gradients, in backwards inside each other.
        ends = (
            [] if ddp.static_graph else [p for p in {0: parameters[0], 1: parameters[-1]}.values() if p.requires_grad]
        )
        self._watches = [self._watch(p) for p in ends]

    def remove(self) -> None:
        """Remove what was installed."""
        while self._watches:
            self._watches.pop().remove()
        self._stop_waiting()

    def forward(self, output: Tensor) -> None:
        """Note a forward that will sync, with the first tensor of its output."""
        if self._watches:
            self._fired.clear()
            self._stop_waiting()  # what is there will be averaged with what comes
            self._through = -1
            output.register_hook(self._passes)  # type: ignore[no-untyped-call]

    def _passes(self, _: Tensor) -> None:
        self._through = _compat.backward_in_progress()

    def _watch(self, parameter: Tensor) -> RemovableHandle:
        key, weak = id(parameter), weakref.ref(parameter)

        def fires(*_: Any) -> None:
            task = _compat.backward_in_progress()
            if task == self._through and self._fired.setdefault(key, task) != task and self._waits is None:
                _compat.after_backward(lambda: self._wait(weak()))

        return get_gradient_edge(parameter).node.register_prehook(fires)

    def _wait(self, parameter: Tensor | None) -> None:
        if parameter is None or parameter.grad is None:
            return
        weak, gradient, shape = weakref.ref(parameter), weakref.ref(parameter.grad), tuple(parameter.shape)

        def check(optimizer: Any, *_: Any) -> None:
            p = weak()
            if p is None or not any(p is one for group in optimizer.param_groups for one in group["params"]):
                return
            self._stop_waiting()
            if p.grad is not None and p.grad is gradient() and bool(p.grad.any()):
                raise JoinError(
                    f"{type(optimizer).__name__} steps with a gradient (of a parameter of shape {shape}) to which two"
                    " backwards through one forward of a DistributedDataParallel model have added. DDP averages"
                    " only the first, so the ranks would drift apart, also without Join. Add the losses and run one"
                    " backward: (loss1 + loss2).backward(); or run a forward for each backward."
                )

        self._waits = register_optimizer_step_pre_hook(check)

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.remove()
            self._waits = None
