"""The tree of errors."""

import ast
import contextlib
import importlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_join
from torch_join._base.errors import shorten_traceback


def test_errors_can_be_caught_as_what_they_are() -> None:
    assert issubclass(torch_join.JoinError, RuntimeError)
    assert issubclass(torch_join.JoinValueError, ValueError)
    assert issubclass(torch_join.JoinTypeError, TypeError)
    assert issubclass(torch_join.JoinTimeoutError, TimeoutError)
    assert issubclass(torch_join.JoinWarning, UserWarning)
    errors = importlib.import_module("torch_join._base.errors")
    for name, error in vars(errors).items():
        if isinstance(error, type) and error.__module__ == errors.__name__:
            assert issubclass(error, (torch_join.JoinError, torch_join.JoinWarning))
            assert name in (errors.__doc__ or ""), f"{name} is missing in the tree"


@contextlib.contextmanager
def context_of_ours() -> Iterator[None]:
    torch_join.JoinDataWarning.warn("of data")
    yield


@pytest.mark.parametrize("name", ["torch_join._tail.loop", "torch.utils.data", "lightning.pytorch.loops", "__main__"])
def test_a_warning_points_at_the_users_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"__name__": name, "context": context_of_ours}
    exec(compile("def use():\n    with context():\n        pass", "library.py", "exec"), space)
    monkeypatch.setitem(globals(), "__name__", "torch_join.join")
    with pytest.warns(torch_join.JoinWarning, match="of data") as caught:
        space["use"]()  # type: ignore[operator]
    # Without a line of the user's in between, the next frame out is pytest's.
    assert caught[0].filename == "library.py" if name == "__main__" else caught[0].filename.endswith("python.py")
    assert caught[0].category is torch_join.JoinDataWarning


@pytest.mark.parametrize(
    ("kind", "how", "left"),
    [
        (torch_join.JoinError, "", ["torch_join", "users", "lightning", "torch_join"]),
        (torch_join.JoinError, "full", ["torch_join", "accelerate_join", "users", "lightning", "torch_join"]),
        (ValueError, "", ["torch_join", "accelerate_join", "users", "lightning", "torch_join"]),
    ],
)
def test_a_traceback_has_two_frames_of_ours(
    kind: type[Exception], how: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_JOIN_TRACEBACK", how)
    call: Any = kind("no luck")
    for name in ["torch_join", "lightning", "users", "accelerate_join", "torch_join"]:
        space: dict[str, Any] = {"__name__": f"{name}.part", "inner": call}
        body = "raise inner" if isinstance(call, Exception) else "inner()"
        exec(f"def call():\n    {body}", space)
        call = space["call"]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # this test's own
    shorten_traceback(error)
    found = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert found == left


def test_all_warnings_are_of_these_kinds() -> None:
    root = Path(torch_join.__file__).parents[1]
    others = [
        f"{path.relative_to(root)}:{node.lineno}"
        for package in ("torch_join", "lightning_join", "accelerate_join", "pytorch_lightning_join")
        for path in (root / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn")
        or (isinstance(node, ast.Name | ast.alias) and ast.unparse(node) in ("rank_zero_warn", "rank_zero_deprecation"))
    ]
    assert others == []
