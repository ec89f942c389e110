"""Rebalanced loops of models that do more with others than DDP does: every rank has a batch but in the last step."""

import pytest

from tests.core.backward.programs import Program, assert_exact, loses_hooks, train
from tests.support.workers import Workers

KINDS = {
    "norms": (),
    "norms, accumulation": ("accumulates",),
    "norms, checkpoint, streams": ("checkpoint", "stream"),
    "contrastive loss": ("no norm", "contrast"),
    "contrastive loss by our gather": ("no norm", "contrast", "ours", "stream"),
    "mean over ranks": ("no norm", "mean", "adam"),
    "FSDP1": ("no norm", "fsdp1", "adam"),
    "FSDP2": ("no norm", "fsdp2", "adam"),
    "FSDP2, norms, streams": ("fsdp2", "stream"),
}
LENGTHS = ((2, 9), (0, 7, 1), (3, 3, 3))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
def test_parameters_are_those_of_one_process_with_the_same_schedule(
    workers: Workers, kind: str, weighting: str
) -> None:
    if weighting == "samples" and "FSDP2, norms" in kind:
        pytest.skip("not supported: collectives in backward of a sharded model, with this weighting")
    for lengths in LENGTHS:
        program = Program(lengths, weighting=weighting, options=frozenset({"rebalance", *KINDS[kind]}))
        if loses_hooks(program) and (weighting == "samples" or sum(lengths) % len(lengths)):
            outcomes = workers.outcomes(program.world_size, train, program, timeout=3.0)
            assert all("lost the hooks with which Join weights" in each.error for each in outcomes), outcomes
            continue
        assert_exact(program, workers.run(program.world_size, train, program), buffers="norms" in kind)
