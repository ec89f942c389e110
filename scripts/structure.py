"""Print what import-linter cannot see: `python scripts/structure.py [ROOT]`, one line for each violation.

The integrations import only names of `torch_join` that are in its `__all__`, and use no attribute private to it.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

INTEGRATIONS = ("lightning_join", "accelerate_join")
OFFERED = {"torch_join": "torch_join/__init__.py", "torch_join.integration": "torch_join/integration.py"}
# Private names of Lightning and torchmetrics that integrations use, and that torch_join has too.
THEIRS = {"_computed", "_iterator", "_timeout", "_update_count"}


def violations(root: Path) -> Iterator[str]:
    """Yield what the sources below `root` do against the rules."""
    public = {module: listed_as_public(ast.parse((root / path).read_text())) for module, path in OFFERED.items()}
    core = [ast.parse(path.read_text()) for path in (root / "torch_join").rglob("*.py")]
    private = {name for tree in core for name in defined(tree) if is_private(name)} - THEIRS
    for path in sorted(path for package in INTEGRATIONS for path in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        where = path.relative_to(root).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in public:
                for alias in node.names:
                    if alias.name not in {*public[node.module], "integration"}:
                        yield f"{where}:{node.lineno}: {alias.name} is no public name of {node.module}"
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
    lines = [*violations(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)]
    for line in lines:
        print(line)
    sys.exit(bool(lines))
