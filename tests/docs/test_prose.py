"""The pages, docstrings and comments have none of the phrases in `scripts/prose.py`; each of these would be found."""

from pathlib import Path

import pytest

from scripts import prose

FOUND = {
    "A rank tells whoever waits.": "whoever",
    "Compare what is\ngiven.": "what is given",
    "Return a shard of its own.": "of its own",
    "A step of the optimizer's, with a scale.": "of the optimizer's",
    "In a step that some rank does not have, it waits.": "that some rank does not have",
    "The others are told at once.": "are told",
    "It trains as ever.": "as ever",
    "The job goes on there.": "goes on",
    "Give all ranks equally many batches.": "equally many",
    "The last one has said so.": "has said",
    "It raises amid an accumulation.": "amid",
    "Call it at the begin of each loop.": "the begin",
    "- Of a shard without indices, it asks nothing.": "- Of a",
}


SOURCE = '''"""Whoever."""

RANK = "goes on"  # amid


class Loop:
    """A loop.

    Of a loop, the begin.
    """
'''


def test_no_page_and_no_clean_source_has_such_a_phrase() -> None:
    assert [*prose.violations(Path(prose.__file__).parent.parent)] == []


@pytest.mark.parametrize("text", FOUND)
def test_each_phrase_is_found(text: str) -> None:
    found = [*prose.phrases(f"# Title\n\n{text}\n")]
    assert (3, FOUND[text]) in [(line, phrase) for line, phrase, _ in found]


@pytest.mark.parametrize(
    "text",
    [
        "```\nwhoever\n```",
        "`goes_on = whoever`",
        "<!-- snippet: goes on -->",
        "[data](data.md#where-a-job-goes-on)",
        "Use one of torch's samplers, and state of its own last step.",
    ],
)
def test_code_and_links_are_left_alone(text: str) -> None:
    assert [*prose.phrases(text)] == []


def test_docstrings_and_comments_are_read_and_code_is_not() -> None:
    found = [*prose.phrases(prose.remarks(SOURCE))]
    assert {(line, phrase) for line, phrase, _ in found} == {
        (1, "Whoever"),
        (3, "amid"),
        (9, "the begin"),
        (9, "Of a"),
    }


def test_a_phrase_in_a_clean_source_is_a_violation(tmp_path: Path) -> None:
    (tmp_path / "torch_join" / "_tail").mkdir(parents=True)
    (tmp_path / "torch_join" / "_tail" / "loop.py").write_text(SOURCE)
    assert [text.split(": ")[0] for text in prose.violations(tmp_path)] == [
        f"torch_join/_tail/loop.py:{line}" for line in (1, 3, 9, 9)
    ]
