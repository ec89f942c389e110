"""Each test says what it expects, and can be read without another test file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
EXPECTS = re.compile(r"raises|warns|check.*|assert_.*|refused.*|_?exact.*")  # functions that do, by their names


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports, or imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def of_test_files(source: str) -> list[str]:
    """Return what a file imports of test files."""
    return [name for name in imported(ast.parse(source)) if re.match(r"tests(\.\w+)*\.test_", name)]


def functions(tree: ast.Module) -> dict[str, ast.AST]:
    return {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def expects(node: ast.AST) -> bool:
    """Whether something is expected in this function itself."""
    called = {getattr(each.func, "id", getattr(each.func, "attr", "")) for each in calls(node)}
    return any(isinstance(each, ast.Assert) for each in ast.walk(node)) or any(map(EXPECTS.fullmatch, called))


def calls(node: ast.AST) -> Iterator[ast.Call]:
    yield from (each for each in ast.walk(node) if isinstance(each, ast.Call))


def without_an_assertion(source: str) -> list[str]:
    """Return the tests of a file in which nothing is expected, neither in what they call, or run on ranks."""
    found = functions(ast.parse(source))
    return [
        name
        for name, node in found.items()
        if name.startswith("test_") and not any(map(expects, [node, *helpers(node, found)]))
    ]


def helpers(node: ast.AST, found: dict[str, ast.AST]) -> list[ast.AST]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return [helper for name, helper in found.items() if name in names]


def test_no_file_imports_from_a_test_file() -> None:
    found = {str(path): names for path in sorted(TESTS.rglob("*.py")) if (names := of_test_files(path.read_text()))}
    assert found == {}


def test_each_test_expects_something() -> None:
    tests = [path for path in sorted(TESTS.rglob("*.py")) if path.name.startswith("test_")]
    assert len(tests) > 80
    assert {str(path): names for path in tests if (names := without_an_assertion(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "imports", "expects_nothing"),
    [
        ("from tests.core.test_a import b\ndef test_x(): assert b", ["tests.core.test_a.b"], []),
        ("from tests.core import test_a\ndef test_x(): run()", ["tests.core.test_a"], ["test_x"]),
        ("import tests.test_a as a\ndef f(): return 1\ndef test_x(): f()", ["tests.test_a"], ["test_x"]),
        ("from tests.core.loops import training\ndef f(): assert 1\ndef test_x(): run(f)", [], []),
        ("def test_x():\n    with pytest.raises(KeyError): {}[1]", [], []),
    ],
)
def test_both_would_be_found(source: str, imports: list[str], expects_nothing: list[str]) -> None:
    assert (of_test_files(source), without_an_assertion(source)) == (imports, expects_nothing)
