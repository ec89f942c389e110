"""The claim: the parameters are those that a single process would have computed."""

import pytest

from tests.support.cases import Case, assert_exact, fit
from tests.support.workers import Workers

# Pairwise over optimizer, weighting, accumulation, clipping, scheduler, lengths, sizes and kind of loader.
CASES = {
    "sgd": Case((3, 7), optimizer="sgd"),
    "adam-first": Case((7, 3), optimizer="adam", scheduler="step", clip=0.3),
    "adamw": Case((3, 7), optimizer="adamw", iterable=True, scheduler="step"),
    "zero": Case((7, 3), optimizer="zero", clip=0.3),
    "zero-iterable": Case((0, 4, 7), optimizer="zero", iterable=True, accumulate=2, scheduler="step"),
    "even": Case((5, 5), optimizer="sgd", accumulate=2, scheduler="onecycle"),
    "even-iterable": Case((5, 5), optimizer="adam", accumulate=3, iterable=True, weighting="samples", ragged=True),
    "empty": Case((0, 4, 7), optimizer="adamw", scheduler="onecycle", clip=0.3),
    "empty-active": Case((0, 4, 7), optimizer="sgd", weighting="active", iterable=True, accumulate=3),
    "empty-samples": Case((0, 4, 7), optimizer="adam", weighting="samples", ragged=True, accumulate=2),
    "middle": Case((1, 6, 2), optimizer="adam", weighting="active", accumulate=2, clip=0.3, scheduler="step"),
    "middle-samples": Case((1, 6, 2), optimizer="sgd", weighting="samples", ragged=True, iterable=True, clip=0.3),
    "middle-zero": Case((1, 6, 2), optimizer="zero", weighting="active", scheduler="onecycle-setup"),
    "window": Case((3, 7), optimizer="adamw", accumulate=3, weighting="samples", ragged=True, scheduler="onecycle"),
    "window-first": Case((7, 3), optimizer="zero", accumulate=3, weighting="samples", ragged=True, scheduler="step"),
    "window-active": Case((7, 2), optimizer="sgd", accumulate=3, weighting="active", iterable=True, clip=0.3),
    "estimate": Case((3, 7), optimizer="sgd", accumulate=2, scheduler="onecycle-setup"),
    "per-epoch": Case((3, 6), optimizer="adam", scheduler="epoch"),
    "per-epoch-iterable": Case((6, 3), optimizer="adam", scheduler="epoch", iterable=True, accumulate=2),
    "grows": Case(((3, 2), (5, 6), (4, 0)), optimizer="adam"),
    "grows-iterable": Case(((3, 2), (5, 6), (4, 0)), optimizer="sgd", iterable=True, accumulate=2),
    "shrinks-reload": Case(((6, 1, 2), (2, 5, 0), (0, 1, 3)), optimizer="adamw", reload=1, accumulate=2),
    "reload": Case((3, 7), optimizer="sgd", reload=1, weighting="samples", ragged=True),
    "reload-2": Case((0, 4, 7), optimizer="adam", reload=2, iterable=True, scheduler="step"),
    "reload-2-sized": Case((7, 3), optimizer="zero", reload=2, accumulate=2),
    "limit": Case((3, 7), optimizer="adam", limit=5),
    "limit-share": Case((4, 8), optimizer="sgd", limit=0.5, accumulate=3),
    "limit-iterable": Case((1, 6, 2), optimizer="adamw", limit=3, iterable=True),
    "max-steps": Case((3, 7), optimizer="adam", max_steps=12, epochs=3, scheduler="step"),
    "max-steps-iterable": Case((7, 3), optimizer="zero", max_steps=5, epochs=3, iterable=True),
    "max-steps-window": Case((2, 7), optimizer="sgd", max_steps=7, epochs=4, accumulate=2),
    "one-process": Case((4,), optimizer="adam", accumulate=3, scheduler="step", clip=0.3),
    "one-process-iterable": Case((4,), optimizer="sgd", iterable=True, weighting="samples", scheduler="epoch"),
    "same-sizes-none": Case(((0, 3), (0, 0), (2, 0)), optimizer="sgd", scheduler="step"),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str) -> None:
    case = CASES[name]
    assert_exact(case, workers.run(case.world_size, fit, case))
