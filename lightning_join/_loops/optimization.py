"""Optimization: a real step, one without a loss, or a shadow; weighted."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_join._compat import AutomaticOptimization, BatchNorm, ClosureResult, ManualOptimization, call
from lightning_join._loops.user_code import NoStopIteration, shadow_step
from lightning_join._strategy_protocol import JoiningStrategy, join_of, strategy_of


class JoinAutomaticOptimization(AutomaticOptimization):
    """Lightning's automatic optimization, in which a joined rank has no `training_step`.

    All that follows it (zero_grad, backward, clipping, the optimizer's step and every hook) is the
    same on all ranks, also where `training_step` returned `None` and others have a loss.
    """

    _result: ClosureResult | None = None

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        join = join_of(self.trainer)
        join.keeps_buffers = self._skip_backward  # StochasticWeightAveraging, in an epoch for BatchNorm alone
        with join.around_step():
            output = super().run(optimizer, batch_idx, kwargs)
        self._result = None  # and with it the graph
        if join.keeps_buffers and join.is_last_step:
            _merge_statistics(self.trainer.lightning_module, strategy_of(self.trainer))
        if join.joined:
            return output or {"loss": torch.zeros(())}
        return {} if join.no_output else output

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        # Lightning's, but for: several ranks may return None.
        trainer: Any = self.trainer
        join = join_of(trainer)
        if join.joined:
            self._result = ClosureResult(shadow_step(trainer))
            return self._result
        with join.loss_step():
            output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        self._result = result = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)
        if result.closure_loss is not None and join.loss_factor != 1.0:
            # The result's `loss`, which is what users see, is a copy made before.
            result.closure_loss = result.closure_loss * join.loss_factor
        return result

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        return None if backward is None else lambda loss: self._backward(backward, loss)

    def _backward(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        if not join_of(self.trainer).backward(lambda: backward(loss)) and self._result is not None:
            self._result.loss = None  # as in one process: the closure returns None, and a GradScaler stays as it is


def _merge_statistics(module: nn.Module, strategy: JoiningStrategy) -> None:
    """Give all ranks the statistics of all ranks' batches; all ranks meet.

    `StochasticWeightAveraging` ends with an epoch in which nothing is trained and each BatchNorm takes the
    plain average over its batches (`momentum=None`). Each rank has averaged over its own.
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
    """Lightning's manual optimization, in which a joined rank repeats what the others' `training_step` trains."""

    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        with join_of(self.trainer).around_step():
            return super().run(kwargs)

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        # Inside of what suppresses it, else it would end one rank's step alone, and in silence.
        with NoStopIteration():
            if join_of(self.trainer).joined:
                self._output = {"loss": shadow_step(self.trainer).detach()}
            else:
                super().advance(kwargs)
