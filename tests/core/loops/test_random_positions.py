"""Random runs in plain loops that are interrupted in random places, and go on."""

import os
import random
import tempfile
from math import ceil
from typing import Any

import torch.distributed as dist

from tests.core.loops import test_positions
from tests.core.loops.test_positions import EPOCHS, KINDS, Case, Place, compare_with
from tests.support.many import seeds
from tests.support.workers import Workers

MOST = 3  # places of a run from which others go on


def train(rank: int, case: Case, folder: str, places: list[tuple[Place, bool]]) -> list[dict[str, Any]]:
    """Train as a whole, and from each of these places; `True`: where a run has left its loop by `break`.

    The last one is gone on from once more, where it came to a later one.
    """
    found = [test_positions.train(rank, case, folder, None)]
    again = f"{folder}/again"
    os.makedirs(again, exist_ok=True)
    for place, breaks in places:
        dist.barrier()
        if breaks:
            test_positions.train(rank, case, folder, None, stop=place)
            dist.barrier()
        found.append(test_positions.train(rank, case, folder, place, into=again))
    dist.barrier()
    found.append(test_positions.train(rank, case, again, later(case, places[-1][0])))
    return found


def later(case: Case, place: Place) -> Place:
    """Return where a run that goes on at a place has saved later: in the same epoch, if there is a step."""
    epoch, step = place
    return (epoch, step + 1) if 0 <= step < steps_of(case) - 1 else (epoch + 1, 0)


def steps_of(case: Case) -> int:
    """Return how many steps an epoch has."""
    sizes = test_positions.sizes_of(case.lengths)
    if case.kind == "sampler":
        return ceil(ceil(sum(sizes) / len(sizes)) / test_positions.SIZE)
    if "with replacement" in case.kind:
        return max(20 if size else 0 for size in sizes)
    if dict(case.options).get("rebalance"):
        return ceil(sum(case.lengths) / len(case.lengths))
    return ceil(max(case.lengths) / 2) if case.kind == "windows" else max(case.lengths)


@seeds(range(2), 300)
def test_random_runs_go_on(workers: Workers, seed: int) -> None:
    one = random.Random(seed)
    lengths = one.choice([(0, 4, 9), (4, 9, 0), (9, 0, 4), (3, 3, 3), (1, 5, 2), (2, 6), (0, 3), (5, 1)])
    kind = one.choice([kind for kind in (*KINDS, "windows") if kind != "stateful, workers"])
    options: dict[str, Any] = {"weighting": one.choice(["world", "active", "samples"])}
    rebalances = one.random() < 0.3 and kind in ("list", "shuffled", "global", "stream", "shuffling stream")
    options |= {"rebalance": True} if rebalances else {"may_break": one.choice([False, True])}
    case = Case(kind, lengths, tuple(options.items()), one.choice([False, True]))
    steps = steps_of(case)
    places = [((one.randrange(EPOCHS - 1), one.randrange(-1, steps)), one.random() < 0.4) for _ in range(MOST)]
    places = [(place, breaks and 0 <= place[1] < steps - 1) for place, breaks in places]
    with tempfile.TemporaryDirectory() as folder:
        ranks = workers.run(len(lengths), train, case, folder, places, deadline=120.0)
    for index, (place, breaks) in enumerate([*places, (later(case, places[-1][0]), False)]):
        try:
            compare_with([runs[0] for runs in ranks], [runs[1 + index] for runs in ranks], place)
        except AssertionError as error:
            raise AssertionError(f"{case}, {place}, by break: {breaks}: {error}") from error
