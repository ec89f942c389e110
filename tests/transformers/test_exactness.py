"""`JoinTrainer`: the parameters are those that a plain `Trainer` in one process computes on the unions."""

import pytest
import torch

from tests.support.workers import Workers
from tests.transformers.recipe import TOLERANCE, Fit, Trained, reference, train

FITS = {
    "rank 0 first": Fit((2, 5)),
    "rank 0 has none": Fit((0, 4), accumulate=2),
    "3 ranks": Fit((3, 0, 5), world_size=3, accumulate=3),
    "means": Fit((2, 5), counts=False, accumulate=2),
    "active": Fit((5, 2), counts=False, weighting="active"),
    "samples": Fit((2, 5), counts=False, weighting="samples", accumulate=3),
    "sharded by Trainer": Fit(samples=7, batch_size=2),
    "sharded by Trainer, 3 ranks": Fit(samples=20, world_size=3, accumulate=2, counts=False, weighting="samples"),
    "streams": Fit((2, 5), stream=True, accumulate=3, arguments={"max_steps": 7}),
    "streams, rank 0 has none": Fit((0, 5), stream=True, counts=False, arguments={"max_steps": 7}),
    "one batch": Fit((0, 1), epochs=3),
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_as_one_process(workers: Workers, fit: Fit) -> None:
    found: list[Trained] = workers.run(fit.world_size, train, fit)
    for trained in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(trained.parameters, found[0].parameters, strict=True))
        assert trained.steps == found[0].steps
    expected = reference(fit, found)
    assert expected.steps == found[0].steps
    for mine, theirs in zip(found[0].parameters, expected.parameters, strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE
