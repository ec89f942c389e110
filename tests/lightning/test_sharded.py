"""`fsdp_join` and `model_parallel_join`: the parameters are those that a single process would have computed."""

import pytest

from tests.support import sharded_fits as sharded
from tests.support.cases import Case, Result, assert_exact
from tests.support.sharded_fits import KINDS
from tests.support.workers import Workers

# By the number of ranks, so that these start once.
CASES = {
    2: [
        Case((2, 5), scheduler="step"),
        Case((5, 2), optimizer="adamw", scheduler="epoch", iterable=True),
        Case((7, 4), optimizer="sgd", weighting="samples", ragged=True, accumulate=3),
        Case((2, 5), model="turns", weighting="active"),
        Case((3, 6), optimizer="sgd", accumulate=2, scheduler="onecycle-setup"),
        Case(((3, 0), (1, 4), (4, 2)), model="turns", optimizer="adamw", reload=1),
        Case((4, 4), optimizer="sgd"),
    ],
    3: [
        Case((3, 0, 5), scheduler="step", weighting="samples", ragged=True),
        Case((0, 2, 4), optimizer="adamw", weighting="active", accumulate=2, iterable=True),
        Case((1, 5, 3), model="turns", optimizer="sgd"),
    ],
}


def fit_all(rank: int, kind: str, cases: list[Case]) -> list[Result]:
    return [sharded.fit(rank, kind, case) for case in cases]


@pytest.mark.parametrize("world_size", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_a_single_process(workers: Workers, kind: str, world_size: int) -> None:
    by_value = Case((2, 5, 0)[:world_size], clip=0.05, clip_by="value")
    by_norm = Case((5, 2, 0)[:world_size], clip=0.3)  # Lightning does not clip by it under FSDPStrategy
    cases = [*CASES[world_size], *([by_value] if kind == "fsdp" else [by_norm])]
    results = workers.run(world_size, fit_all, kind, cases, deadline=240)
    for case, *per_rank in zip(cases, *results, strict=True):
        assert_exact(case, per_rank)
