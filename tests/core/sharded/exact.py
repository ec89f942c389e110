"""Sharded models are trained by recipes, and compared with one process."""

from typing import Any

from tests.support.front_ends.sharded import fits_torch, train
from tests.support.sharded import Recipe, differences, expected_of
from tests.support.workers import Workers


def trained(workers: Workers, recipes: dict[str, Recipe], function: Any = train, deadline: float = 180.0) -> Any:
    """Train by each, and return what each rank has then."""
    given = list(recipes.values())
    outcomes = workers.outcomes(given[0].world_size, function, given, deadline=deadline, timeout=60.0)
    failed = [f"rank {rank}: {one.error}\n{one.trace[-1500:]}" for rank, one in enumerate(outcomes) if one.error]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def check(workers: Workers, recipes: dict[str, Recipe], deadline: float = 180.0) -> float:
    """Train by each, and return the largest difference."""
    recipes = {name: recipe for name, recipe in recipes.items() if fits_torch(recipe)}
    ranks = trained(workers, recipes, deadline=deadline)
    worst, wrong = 0.0, []
    for index, (name, recipe) in enumerate(recipes.items()):
        wanted = expected_of(recipe)
        for rank, mine in enumerate(ranks):
            found = differences(mine[index], rank, wanted, recipe)
            worst = max(worst, *found.values())
            if off := {what: value for what, value in found.items() if not value <= recipe.tolerance}:
                wrong.append(f"{name}, rank {rank}: {len(off)} things are off, such as {off.popitem()}")
    assert not wrong, "\n".join(wrong)
    return worst
