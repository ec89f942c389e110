"""Optimizers that step in backward, tensor parallelism and compiled models."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.core.sharded.exact import check
from tests.covering import others_long
from tests.emulator import place
from tests.needs import needs
from tests.support import run
from tests.support.front_ends.sharded import PATIENCE, Training, whole
from tests.support.sharded import Recipe, Trained, differences, expected_of
from tests.support.workers import Workers
from torch_join import Join


class InBackward(Training):
    """Each parameter has an optimizer, which steps as soon as there is a gradient, and a schedule."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.each = [recipe.make_optimizer(iter([p])) for p in self.model.parameters()]
        self.schedulers = [made for each in self.each if (made := recipe.make_scheduler(each)) is not None]
        for p, optimizer in zip(self.model.parameters(), self.each, strict=True):
            if recipe.api == "fsdp1":  # as `_apply_optimizer_in_backward` does: FSDP steps it itself
                p._in_backward_optimizers = [optimizer]
            else:
                p.register_post_accumulate_grad_hook(_stepping(optimizer))

    def joined(self) -> Join:
        return Join([self.model, *self.each, *self.schedulers], weighting=self.recipe.weighting)  # type: ignore[arg-type]

    def update(self, epoch: int, step: int) -> None:
        pass

    def trained(self) -> Trained:
        self.optimizers = self.each
        return super().trained()


def _stepping(optimizer: torch.optim.Optimizer) -> Any:
    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_in_backward(rank: int, recipe: Recipe) -> Trained:
    return InBackward(rank, recipe).run_epochs()


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe((2, 5), scheduler="step"),
        Recipe((2, 0, 5), weighting="samples", scheduler="step", optimizer="sgd"),
        pytest.param(
            Recipe((5, 3), accumulate=2, no_sync=True, model="either"),
            marks=needs("fully_shard's reduction of what the last backward does not come to"),
        ),
        Recipe((2, 5), api="fsdp1", scheduler="step"),
        Recipe((2, 0, 5), api="fsdp1", weighting="samples", scheduler="step", optimizer="sgd"),
        Recipe((5, 3), api="fsdp1", accumulate=2, no_sync=True),
    ],
    ids=["two", "three", "accumulating", "FSDP1", "FSDP1 three", "FSDP1 accumulating"],
)
def test_optimizers_in_backward(workers: Workers, recipe: Recipe) -> None:
    wanted = expected_of(recipe)
    for rank, mine in enumerate(workers.run(recipe.world_size, train_in_backward, recipe, **PATIENCE)):
        assert max(differences(mine, rank, wanted, recipe).values()) <= recipe.tolerance


class Parallel(Training):
    """Two teams of two ranks, each of which computes its batches together."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        self.rank, self.recipe = rank // 2, recipe
        mesh: Any = init_device_mesh(place().type, (2, 2), mesh_dim_names=("data", "tensor"))
        model = recipe.build()
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data"])
        run.Training.__init__(self, recipe, fully_shard(model, mesh=mesh["data"]))
        for group in self.optimizer.param_groups:
            group["foreach"] = False
        self.losses = {}

    def trained(self) -> Trained:
        state = {name: whole(value) for name, value in self.model.state_dict().items()}
        return Trained(state, {}, self.norms, self.losses, self.rates[0])


def train_parallel(rank: int, recipes: list[Recipe]) -> list[Trained]:
    return [Parallel(rank, recipe).run_epochs() for recipe in recipes]


def test_tensor_parallelism(workers: Workers) -> None:
    recipes = [
        Recipe((5, 2), model="of even width"),
        Recipe((0, 4), model="of even width", weighting="active"),
        Recipe((2, 5), model="of even width", weighting="samples", accumulate=2, no_sync=True),
        Recipe((0, 5), model="of even width", accumulate=3, optimizer="adamw"),
    ]
    found = workers.run(4, train_parallel, recipes, **PATIENCE)
    for index, recipe in enumerate(recipes):
        wanted = expected_of(recipe)
        for rank in range(4):
            off = differences(found[rank][index], rank // 2, wanted, recipe)
            assert max(off.values()) <= recipe.tolerance, off


def train_uneven_team(rank: int) -> None:
    Parallel(rank, Recipe((4 if rank == 1 else 5, 5), model="of even width")).run_epochs()


def test_a_team_with_different_batches(workers: Workers) -> None:
    for outcome in workers.outcomes(4, train_uneven_team, **PATIENCE):
        assert "compute each batch together (tensor parallelism" in outcome.error


class Compiled(Training):
    """`torch.compile` of the whole model."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.model = torch.compile(self.model, backend="aot_eager")

    def trained(self) -> Trained:
        self.model = self.model._orig_mod
        return super().trained()


