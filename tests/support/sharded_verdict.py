"""What becomes of a training of a sharded model: it ends right, or with an error that is promised."""

import re
from collections.abc import Callable
from typing import Any

from tests.support.front_ends.sharded import fits_torch, train_padded
from tests.support.sharded import Recipe, Trained, differences, expected_of
from tests.support.sharded_search import fits_one_process
from tests.support.workers import DeadlineError, Outcome, Workers

NOTHING = "(?!)"
DEADLINE = 120.0  # of a case; the first one imports FSDP


def promised(recipe: Recipe) -> str:
    """Return what the errors match that the documentation promises for such a training."""
    found = [NOTHING]
    if recipe.model == "checkpointed reentrant":
        found.append("was modified by hand")
    goes_on = recipe.rest == "goes on" and (recipe.framework or recipe.api == "fsdp1")
    if recipe.no_sync and (recipe.masked >= 0 or goes_on):
        found.append("accumulated, not yet synced gradient")
    if recipe.clears == "data.zero_" and recipe.api == "fsdp2":
        found.append("the active ranks cleared that gradient too")  # where the leader's shard is empty
    if recipe.framework.get("manual"):
        found.append("uses manual optimization")
    return "|".join(found)


def verdict(workers: Workers, recipe: Recipe, train: Callable[..., Any], *args: Any) -> str:
    """Return "right", "refused: ...", or what is wrong."""
    if not fits_torch(recipe):
        return "refused: torch cannot do it"
    ranks = recipe.world_size * recipe.peers
    try:
        outcomes = workers.outcomes(ranks, train, *args, deadline=DEADLINE, timeout=15.0)
    except DeadlineError as error:
        return f"hangs: {error}"
    if any(outcome.error for outcome in outcomes):
        return _refusal(outcomes, recipe)
    try:
        wanted = _wanted(workers, recipe)
    except AssertionError as error:
        return f"wrong: FSDP itself cannot do it: {error}"
    off = {
        f"{what} on rank {rank}, run {run}": value
        for rank, outcome in enumerate(outcomes)
        for run, found in enumerate(outcome.value)
        for what, value in differences(found, rank // recipe.peers, wanted[rank // recipe.peers], recipe).items()
        if not value <= recipe.tolerance
    }
    return f"wrong: {len(off)} things are off: {dict([*off.items()][:3])}" if off else "right"


def check(workers: Workers, recipe: Recipe, train: Callable[..., Any], *args: Any) -> None:
    found = verdict(workers, recipe, train, *args)
    assert found.startswith(("right", "refused")), f"{recipe}\n{found}"


def _refusal(outcomes: list[Outcome], recipe: Recipe) -> str:
    named = r"(RuntimeError: in Recipe\(.*\) <- )?(JoinError|UnsupportedError|PeerFailedError|JoinTimeoutError): "
    errors = [outcome.error for outcome in outcomes]
    if all(re.match(named, error) and re.search(promised(recipe), error) for error in errors):
        return f"refused: {errors[0].split(' <- ')[-1][:80]}"
    return "wrong: " + "\n".join(f"rank {rank}: {one.error}\n{one.trace}" for rank, one in enumerate(outcomes))


def _wanted(workers: Workers, recipe: Recipe) -> list[Trained]:
    """Return what each rank should end with."""
    if fits_one_process(recipe):
        return [expected_of(recipe)] * recipe.world_size
    ranks = workers.run(recipe.world_size, train_padded, [recipe], deadline=DEADLINE, timeout=15.0)
    losses = [found[0].losses for found in ranks]
    total = {epoch: [each[epoch] for each in losses] for epoch in losses[0]}
    return [found[0]._replace(losses=total) for found in ranks]
