"""Optimization in a step with a loss, in one without a loss, and in a joined rank's step; losses are weighted."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_join._compat import AutomaticOptimization, BatchNorm, ClosureResult, ManualOptimization
from lightning_join._loops.user_code import NoStopIteration, shadow_step
from lightning_join._strategy_protocol import JoiningStrategy, join_of, strategy_of

# The strategy's `training_step` returns this in place of `None`, which Lightning refuses if there are several ranks.
NOTHING = object()


class _StepResult(ClosureResult):
    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        output = None if training_step_output is NOTHING else training_step_output
        return super().from_training_step_output(output, normalize)


class JoinAutomaticOptimization(AutomaticOptimization):
    """Lightning's automatic optimization, in which a joined rank runs no `training_step`.

    Everything after it (zero_grad, backward, clipping, the optimizer's step and every hook) runs alike on all ranks,
    even if `training_step` returned `None` while other ranks have a loss.
    """

    output_result_cls = _StepResult
    _result: ClosureResult | None = None

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        join, loop = join_of(self.trainer), cast(Any, self.trainer).fit_loop.epoch_loop
        join.keeps_buffers = self._skip_backward  # StochasticWeightAveraging, in an epoch for BatchNorm alone
        with loop.around_optimization(), join.around_step():
            output = super().run(optimizer, batch_idx, kwargs)
        self._result = None  # and with it the graph
        if join.keeps_buffers and join.is_last_step:
            _merge_statistics(self.trainer.lightning_module, strategy_of(self.trainer))
        if join.joined:
            output = output or {"loss": torch.zeros(())}
        elif join.no_output:
            output = {}
        return cast(dict[str, Any], loop.end_step(output, kwargs))

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        trainer: Any = self.trainer
        join = join_of(trainer)
        if join.joined and not join.runs_placeholders:
            self._result = ClosureResult(shadow_step(trainer))
            return self._result
        with join.loss_step():
            self._result = result = super()._training_step(kwargs)
        if result.closure_loss is not None and join.loss_factor != 1.0:
            # Users see the result's `loss`, a copy that was made before.
            result.closure_loss = result.closure_loss * join.loss_factor
        return result

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        return None if backward is None else lambda loss: self._backward(backward, loss)

    def _backward(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        if not join_of(self.trainer).backward(lambda: backward(loss)) and self._result is not None:
            self._result.loss = None  # as in one process: the closure returns None, and a GradScaler stays as it is


def _merge_statistics(module: nn.Module, strategy: JoiningStrategy) -> None:
    """Set BatchNorm's statistics on all ranks to those of all ranks' batches; all ranks meet.

    `StochasticWeightAveraging` ends with an epoch in which nothing is trained and each BatchNorm takes the plain
    average over its batches (`momentum=None`). Each rank has averaged over its own batches.
    """
    for norm in module.modules():
        if not isinstance(norm, BatchNorm) or norm.momentum is not None or norm.num_batches_tracked is None:
            continue
        count = norm.num_batches_tracked
        total = strategy.reduce(count.clone(), reduce_op="sum")
        for average in (norm.running_mean, norm.running_var) if total > 0 else ():
            assert average is not None
            average.copy_(strategy.reduce(average * count, reduce_op="sum") / total)
        count.copy_(total)


class JoinManualOptimization(ManualOptimization):
    """Lightning's manual optimization, in which a joined rank mirrors the `training_step` of the active ranks."""

    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        with join_of(self.trainer).around_step():
            output = super().run(kwargs)
        loop = cast(Any, self.trainer).fit_loop.epoch_loop
        return cast(dict[str, Any], loop.end_step(output, kwargs))

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        # Inside Lightning's code that suppresses the exception, which would silently end the step on this rank alone.
        with NoStopIteration():
            join = join_of(self.trainer)
            if join.joined and not join.runs_placeholders:
                self._output = {"loss": shadow_step(self.trainer).detach()}
            else:
                super().advance(kwargs)
