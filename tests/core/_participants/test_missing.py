"""What a tail needs and was not given to `Join` is warned of, and nothing else is."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import SequentialLR, StepLR

from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join


class Wrapped(Optimizer):
    """Like Accelerate's: an optimizer around one, with the other's state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class WrappedScheduler:
    """Like Accelerate's: a scheduler around one."""

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self.optimizers = scheduler, [optimizer]

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


class Training:
    """Everything in one object with a state."""

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self.parts = [optimizer, scheduler]

    def state_dict(self) -> Any:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Any) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class Hidden(nn.Module):
    """A module, of which only tensors are handed over, whatever else it holds."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer


class Set(Optimizer):
    """A user's own optimizer without a state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        pass


def given(kind: str, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return what `Join` gets besides the model, and what the loop steps."""
    adam, plain = Adam(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    head = SGD([*model.parameters()][:1], lr=0.1, momentum=0.9)

    def of(optimizer: Optimizer = adam) -> StepLR:
        return StepLR(optimizer, 1)

    def zero() -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1)

    kinds: dict[str, Callable[[], tuple[list[Any], list[Any]]]] = {
        "nothing": lambda: ([], [adam]),
        "the scheduler only": lambda: ([one := of()], [adam, one]),
        "a part": lambda: ([adam], [adam, head]),
        "in a module": lambda: ([Hidden(adam)], [adam]),
        "sharded": lambda: ([one := zero()], [one]),
        "sharded, scheduler forgotten": lambda: ([one := zero()], [one, of(one)]),
        "wrapped": lambda: ([Wrapped(adam), WrappedScheduler(one := of(), Wrapped(adam))], [adam, one]),
        "wrapped, scheduler forgotten": lambda: ([Wrapped(adam)], [adam, of()]),
        "scheduler of the inner one": lambda: ([Wrapped(adam), one := of()], [adam, one]),
        "in one object": lambda: ([Training(adam, one := of())], [adam, one]),
        "both": lambda: ([one := SequentialLR(adam, [of(), of()], [1]), adam], [adam, one]),
        "scheduler forgotten": lambda: ([adam], [adam, of()]),
        "scheduler not stepped": lambda: ([of().optimizer], [adam]),
        "stateless": lambda: ([], [plain, Set(model.parameters())]),
        "stateless, rate changed": lambda: ([], [plain, of(plain)]),
        "of another model": lambda: ([], [Adam(nn.Linear(1, 1).parameters())]),
    }
    return kinds[kind]()


def train(rank: int, kind: str, lengths: tuple[int, ...], loop: str = "sized") -> list[str]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    things, steps = given(kind, model)
    with warned("After the tail of a loop, the ranks differ in") as said:
        for _ in range(2):
            with Join([model, *things]) as join:
                batches = list(range(lengths[rank]))
                for _ in join.batches(batches) if loop == "sized" else batches:
                    for thing in steps:
                        if isinstance(thing, Optimizer):
                            thing.zero_grad()
                    model(torch.ones(3, 2)).sum().backward()
                    for thing in steps:
                        thing.step()
    return said


QUIET = ["sharded", "wrapped", "scheduler of the inner one", "in one object", "both", "scheduler not stepped"]
QUIET += ["stateless", "of another model"]
LOUD = {
    "nothing": r"steps\[0\] \(Adam\) in train\(\), which was not given to Join: .state\[0\]\['step'\]",
    "the scheduler only": r"steps\[0\] \(Adam\) in train\(\), which",
    "a part": r"steps\[1\] \(SGD\) in train\(\), which .* .state\[0\]\['momentum_buffer'\]",
    "in a module": r"steps\[0\] \(Adam\) in train\(\), which",
    "sharded, scheduler forgotten": r"steps\[1\] \(StepLR\) in train\(\), which .* .last_epoch",
    "wrapped, scheduler forgotten": r"steps\[1\] \(StepLR\) in train\(\), which",
    "scheduler forgotten": r"steps\[1\] \(StepLR\) in train\(\), which",
    "stateless, rate changed": r"steps\[0\] \(SGD\) in train\(\), which .* .param_groups\[0\]\['lr'\]",
}


IN_A_PLAIN_FOR = ("the scheduler only", "a part", "sharded, scheduler forgotten", "wrapped, scheduler forgotten")


@pytest.mark.parametrize("kind", QUIET)
def test_what_was_given_is_not_warned_of(workers: Workers, kind: str) -> None:
    assert workers.run(2, train, kind, (2, 4)) == [[]] * 2


@pytest.mark.parametrize("kind", LOUD)
def test_what_was_forgotten_is_warned_of_once(workers: Workers, kind: str) -> None:
    said, nothing = workers.run(2, train, kind, (2, 4), "plain" if kind in IN_A_PLAIN_FOR else "sized")
    assert nothing == []
    assert len(said) == 1
    assert re.search(LOUD[kind], said[0])
    assert "Join([model, optimizer" in said[0]


def test_even_inputs_need_nothing(workers: Workers) -> None:
    assert workers.run(2, train, "nothing", (2, 2)) == [[]] * 2


def compute(rank: int, kind: str, lengths: list[int], options: dict[str, Any]) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    metric: Any = {
        "a minimum": torchmetrics.MinMetric,
        "a collection": lambda: torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MeanMetric()]),
        "a sum": torchmetrics.SumMetric,
        "a sum in each step": lambda: torchmetrics.SumMetric(dist_sync_on_step=True),
    }[kind]()
    with warned("synced after") as said:
        with Join([ddp, *([metric] if options.pop("given", False) else [])], **options) as join:
            for _ in join.batches(range(lengths[rank])):
                ddp(torch.ones(1, 2)).sum().backward()
                if kind == "a sum in each step":
                    assert metric(2.0) == 2.0 * len(join.active_ranks)
                    continue
                metric.update(5.0)
                metric.compute()
        metric.compute()
    return said


@pytest.mark.parametrize(
    ("kind", "name"), [("a minimum", "MinMetric"), ("a collection", "MetricCollection"), ("a sum", "SumMetric")]
)
def test_a_metric_that_syncs_in_a_tail_and_was_not_given(workers: Workers, kind: str, name: str) -> None:
    nothing, said = workers.run(2, compute, kind, [1, 3], {})
    assert nothing == []
    assert len(said) == 1  # however often
    assert said[0].startswith(f"{name} synced after some ranks finished")
    assert "Pass it to Join ([model, optimizer, metric])" in said[0]
    assert workers.run(2, compute, kind, [1, 3], {"given": True}) == [[], []]
    assert workers.run(2, compute, kind, [2, 2], {"may_break": True}) == [[], []]


def test_a_sum_over_a_step_needs_no_word(workers: Workers) -> None:
    assert workers.run(2, compute, "a sum in each step", [1, 3], {}) == [[], []]
