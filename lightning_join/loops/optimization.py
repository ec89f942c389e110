"""Automatic optimization: a real step or its shadow, weighted."""

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from lightning_join._compat import AutomaticOptimization, ClosureResult
from lightning_join.loops._access import join_of


class JoinAutomaticOptimization(AutomaticOptimization):
    """Lightning's automatic optimization, in which a joined rank has no `training_step`.

    All that follows it (zero_grad, backward, clipping, the optimizer's step and every hook) is the
    same on all ranks.
    """

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        with join_of(self.trainer).around_step():
            return super().run(optimizer, batch_idx, kwargs)

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        join = join_of(self.trainer)
        if join.joined:
            return ClosureResult(join.shadow_forward())
        result = super()._training_step(kwargs)
        if result.closure_loss is not None and join.loss_factor != 1.0:
            # The result's `loss`, which is what users see, is a copy made before.
            result.closure_loss = result.closure_loss * join.loss_factor
        return result
