"""The directive `error-messages`: all messages with which the packages raise one of their errors, from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch_join", "lightning_join", "accelerate_join")
LEAST = 25  # letters of a text that somebody could look for


class Message(NamedTuple):
    """What an error says, with `…` for what differs, and where it is raised."""

    kind: str
    text: str
    path: str


def messages(root: Path = ROOT) -> Iterator[Message]:
    """Yield the messages of all errors, in the order of the files."""
    kinds = {node.name for node in ast.walk(_parse(root / "torch_join/_base/errors.py")) if _is_error(node)}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(_parse(path)):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in kinds
                    and node.args
                ):
                    text = " ".join(_text(node.args[0]).split())
                    if sum(letter.isalpha() for letter in text) >= LEAST:
                        yield Message(node.func.id, text, path.relative_to(root).as_posix())


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name.endswith("Error")


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body):
            return _text(body)
    return "…"


class ErrorMessages(Directive):
    """Lists the messages of one class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        items = nodes.bullet_list(classes=["error-messages"])
        for text in sorted({each.text for each in messages() if each.kind == self.arguments[0]}):
            parts = text.split("`")  # every other one is a name
            texts = [nodes.literal(text=part) if place % 2 else nodes.Text(part) for place, part in enumerate(parts)]
            items += nodes.list_item("", nodes.paragraph("", "", *texts))
        return [items]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("error-messages", ErrorMessages)
    return {"parallel_read_safe": True}
