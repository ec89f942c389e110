"""Ray Train starts its workers again where one was killed in the tail, and they go on in it, exactly."""

import pytest

from tests.ray import job
from tests.support.run import TOLERANCE

pytestmark = pytest.mark.long
LENGTHS = (2, 8, 4)


@pytest.mark.parametrize("name", ["plain_killed", "lightning_killed"])
def test_a_killed_worker_is_replaced_in_the_tail(name: str) -> None:
    done = job.run("tests.ray.killed", [name], deadline=240, failures=1)[name]
    assert not any(each.error for each in done), done[0].error
    for rank, (off, resumed_at, trained) in enumerate(each.value for each in done):
        assert off < TOLERANCE
        # The last report came at the end of step 2 of the first epoch, behind the only batches of rank 0.
        assert resumed_at == 2
        assert trained == max(0, LENGTHS[rank] - 3) + LENGTHS[rank]
