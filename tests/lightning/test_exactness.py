"""The claim: the parameters are those that a single process would have computed."""

from dataclasses import replace

import pytest

from tests.covering import others_long
from tests.support.front_ends.lightning import Fit, assert_exact, fit
from tests.support.workers import Workers

# Pairwise over optimizer, weighting, accumulation, clipping, scheduler, lengths, sizes and kind of loader.
CASES = {
    "sgd": Fit((3, 7), optimizer="sgd"),
    "adam-first": Fit((7, 3), optimizer="adam", scheduler="step", clip=0.3),
    "adamw": Fit((3, 7), optimizer="adamw", iterable=True, scheduler="step"),
    "zero": Fit((7, 3), optimizer="zero", clip=0.3),
    "zero-iterable": Fit((0, 4, 7), optimizer="zero", iterable=True, accumulate=2, scheduler="step"),
    "even": Fit((5, 5), optimizer="sgd", accumulate=2, scheduler="onecycle"),
    "even-iterable": Fit((5, 5), optimizer="adam", accumulate=3, iterable=True, weighting="samples", ragged=True),
    "empty": Fit((0, 4, 7), optimizer="adamw", scheduler="onecycle", clip=0.3),
    "empty-active": Fit((0, 4, 7), optimizer="sgd", weighting="active", iterable=True, accumulate=3),
    "empty-samples": Fit((0, 4, 7), optimizer="adam", weighting="samples", ragged=True, accumulate=2),
    "middle": Fit((1, 6, 2), optimizer="adam", weighting="active", accumulate=2, clip=0.3, scheduler="step"),
    "middle-samples": Fit((1, 6, 2), optimizer="sgd", weighting="samples", ragged=True, iterable=True, clip=0.3),
    "middle-zero": Fit((1, 6, 2), optimizer="zero", weighting="active", scheduler="onecycle-setup"),
    "window": Fit((3, 7), optimizer="adamw", accumulate=3, weighting="samples", ragged=True, scheduler="onecycle"),
    "window-first": Fit((7, 3), optimizer="zero", accumulate=3, weighting="samples", ragged=True, scheduler="step"),
    "window-active": Fit((7, 2), optimizer="sgd", accumulate=3, weighting="active", iterable=True, clip=0.3),
    "estimate": Fit((3, 7), optimizer="sgd", accumulate=2, scheduler="onecycle-setup"),
    "per-epoch": Fit((3, 6), optimizer="adam", scheduler="epoch"),
    "per-epoch-iterable": Fit((6, 3), optimizer="adam", scheduler="epoch", iterable=True, accumulate=2),
    "grows": Fit(((3, 2), (5, 6), (4, 0)), optimizer="adam"),
    "grows-iterable": Fit(((3, 2), (5, 6), (4, 0)), optimizer="sgd", iterable=True, accumulate=2),
    "shrinks-reload": Fit(((6, 1, 2), (2, 5, 0), (0, 1, 3)), optimizer="adamw", reload=1, accumulate=2),
    "reload": Fit((3, 7), optimizer="sgd", reload=1, weighting="samples", ragged=True),
    "reload-2": Fit((0, 4, 7), optimizer="adam", reload=2, iterable=True, scheduler="step"),
    "reload-2-sized": Fit((7, 3), optimizer="zero", reload=2, accumulate=2),
    "limit": Fit((3, 7), optimizer="adam", limit=5),
    "limit-share": Fit((4, 8), optimizer="sgd", limit=0.5, accumulate=3),
    "limit-iterable": Fit((1, 6, 2), optimizer="adamw", limit=3, iterable=True),
    "max-steps": Fit((3, 7), optimizer="adam", max_steps=12, epochs=3, scheduler="step"),
    "max-steps-iterable": Fit((7, 3), optimizer="zero", max_steps=5, epochs=3, iterable=True),
    "max-steps-window": Fit((2, 7), optimizer="sgd", max_steps=7, epochs=4, accumulate=2),
    "one-process": Fit((4,), optimizer="adam", accumulate=3, scheduler="step", clip=0.3),
    "one-process-iterable": Fit((4,), optimizer="sgd", iterable=True, weighting="samples", scheduler="epoch"),
    "same-sizes-none": Fit(((0, 3), (0, 0), (2, 0)), optimizer="sgd", scheduler="step"),
}
SOME = [
    "sgd",
    "adam-first",
    "zero-iterable",
    "even",
    "even-iterable",
    "empty",
    "empty-samples",
    "middle",
    "window-first",
]
SOME += ["window-active", "estimate", "per-epoch-iterable", "grows", "shrinks-reload", "reload-2", "limit-share"]
SOME += ["limit-iterable", "max-steps-window", "one-process", "same-sizes-none"]


@pytest.mark.parametrize("name", others_long(CASES, *SOME))
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str) -> None:
    case = CASES[name]
    assert_exact(case, workers.run(case.world_size, fit, case))


@pytest.mark.parametrize("name", others_long(CASES, *[*CASES][::4]))
def test_rebalanced_it_is_one_process_with_the_same_schedule(workers: Workers, name: str) -> None:
    case = replace(CASES[name], rebalance=True)
    assert_exact(case, workers.run(case.world_size, fit, case))
