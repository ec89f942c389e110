"""The tree of errors."""

import importlib

import torch_join


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
