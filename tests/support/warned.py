"""What somebody is warned of."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_join import JoinWarning

TESTS = Path(__file__).parents[1]


@contextmanager
def warned(about: str = "") -> Iterator[list[str]]:
    """The texts of all warnings within this that hold these words; they are there at its end.

    Ours point at a line of the tests, which are the user's.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    lost = [one for one in caught if issubclass(one.category, JoinWarning) and not within(one.filename)]
    assert not lost, lost[0]
    texts += [text for one in caught if about in (text := str(one.message))]


def within(file: str) -> bool:
    return Path(file).is_relative_to(TESTS)
