"""Tests on an emulated accelerator: see `tests/emulator`."""

from collections.abc import Iterator

import pytest

from tests import emulator
from tests.support.workers import Workers


@pytest.fixture(scope="session")
def devices() -> Iterator[Workers]:
    """Ranks of which each has a device of its own."""
    if emulator.compiler() is None:
        pytest.skip("NOTHING OF AN ACCELERATOR'S RULES IS TESTED: there is no g++ to build the emulator with")
    emulator.build()
    pool = Workers(4, device=emulator.DEVICE)
    yield pool
    pool.close()
