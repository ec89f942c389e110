"""Several sharded models in one loop, beside each other, in one container, and with a replicated one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.sharded import LIMIT, PATIENCE, full_state, shard
from tests.support.run import TOLERANCE, weights_of
from tests.support.sharded import EPOCHS, Recipe
from tests.support.small import step_on
from tests.support.workers import Workers
from torch_join import Join

States = list[dict[str, Tensor]]
BATCHES = Recipe((2, 5, 0))  # whose batches and two models are used


def nets() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Recipe(model="skipping").build(), nn.Linear(6, 6).double(), Recipe(model="mlp").build()]


def optimizers_of(groups: list[list[nn.Parameter]]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(group, lr=0.02) for group in groups]


def step(run: list[Any], batch: tuple[Tensor, Tensor], number: int) -> Tensor:
    """A loss to which the last model contributes in every other step."""
    x, y = batch
    x = run[1](run[0](x))
    return functional.mse_loss(run[2](x) if number % 2 else x, y)


def alone(weighting: str, clip: float) -> States:
    models = nets()
    optimizers = optimizers_of([list(model.parameters()) for model in models])
    for epoch in range(EPOCHS):
        data = [BATCHES.batches(rank, epoch) for rank in range(3)]
        for number in range(5):
            here = {rank: mine[number] for rank, mine in enumerate(data) if number < len(mine)}
            counts = weights_of(weighting, 3, {rank: len(x) for rank, (x, _) in here.items()})
            losses = (counts[rank] * step(models, batch, number) for rank, batch in here.items())
            step_on(losses, *optimizers, clip=clip)
    return [{name: value.detach() for name, value in model.state_dict().items()} for model in models]


def apart(models: list[Any], api: str) -> tuple[list[Any], list[Any]]:
    """Two sharded models, and one of `DistributedDataParallel` between them."""
    found = [shard(models[0], Recipe(api=api)), DistributedDataParallel(models[1]), shard(models[2], Recipe(api=api))]
    return found, found


def all_sharded(models: list[Any], api: str) -> tuple[list[Any], list[Any]]:
    found = [shard(models[0], Recipe(api=api)), None, shard(models[2], Recipe(api=api))]
    found[1] = fully_shard(models[1]) if api == "fsdp2" else shard(models[1], Recipe(api=api))
    return found, found


def contained(models: list[Any], api: str) -> tuple[list[Any], list[Any]]:
    """One container of several outermost sharded modules."""
    found, _ = all_sharded(models, api)
    return found, [nn.ModuleList(found)]


SETUPS: dict[str, Callable[[list[Any], str], tuple[list[Any], list[Any]]]] = {
    "with a replicated one": apart,
    "all sharded": all_sharded,
    "contained": contained,
}


def train(rank: int, setup: str, api: str, weighting: str, one_optimizer: bool, clip: float) -> States:
    models, given = SETUPS[setup](nets(), api)
    groups = [list(model.parameters()) for model in models]
    optimizers = optimizers_of([[p for group in groups for p in group]] if one_optimizer else groups)
    for epoch in range(EPOCHS):
        with Join([*given, *optimizers], weighting=weighting, timeout=LIMIT) as join:  # type: ignore[arg-type]
            for number, batch in enumerate(join.batches(BATCHES.batches(rank, epoch))):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                step(models, batch, number).backward()
                for model in models if clip else ():
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                for optimizer in optimizers:
                    optimizer.step()
    return [
        {name.removeprefix("module."): value.detach() for name, value in full_state(model).items()} for model in models
    ]


@pytest.mark.parametrize(
    ("setup", "api", "weighting", "one_optimizer", "clip"),
    [
        ("with a replicated one", "fsdp2", "world", False, 0.0),
        ("with a replicated one", "fsdp2", "samples", False, 0.3),
        ("with a replicated one", "fsdp1", "active", False, 0.0),
        ("all sharded", "fsdp2", "active", False, 0.3),
        ("all sharded", "fsdp2", "world", True, 0.0),
        ("all sharded", "fsdp1", "samples", True, 0.0),
        ("contained", "fsdp2", "samples", True, 0.0),
        ("contained", "fsdp2", "world", False, 0.3),
        ("contained", "fsdp1", "world", True, 0.0),
    ],
)
def test_several_models(
    workers: Workers, setup: str, api: str, weighting: str, one_optimizer: bool, clip: float
) -> None:
    wanted = alone(weighting, clip)
    for states in workers.run(3, train, setup, api, weighting, one_optimizer, clip, **PATIENCE):
        for mine, theirs in zip(states, wanted, strict=True):
            for name, value in theirs.items():
                assert float((mine[name] - value).abs().max()) <= TOLERANCE, name


def distil(teacher: Any, pupil: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        wanted = teacher(batch[0])
    return functional.mse_loss(pupil(batch[0]), wanted)


def train_pupil(rank: int, api: str) -> dict[str, Tensor]:
    teacher, _, pupil = nets()
    teacher.requires_grad_(False)
    teacher, pupil = (shard(model, Recipe(api=api)) for model in (teacher, pupil))
    optimizer = torch.optim.Adagrad(pupil.parameters(), lr=0.1)
    with Join([teacher, pupil, optimizer], timeout=LIMIT) as join:
        for batch in join.batches(BATCHES.batches(rank, 0)):
            optimizer.zero_grad()
            distil(teacher, pupil, batch).backward()
            optimizer.step()
    return full_state(pupil)


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_model_that_does_not_train(workers: Workers, api: str) -> None:
    teacher, _, pupil = nets()
    optimizer = torch.optim.Adagrad(pupil.parameters(), lr=0.1)
    data = [BATCHES.batches(rank, 0) for rank in range(3)]
    for number in range(5):
        optimizer.zero_grad()
        for mine in data:
            if number < len(mine):
                (distil(teacher, pupil, mine[number]) / 3).backward()
        optimizer.step()
    for state in workers.run(3, train_pupil, api, **PATIENCE):
        for name, value in pupil.state_dict().items():
            assert float((state[name] - value).abs().max()) <= TOLERANCE, name
