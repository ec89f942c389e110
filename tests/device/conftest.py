"""Tests on an emulated accelerator: see `tests/emulator`."""

import os
from collections.abc import Iterator

import pytest

from tests import emulator
from tests.support.workers import Workers


@pytest.fixture(scope="session")
def devices() -> Iterator[Workers]:
    """Ranks with devices: emulated ones, or what `TORCH_JOIN_TEST_DEVICE` names."""
    device = os.environ.get("TORCH_JOIN_TEST_DEVICE", emulator.DEVICE)
    if device == emulator.DEVICE:
        if emulator.compiler() is None:
            pytest.skip("NOTHING OF AN ACCELERATOR'S RULES IS TESTED: there is no g++ to build the emulator with")
        emulator.build()
    pool = Workers(4, device=device)
    yield pool
    pool.close()


@pytest.fixture
def emulated(devices: Workers) -> Workers:
    """Ranks with emulated devices, which count what happens on them."""
    if devices.device != emulator.DEVICE:
        pytest.skip("it counts what only the emulator can")
    return devices
