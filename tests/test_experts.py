"""Experts that live on several ranks, on every front end: a finished rank runs the step itself, on a placeholder."""

import importlib
import random
import time
from typing import Any

import pytest

from tests.support.experts import Case, masked
from tests.support.many import note, seeds
from tests.support.workers import Workers

MODULES = {
    "plain": "experts",
    "fabric": "experts",
    "accelerate": "experts",
    "lightning": "experts_lightning",
    "transformers": "experts_transformers",
}
CASES = {
    "rows": ("plain", Case((1, 4, 0, 3), placeholder="rows", balance="global", bias=True), False),
    "last, by samples": ("plain", Case((0, 3, 2, 4), weighting="samples", clips=True), True),
    "masked, active": (
        "plain",
        Case((2, 1, 4, 0), placeholder=masked, weighting="active", ranks_per_model=4, balance=""),
        False,
    ),
    "fsdp": ("plain", Case((1, 3), "fsdp", weighting="samples", placeholder="rows", window=2), True),
    "fsdp, last": ("plain", Case((0, 2, 5, 3), "fsdp", weighting="active", clips=True), False),
    "Lightning, fully_shard": ("lightning", Case((3, 1), "fsdp", weighting="samples"), False),
    "Lightning, rows": ("lightning", Case((1, 4), placeholder="rows", weighting="active"), False),
    "Lightning, by samples": ("lightning", Case((0, 2, 5, 3), weighting="samples", ranks_per_model=4), False),
    "Lightning, manual": ("lightning", Case((1, 3), weighting="active", manual=True), False),
    "Lightning, by a callback": ("lightning", Case((0, 3), weighting="samples", callback=True), False),
    "Fabric": ("fabric", Case((0, 2, 5, 3), weighting="samples", window=2, clips=True), False),
    "Accelerate": ("accelerate", Case((1, 4), placeholder="rows", weighting="active", window=3), True),
    "Trainer, by samples": ("transformers", Case((0, 2, 5, 3), weighting="samples", ranks_per_model=4), False),
    "Trainer, rows": ("transformers", Case((1, 4), placeholder="rows", weighting="active"), True),
    "Trainer, masked": ("transformers", Case((4, 0), placeholder=masked, balance=""), False),
}


def check(workers: Workers, front_end: str, case: Case, streams: bool) -> None:
    module: Any = importlib.import_module(f"tests.support.front_ends.{MODULES[front_end]}")
    ranks = workers.run(len(case.lengths), getattr(module, front_end), case, streams, deadline=90.0)
    module.check(case, ranks)


@pytest.mark.parametrize("name", CASES)
def test_experts_are_those_of_one_process(workers: Workers, name: str) -> None:
    check(workers, *CASES[name])


def draw(seed: int) -> tuple[str, Case, bool]:
    pick = random.Random(seed)
    front_end, world = pick.choice([*MODULES]), pick.choice((2, 4, 4))
    lengths = *(pick.randint(0, 5) for _ in range(world - 1)), pick.randint(1, 5)
    placeholder = pick.choice(("rows", "rows", "last", masked))
    # What is summed over all ranks would count the rows of any other placeholder.
    balance = pick.choice(("", "local", "global" if placeholder == "rows" else "local"))
    wrap = pick.choice(("ddp", "fsdp")) if front_end in ("plain", "lightning") else "ddp"
    manual = front_end == "lightning" and wrap == "ddp" and pick.random() < 0.3
    window = 1 if manual else pick.choice((1, 1, 2, 3))
    if front_end == "transformers" and max(lengths) % window:
        window = 1  # Trainer divides an epoch's last window by the number of batches that this one has
    case = Case(
        lengths,
        wrap,
        ranks_per_model=pick.choice((2, world)),
        weighting=pick.choice(("world", "active", "samples")),
        placeholder=placeholder,
        balance=balance,
        bias=placeholder == "rows" and pick.random() < 0.4,
        window=window,
        clips=pick.random() < 0.5,
        manual=manual,
        callback=front_end == "lightning" and wrap == "ddp" and pick.random() < 0.3,
    )
    return front_end, case, pick.random() < 0.4


@seeds(range(2), 500)
def test_any_experts(workers: Workers, seed: int) -> None:
    front_end, case, streams = draw(seed)
    began, ended = time.monotonic(), "failed"
    try:
        check(workers, front_end, case, streams)
        ended = "right"
    finally:
        note(seed, (front_end, case, streams), ended, time.monotonic() - began)
