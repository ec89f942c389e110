"""Every idiom of clearing gradients, amid accumulations too, against FSDP itself on padded ranks.

What an idiom clears is FSDP's to say: between forward and backward a module knows its whole parameters, for example,
and not those that the optimizer steps.
"""

from itertools import product

import pytest

from tests.core.sharded.test_exactness import trained
from tests.support.front_ends.sharded import train_padded
from tests.support.sharded import Recipe, differences
from tests.support.workers import Workers

IDIOMS = ["zero_grad", "zero_grad to zero", "model.zero_grad", "None", "data.zero_", "zero_", "zeros"]
PLACES = ["before", "between", "after"]
ACCUMULATIONS = {
    "each": Recipe((5, 2)),
    "synced": Recipe((2, 5), accumulate=2, optimizer="sgd"),
    "unsynced": Recipe((4, 7, 0), accumulate=3, no_sync=True),
    "masked": Recipe((2, 5), masked=1, optimizer="sgd"),
    "masked unsynced": Recipe((5, 3, 6), accumulate=2, no_sync=True, masked=2),
}


def recipes(api: str, accumulation: str) -> dict[str, Recipe]:
    recipe = ACCUMULATIONS[accumulation].but(api=api)
    return {f"{how} {where}": recipe.but(clears=how, clear=where) for how, where in product(IDIOMS, PLACES)}


def check(workers: Workers, recipes: dict[str, Recipe], deadline: float = 180.0) -> None:
    wanted = trained(workers, recipes, train_padded, deadline)
    found = trained(workers, recipes, deadline=deadline)
    wrong = [
        f"{name}, rank {rank}: {off}"
        for rank, (theirs, mine) in enumerate(zip(wanted, found, strict=True))
        for index, (name, recipe) in enumerate(recipes.items())
        if not (off := max(differences(mine[index], rank, theirs[index], recipe).values())) <= recipe.tolerance
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("api", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.long)])
def test_a_selection(workers: Workers, api: str) -> None:
    check(workers, dict(list(recipes(api, "synced").items())[::2]))
    check(workers, dict(list(recipes(api, "unsynced").items())[1::4]))


def test_zeros_where_a_module_does_not_run(workers: Workers) -> None:
    # FSDP1 takes such zeros over when it gathers the module.
    check(workers, {"zeros": Recipe((2, 5), api="fsdp1", model="either", clears="zeros")})


@pytest.mark.long
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_all(workers: Workers, api: str, accumulation: str) -> None:
    check(workers, recipes(api, accumulation), deadline=300.0)
