import os
from collections.abc import Iterator

import pytest

from tests.support.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    pool = Workers(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put the environment back: a `Trainer` that launched here leaves `LOCAL_RANK`, with which none launches again."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
