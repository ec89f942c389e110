"""Uneven inputs under Ray Train: parameters are those of one process, and reports come from whoever has a batch."""

from typing import Any

import pytest

from tests.ray import job
from tests.support.front_ends.lightning import Fit, assert_exact
from tests.support.many import seeds
from tests.support.run import TOLERANCE
from tests.support.workers import Outcome

FIT = Fit((2, 7, 0), epochs=2, scheduler="step", ragged=True)
REFUSED = {
    "report_itself": "ray.train.report",
    "barrier": "ray.train.collective.barrier",
    "broadcast": "ray.train.collective.broadcast_from_rank_zero",
}
FITS = ["prepared", "by_name", "by_callback", "sharded", "reports_in_hooks"]
SAMPLES = ["each_sample_prepared", "each_sample_by_name"]
OTHERS = ["reports_in_the_tail", "reports_in_accelerates_loop", "report_itself_on_even_inputs", "all_rows"]
OTHERS += ["prepares_shards", "reports_in_a_training_step"]


@pytest.fixture(scope="module")
def done() -> dict[str, list[Outcome]]:
    return job.run("tests.ray.cases", [*REFUSED, *FITS, *SAMPLES, *OTHERS], deadline=240)


def values(done: dict[str, list[Outcome]], name: str) -> list[Any]:
    assert not any(each.error for each in done[name]), "\n".join(each.trace or each.error for each in done[name])
    return [each.value for each in done[name]]


def test_a_report_in_the_tail_is_the_lowest_active_ranks(done: dict[str, list[Outcome]]) -> None:
    found = values(done, "reports_in_the_tail")
    assert max(off for off, _ in found) < TOLERANCE
    # Rank 0 has two batches, rank 1 has six.
    firsts = [(0, 1, 0), (0, 3, 1), (0, 5, 1), (1, 1, 0), (1, 3, 1), (1, 5, 1)]
    expected = [({"epoch": e, "step": s, "of": rank}, f"{e}-{s}", rank) for e, s, rank in firsts]
    assert [reported for _, reported in found] == [expected] * 3


def test_accelerates_loop_takes_a_report(done: dict[str, list[Outcome]]) -> None:
    found = values(done, "reports_in_accelerates_loop")
    assert max(off for off, _ in found) < TOLERANCE
    expected = [(e, s, 2 if s else 0) for e in (10, 11, 12) for s in range(3)]
    for _, reported in found:
        assert [(said["epoch"], said["step"], said["of"]) for said, _, _ in reported] == expected
        assert [rank for *_, rank in reported] == [rank for *_, rank in expected]


@pytest.mark.parametrize("name", REFUSED)
def test_what_waits_for_all_workers_is_refused_in_the_tail(done: dict[str, list[Outcome]], name: str) -> None:
    for rank, outcome in enumerate(done[name]):
        kind = "UnsupportedError" if rank else "PeerFailedError"
        assert outcome.error.startswith(kind), outcome.error
        assert f"{REFUSED[name]} was called in a step for which rank 0 had no batch" in outcome.error
        assert ("torch_join.ray.Report()" in outcome.error) == (name == "report_itself")


def test_a_training_step_that_reports_is_refused_in_the_tail(done: dict[str, list[Outcome]]) -> None:
    for outcome in done["reports_in_a_training_step"]:
        assert "ray.train.report was called in a step for which rank 2 had no batch" in outcome.error


def test_even_inputs_report_as_ever(done: dict[str, list[Outcome]]) -> None:
    assert max(values(done, "report_itself_on_even_inputs")) < TOLERANCE


def test_unequal_shards_lose_no_row(done: dict[str, list[Outcome]]) -> None:
    for off, read, lengths in values(done, "all_rows"):
        assert off < TOLERANCE
        assert [sorted(rows) for rows in read] == [[*range(61)]] * 2
        assert len(set(lengths)) > 1


def test_a_shard_that_is_dealt_out_again_is_warned_of(done: dict[str, list[Outcome]]) -> None:
    for said in values(done, "prepares_shards"):
        found = [text for text in said if "have different lengths (5 to 25)" in text]
        assert len(found) == 1, said
        assert "prepare_data_loader(loader, add_dist_sampler=False)" in found[0]


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_exact(done: dict[str, list[Outcome]], name: str) -> None:
    assert_exact(FIT, values(done, name))


@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_is_trained_on_once(done: dict[str, list[Outcome]], name: str) -> None:
    assert sorted(row for read in values(done, name) for row in read) == [*range(50)]


@seeds(range(0), 100, of=50)
def test_any_run(seed: int) -> None:
    names = [f"drawn_{each}" for each in range(50 * seed, 50 * seed + 50)]
    done = job.run("tests.ray.cases", names, deadline=500)
    for name in names:
        for what, off in values(done, name):
            assert off < TOLERANCE, f"{name}: {what}"
