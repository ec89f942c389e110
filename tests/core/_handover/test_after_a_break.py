"""What a rank's own code does between a `break` and the next meeting: right, or an error on all ranks."""

import copy
import io
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from accelerate_join import join_batches
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.run import difference
from tests.support.small import batch, step_on, steps_of
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join

Lengths = tuple[int, ...]
NEVER = 99


class Training:
    """A model with BatchNorm, Adam, a schedule per epoch, an average per epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().eval()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.average = AveragedModel(self.net)
        self.model: Any = self.net

    @property
    def given(self) -> list[Any]:
        self.model = DistributedDataParallel(self.net)
        return [self.model, self.optimizer, self.scheduler, self.average]

    def step(self, *batches: Tensor, share: float = 1.0) -> None:
        step_on((self.model(x).pow(2).mean() * share for x in batches), self.optimizer)

    def change(self, how: str) -> None:
        """What comes after the loop."""
        if how == "average":
            self.average.update_parameters(self.net)
        elif how == "scheduler":
            self.scheduler.step()
        elif how == "step":
            self.step_alone()
        elif how == "weight":
            self.net[0].weight.data.mul_(0.5)  # no version counter sees it
        elif how == "buffer":
            self.net.train()
            self.net(batch(9, 9))
            self.net.eval()
        elif how == "swap":  # evaluate the average
            kept = copy.deepcopy(self.net.state_dict())
            self.net.load_state_dict(self.average.module.state_dict())
            self.net(batch(9, 9))
            self.net.load_state_dict(kept)
        elif how == "nothing":
            self.net.train().eval()
            self.net.requires_grad_(False).requires_grad_(True)
            with torch.no_grad():
                self.net(batch(9, 9))
            self.optimizer.zero_grad()
            torch.save([thing.state_dict() for thing in (self.net, self.optimizer, self.scheduler)], io.BytesIO())

    def step_alone(self) -> None:
        for p in self.net.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()

    @property
    def result(self) -> list[Tensor]:
        rate = torch.tensor(self.scheduler.get_last_lr(), dtype=torch.float64)
        return [*(t.detach().clone() for t in (*self.net.parameters(), *self.average.parameters())), rate]


def train(rank: int, lengths: Lengths, stops: Lengths, how: str, where: str = "", may_break: bool = False) -> Any:
    training = Training()
    with Join(training.given, may_break=may_break) as join:
        for epoch in range(2):
            loop: Any = join.batches([batch(rank, s) for s in range(lengths[rank])])
            if where == "held":
                loop = iter(loop)
            for step, x in enumerate(loop):
                training.step(x)
                if step + 1 == stops[rank]:
                    break
            if where == "after a loop":
                for _ in join.batches(()):
                    pass
            if where != "after the with" or epoch == 0:
                training.change(how if where != "after the with" else "")
    if where == "after the with":
        training.change(how)
    return training.result


def alone(lengths: Lengths, stops: Lengths, how: str, where: str) -> list[Tensor]:
    training = Training()
    for _ in range(2):
        for places in steps_of([*map(min, lengths, stops)]):
            training.step(*(batch(*place) for place in places), share=1 / len(lengths))
        if where != "after the with":
            training.change(how)
    if where == "after the with":
        training.change(how)
    return training.result


CHANGES = {
    "average": "AveragedModel",
    "scheduler": "StepLR",
    "step": "Adam",
    "weight": "parameters",
    "buffer": "buffers",
}
# Lengths, the step after which each rank breaks, `may_break`.
SOME_STAY: list[tuple[Lengths, Lengths, bool]] = [
    ((1, 4), (NEVER, 3), False),
    ((0, 4, 4), (NEVER, 3, 3), False),
    ((4, 2, 5), (3, NEVER, 3), False),
    ((5, 3), (2, NEVER), True),  # the one that breaks comes first, and waits
    ((0, 3, 5), (NEVER, NEVER, 4), True),
]
ALL_LEAVE: list[tuple[Lengths, Lengths, bool]] = [
    ((2, 4), (2, NEVER), False),  # it breaks with its last batch
    ((2, 4), (NEVER, 2), False),  # the other's loop ends with that step
    ((4, 4), (3, 3), False),
    ((4, 3), (3, 3), False),
    ((2, 4), (2, 4), False),
    ((6, 6, 6), (2, 4, 1), True),
    ((4, 4), (3, 3), True),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize(("lengths", "stops", "may_break"), SOME_STAY)
def test_a_change_that_others_would_repeat_or_undo_raises(
    workers: Workers, lengths: Lengths, stops: Lengths, may_break: bool, how: str
) -> None:
    outcomes = workers.outcomes(len(lengths), train, lengths, stops, how, "", may_break)
    for outcome in outcomes:
        assert "with `break` and then changed" in outcome.error, outcome
        assert CHANGES[how] in outcome.error
    first, *others = {outcome.error for outcome in outcomes}
    assert not others, first


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["nothing", "swap"])
@pytest.mark.parametrize(("lengths", "stops", "may_break"), SOME_STAY)
def test_what_leaves_everything_as_it_was_does_not(
    workers: Workers, lengths: Lengths, stops: Lengths, may_break: bool, how: str
) -> None:
    expected = alone(lengths, stops, "", "")
    for result in workers.run(len(lengths), train, lengths, stops, how, "", may_break):
        assert difference(result, expected) < 1e-10


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["average", "scheduler", "weight"])
@pytest.mark.parametrize(("lengths", "stops", "may_break"), ALL_LEAVE)
def test_where_all_ranks_break_it_is_exact(
    workers: Workers, lengths: Lengths, stops: Lengths, may_break: bool, how: str
) -> None:
    expected = alone(lengths, stops, how, "")
    for result in workers.run(len(lengths), train, lengths, stops, how, "", may_break):
        assert difference(result, expected) < 1e-10


@pytest.mark.parametrize("where", ["after a loop", "after the with"])
@pytest.mark.parametrize(("lengths", "stops", "may_break"), SOME_STAY[:6:2])
def test_the_ways_that_the_error_names_are_exact(
    workers: Workers, lengths: Lengths, stops: Lengths, may_break: bool, where: str
) -> None:
    expected = alone(lengths, stops, "average", where)
    for result in workers.run(len(lengths), train, lengths, stops, "average", where, may_break):
        assert difference(result, expected) < 1e-10


def shard(rank: int, stops: Lengths, how: str) -> list[Tensor]:
    training = Training()
    ddp = DistributedDataParallel(training.net)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.05)
    with Join([ddp, optimizer], may_break=True) as join:
        for step, x in enumerate(join.batches([batch(rank, s) for s in range(6)])):
            train_on(ddp, optimizer, x)
            if step + 1 == stops[rank]:
                break
        training.change(how)
    return training.result


def test_a_change_to_what_a_shard_is_stepped_with_raises(workers: Workers) -> None:
    # The rank that owns a shard would give the others what it has changed already.
    for outcome in workers.outcomes(2, shard, (1, 3), "weight"):
        assert "with `break` and then changed model 0 (DistributedDataParallel): parameters" in outcome.error, outcome
    for how, stops in ("nothing", (1, 3)), ("weight", (2, 2)):
        expected = Training()
        for step in range(max(stops)):
            here = [batch(rank, step) for rank, stop in enumerate(stops) if step < stop]
            expected.step(*here, share=1 / 2)
        expected.change(how)
        for result in workers.run(2, shard, stops, how):
            assert difference(result, expected.result) < 1e-10


def hold(rank: int, lengths: Lengths, stops: Lengths) -> list[str]:
    with warned("Join cannot tell whether") as said:
        train(rank, lengths, stops, "average", "held")
    return said


@pytest.mark.parametrize(("lengths", "stops", "text"), [((0, 4, 4), (NEVER, 3, 3), "ranks 1, 2"), ((4, 2), (3, 2), "")])
def test_where_nobody_can_tell_it_warns(workers: Workers, lengths: Lengths, stops: Lengths, text: str) -> None:
    first, *others = workers.run(len(lengths), hold, lengths, stops)
    assert len(first) == (1 if text else 0)  # where it is still held
    assert all(f"whether {text} changed" in one for one in first)
    assert not any(others)


def leave_with_accelerate(rank: int, how: str) -> int:
    with accelerator_of(rank) as accelerator:
        training = Training()
        given = training.net, training.optimizer, training.scheduler
        training.model, training.optimizer, scheduler = accelerator.prepare(*given)
        loader: Any = DataLoaderShard([batch(rank, s) for s in range((1, 4)[rank])], batch_size=None)  # type: ignore[arg-type]
        for epoch in range(2):
            for step, x in enumerate(join_batches(accelerator, loader)):
                training.step(x)
                if step == 2:
                    break
            loader.set_epoch(epoch + 1)
            if how == "scheduler":
                scheduler.step()
        accelerator.end_training()
        return int(loader.iteration)


def test_with_accelerate(workers: Workers) -> None:
    assert workers.run(2, leave_with_accelerate, "") == [2, 2]
    for outcome in workers.outcomes(2, leave_with_accelerate, "scheduler"):
        assert "LR scheduler 0 (StepLR)" in outcome.error, outcome


def evaluate(rank: int, lengths: Lengths, stops: Lengths, how: str) -> list[str]:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters())
    with warned() as said, Join([ddp, optimizer], may_break="heartbeat" in how, audit=True) as join:
        for _epoch in range(2):
            batches = [batch(rank, step) for step in range(lengths[rank])]
            loop: Any = iter(join.batches(batches))
            for _ in batches if how == "next" else ():
                train_on(ddp, optimizer, next(loop))
            for step, x in enumerate(loop) if how != "next" else ():
                train_on(ddp, optimizer, x)
                if step + 1 == stops[rank]:
                    break
            del loop
            ddp.eval()
            if "weight" in how:
                net[0].weight.data.mul_(0.5)
            with torch.no_grad():
                for x in join.batches([batch(rank, step) for step in range(2)]):
                    ddp(x)
            ddp.train()
    return said


def train_on(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("lengths", "stops", "how"),
    [
        ((5, 5), (5, NEVER), "heartbeat"),  # an even loop: only rank 0 has set flags when they are compared
        ((4, 4), (NEVER, 3), "heartbeat"),
        ((3, 5, 5), (1, 4, 2), "heartbeat, weight"),  # where the first one joins it has changed the weight already
        ((3, 5, 5), (3, 3, 3), "weight"),
        ((0, 4, 2), (NEVER, NEVER, NEVER), "next"),  # rank 0 never asks
    ],
)
def test_what_may_be_changed_is_no_drift(workers: Workers, lengths: Lengths, stops: Lengths, how: str) -> None:
    assert not any(workers.run(len(lengths), evaluate, lengths, stops, how))
