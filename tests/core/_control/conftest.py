from collections.abc import Iterator

import pytest

from tests.support.workers import Workers


@pytest.fixture(scope="module")
def crowd() -> Iterator[Workers]:
    pool = Workers(16)
    yield pool
    pool.close()
