"""The directive `private-names`: the private names of a framework that the packages rely on, from `_compat` modules."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch_join", "lightning_join", "accelerate_join")


def modules(root: Path = ROOT) -> list[Path]:
    """Return the modules that may use private names."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py") if "_compat" in str(path))


def private_names(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield a framework, the owner there, and a name of it: those that a module checks, and private ones it imports."""
    tree = ast.parse(path.read_text())
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="check_names"), args=[ast.Constant(value=str(framework)), _, ast.Dict() as needed]
            ):
                for owner, names in zip(needed.keys, needed.values, strict=True):
                    for name in _evaluate(names, constants).split():
                        yield framework.partition(".")[0], ast.unparse(owner or names), name
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] not in PACKAGES:
                is_private = any(part.startswith("_") for part in module.split("."))
                for alias in node.names:
                    if is_private or (alias.name.startswith("_") and not alias.name.startswith("__")):
                        yield module.partition(".")[0], module, alias.name


def _evaluate(node: ast.expr, constants: dict[str, Any]) -> str:
    """Return what a text is that a module makes of its own constants."""
    return str(eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}, constants))


class PrivateNames(Directive):
    """Lists those of one framework, by module and owner."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        items = nodes.bullet_list()
        for path in modules():
            owners: dict[str, set[str]] = {}
            for framework, owner, name in private_names(path):
                if framework == self.arguments[0]:
                    owners.setdefault(owner, set()).add(name)
            if not owners:
                continue
            inner = nodes.bullet_list()
            for owner, names in sorted(owners.items()):
                texts: list[nodes.Node] = [nodes.literal(text=owner), nodes.Text(": ")]
                for number, name in enumerate(sorted(names)):
                    texts += [nodes.Text(", ")] * bool(number) + [nodes.literal(text=name)]
                inner += nodes.list_item("", nodes.paragraph("", "", *texts))
            head = nodes.paragraph("", "", nodes.literal(text=path.relative_to(ROOT).as_posix()))
            items += nodes.list_item("", head, inner)
        return [items]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("private-names", PrivateNames)
    return {"parallel_read_safe": True}