def train_compiled(rank: int, recipe: Recipe) -> Trained:
    return Compiled(rank, recipe).run_epochs()


@pytest.mark.parametrize("api", others_long(["fsdp2", "fsdp1"], "fsdp1"))
def test_compiled_blocks(workers: Workers, api: str) -> None:
    recipe = Recipe((2, 5), api=api, options={"compiled": "aot_eager"})
    check(workers, {"blocks": recipe, "no batch": recipe.but(lengths=(0, 4), weighting="samples")})


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on CPUs")
@pytest.mark.parametrize("api", others_long(["fsdp2", "fsdp1"], "fsdp2"))
def test_blocks_compiled_by_inductor(workers: Workers, api: str) -> None:
    recipe = Recipe((2, 5), api=api, options={"compiled": "inductor"})
    check(workers, {"blocks": recipe, "no batch": recipe.but(lengths=(0, 4), weighting="samples")}, deadline=300.0)


@pytest.mark.parametrize("api", others_long(["fsdp2", "fsdp1"], "fsdp2"))
def test_a_compiled_model(workers: Workers, api: str) -> None:
    recipe = Recipe((2, 5), api=api)
    wanted = expected_of(recipe)
    for rank, mine in enumerate(workers.run(2, train_compiled, recipe, **PATIENCE)):
        assert max(differences(mine, rank, wanted, recipe).values()) <= recipe.tolerance


def evaluate(
    rank: int, lengths: tuple[int, ...], first_generation: bool, trains: bool
) -> tuple[list[float], list[float]]:
    """Return outputs of two evaluations under `inference_mode`, each perhaps after an epoch, and of a model alone."""
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double().to(place())
    model: Any = copy.deepcopy(alone)
    if first_generation:
        policy = ModuleWrapPolicy([torch.nn.Linear])
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=place(), auto_wrap_policy=policy)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    batches = [
        torch.full((2, 4), 1.0 + rank + step, device=place(), dtype=torch.float64) for step in range(lengths[rank])
    ]
    optimizer, reference = (torch.optim.SGD(each.parameters(), 1e-3) for each in (model, alone))
    found, expected = [], []
    with Join([model, optimizer]) as join:
        for _ in range(2):
            for x in join.batches(batches if trains else []):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            with torch.inference_mode():
                found += [model(x).sum().item() for x in join.batches(batches)]
            for step in range(max(lengths) if trains else 0):
                reference.zero_grad()
                for r in range(len(lengths)):
                    if step < lengths[r]:
                        x = torch.full((2, 4), 1.0 + r + step, device=place(), dtype=torch.float64)
                        (alone(x).square().mean() / len(lengths)).backward()
                reference.step()
            expected += [alone(x).sum().item() for x in batches]
    return found, expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("first_generation", [False, True])
def test_an_evaluation_under_inference_mode(workers: Workers, first_generation: bool, trains: bool) -> None:
    for found, expected in workers.run(3, evaluate, (2, 4, 0), first_generation, trains):
        assert found == pytest.approx(expected, abs=1e-12)


def accumulate(rank: int, lengths: tuple[int, ...], at_own_last: bool, weighting: str) -> None:
    model = fully_shard(torch.nn.Linear(4, 1).double().to(place()))
    with Join([model], weighting=weighting) as join:
        for x in join.batches([torch.ones(2, 4, device=place(), dtype=torch.float64)] * lengths[rank]):
            is_last = join.step + 1 == lengths[rank]
            model.set_requires_gradient_sync(at_own_last if is_last else join.step % 2 == 1)
            model(x).mean().backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("weighting", ["world", "samples"])
@pytest.mark.parametrize("lengths", [(3, 6), (6, 4)])
def test_windows_of_unequal_length_are_told_at_the_last_batch(
    workers: Workers, lengths: tuple[int, ...], weighting: str
) -> None:
    shorter = lengths.index(min(lengths))
    outcomes = workers.outcomes(2, accumulate, lengths, min(lengths) % 2 == 1, weighting, timeout=5.0)
    for outcome in outcomes:
        assert f"Rank {shorter}'s last backward in this loop" in outcome.error
    assert outcomes[shorter].seconds < 5, outcomes  # the other one may wait in a gather for this process to end
