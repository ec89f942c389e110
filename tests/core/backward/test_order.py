"""The order of collectives is the same on every two ranks, over all process groups that they have in common."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.core.backward import programs
from tests.core.backward.programs import Program
from tests.covering import others_long
from tests.needs import needs
from tests.support.inside import recorded_collectives
from tests.support.workers import Workers


@pytest.fixture(scope="module")
def recorders() -> Iterator[Workers]:
    """Processes of their own: torch reads the size of its recorder once."""
    pool = Workers(4)
    yield pool
    pool.close()


def record(rank: int, train: Any, program: Any, rendezvous: str) -> list[tuple[str, str, Any]]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    size = program.world_size
    dist.init_process_group(
        "gloo", store=dist.FileStore(rendezvous, size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    before = len(recorded_collectives())
    train(rank, program)
    return recorded_collectives()[before:]


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "norms in a group of their own": (programs.train, Program((2, 6), options=frozenset({"group"}))),
    "everything": (programs.train, Program((0, 5, 3), options=frozenset({"group", "mean", "contrast", "checkpoint"}))),
    "two models": (programs.train, Program((2, 5, 4), options=frozenset({"summed", "mean"}))),
    "accumulation": (programs.train, Program((5, 1), options=frozenset({"accumulates", "group"}))),
    "FSDP": (programs.train, Program((2, 5, 0), options=frozenset({"fsdp2", "group", "mean"}))),
    **{f"random {seed}": (programs.train, programs.draw(seed)) for seed in range(100, 108)},
}


SOME = [name for name in PROGRAMS if not name.startswith("random") or int(name[-1]) < 3]


@needs("a record of gloo's collectives")
@pytest.mark.parametrize("name", others_long(PROGRAMS, *SOME))
def test_all_ranks_issue_everything_in_one_order(recorders: Workers, name: str, tmp_path: Path) -> None:
    train, program = PROGRAMS[name]
    found = recorders.run(program.world_size, record, train, program, str(tmp_path / "store"), store="")
    for mine in found:  # what a scatter is given depends on the rank
        mine[:] = [(group, name, None if "scatter" in name else sizes) for group, name, sizes in mine]
    groups = [{group for group, *_ in mine} for mine in found]
    assert len(found[0]) > 20
    for mine, its in zip(found, groups, strict=True):
        common = its & groups[0]
        assert [each for each in mine if each[0] in common] == [each for each in found[0] if each[0] in common]
