"""The snippets of docs/deepspeed.md run."""

from pathlib import Path

import pytest

from tests.docs.given import check_program
from tests.docs.snippets import DOCS, Program, programs_of
from tests.support.workers import Workers


@pytest.mark.parametrize("program", programs_of(DOCS / "deepspeed.md"), ids=lambda program: program.name)
def test_a_snippet_runs(workers: Workers, program: Program, tmp_path: Path) -> None:
    check_program(workers, program, tmp_path)
