"""The pages have none of the phrases in `scripts/prose.py`, and each of these would be found."""

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


def test_no_page_has_such_a_phrase() -> None:
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
