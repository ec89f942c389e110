"""The Python in the pages: found, put into what stands around it, and run on ranks with different numbers of batches.

A comment before a snippet says how it runs, if not by itself with what is given for its page:

    <!-- snippet: goes on -->          after the one before it, with its names
    <!-- snippet: in loop -->          within a template of `given.py`, here `LOOP`
    <!-- snippet: given fabric -->     with what is given for another kind of page
    <!-- snippet: raises JoinError --> ends in that error on all ranks
    <!-- snippet: needs deepspeed -->  where this package is installed
"""

import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_SNIPPET = re.compile(
    r"^(?P<indent>[ ]*)(?:<!-- snippet: (?P<how>[^>]+?) -->\s+)?```(?:python|\{code-block\} python)\n"
    r"(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """One block of Python in a page.

    Attributes:
        page: Its path in the repository.
        line: Where its code begins.
        code: What it is.
        how: What the comment before it says.
    """

    page: str
    line: int
    code: str
    how: tuple[str, ...] = ()

    def said(self, word: str) -> str | None:
        """Return what follows a word in the comment before it, if that is there."""
        return next((each.removeprefix(word).strip() for each in self.how if each.split()[0] == word), None)


@dataclass(frozen=True)
class Program:
    """A snippet with those that it goes on from."""

    snippets: tuple[Snippet, ...]

    @property
    def name(self) -> str:
        return f"{self.snippets[0].page}:{self.snippets[0].line}"

    def said(self, word: str) -> str | None:
        return next((said for each in self.snippets if (said := each.said(word)) is not None), None)

    @property
    def code(self) -> str:
        """The program: its snippets, one after the other."""
        return "\n\n".join(each.code for each in self.snippets)


def snippets_of(path: Path) -> list[Snippet]:
    """Return the snippets of a page, from its first to its last."""
    text = path.read_text()
    found = []
    for match in _SNIPPET.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        how = tuple(each.strip() for each in (match["how"] or "").split(",") if each.strip())
        found.append(Snippet(str(path.relative_to(ROOT)), line, textwrap.dedent(match["code"]), how))
    return found


def programs_of(path: Path) -> list[Program]:
    """Return the snippets of a page, those that go on from others together with these."""
    programs: list[Program] = []
    for snippet in snippets_of(path):
        if "goes on" in snippet.how:
            programs[-1] = replace(programs[-1], snippets=(*programs[-1].snippets, snippet))
        else:
            programs.append(Program((snippet,)))
    return programs


def pages() -> list[Path]:
    """Return all pages that users read."""
    return [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]


def fill(template: str, code: str) -> str:
    """Put code where a template says `HERE`, as far in as that is, and its imports before all."""
    lines = code.splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    rest = "\n".join(line for line in lines if line not in imports)
    here = next(line for line in template.splitlines(keepends=True) if line.strip() == "HERE")
    margin = here[: len(here) - len(here.lstrip())]
    return "\n".join([*imports, template.replace(here, textwrap.indent(rest, margin) + "\n")])
