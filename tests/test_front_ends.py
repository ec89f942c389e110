"""One run, described once, on every front end: what a feature needs to be tested on all of them is a line here."""

import importlib
from typing import Any

import pytest

from tests.support.run import TOLERANCE, Run, difference, reference, same_bits
from tests.support.workers import Workers

FRONT_ENDS = ("plain", "sharded", "lightning", "fabric", "accelerate", "transformers", "deepspeed")
RUNS = {
    "rank 0 has none": Run((0, 2, 4), epochs=2),
    "rank 0 joins first": Run((1, 4, 2), epochs=2, optimizer="sgd", weighting="samples", ragged=True, accumulate=2),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_it_trains_as_one_process_does(workers: Workers, front_end: str, name: str) -> None:
    module = f"tests.support.front_ends.{front_end}"
    if front_end == "deepspeed":
        pytest.importorskip("deepspeed")
    ranks: list[Any] = workers.run(3, importlib.import_module(module).parameters, RUNS[name], deadline=90.0)
    assert all(same_bits(mine, ranks[0]) for mine in ranks)
    # An engine of DeepSpeed computes in float32.
    assert difference(ranks[0], reference(RUNS[name]).parameters) < (1e-4 if front_end == "deepspeed" else TOLERANCE)
