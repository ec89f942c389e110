"""Programs drawn from a seed, each compared with itself in plain DDP where every rank runs every step.

A program puts together what training loops do: see the tables in `tests/soak/idioms`. `scripts/test -m long
tests/soak/test_idioms.py` runs a thousand. A failure names its seed and its program; `TORCH_JOIN_SEED=seed
TORCH_JOIN_CASES=1` runs it again, and `TORCH_JOIN_SOAK_LOG` names a file that notes how each one ended.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.soak.idioms.programs import Execution, Program, draw
from tests.soak.idioms.worlds import Joined, Reference, differences, digests
from tests.support.many import note, seeds
from tests.support.warned import warned
from tests.support.workers import DeadlineError, Outcome, Workers

TOLERANCE = 1e-9
LARGEST = 1e6  # beyond which rounding may be what differs
ATTEMPTS = 8
# Idioms that are wrong with a warning, and patterns of the names of what may be wrong then.
EXCUSED = {
    "average of rank 0": r" shadow",
    "forgotten average": r" shadow",
    "counted forwards": "",
    "attribute that appears": "",
    "contrast of a package": "",
    "kept iterator": r"^\d",  # all that is read before the end
    "breaks apart": r" (read|copy)",
    "own buffers": r"",
}


class ReferenceFailedError(Exception):
    """Plain DDP itself cannot run this program."""


class OthersFailedError(Exception):
    """Another rank did not come to the program's end."""


@dataclass(frozen=True)
class Compared:
    """What one rank has found."""

    expected: dict[str, str]  # digests, by name
    found: dict[str, str]
    off: dict[str, float]
    largest: float
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    kind: str  # "right", "error", "warned", "silent", or "no reference"
    said: str = ""


def run(rank: int, program: Program) -> Compared:
    torch.set_default_dtype(torch.float64)
    expected, found = (kind(rank, program.lengths, program.weighting) for kind in (Reference, Joined))
    try:
        with warned() as usual:
            Execution(expected, program).run()
    except Exception as error:
        raise ReferenceFailedError(str(error)) from error
    dist.barrier()
    with warned() as texts:
        Execution(found, program).run()
    try:
        dist.barrier()
    except Exception as error:
        raise OthersFailedError(str(error)) from error
    weights = [value for name, value in expected.found.items() if " net." in name and value.numel()]
    largest = max(float(value.abs().nan_to_num(torch.inf).max()) for value in weights)
    off = differences(found.found, expected.found, TOLERANCE)
    return Compared(digests(expected.found), digests(found.found), off, largest, sorted({*texts} - {*usual}))


def apart(of: list[dict[str, str]]) -> set[str]:
    """Return the names of what some ranks hold with other bits than rank 0."""
    return {name for name, digest in of[0].items() if any(other.get(name, digest) != digest for other in of)}


def judge(program: Program, outcomes: list[Outcome]) -> Verdict:
    errors = [outcome.error for outcome in outcomes]
    if any(error.startswith("ReferenceFailedError") for error in errors):
        return Verdict("no reference", errors[0])
    if any(errors):
        told = "\n".join(f"rank {rank}: {error or 'fine'}" for rank, error in enumerate(errors))
        on_all = not any(not error or error.startswith("OthersFailedError") for error in errors)
        by_name = any(not re.search("gloo|timed out", error, re.IGNORECASE) for error in errors)
        return Verdict("error" if on_all and by_name else "silent", told)
    ranks: list[Compared] = [outcome.value for outcome in outcomes]
    own = apart([one.expected for one in ranks])
    if any(one.largest > LARGEST for one in ranks):
        return Verdict("no reference", "it diverges")
    if rest := [name for name in own if ".buffer " not in name and " read." not in name]:
        return Verdict("no reference", f"plain DDP leaves ranks apart in {rest[:3]}")
    if own and program.ddp == "own buffers":
        return Verdict("no reference", f"each rank trains with its own {sorted(own)[:3]}")
    buffers = {name.replace(".buffer ", ".") for name in own}
    wrong = {
        name: max(one.off.get(name, 0.0) for one in ranks)
        for name in {name for one in ranks for name in one.off} | apart([one.found for one in ranks])
        if name not in own and name not in buffers
    }
    if not wrong:
        return Verdict("right")
    warnings = sorted({text for one in ranks for text in one.warnings})
    worst = sorted(wrong, key=lambda name: (name[0].isdigit(), -wrong[name]))[:5]
    said = f"{len(wrong)} values, among them {[(name, wrong[name]) for name in worst]}; warnings: {warnings}"
    idioms = [program.loop, program.loss, *program.extras]
    if any("hand_over_buffers" in text for text in warnings):  # nobody can tell which ones the model keeps alike itself
        idioms.append(program.ddp)
    excuses = [EXCUSED[idiom] for idiom in idioms if idiom in EXCUSED]
    excused = all(any(re.search(excuse, name) for excuse in excuses) for name in wrong)
    return Verdict("warned" if warnings and excused else "silent", said)


def try_out(workers: Workers, program: Program) -> Verdict:
    try:
        return judge(program, workers.outcomes(len(program.lengths), run, program, deadline=90.0, timeout=20.0))
    except DeadlineError as error:
        return Verdict("silent", str(error))


@seeds(range(0), 1000)
def test_it_is_right_or_says_what_is_wrong(workers: Workers, seed: int) -> None:
    check(workers, seed)


@pytest.mark.parametrize("seed", range(4))
def test_some_are(workers: Workers, seed: int) -> None:
    check(workers, seed)


def check(workers: Workers, seed: int) -> None:
    for attempt in range(ATTEMPTS):
        began, program = time.monotonic(), draw(seed, attempt)
        verdict: Any = try_out(workers, program)
        note(seed, f"{program}: {verdict.said!r}", verdict.kind, time.monotonic() - began)
        if verdict.kind != "no reference":
            break
    assert verdict.kind != "silent", f"{program} of seed {seed}: {verdict.said}"
