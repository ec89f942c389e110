"""Every idiom of clearing gradients, amid accumulations too, against FSDP itself on padded ranks.

What an idiom clears is FSDP's to say: between forward and backward a module knows its whole parameters, for example,
and not those that the optimizer steps.
"""

from itertools import product

import pytest
import torch
from torch import nn

from tests.core.sharded.exact import trained
from tests.covering import others_long
from tests.support.front_ends.sharded import PATIENCE, shard_fully, train, train_padded, whole
from tests.support.inside import RECORDED
from tests.support.sharded import Recipe, differences
from tests.support.workers import Workers
from torch_join import Join

IDIOMS = ["zero_grad", "zero_grad to zero", "model.zero_grad", "None", "data.zero_", "zero_", "zeros"]
PLACES = ["before", "between", "after"]
ACCUMULATIONS = {
    "each": Recipe((5, 2)),
    "synced": Recipe((2, 5), accumulate=2, optimizer="sgd"),
    "unsynced": Recipe((4, 7, 0), accumulate=3, no_sync=True),
    "masked": Recipe((2, 5), masked=1, optimizer="sgd"),
    "masked unsynced": Recipe((5, 3, 6), accumulate=2, no_sync=True, masked=2),
}


# Of FSDP1 the module's gradients are those that no sync has averaged. On the one active rank these are zeros, which
# `.data.zero_()` leaves as they are: only a count of an optimizer's `zero_grad` tells whether they were cleared.
DOUBTS = [("fsdp1", "masked unsynced", how) for how in IDIOMS[2:]]


def recipes(api: str, accumulation: str, doubts: bool = False) -> dict[str, Recipe]:
    recipe = ACCUMULATIONS[accumulation].but(api=api)
    idioms = [how for how in IDIOMS if ((api, accumulation, how) in DOUBTS) == doubts]
    return {f"{how} {where}": recipe.but(clears=how, clear=where) for how, where in product(idioms, PLACES)}


def check(workers: Workers, recipes: dict[str, Recipe], deadline: float = 180.0) -> None:
    wanted = trained(workers, recipes, train_padded, deadline)
    found = trained(workers, recipes, deadline=deadline)
    wrong = [
        f"{name}, rank {rank}: {off}"
        for rank, (theirs, mine) in enumerate(zip(wanted, found, strict=True))
        for index, (name, recipe) in enumerate(recipes.items())
        if not (off := max(differences(mine[index]._replace(losses={}), rank, theirs[index], recipe).values()))
        <= recipe.tolerance
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("api", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.long)])
def test_a_selection(workers: Workers, api: str) -> None:
    check(workers, dict(list(recipes(api, "synced").items())[::5]))
    check(workers, dict(list(recipes(api, "unsynced").items())[1::5]))


def test_zeros_where_a_module_does_not_run(workers: Workers) -> None:
    # FSDP1 takes such zeros over when it gathers the module.
    check(workers, {"zeros": Recipe((2, 5), api="fsdp1", model="either", clears="zeros")})


def begin_anew(rank: int, syncs: bool) -> list[float]:
    model = shard_fully(nn.Linear(4, 4), {})
    optimizer = torch.optim.SGD(model.parameters())
    with Join([model, optimizer]) as join:
        for synced in (syncs, True):
            optimizer.zero_grad()
            for x in join.batches([torch.ones(2, 4)] * rank):
                model.set_requires_gradient_sync(synced)
                model(x).sum().backward()
    return [whole(p.grad).flatten()[0].item() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("syncs", "wanted"), [(True, 1.0), (False, 2.0)])
def test_what_a_loop_has_left_is_dropped_if_it_was_synced(workers: Workers, syncs: bool, wanted: float) -> None:
    assert workers.run(2, begin_anew, syncs, **PATIENCE) == [[wanted, wanted]] * 2


@pytest.mark.long
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_all(workers: Workers, api: str, accumulation: str) -> None:
    check(workers, recipes(api, accumulation), deadline=300.0)
    for name, recipe in recipes(api, accumulation, doubts=True).items():
        for outcome in workers.outcomes(recipe.world_size, train, [recipe], **PATIENCE):
            assert "not yet synced gradient" in outcome.error, name
            assert outcome.seconds < 30 or not RECORDED, name  # and not until the group's timeout


# The last rank holds nothing of the root, and leads. Between a forward and its backward, and after an evaluation, a
# module knows the root's whole parameters, so that what is done to its parameters does not come to the shards.
WITHOUT_A_SHARD = Recipe((0, 0, 0, 3), optimizer="sgd", evaluation="another with", loop="plain")


@pytest.mark.parametrize("where", others_long(PLACES[:2], "between"))
def test_where_the_leader_has_no_shard(workers: Workers, where: str) -> None:
    idioms = ["zero_grad", "model.zero_grad", "None", "zero_", "zeros"]
    check(workers, {how: WITHOUT_A_SHARD.but(clears=how, clear=where) for how in idioms})


def test_where_some_units_are_in_parts(workers: Workers) -> None:
    # So what is done to the module's parameters comes to the shards of the block that has not run, and to no others.
    recipe = WITHOUT_A_SHARD.but(model="either", clear="between", options={"reshard": 2})
    check(workers, {how: recipe.but(clears=how) for how in ("None", "zero_")})


def test_without_a_trace_nobody_can_tell(workers: Workers) -> None:
    recipe = WITHOUT_A_SHARD.but(clears="data.zero_")
    for outcome in workers.outcomes(4, train, [recipe], **PATIENCE):
        assert "cannot tell whether the active ranks cleared that gradient too" in outcome.error
