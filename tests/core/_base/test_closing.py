"""How a generator finds out that it is closed on purpose."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from typing import Any

import pytest
from tqdm import tqdm

from torch_join._base.closing import is_left_on_purpose

Begin = Callable[[], Iterator[int]]


def breaks(begin: Begin) -> None:
    for number in begin():
        if number == 2:
            break


def breaks_in_a_progress_bar(begin: Begin) -> None:
    for number, _ in enumerate(tqdm(begin(), file=StringIO())):
        if number == 2:
            break


def breaks_in_a_with(begin: Begin) -> None:
    for number in begin():
        with suppress(KeyError):
            if number == 2:
                break


def returns(begin: Begin) -> int:
    for number in begin():
        return number
    return -1


def zips(begin: Begin) -> None:
    for _ in zip(range(3), begin(), strict=False):
        pass


def slices(begin: Begin) -> None:
    for _ in itertools.islice(begin(), 3):
        pass


def deletes(begin: Begin) -> None:
    loop = begin()
    next(loop)
    del loop


def raises(begin: Begin) -> None:
    for _ in begin():
        raise KeyError


def raises_in_a_setter(begin: Begin) -> None:
    for _ in begin():
        begin.attribute.other = 1  # type: ignore[attr-defined]


def raises_in_a_generator_around(begin: Begin) -> None:
    for _ in (number // 0 for number in begin()):
        pass


def raises_in_a_progress_bar(begin: Begin) -> None:
    for _ in tqdm(begin(), file=StringIO()):
        raise KeyError


def raises_while_a_variable_holds_it(begin: Begin) -> None:
    def hold() -> None:
        loop = begin()
        next(loop)
        raise KeyError

    try:
        hold()
    except KeyError as error:  # which holds the frame, and what that holds, to the end of this
        str(error)


@pytest.mark.parametrize(
    "leave",
    [breaks, breaks_in_a_progress_bar, breaks_in_a_with, returns, zips, slices, deletes],
    ids=lambda leave: leave.__name__,
)
def test_it_is_left_on_purpose(leave: Callable[[Begin], Any]) -> None:
    assert ask(leave) == [True]


@pytest.mark.parametrize(
    "leave",
    [
        raises,
        raises_in_a_setter,
        raises_in_a_generator_around,
        raises_in_a_progress_bar,
        raises_while_a_variable_holds_it,
    ],
    ids=lambda leave: leave.__name__,
)
def test_an_exception_is_never_taken_for_that(leave: Callable[[Begin], Any]) -> None:
    assert ask(leave) == [False]


def ask(leave: Callable[[Begin], Any]) -> list[bool]:
    found: list[bool] = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(5)
        except GeneratorExit:
            found.append(is_left_on_purpose())
            raise

    with suppress(KeyError, AttributeError, ZeroDivisionError):
        leave(numbers)
    return found
