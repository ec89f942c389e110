"""One run, or one fault of a user's, on every front end: to test a feature or a check on all of them takes a line."""

import dataclasses
import importlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.drawn import draw
from tests.support.faults import epochs_of, log_of
from tests.support.faults import run as run_fault
from tests.support.front_ends import FRONT_ENDS
from tests.support.many import note, seeds
from tests.support.run import TOLERANCE, Run, difference, reference, same_bits
from tests.support.workers import Workers

RUNS = {
    "rank 0 has none": Run((0, 2, 4), epochs=2),
    "rank 0 joins first": Run((1, 4, 2), epochs=2, optimizer="sgd", weighting="samples", ragged=True, accumulate=2),
    "streams": Run((4, 2, 0), epochs=2, iterable=True, weighting="active", accumulate=2, clip=0.1),
    "counted": Run((1, 4, 2), epochs=2, weighting="count", ragged=True, scheduler="step"),
    # The plan is the same where lengths are not certain.
    "rebalanced": Run((1, 4, 0), epochs=2, optimizer="sgd", rebalance=True),
}

# Finished ranks run the step themselves.
PLACEHOLDERS = Run((1, 4, 0), epochs=2, optimizer="sgd", weighting="samples", ragged=True, clip=0.1, placeholder="last")


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_it_trains_as_one_process_does(workers: Workers, front_end: str, name: str) -> None:
    module = f"tests.support.front_ends.{front_end}"
    if front_end == "deepspeed":
        pytest.importorskip("deepspeed")
    parameters = importlib.import_module(module).parameters
    ranks: list[Any] = workers.run(3, parameters, RUNS[name], deadline=90.0)
    assert all(same_bits(mine, ranks[0]) for mine in ranks)
    # An engine of DeepSpeed computes in float32.
    assert difference(ranks[0], reference(RUNS[name]).parameters) < (1e-4 if front_end == "deepspeed" else TOLERANCE)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@seeds(range(6), 600)
def test_any_run_is_as_one_process_does_it(workers: Workers, seed: int) -> None:
    """Many of them: `scripts/test -m long`, from `TORCH_JOIN_SEED` on; `TORCH_JOIN_SOAK_LOG` names a log of them."""
    front_end, run = draw(seed)
    module = importlib.import_module(f"tests.support.front_ends.{front_end}")
    began, ended = time.monotonic(), "failed"
    try:
        ranks: list[Any] = workers.run(run.world_size, module.parameters, run, deadline=90.0)
        assert all(same_bits(mine, ranks[0]) for mine in ranks), f"{front_end}: the ranks of {run} differ"
        found = difference(ranks[0], reference(run).parameters)
        assert found < TOLERANCE, f"{front_end}: {run} is {found} off"
        ended = "right"
    finally:
        note(seed, f"{front_end}: {run}", ended, time.monotonic() - began)


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("front_end", ["plain", "lightning", "fabric", "accelerate", "transformers"])
def test_a_finished_rank_may_run_the_step_itself(workers: Workers, front_end: str, iterable: bool) -> None:
    run = dataclasses.replace(PLACEHOLDERS, iterable=iterable)
    module = importlib.import_module(f"tests.support.front_ends.{front_end}")
    ranks: list[Any] = workers.run(3, module.parameters, run, deadline=90.0)
    assert all(same_bits(mine, ranks[0]) for mine in ranks)
    assert difference(ranks[0], reference(run).parameters) < TOLERANCE


