"""Sharded models: what cannot be followed raises by name on all ranks, and a rank that fails is named on the others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.front_ends.lightning import Fit, Module
from tests.support.run import Batch
from tests.support.sharded_fits import KINDS, ShardedModule, build_sharded, build_strategy, on_cpus
from tests.support.workers import Workers, connect


class Manual(ShardedModule):
    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.automatic_optimization = False


class NoLoss(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


class Constant(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return torch.zeros((), requires_grad=True) if batch_idx == 3 else loss


class NotSharded(Module):
    def configure_model(self) -> None:
        pass


class Whole(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            _ = next(self.net.parameters()).full_tensor()  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


class Projected(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.5)
        return super().training_step(batch, batch_idx)


class Cleared(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.trainer.optimizers[0].state.clear()
        return super().training_step(batch, batch_idx)


class Hooked(ShardedModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            next(self.net.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        return super().training_step(batch, batch_idx)


CASE = Fit((2, 5), epochs=1)
REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    # the module, the trainer's options, under which strategies, and what is said
    "manual": (Manual, {}, KINDS[:1], ("UnsupportedError: Manual uses manual optimization",)),
    "no loss": (NoLoss, {}, KINDS[:1], ("UnsupportedError: training_step returned None", "0.0 * output.sum()")),
    "constant": (Constant, {}, KINDS, ("UnsupportedError: training_step returned a loss that does not depend on",)),
    "not sharded": (NotSharded, {}, KINDS[1:], ("so ModelParallelJoinStrategy would never average its gradients",)),
    # Of FullyShardedDataParallel's parameters torch itself says that they cannot be whole in a forward.
    "projected": (Projected, {}, KINDS, ("JoinError: The sharded parameters were modified",)),
    "hooked": (Hooked, {}, KINDS[1:], ("JoinError: A hook of a sharded gradient",)),
    "cleared": (Cleared, {}, KINDS[1:], ("JoinError: The state of Adam was modified",)),
    "whole": (Whole, {}, KINDS[1:], ("UnsupportedError", "needs the shards of finished ranks")),
}


def fit(rank: int, kind: str, make: Any, options: dict[str, Any]) -> None:
    connect()
    with on_cpus():
        build_sharded(kind, CASE, **options).fit(make(CASE))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in REFUSED for kind in REFUSED[name][2]])
def test_what_raises_on_all_ranks(workers: Workers, name: str, kind: str) -> None:
    make, options, _, texts = REFUSED[name]
    for outcome in workers.outcomes(2, fit, kind, make, options, timeout=15.0):
        for text in texts:
            assert text in outcome.error, outcome.trace or outcome.error or "no error"
        assert outcome.seconds < 12


def test_arguments() -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="weighting"):
            build_strategy(kind, Fit((1,), weighting="mean"))
