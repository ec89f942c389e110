"""Fabric on uneven dataloaders, against one process in float64."""

import pytest

from tests.fabric.recipe import TOLERANCE, check, train
from tests.support.accelerated import Script
from tests.support.workers import Workers

SCRIPTS = {
    "shards": Script(lengths=(2, 5), scheduler="step"),
    "an empty rank": Script(3, lengths=(0, 4, 2), weighting="samples", scheduler="epoch"),
    "streams": Script(3, lengths=(2, 5, 3), iterable=True, accumulate=2, clip=0.3, weighting="active"),
    "streams, an empty rank": Script(lengths=(0, 3), iterable=True, optimizer="sgd", accumulate=3, scheduler="step"),
    "Fabric shards": Script(samples=20, accumulate=2, clip=0.2, weighting="samples"),
    "Fabric shards, 3 ranks": Script(3, samples=19, batch_size=2, optimizer="sgd"),
    "ZeRO": Script(3, lengths=(1, 4, 2), optimizer="zero", clip=0.3),
    "rebalanced": Script(3, lengths=(1, 7, 2), rebalance=True, weighting="samples"),
    "heartbeat": Script(3, lengths=(1, 4, 2), may_break=True, accumulate=2),
    "one rank": Script(1, lengths=(3,), accumulate=2, scheduler="step"),
    "one rank, a stream": Script(1, lengths=(3,), accumulate=2, iterable=True, weighting="samples"),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_parameters_are_those_of_one_process(workers: Workers, script: Script) -> None:
    ranks = workers.run(script.world_size, train, script)
    assert check(script, ranks) < TOLERANCE