OF_OWN_LOOPS = ("plain", "sharded", "fabric", "accelerate")
IN_LOCKSTEP = ("lightning", "transformers")
ALL = (*OF_OWN_LOOPS, *IN_LOCKSTEP)
# The fault, the front ends that find it, and a part of the error, which all ranks raise.
REFUSED = [
    ("MonitorOnOne", OF_OWN_LOOPS, "The ranks passed different joinables to Join"),
    ("MonitorOnOne", IN_LOCKSTEP, "A JoinMonitor is among the callbacks of rank 1, but not of rank 0."),
    ("Window", ("plain", "fabric"), "holds gradients that its optimizer has not used yet"),
    ("Window", ("sharded",), "finished while holding an accumulated, not yet synced gradient"),
    ("MockGiven", OF_OWN_LOOPS, "The list of joinables contains a Mock"),
    ("MockGiven", ("lightning",), "got Mock"),
    ("OwnRate", ALL, "The ranks' optimizers differ"),
    ("Miscounts", ALL, "weighting returned nan"),
    ("Raises", ALL, "RuntimeError: out of luck"),
    ("Unfreezes", IN_LOCKSTEP, "were unfrozen in the middle of an epoch"),
]
# The same, and the ranks that are warned.
WARNED = [
    ("Gather", ALL, "with gradients, in a forward, while rank 0 of its group has finished", (1,)),
    ("DealtAgain", ("fabric", "accelerate", "transformers"), "so each dataset seems to be a rank's own shard.", (0, 1)),
    ("DealtAgain", ("lightning",), "so each dataset seems to be a rank's own shard.", (0,)),
    ("DealtAgainAlike", ("fabric", "accelerate", "transformers"), "but their first or last samples differ", (0, 1)),
    ("DealtAgainAlike", ("lightning",), "but their first or last samples differ", (0,)),
    ("Window", ("accelerate",), "within an accumulation window", (0, 1)),
    ("Window", ("lightning",), "within an accumulation window", (0,)),
    ("Skips", OF_OWN_LOOPS, "Rank 0 did not sync gradients in step 0 of the loop, but rank 1 did. Since then", (0,)),
    ("AverageOnOne", ("plain", "fabric", "accelerate"), "and these had finished: average", (0,)),
    ("Unfreezes", ("plain", "fabric", "accelerate"), "the ranks already differed in model 0", (0,)),
]


def of_each(table: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return each front end of each line. A plain loop and Lightning run by default, or the first of the line's own."""
    return [
        pytest.param(fault, end, *how, marks=() if end in ("plain", "lightning", ends[0]) else pytest.mark.long)
        for fault, ends, *how in table
        for end in ends
    ]


@pytest.mark.parametrize(("fault", "front_end", "said"), of_each(REFUSED))
def test_a_fault_raises_on_all_ranks(workers: Workers, fault: str, front_end: str, said: str) -> None:
    # The ranks of a sharded model wait in a gather to the end of this time.
    timeout = 3.0 if (fault, front_end) == ("Window", "sharded") else 30.0
    for outcome in workers.outcomes(2, run_fault, front_end, fault, timeout=timeout):
        assert said in outcome.error
        if not outcome.error.startswith("RuntimeError"):  # the user's own, whose frames all stay
            *_, last = outcome.trace.split("Traceback (most recent call last):")
            ours = re.findall(r'File "[^"]*/(?:torch|lightning|accelerate)_join/', last)
            assert len(ours) <= 6, last


@pytest.mark.parametrize(("fault", "front_end", "said", "ranks"), of_each(WARNED))
def test_a_fault_is_warned_of(workers: Workers, fault: str, front_end: str, said: str, ranks: tuple[int, ...]) -> None:
    for rank, texts in enumerate(workers.run(2, run_fault, front_end, fault)):
        assert any(said in text for text in texts) == (rank in ranks)


_TAIL = (
    "Rank 0 has run out of batches; 1 of 2 ranks still have batches. weighting='world': their steps are scaled by 1/2;"
    " weighting='samples' counts each sample the same."
)
_EPOCH = (
    "Epoch {}: 4 batches (1, 3 on 2 ranks) in N s, N% of rank-seconds idle. Joined: rank 0 at batch 1 after N s."
    " rebalance=True would save about 1 of 3 steps."
)


@pytest.mark.parametrize("front_end", ALL)
def test_a_log_says_who_has_finished_and_what_that_has_cost(workers: Workers, front_end: str) -> None:
    first, second = workers.run(2, log_of, front_end)
    assert first == []
    lines = [re.sub(r"[\d.]+( s\b|%)", r"N\1", line) for line in second]
    assert lines == [_TAIL, _EPOCH.format(0), _EPOCH.format(1)]
    assert workers.run(2, log_of, front_end, logging.WARNING) == [[], []]
    if front_end in IN_LOCKSTEP:  # whose monitors log each epoch
        assert workers.run(2, log_of, front_end, logging.NOTSET, "Monitored") == [[], [_TAIL]]


@pytest.mark.parametrize("front_end", ALL)
def test_a_monitor_counts_the_batches_and_samples_of_each_epoch(workers: Workers, front_end: str) -> None:
    assert workers.run(2, epochs_of, front_end) == [[[(1, 2, 2), (3, 0, 6)]] * 2] * 2


@pytest.mark.parametrize("front_end", ALL)
def test_without_a_fault_nothing_is_said(workers: Workers, front_end: str) -> None:
    for texts in workers.run(2, run_fault, front_end, "Fault"):
        assert not any("ank" in text for text in texts), texts
