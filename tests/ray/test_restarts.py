"""Ray Train starts its workers again where one was killed in the tail, and they go on in it, exactly."""

import pytest

from tests.ray import job
from tests.support.run import TOLERANCE

pytestmark = pytest.mark.long
DRAWN = [f"{kind}_killed_{seed}" for seed in range(5) for kind in ("plain", "lightning")]


@pytest.mark.parametrize("name", ["plain_killed", "lightning_killed", *DRAWN])
def test_a_killed_worker_is_replaced(name: str) -> None:
    from tests.ray import killed  # which needs Ray

    case = killed.drawn(int(name.rpartition("_")[2])) if name in DRAWN else killed.Killed()
    done = job.run("tests.ray.killed", [name], deadline=240, failures=1)[name]
    assert not any(each.error for each in done), done[0].error
    for length, (off, resumed_at, trained) in zip(case.run.lengths, (each.value for each in done), strict=True):
        assert off < TOLERANCE
        assert resumed_at == case.saved
        assert trained == max(0, length - case.saved - 1) + length
