"""What somebody is warned of."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warned(about: str = "") -> Iterator[list[str]]:
    """The texts of all warnings within this that hold these words; they are there at its end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [text for one in caught if about in (text := str(one.message))]
