"""Runs that are drawn from a seed, each on one of the front ends."""

import random
from collections.abc import Sequence

from tests.support.front_ends import FRONT_ENDS
from tests.support.front_ends.lightning import Fit
from tests.support.run import OPTIMIZERS, Run

ANY = [name for name in FRONT_ENDS if name != "deepspeed"]
UNUSED = ("unused", "sometimes", "turns")


def draw(seed: int, of: Sequence[str] = ANY, worlds: Sequence[int] = ()) -> tuple[str, Run]:
    """Return one of these front ends, and a run that it can do on one of these numbers of ranks."""
    pick = random.Random(seed)
    front_end = pick.choice(of)
    if front_end == "lightning":
        return front_end, _fit(pick, seed, worlds or (2, 2, 3, 3, 4))
    lengths = [0]
    while not any(lengths):
        lengths = [pick.choice((0, 1, 2, 3, 5)) for _ in range(pick.choice(worlds or (2, 3, 3)))]
    accumulate = pick.choice((1, 1, 2, 3))
    if front_end == "transformers" and max(lengths) % accumulate:
        accumulate = 1  # Trainer divides an epoch's last window by the number of batches that this one has
    weighting = pick.choice(["world", "active", "samples", *(["count"] if accumulate == 1 else [])])
    iterable = pick.random() < 0.4
    return front_end, Run(
        tuple(lengths),
        epochs=pick.choice((1, 2, 3)),
        optimizer=pick.choice([*OPTIMIZERS]),
        weighting=weighting,
        accumulate=accumulate,
        clip=pick.choice((None, None, 0.1)),
        scheduler=pick.choice((None, "step")),
        ragged=weighting in ("samples", "count") or pick.random() < 0.5,
        iterable=iterable,
        rebalance=front_end == "plain" and not iterable and pick.random() < 0.5,
        seed=seed,
    )


def _fit(pick: random.Random, seed: int, worlds: Sequence[int]) -> Fit:
    """Return what Lightning can do besides: lengths that change, limits, models with unused parameters."""
    world_size, epochs = pick.choice(worlds), pick.choice((1, 2, 3))
    changes, iterable = pick.choice((False, False, True)), pick.choice((False, True))
    most = pick.choice((2, 5, 12))
    drawn = [
        [pick.choice((0, pick.randint(0, most))) for _ in range(world_size)] for _ in range(epochs if changes else 1)
    ]
    for lengths in drawn:
        lengths[pick.randrange(world_size)] = pick.randint(1, most)  # no epoch is empty
    limit = pick.choice((None, None, None, pick.randint(1, 6), 1.0 if iterable else 0.5))
    if limit == 0.5:
        drawn = [[2 * length for length in lengths] for lengths in drawn]
    model = pick.choice(("mlp", "mlp", "norm", "sparse", *UNUSED))
    plans = (None, "step", "epoch") if changes or iterable else (None, "step", "epoch", "onecycle", "onecycle-setup")
    weighting = pick.choice(("world", "active", "samples", "count"))
    ddp = {"find_unused_parameters": model in UNUSED, "gradient_as_bucket_view": pick.choice((False, True))}
    case = Fit(
        drawn if changes else drawn[0],
        epochs=epochs,
        model=model,
        optimizer=pick.choice(("sgd", "adam", "adamw", "zero")),
        weighting=weighting,
        accumulate=1 if weighting == "count" else pick.choice((1, 1, 2, 3)),
        clip=pick.choice((None, 0.3)),
        scheduler=pick.choice(plans),
        iterable=iterable,
        ragged=pick.choice((False, True)),
        reload=pick.choice((0, 0, 1)),
        limit=limit,
        hooked=pick.choice((False, False, True)),
        clear=pick.choice(("before", "before", "before, zeros")),
        rebalance=pick.choice((False, True)),
        ddp=ddp,
        seed=seed,
    )
    if model == "sparse":
        case = case.but(optimizer="plain", clip=None, clear="before", hooked=False, ddp={})
    if pick.choice((False, False, True)) and case.scheduler in (None, "step"):  # a reference ends amid an epoch
        case = case.but(max_steps=pick.randint(1, case.total_steps()))
    return case
