"""The messages in the pages' tables of errors and warnings are in the sources, as far as the tables quote them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.snippets import DOCS

ROOT = DOCS.parent
PACKAGES = ("torch_join", "lightning_join", "accelerate_join")


def text_of(node: ast.AST) -> str:
    """Return a text of the sources, with `…` for the parts that vary."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body):
            return text_of(body)
    return "…"


def texts() -> Iterator[str]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            yield from (" ".join(text_of(n).split()) for n in nodes if isinstance(n, ast.Constant | ast.JoinedStr))


def quoted(path: Path) -> Iterator[list[str]]:
    """Yield the parts of each message in a page's tables, without what varies between them."""
    head = ""
    for line in path.read_text().splitlines():
        cell = line.split("|")[1].strip() if line.startswith("|") else ""
        head = cell if not head else head * bool(cell)
        if head in ("message", "warning") and cell not in ("message", "warning") and cell.strip("-") != "":
            yield [part.replace("`", "").strip() for part in cell.split("…")]


def test_messages_in_tables_are_in_the_sources() -> None:
    known = [text.replace("`", "") for text in texts()]
    rows = [(page.name, parts) for page in DOCS.glob("*.md") for parts in quoted(page)]
    assert len(rows) > 40
    missing = [row for row in rows if not any(all(part in text for part in row[1]) for text in known)]
    assert [row for row in missing if row[1] != ["JoinTimeoutError"]] == []
