"""Random trainings by engines, with whatever drives them; the seed is in the name of the test."""

import random

from tests.deepspeed.fronts import EXPECTED, accelerate, fabric, lightning
from tests.support.front_ends.deepspeed import Recipe, Trained, check, expected_of, train
from tests.support.many import check_each, seeds
from tests.support.workers import Workers

BATCH = 10
FRONTS = {"plain": train, "lightning": lightning, "fabric": fabric, "accelerate": accelerate}


def draw(seed: int, world_size: int) -> Recipe:
    choose = random.Random(seed).choice
    front, stage = choose(["plain", "plain", "lightning", "fabric", "accelerate"]), choose([0, 1, 2, 3, 3])
    window = 1 if front == "fabric" else choose([1, 1, 2, 3])
    longest = window * choose([1, 2, 3]) if front == "lightning" else choose([2, 3, 4, 5])  # see `test_fronts`
    lengths = [choose([0, 1, longest // 2, longest - 1, longest]) for _ in range(world_size)]
    lengths[choose(range(world_size))] = longest
    options = {
        "reduce_bucket_size": choose([20, 70, 500, 10**6]),
        "reduce_scatter": choose([True, True, False]),
        "overlap_comm": choose([False, False, True]),
        "contiguous_gradients": choose([True, True, False]),
        "stage3_param_persistence_threshold": choose([0, 9, 40, 10000]),
        "stage3_prefetch_bucket_size": choose([0, 50, 1000]),
    }
    if stage > 1 and choose([True, False, False]):
        options["offload_optimizer"] = {"device": "cpu"}
    kinds = ["", "", "tied", "frozen", "reentrant", "not reentrant", "external"]
    # Elsewhere an engine uses old gradients (see `test_models`), or, without Join too, drops those of a micro-batch.
    overlaps = stage == 1 and window > 1 and options["overlap_comm"]
    if stage < 3 and "offload_optimizer" not in options and not overlaps:
        kinds.append("path")
    clips = [0.0] if front == "fabric" and stage == 0 else [0.0, 0.0, 0.03]  # there nobody clips
    weightings = ["world", "active", "samples"]
    if front in ("plain", "fabric") or window == 1:  # else a function raises there
        weightings.append("count")
    return Recipe(
        tuple(lengths),
        stage=stage,
        front=front,
        weighting=choose(weightings),
        accumulate=window,
        clip=choose(clips),
        optimizer=choose(["sgd", "adamw"]),
        model=choose(kinds),
        seed=1000 + seed,
        options=options,
    )


def train_by_front(rank: int, recipe: Recipe) -> Trained:
    return FRONTS[recipe.front](rank, recipe)


def check_one(recipe: Recipe, ranks: tuple[Trained, ...]) -> None:
    options = dict(EXPECTED.get(recipe.front, {}))
    if "scheduled_times" in options:
        options["scheduled_times"] = recipe.world_size
    check([*ranks], expected_of(recipe, **options))


@seeds(range(0), 300, of=BATCH)
def test_random_trainings(workers: Workers, seed: int) -> None:
    recipes = [draw(BATCH * seed + place, 3 if seed % 3 == 2 else 2) for place in range(BATCH)]
    check_each(workers, train_by_front, recipes, check_one, deadline=400.0)
