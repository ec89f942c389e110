"""Print what import-linter cannot see: integrations use the public names of `torch_join`, and none of its private."""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

INTEGRATIONS = ("lightning_join", "accelerate_join")
OFFERED = {"torch_join": "torch_join/__init__.py", "torch_join.integration": "torch_join/integration.py"}
# Private names of Lightning and torchmetrics that integrations use, and that torch_join has too.
THEIRS = {"_computed", "_iterator", "_sampler", "_timeout", "_update_count"}


def violations(root: Path) -> Iterator[str]:
    """Yield what the sources below `root` do against the rules."""
    public = {module: listed_as_public(ast.parse((root / path).read_text())) for module, path in OFFERED.items()}
    core = [ast.parse(path.read_text()) for path in (root / "torch_join").rglob("*.py")]
    private = {name for tree in core for name in defined(tree) if is_private(name)} - THEIRS
    for path in sorted(path for package in INTEGRATIONS for path in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        where = path.relative_to(root).as_posix()
        named = {"integration": "torch_join.integration"}  # what modules are called here
        for node in ast.walk(tree):
            asked: list[tuple[str, str]] = []
            match node:
                case ast.ImportFrom(module=str(module)):
                    asked = [(module, alias.name) for alias in node.names if alias.name != "integration"]
                case ast.Import():
                    named |= {alias.asname: alias.name for alias in node.names if alias.asname}
                case ast.Attribute(value=ast.Name(id=owner), attr=name):
                    asked = [(named.get(owner, owner), name)] if name != "integration" else []
                case ast.Constant(value=str(text)) if text.startswith("torch_join._"):
                    yield f"{where}:{node.lineno}: {text} is private"
            for module, name in asked:
                if module in public and name not in public[module]:
                    yield f"{where}:{node.lineno}: {name} is no public name of {module}"
        for line, name in reached_into(tree, {*defined(tree)}):
            if name in private:
                yield f"{where}:{line}: {name} is private in torch_join"


def listed_as_public(tree: ast.Module) -> list[str]:
    """Return what a module's `__all__` lists."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return [
        name for node in assigned if ast.unparse(node.targets[0]) == "__all__" for name in ast.literal_eval(node.value)
    ]


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes that are defined below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore, and is none of Python's own."""
    return name.startswith("_") and bool(name.strip("_")) and not name.endswith("__")


def reached_into(tree: ast.AST, own: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the names that others are asked for, by attribute, or `getattr` and the like; of `self`, all but `own`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value) not in ("self", "cls") or node.attr not in own):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


if __name__ == "__main__":
    sys.exit("\n".join(violations(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)) or 0)
