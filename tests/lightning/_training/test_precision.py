"""What Lightning has around a `training_step` is around what joined ranks do in its place."""

from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.joinables import WorldJoinable
from tests.support.run import Batch, difference, loss_of
from tests.support.workers import Workers


class Preconditioned(torch.optim.NAdam):
    """A step whose bits, and whose state, depend on the context it is made in; and that notes this context."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = closure()
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                p.grad = (p.grad @ p.grad.T) @ p.grad + p.grad
        super().step()
        return result


class Manual(Module):
    def __init__(self, case: Fit, precision: str) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.net.to(torch.float64 if precision == "64-true" else torch.float32)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, (batch[0].to(self.net.last.weight.dtype), batch[1])))
        optimizer.step()
        return torch.zeros(())

    def configure_optimizers(self) -> Any:
        return Preconditioned(self.parameters(), lr=0.02)


def fit_manual(rank: int, precision: str) -> tuple[list[Tensor], list[Any], list[str]]:
    module = Manual(Fit((4, 0, 2), epochs=2), precision)
    profiler = SimpleProfiler()
    build_trainer(module.case, precision=precision, profiler=profiler).fit(module)
    state = module.trainer.optimizers[0].state.values()
    dtypes = [value.dtype for each in state for value in each.values()]
    steps = [name for name in profiler.recorded_durations if name.endswith("training_step")]
    return [p.detach() for p in module.parameters()], dtypes, [n for n in steps for _ in profiler.recorded_durations[n]]


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_a_step_of_manual_optimization(workers: Workers, precision: str) -> None:
    (first, dtypes, steps), *others = workers.run(3, fit_manual, precision)
    assert len(steps) == 8
    for parameters, its_dtypes, its_steps in others:
        assert difference(first, parameters) == 0
        assert dtypes == its_dtypes
        assert len(its_steps) == 8  # shadow steps are counted too, so that a profiler's schedule is the same


class Watches(WorldJoinable):
    """Notes what new tensors are made of, and whether products are rounded, in a step and in the hook in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, bool]] = set()

    def note(self) -> None:
        self.seen.add((torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = JoinHook()
        hook.main_hook = self.note  # type: ignore[method-assign]
        return hook


class Automatic(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        watches: Any = self.trainer.strategy.joinables[0]
        Join.notify_join_context(watches)
        watches.note()
        return loss_of(self.net, batch)


def fit_automatic(rank: int, precision: str) -> set[tuple[torch.dtype, bool]]:
    watches = Watches()
    case = Fit((3, 0), epochs=1, ddp={"joinables": [watches]})
    build_trainer(case, precision=precision).fit(Automatic(case))
    return watches.seen


@pytest.mark.parametrize(
    ("precision", "seen"), [("bf16-mixed", (torch.float32, True)), ("64-true", (torch.float64, False))]
)
def test_a_step_of_automatic_optimization(workers: Workers, precision: str, seen: Any) -> None:
    assert workers.run(2, fit_automatic, precision) == [{seen}, {seen}]
