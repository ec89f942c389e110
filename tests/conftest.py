import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.covering import is_in, mark_others_long
from tests.cpu_only import why_only_on_a_cpu

if TYPE_CHECKING:
    from tests.support.workers import Workers

# Torch asks for the names of the loopback interface, and stands still for five seconds where nobody answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


ALL_TESTS = pytest.StashKey[list[str]]()  # that were collected, the long ones among them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="run the K-th of N parts of the tests; a test stays in its part")


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave something out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[ALL_TESTS] = [item.nodeid for item in items]
    mark_others_long(items)
    if part := config.getoption("--slice"):
        config.hook.pytest_deselected(items=[item for item in items if not is_in(part, item.nodeid)])
        items[:] = [item for item in items if is_in(part, item.nodeid)]
    # First the examples, of which each takes half a minute: else one process runs them at the end, and the other waits.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/repository/"))
    if os.environ.get("TORCH_JOIN_TEST_DEVICE", "cpu") == "cpu":
        return
    for item in items:
        if reason := why_only_on_a_cpu(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # as in workers: references are trained here


@pytest.fixture(scope="session")
def workers() -> "Iterator[Workers]":
    from tests.support.workers import Workers  # not in the process that only deals out the tests

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
