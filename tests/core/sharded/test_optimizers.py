"""Two optimizers of one sharded model, of which one steps every second time with what has been accumulated."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from tests.support.sharded import EPOCHS, Batch, Recipe, weights
from tests.support.sharding import PATIENCE, Training
from tests.support.workers import Workers
from torch_join import Join

SPLITS: dict[str, Callable[[str], bool]] = {
    "units": lambda name: "blocks.1" in name,
    "biases": lambda name: name.endswith("bias"),  # units have parameters of both
}


def two_optimizers(named: Iterable[tuple[str, nn.Parameter]], split: str) -> list[torch.optim.Optimizer]:
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, p in named:
        found[SPLITS[split](name)].append(p)
    return [torch.optim.AdamW(found[0], lr=0.02), torch.optim.RMSprop(found[1], lr=0.01, momentum=0.5)]


class OfTwo(Training):
    def __init__(self, rank: int, recipe: Recipe, split: str) -> None:
        super().__init__(rank, recipe)
        self.optimizer, self.other = two_optimizers(self.model.named_parameters(), split)

    def joined(self) -> Join:
        return Join([self.model, self.other, self.optimizer], weighting=self.recipe.weighting)  # type: ignore[arg-type]

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        if step % 2 == 0:
            self.other.zero_grad()
        super().step(epoch, step, batch)

    def update(self, epoch: int, step: int) -> None:
        super().update(epoch, step)
        if step % 2:
            self.other.step()


def train_two(rank: int, recipe: Recipe, split: str) -> dict[str, Tensor]:
    return OfTwo(rank, recipe, split).run().state


def reference_of_two(recipe: Recipe, split: str) -> dict[str, Tensor]:
    net = recipe.model()
    one, other = two_optimizers(net.named_parameters(), split)
    for epoch in range(EPOCHS):
        data = [recipe.batches(epoch, rank) for rank in range(recipe.world_size)]
        for step in range(max(recipe.lengths)):
            here = {rank: mine[step] for rank, mine in enumerate(data) if step < len(mine)}
            counts = weights(recipe.weighting, recipe.world_size, {rank: len(x) for rank, (x, _) in here.items()})
            if step % 2 == 0:
                other.zero_grad()
            one.zero_grad()
            for rank, batch in here.items():
                for loss in recipe.losses(net, batch, rank):
                    (counts[rank] * loss).backward()
            one.step()
            if step % 2:
                other.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(("api", "split"), [("fsdp2", "units"), ("fsdp2", "biases"), ("fsdp1", "units")])
def test_two_optimizers(workers: Workers, api: str, split: str) -> None:
    for recipe in (Recipe((2, 5)), Recipe((0, 4), weighting="samples"), Recipe((5, 2, 0))):
        wanted = reference_of_two(recipe, split)
        for mine in workers.run(recipe.world_size, train_two, recipe.but(api=api), split, **PATIENCE):
            for name, value in wanted.items():
                assert float((mine[name] - value).abs().max()) <= recipe.tolerance, name


def train_one_epoch(rank: int, recipe: Recipe, split: str) -> None:
    training = OfTwo(rank, recipe, split)
    with training.joined() as join:
        for step, batch in enumerate(join.batches(recipe.batches(0, rank))):
            training.step(0, step, batch)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 0, 0)], ids=["seen", "not in the shard"])
def test_a_flat_gradient_that_is_cleared_in_part(workers: Workers, lengths: tuple[int, ...]) -> None:
    # In the second case the one active rank's shard holds no bias.
    recipe = Recipe(lengths, api="fsdp1")
    for outcome in workers.outcomes(len(lengths), train_one_epoch, recipe, "biases", **PATIENCE):
        with pytest.raises(RuntimeError, match="A gradient was changed by hand"):
            raise RuntimeError(outcome.error)
