"""What holds on CPUs holds on an accelerator: parameters are those of one process, bit for bit alike on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from tests.core.backward import programs
from tests.core.backward.programs import KINDS, assert_exact
from tests.covering import others_long
from tests.device.jobs import (
    BLOCKING,
    BOTH,
    SERIAL,
    Job,
    assert_one_order,
    skip_where_hooks_are_lost,
    skip_without_functional_gather,
)
from tests.support.front_ends import plain
from tests.support.front_ends.plain import Loop
from tests.support.run import difference, reference
from tests.support.workers import Workers
from torch_join import Join

PLAIN: dict[str, Loop] = {
    "Adam": Loop((2, 5, 3), ragged=True),
    "samples": Loop((0, 4, 2), weighting="samples", optimizer="sgd"),
    "active, streams": Loop((4, 0), weighting="active", loop="iterable"),
    "a plain for": Loop((3, 1), loop="plain"),
    "heartbeat": Loop((1, 4), loop="heartbeat"),
    "ZeRO and SGD": Loop((2, 5, 1), optimizer="zero+sgd"),
    "schedulers, clipping": Loop((5, 2), scheduler="plateau", clip=0.1),
    "a scaler": Loop((2, 4), scaler=8.0, clip=0.5),
    "accumulation": Loop((2, 5), accumulate=2),
    "BatchNorm, evaluation": Loop((2, 5), model="norm", evaluation="no_grad", one_context=True),
    "two models": Loop((2, 4), loss="two models"),
    "a gradient penalty": Loop((1, 3), loss="penalty"),
    "gradients of zeros": Loop((1, 3), clear="before, zeros", optimizer="adamw"),
    "leaving early": Loop((3, 3), leaves=True),
    "even": Loop((3, 3)),
    **{f"{kind} in each step": Loop((1, 4, 2), collective=kind) for kind in ("sum", "avg", "all_gather", "objects")},
}


@pytest.mark.parametrize("name", others_long(PLAIN, *[*PLAIN][::2]))
def test_plain_loops(devices: Workers, name: str) -> None:
    program = PLAIN[name]
    expected = reference(program)
    outcomes = devices.run(program.world_size, plain.train, program)
    for outcome in outcomes:
        assert difference(outcome.parameters, expected.parameters) < 1e-10
        assert outcome.lr == expected.training.rates
        assert all(map(torch.equal, outcome.parameters, outcomes[0].parameters))


# torch.compile does not run under the mode that has these programs make their tensors on the device.
BACKWARDS = [kind for kind in KINDS if "compiled" not in kind]


@pytest.mark.parametrize("kind", others_long(BACKWARDS, *BACKWARDS[::3]))
def test_collectives_in_backward_in_one_order(devices: Workers, kind: str, tmp_path: Path) -> None:
    options, wrapper = KINDS[kind]
    if "functional" in options:
        skip_without_functional_gather(devices)
    program = programs.Program((0, 4, 2), weighting="world", options=frozenset(options), ddp=dict(wrapper))
    skip_where_hooks_are_lost(program)
    exact_in_order(devices, program, tmp_path)


def exact_in_order(devices: Workers, program: programs.Program, folder: Path) -> None:
    results = SERIAL.run(devices, 3, folder, programs.train, program)
    assert_exact(program, [tensors for tensors, _ in results])
    assert_one_order([log for _, log in results])


def in_order(devices: Workers, job: Job, recipe: programs.Program, folder: Path) -> None:
    if "fsdp2" in recipe.options:
        skip_without_functional_gather(devices)
    expected = reference(recipe)
    results = job.run(devices, recipe.world_size, folder, programs.train, recipe)
    for tensors, _ in results:
        assert difference(tensors, [*expected.parameters, *expected.buffers]) < 1e-10
    assert_one_order([log for _, log in results])


@pytest.mark.parametrize("seed", others_long(range(300, 312), *range(300, 304)))
def test_random_programs_in_one_order(devices: Workers, seed: int, tmp_path: Path) -> None:
    in_order(devices, (SERIAL, BLOCKING, BOTH)[seed % 3], programs.draw(seed), tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("options", [("no norm",), (), ("contrast", "mean"), ("checkpoint", "adam")], ids=str)
def test_sharded_models(devices: Workers, api: str, options: tuple[str, ...], tmp_path: Path) -> None:
    if api == "fsdp2":
        skip_without_functional_gather(devices)
    program = programs.Program((2, 5, 0), weighting="active", options=frozenset((api, *options)))
    if api == "fsdp2":
        skip_where_hooks_are_lost(program)
    exact_in_order(devices, program, tmp_path)


class SteppedInBackward:
    """A model of which torch steps each parameter as soon as its gradient is averaged, and batches of it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        x, y = (torch.randn(2 + rank, size, generator=generator, dtype=torch.float64) for size in (4, 1))
        return (model(x) - y).pow(2).mean()

    def tensors(self, optimizers: list[Any]) -> list[Tensor]:
        momenta = [o.state[p]["momentum_buffer"] for o in optimizers for p in o.param_groups[0]["params"]]
        return [tensor.detach().cpu() for tensor in [*self.model.parameters(), *momenta]]


def step_in_backward(rank: int, lengths: tuple[int, ...], weighting: Any, given: bool) -> list[Tensor]:
    stepped = SteppedInBackward()
    parameters: Any = [*stepped.model.parameters()]
    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1, "momentum": 0.9})
    optimizers = [optimizer for parameter in parameters for optimizer in parameter._in_backward_optimizers]
    ddp = DistributedDataParallel(stepped.model, bucket_cap_mb=0.0001)
    for _ in range(2):
        with Join([ddp, *(optimizers if given else [])], weighting=weighting) as join:
            for step in join.batches(range(lengths[rank])):
                stepped.loss(ddp, rank, step).backward()
    return stepped.tensors(optimizers)


# Torch runs them on a stream of an accelerator, so that there are none on CPUs.
@pytest.mark.covering(2)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("weighting", ["world", "active"])
@pytest.mark.parametrize("lengths", [(3, 3), (2, 5, 3), (0, 4, 2), (4, 0)])
def test_optimizers_in_backward(devices: Workers, lengths: tuple[int, ...], weighting: str, given: bool) -> None:
    stepped = SteppedInBackward()
    optimizer = torch.optim.SGD(stepped.model.parameters(), lr=0.1, momentum=0.9)
    for step in [*range(max(lengths))] * 2:
        active = [rank for rank, length in enumerate(lengths) if step < length]
        optimizer.zero_grad()
        for rank in active:
            share = len(active) if weighting == "active" else len(lengths)
            (stepped.loss(stepped.model, rank, step) / share).backward()
        optimizer.step()
    for tensors in devices.run(len(lengths), step_in_backward, lengths, weighting, given):
        assert difference(tensors, stepped.tensors([optimizer])) < 1e-10
