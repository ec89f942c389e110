"""Trainings that go on, in the middle of an uneven epoch, from what an earlier version has saved.

A state of 0.2.0 is read for one release.
"""

import shutil
from pathlib import Path

import pytest

from tests.states.trainings import FILES, SAVED, TRAININGS, train
from tests.support.workers import Workers


@pytest.mark.parametrize("name", TRAININGS)
def test_what_was_left_is_trained_on(workers: Workers, tmp_path: Path, name: str) -> None:
    shutil.copytree(FILES / name, tmp_path / "state")
    (tmp_path / "whole").mkdir()
    whole = workers.run(2, train, name, str(tmp_path / "whole"), False)
    resumed = workers.run(2, train, name, str(tmp_path / "state"), True)
    for seen, rest in zip(whole, resumed, strict=True):
        expected = [samples for place, samples in sorted(seen.items()) if place > SAVED]
        assert [samples for _, samples in sorted(rest.items())] == expected
