"""Plain loops in which batches are rebalanced: the parameters are those of one process that follows the schedule."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.core.backward.programs import Sum
from tests.covering import others_long
from tests.support.front_ends.plain import Loop, assert_exact, train
from tests.support.run import reference
from tests.support.workers import Workers
from torch_join import Join

OPTIMIZERS = ("sgd", "adam", "adamw", "zero")
FEATURES: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.3},
    "step": {"scheduler": "step"},
    "plateau": {"scheduler": "plateau"},
    "penalty": {"loss": "penalty", "clip": 0.3},
    "two-models": {"loss": "two models"},
    "two-forwards": {"loss": "two forwards"},
    "two-backwards": {"loss": "two backwards"},
    "window": {"accumulate": 3, "lengths": (4, 7, 0)},
    "scaler": {"scaler": 8.0, "clip": 0.3, "clear": "after"},
    "in-turns": {"lengths": ((2, 5, 3), (4, 1, 4), (0, 3, 6))},
    "one-context": {"one_context": True, "scheduler": "step"},
    "sum": {"collective": "sum"},
    "norm": {"model": "norm"},
}
LENGTHS = ((3, 6), (9, 1), (0, 4, 2), (7, 0), (2, 0, 0), (1, 9, 2), (3, 3), (0, 1))
WEIGHTINGS = ("world", "active", "samples")
LOOPS = ("sized", "iterable")


def crossed() -> dict[str, Loop]:
    programs = {}
    for i, (name, feature) in enumerate(FEATURES.items()):
        for j, optimizer in enumerate(OPTIMIZERS):
            turns = {
                "lengths": LENGTHS[(3 * i + j) % 8],
                "weighting": WEIGHTINGS[(i + j) % 3],
                "loop": LOOPS[(i + j // 2) % 2],
            }
            programs[f"{optimizer}-{name}"] = Loop(**{"optimizer": optimizer, "rebalance": True, **turns, **feature})
    return programs


PROGRAMS = {
    "empty": Loop((0, 0), rebalance=True),
    "even": Loop((4, 4), rebalance=True),
    "even-stream": Loop((4, 4), rebalance=True, loop="iterable"),
    "one": Loop((3,), rebalance=True),
    **crossed(),
}


# Optimizers take turns.
SOME = [f"{OPTIMIZERS[i % 4]}-{feature}" for i, feature in enumerate(FEATURES)]


@pytest.mark.parametrize("name", others_long(PROGRAMS, "empty", "even", "even-stream", "one", *SOME))
def test_parameters_are_those_of_one_process_with_the_same_schedule(workers: Workers, name: str) -> None:
    program = PROGRAMS[name]
    outcomes = workers.run(program.world_size, train, program)
    assert_exact(outcomes, reference(program))


def train_without_numpy(rank: int, program: Loop) -> Any:
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("Numpy is not available")):
        return train(rank, program)


@pytest.mark.parametrize("rebalance", [False, True])
def test_numpy_may_be_missing(workers: Workers, rebalance: bool) -> None:
    program = Loop((2, 7), rebalance=rebalance)
    outcomes = workers.run(program.world_size, train_without_numpy, program)
    assert_exact(outcomes, reference(program))


class Slow(Dataset[torch.Tensor]):
    """Ones; reading for a step that is not the first waits until rank 0's forward of the step before has begun."""

    def __init__(self, length: int, begun: Path) -> None:
        self.length, self.begun, self.step, self.waited = length, begun, 0, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.monotonic() + 10
        while self.step > 1 and not (self.begun / str(self.step)).exists():
            assert time.monotonic() < end, "rank 0 waits for this rank's loader before its forward"
            time.sleep(0.001)
        self.waited += self.step > 1
        return torch.ones(2, 3)


def train_beside_a_slow_loader(rank: int, begun: Path) -> int:
    data: Any = Slow(9, begun) if rank == 1 else [torch.ones(2, 3)] * 3
    module = nn.Linear(3, 1)
    if rank == 0:
        steps = iter(range(6))
        module.register_forward_pre_hook(lambda *_: (begun / str(next(steps))).touch())
    ddp = DistributedDataParallel(module)
    with Join([ddp], rebalance=True) as join:
        for step, batch in enumerate(join.batches(DataLoader(data, batch_size=None) if rank == 1 else data)):
            ddp(batch).sum().backward()
            if rank == 1:
                data.step = step + 1
    return data.waited if rank == 1 else 0


def test_where_lengths_are_certain_a_slow_loader_is_waited_for_in_backward(workers: Workers, tmp_path: Path) -> None:
    _, waited = workers.run(2, train_beside_a_slow_loader, tmp_path)
    assert waited > 2


def step_apart(rank: int, how: str) -> tuple[list[float], int]:
    """Do something on rank 0 alone, and then something together, before a forward."""
    lengths = (3, 9)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer], rebalance=True) as join:
        for batch in join.batches([torch.ones(2, 3)] * lengths[rank]):
            optimizer.zero_grad(set_to_none=False)
            if rank == 0 and how == "asks":
                assert join.active_ranks == (0, 1)
            if rank == 0 and how == "evaluates":
                with torch.no_grad():
                    ddp(batch)
            if how == "leaves out":
                if rank == 0 or join.step != 2:
                    with ddp.no_sync():
                        ddp(batch).sum().backward()
                for p in ddp.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)
            else:
                number = torch.tensor(len(batch))
                dist.all_reduce(number)
                (ddp(batch).sum() / number).backward()
            optimizer.step()
    return [float(x) for x in ddp.module.weight.flatten()], join.step


@pytest.mark.parametrize("how", ["asks", "evaluates", "leaves out"])
def test_ranks_may_do_different_things_before_something_they_do_together(workers: Workers, how: str) -> None:
    """No rank waits in its step for what another one does in that step."""
    (one, steps), other = workers.run(2, step_apart, how)
    assert (one, steps) == other
    assert steps == 6


def train_without_samples(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    batches = [torch.ones(0 if rank == 0 and i > 2 else 2, 3) for i in range((5, 7)[rank])]
    with Join([ddp], rebalance=True, weighting="samples", backward_collectives=True) as join:
        for batch in join.batches(batches):
            Sum.apply(ddp(batch).sum()).backward()


def test_a_batch_without_samples_is_refused_where_a_collective_comes_first_in_backward(workers: Workers) -> None:
    for outcome in workers.outcomes(2, train_without_samples, timeout=2.0):
        assert "a batch that is empty or counts 0" in outcome.error


def keep_a_loss(rank: int) -> bool:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    with Join([ddp], rebalance=True) as join:
        for step, batch in enumerate(join.batches([torch.ones(2, 3)] * (3, 9)[rank])):
            if step == 4:
                break
            loss = ddp(batch).sum()
            loss.backward()
    watched = weakref.ref(ddp)
    del join, ddp
    deadline = time.monotonic() + 5
    while watched() is not None and time.monotonic() < deadline:
        gc.collect()  # which does nothing while another thread collects
        time.sleep(0.01)
    return watched() is None and loss.grad_fn is not None


def test_a_loss_that_is_kept_keeps_no_model(workers: Workers) -> None:
    assert workers.run(2, keep_a_loss) == [True, True]
