import os
from collections.abc import Iterator

import pytest

from tests.cpu_only import why_only_on_a_cpu
from tests.support.workers import Workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First the examples, of which each takes half a minute: else one process runs them at the end, and the other waits.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/repository/"))
    if os.environ.get("TORCH_JOIN_TEST_DEVICE", "cpu") == "cpu":
        return
    for item in items:
        if reason := why_only_on_a_cpu(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


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
