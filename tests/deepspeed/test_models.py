"""What a model may do, and in which precision, bit for bit as in a plain engine whose rank without a batch adds zeros.

That one runs its last batch, or a made-up one, with its loss times zero: which is right as long as all is finite.
"""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.front_ends.deepspeed import TIMEOUT, Net, Recipe, check, deepspeed_of, engine_of, outcome
from tests.support.workers import Workers
from torch_join import Join

LENGTHS = (1, 4)
EMPTY = (0, 4)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = {
    "tied 1": Recipe(EMPTY, stage=1, model="tied"),
    "tied 3": Recipe(LENGTHS, stage=3, model="tied", accumulate=2),
    "frozen 2": Recipe(LENGTHS, stage=2, model="frozen"),
    "frozen 3": Recipe(EMPTY, stage=3, model="frozen"),
    "reentrant 2": Recipe(LENGTHS, stage=2, model="reentrant"),
    "reentrant 3": Recipe(EMPTY, stage=3, model="reentrant"),
    "not reentrant 3": Recipe(LENGTHS, stage=3, model="not reentrant", accumulate=2),
    "external 3": Recipe(EMPTY, stage=3, model="external"),
    "path 1": Recipe(LENGTHS, stage=1, model="path"),
    "path 2": Recipe(EMPTY, stage=2, model="path"),
    "path 3": Recipe(LENGTHS, stage=3, model="path"),
    "twice 2": Recipe(LENGTHS, stage=2, model="twice"),
    "twice 3": Recipe(EMPTY, stage=3, model="twice"),
    "thaws 3": Recipe(LENGTHS, stage=3, model="thaws"),
    "evaluates 3": Recipe(EMPTY, stage=3, model="evaluates", accumulate=2),
    "gathers 3": Recipe(LENGTHS, stage=3, model="gathers"),
    "bf16 1": Recipe(LENGTHS, stage=1, optimizer="adamw", config={"bf16": {"enabled": True}}),
    "bf16 3": Recipe(EMPTY, stage=3, accumulate=2, config={"bf16": {"enabled": True}}),
    "fp16 2": Recipe(LENGTHS, stage=2, config={"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}),
    "fp16 3": Recipe(LENGTHS, stage=3, config={"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}),
}


def step(recipe: Recipe, deepspeed: Any, engine: Any, net: Net, batch: Any, number: int, share: float) -> None:
    kind = next((TYPES[name] for name in TYPES if name in recipe.config), torch.float32)
    net.step = number
    if net.kind == "thaws":
        net.b.weight.requires_grad_(number == 2)
    x, y = (part.to(kind) for part in batch)
    if kind is torch.float16 and number == 2 and share:
        y = y + float("inf")  # on the only rank that has a batch: the step is skipped, and the scale is halved
    output = engine(x)
    if net.kind == "twice":
        output = output + engine(2 * x)
    if net.kind == "evaluates" and number % 2:
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()
    engine.backward(functional.mse_loss(output, y).float() * share)
    engine.step()
    if net.kind == "gathers":
        with deepspeed.zero.GatheredParameters([net.b.weight, net.c.weight]):
            assert net.b.weight.numel() == 64


def joining(rank: int, recipe: Recipe) -> Any:
    with deepspeed_of(rank) as deepspeed:
        net = Net(recipe.model)
        engine, scheduler = engine_of(deepspeed, recipe, net)
        with Join([engine, scheduler], timeout=TIMEOUT) as join:
            for _ in range(recipe.epochs):
                for number, batch in enumerate(join.batches(recipe.batches(rank))):
                    step(recipe, deepspeed, engine, net, batch, number, 1.0)
        return outcome(deepspeed, engine, net)


def even(rank: int, recipe: Recipe) -> Any:
    with deepspeed_of(rank) as deepspeed:
        net = Net(recipe.model)
        engine, _ = engine_of(deepspeed, recipe, net)
        batches = recipe.batches(rank)
        made_up: tuple[Tensor, Tensor] = (torch.ones(1, 4), torch.ones(1, 1))
        for _ in range(recipe.epochs):
            for number in range(max(recipe.lengths)):
                has_batch = number < len(batches)
                batch = batches[number] if has_batch else (batches or [made_up])[-1]
                step(recipe, deepspeed, engine, net, batch, number, float(has_batch))
        return outcome(deepspeed, engine, net)


def both(rank: int, names: list[str]) -> list[tuple[Any, Any]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):  # slow, but right, on CPUs
        return [(even(rank, RECIPES[name]), joining(rank, RECIPES[name])) for name in names]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_joined_rank_is_as_one_that_adds_zeros(workers: Workers, stage: int) -> None:
    names = [name for name, recipe in RECIPES.items() if recipe.stage == stage]
    outcomes = workers.outcomes(2, both, names, deadline=150.0)
    failed = [f"rank {rank}: {one.error}\n{one.trace[-2500:]}" for rank, one in enumerate(outcomes) if one.error]
    assert not failed, "\n".join(failed)
    for place, name in enumerate(names):
        theirs, ours = zip(*(one.value[place] for one in outcomes), strict=True)
        assert check(list(ours), {k: p.double() for k, p in theirs[0].parameters.items()}) == 0.0, name
        assert ours[0].counters == theirs[0].counters, name


def through_two(rank: int, stage: int, joins: bool) -> Any:
    """Train two engines by one backward through both, as a generator is by a discriminator."""
    recipe = Recipe(LENGTHS, stage=stage)
    with deepspeed_of(rank) as deepspeed:
        nets = Net(), torch.nn.Linear(1, 1)
        with torch.no_grad():
            nets[1].weight.fill_(0.5), nets[1].bias.fill_(0.1)
        first, second = (engine_of(deepspeed, recipe, net)[0] for net in nets)
        with Join([first, second], enable=joins, timeout=TIMEOUT) as join:
            batches = recipe.batches(rank)
            missing = 0 if joins else max(LENGTHS) - len(batches)
            for number, (x, y) in enumerate(join.batches(batches + batches[-1:] * missing)):
                share = float(number < len(batches))
                first.backward(functional.mse_loss(second(first(x)), y) * share)
                first.step()
                second.step()
        return [outcome(deepspeed, *each) for each in zip((first, second), nets, strict=True)]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_goes_through_two_engines(workers: Workers, stage: int) -> None:
    found = workers.run(2, through_two, stage, True, deadline=60.0)
    theirs = workers.run(2, through_two, stage, False, deadline=60.0)[0]
    for place, expected in enumerate(theirs):
        ours = [each[place] for each in found]
        assert check(ours, {name: p.double() for name, p in expected.parameters.items()}) == 0.0
        assert ours[0].counters == expected.counters
