"""`fsdp_join` and `model_parallel_join`: the parameters are those that a single process would have computed."""

import pytest
import torch
from torch import Tensor

from tests.support import sharded_fits as sharded
from tests.support.front_ends.lightning import Fit, Result, assert_exact
from tests.support.run import Batch, count_of
from tests.support.sharded_fits import KINDS
from tests.support.workers import Workers

# By the number of ranks, so that these start once.
CASES = {
    2: [
        Fit((2, 5), scheduler="step"),
        Fit((5, 2), optimizer="adamw", scheduler="epoch", iterable=True),
        Fit((7, 4), optimizer="sgd", weighting="samples", ragged=True, accumulate=3),
        Fit((2, 5), model="turns", weighting="active"),
        Fit((3, 6), optimizer="sgd", accumulate=2, scheduler="onecycle-setup"),
        Fit(((3, 0), (1, 4), (4, 2)), model="turns", optimizer="adamw", reload=1),
        Fit((4, 4), optimizer="sgd"),
    ],
    3: [
        Fit((3, 0, 5), scheduler="step", weighting="samples", ragged=True),
        Fit((0, 2, 4), optimizer="adamw", weighting="active", accumulate=2, iterable=True),
        Fit((1, 5, 3), model="turns", optimizer="sgd"),
        Fit((7, 2, 0), optimizer="adamw", weighting="samples", ragged=True, accumulate=2, rebalance=True),
        Fit((0, 7, 1), optimizer="sgd", iterable=True, rebalance=True),
    ],
}


class NothingOverNothing(sharded.ShardedModule):
    """Its loss is NaN, and so are its gradients, where a batch counts 0."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        counted = torch.tensor(count_of(batch), dtype=torch.float64)
        return super().training_step(batch, batch_idx) * (counted / counted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_counts_nothing_contributes_nothing(workers: Workers, kind: str) -> None:
    case = Fit((3, 7), weighting="count", optimizer="sgd")
    counts = [[count_of(case.batch(rank, epoch, index)) for rank in (0, 1)] for epoch in range(3) for index in range(3)]
    assert any(0 in row and any(row) for row in counts)
    assert_exact(case, workers.run(2, sharded.fit, kind, case, NothingOverNothing))


def fit_all(rank: int, kind: str, cases: list[Fit]) -> list[Result]:
    return [sharded.fit(rank, kind, case) for case in cases]


@pytest.mark.parametrize("world_size", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_a_single_process(workers: Workers, kind: str, world_size: int) -> None:
    by_value = Fit((2, 5, 0)[:world_size], clip=0.05, clip_by="value")
    by_norm = Fit((5, 2, 0)[:world_size], clip=0.3)  # Lightning does not clip by it under FSDPStrategy
    cases = [*CASES[world_size], *([by_value] if kind == "fsdp" else [by_norm])]
    results = workers.run(world_size, fit_all, kind, cases, deadline=240)
    for case, *per_rank in zip(cases, *results, strict=True):
        assert_exact(case, per_rank)
