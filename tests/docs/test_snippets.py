"""Each snippet of Python in the pages runs, on two ranks, of which the first runs out of batches first."""

from pathlib import Path

import pytest

from tests.docs.given import KINDS, TEMPLATES, check_program, run
from tests.docs.snippets import Program, fill, pages, programs_of, snippets_of
from tests.support.workers import Workers

PROGRAMS = [program for page in pages() for program in programs_of(page)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_it_runs(workers: Workers, program: Program, tmp_path: Path) -> None:
    check_program(workers, program, tmp_path)


def test_comments_say_what_there_is() -> None:
    words = {"goes", "in", "given", "raises", "needs"}
    for page in pages():
        for snippet in snippets_of(page):
            assert {each.split()[0] for each in snippet.how} <= words, snippet
            assert snippet.said("in") in {None, *TEMPLATES}, snippet
            assert snippet.said("given") in {None, *KINDS}, snippet
        assert page.read_text().count("```python") == len(snippets_of(page)), page


def test_a_snippet_that_is_wrong_is_noticed(workers: Workers, tmp_path: Path) -> None:
    code = fill(TEMPLATES["loop"], "loss = loss * no_such_name")
    outcomes = workers.outcomes(2, run, "page", code, "plain", str(tmp_path))
    assert all("no_such_name" in outcome.error for outcome in outcomes)
