"""Programs that hang are told where; slow ones are not accused: each is drawn from a seed.

Each takes up to a minute, in which its ranks mostly wait: `pytest -n 4 -m long tests/soak/test_hangs.py` runs many at a
time, from `TORCH_JOIN_SEED` on; `TORCH_JOIN_SOAK_LOG` names a log of how they end.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.soak.hangs.cases import Verdict, draw_hang, draw_slow, is_proven, judge_hang, judge_slow
from tests.soak.hangs.running import Record, prepare, records, run
from tests.soak.hangs.script import Case
from tests.support.many import note, seeds
from tests.support.workers import DeadlineError, Workers

STARTS = 120.0  # seconds, in which frameworks are imported
HANGS = 40.0  # seconds, after which a program is killed
TIMEOUT = 600.0  # of the process group: nobody waits for it

pytestmark = pytest.mark.filterwarnings("ignore")


def try_out(workers: Workers, case: Case, folder: Path, deadline: float, judge: Callable[..., Verdict]) -> Verdict:
    errors: Sequence[str] = []
    workers.outcomes(case.world_size, prepare, case.front_end, store="", deadline=STARTS)
    try:
        done = workers.outcomes(case.world_size, run, case, str(folder), deadline=deadline, timeout=TIMEOUT)
        errors = [outcome.error for outcome in done]
    except DeadlineError as error:
        ended = str(error).partition("did not come back")[2]
        errors = [
            "the process ended" * (f"rank {rank} ended: the process ended" in ended) for rank in range(case.world_size)
        ]
        errors.append(str(error))
    found: Sequence[Record] = records(str(folder), case.world_size)
    return judge(case, found, errors)


def check(
    workers: Workers, case: Case, folder: Path, deadline: float, judge: Callable[..., Verdict], good: tuple[str, ...]
) -> None:
    began = time.monotonic()
    verdict: Any = try_out(workers, case, folder, deadline, judge)
    after = f" ({verdict.seconds:.1f} s after it was stuck)" if verdict.seconds else ""
    note(case.seed, f"{case}: {verdict.said!r}", f"{verdict.kind}{after}", time.monotonic() - began)
    assert verdict.kind in good, f"{verdict.kind}: {case}: {verdict.said}"


@seeds(range(0), 200)
def test_a_hang_is_told(workers: Workers, tmp_path: Path, seed: int) -> None:
    good = ("told", "logged", "said to wait", "named", "no hang", "gloo's abort")
    case = draw_hang(seed)
    check(workers, case, tmp_path, HANGS if is_proven(case) else 2 * HANGS, judge_hang, good)


@seeds(range(0), 200)
def test_a_slow_program_is_not_accused(workers: Workers, tmp_path: Path, seed: int) -> None:
    case = draw_slow(seed)
    check(workers, case, tmp_path, HANGS + 2 * case.seconds, judge_slow, ("right",))
