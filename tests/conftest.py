from collections.abc import Iterator

import pytest

from tests.support.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    pool = Workers(4)
    yield pool
    pool.close()
