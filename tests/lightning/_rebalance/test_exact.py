"""Fits in which batches are rebalanced: the parameters are those of one process that follows the same schedule."""

from dataclasses import replace

import pytest

from tests.covering import others_long
from tests.support.front_ends.lightning import Fit, assert_exact, fit
from tests.support.workers import Workers

CASES = {
    "sgd": Fit((3, 7), optimizer="sgd"),
    "adam-first": Fit((7, 3), optimizer="adam", scheduler="step", clip=0.3),
    "adamw": Fit((9, 1), optimizer="adamw", iterable=True, scheduler="step"),
    "zero": Fit((7, 3), optimizer="zero", clip=0.3),
    "zero-iterable": Fit((0, 4, 7), optimizer="zero", iterable=True, accumulate=2, scheduler="step"),
    "even": Fit((5, 5), optimizer="sgd", accumulate=2, scheduler="onecycle"),
    "even-iterable": Fit((5, 5), optimizer="adam", accumulate=3, iterable=True, weighting="samples", ragged=True),
    "empty": Fit((0, 4, 7), optimizer="adamw", scheduler="onecycle", clip=0.3),
    "empty-active": Fit((0, 9, 1), optimizer="sgd", weighting="active", iterable=True, accumulate=3),
    "empty-samples": Fit((0, 4, 7), optimizer="adam", weighting="samples", ragged=True, accumulate=2),
    "middle-samples": Fit((1, 9, 2), optimizer="sgd", weighting="samples", ragged=True, iterable=True, clip=0.3),
    "middle-zero": Fit((1, 6, 2), optimizer="zero", weighting="active", scheduler="onecycle-setup"),
    "window": Fit((3, 7), optimizer="adamw", accumulate=3, weighting="samples", ragged=True, scheduler="onecycle"),
    "per-epoch": Fit((3, 6), optimizer="adam", scheduler="epoch"),
    "per-epoch-iterable": Fit((6, 3), optimizer="adam", scheduler="epoch", iterable=True, accumulate=2),
    "grows": Fit(((3, 2), (5, 6), (4, 0)), optimizer="adam"),
    "grows-iterable": Fit(((3, 2), (5, 6), (4, 0)), optimizer="sgd", iterable=True, accumulate=2),
    "shrinks-reload": Fit(((6, 1, 2), (2, 5, 0), (0, 1, 3)), optimizer="adamw", reload=1, accumulate=2),
    "limit": Fit((3, 7), optimizer="adam", limit=5),
    "limit-iterable": Fit((1, 6, 2), optimizer="adamw", limit=3, iterable=True),
    "max-steps": Fit((3, 7), optimizer="adam", max_steps=12, epochs=3, scheduler="step"),
    "max-steps-iterable": Fit((9, 1), optimizer="zero", max_steps=7, epochs=3, iterable=True),
    "one-batch": Fit((0, 1, 0), optimizer="adam"),
    "one-batch-iterable": Fit((0, 0, 2), optimizer="adam", iterable=True),
    "norm": Fit((2, 5, 0), model="norm"),
    "one-process": Fit((4,), optimizer="adam", accumulate=3, scheduler="step", clip=0.3),
}


@pytest.mark.parametrize("name", others_long(CASES, *[*CASES][::3]))
def test_parameters_are_those_of_one_process_with_the_same_schedule(workers: Workers, name: str) -> None:
    case = replace(CASES[name], rebalance=True)
    assert_exact(case, workers.run(case.world_size, fit, case))
