"""Callables of ours in users' objects."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

import torch

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat


def _nothing(*_: Any, **__: Any) -> None:
    pass


@cache
def _untraced() -> Callable[..., Any]:
    # Made when it is needed: dynamo takes long to import, and torch's optimizers have done so by then.
    return untraced(lambda call, args, kwargs: call(*args, **kwargs))


def untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `call` where dynamo compiles nothing of it, not even a frame of ours around it.

    It takes longer to call than a `Hook`, and is for what is registered for all modules, or all optimizers, in a tail:
    dynamo would compile a `Hook` anew for each type of module.
    """
    return torch.compiler.disable(call)  # type: ignore[no-any-return, no-untyped-call]


class Hook:
    """A callable that stays with its object: a copy or a pickle of that has another one in its place.

    `torch.compile` does not trace it: what ours do is between the ranks, and no part of a graph.

    Args:
        call: What to call.
        copied: What copies have instead; a method of the object becomes the copy's own.
    """

    def __init__(self, call: Callable[..., Any], copied: Callable[..., Any] = _nothing) -> None:
        self._call = call
        self._copied = copied
        self._untraced = _untraced()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where nothing is compiled, what keeps dynamo away would be most of what a hook costs in a step.
        if torch.compiler.is_dynamo_compiling() or _compat.compiles_frames():
            return self._untraced(self._call, args, kwargs)
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self._copied,)


class StepHooks:
    """Calls `send` right before an optimizer's step, after its closure; what that opens is closed after the step.

    Args:
        optimizer: The optimizer.
        send: Tells joined ranks of the step, and returns what lets it go on.
        is_quiet: Whether a step is one that nobody is told of.
    """

    def __init__(
        self, optimizer: Any, send: Callable[[], AbstractContextManager[None]], is_quiet: Callable[[], bool]
    ) -> None:
        self._optimizer = optimizer
        self._send = send
        self._is_quiet = is_quiet
        self._stepping = ExitStack()
        before, after = Hook(self._before), Hook(lambda *_: self._stepping.close())
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def remove(self) -> None:
        """Call nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stepping.close()  # of a step that has raised
        if self._is_quiet():
            return None
        optimizer, *positional = args  # torch passes the optimizer among them
        closure = positional[0] if positional else kwargs.get("closure")
        if positional[1:] or {*kwargs} - {"closure"}:
            raise UnsupportedError(
                f"step() of {type(self._optimizer).__name__} got more than a closure, while some rank has joined, which"
                " steps its shards without. Set what it needs in the optimizer's param_groups."
            )
        if closure is None:
            self._stepping.enter_context(self._send())
            return None
        return (optimizer, self._once(closure)), {}

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        has_run = False

        def closure_and_send() -> Any:
            nonlocal has_run
            if has_run:
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} runs its closure more than once in a step, and decides by values"
                    " of one rank's shards, which ranks that have joined do not know. Use an optimizer that runs it"
                    " once, or give every rank the same number of batches."
                )
            has_run = True
            with torch.enable_grad():
                loss = closure()
            self._stepping.enter_context(self._send())
            return loss

        return closure_and_send


def _same(copied: Any) -> Any:
    return copied
