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


def around_steps(
    optimizer: Any, send: Callable[[], AbstractContextManager[None]], is_quiet: Callable[[], bool]
) -> Callable[[], None]:
    """Call `send` right before an optimizer's steps, after its closure; what that opens is closed after the step.

    Args:
        optimizer: The optimizer.
        send: Tells joined ranks of the step, and returns what lets it go on.
        is_quiet: Whether a step is one that nobody is told of.

    Returns:
        What ends that.
    """
    stepping = ExitStack()

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stepping.close()  # of a step that has raised
        if is_quiet():
            return None
        itself, *positional = args  # torch passes the optimizer among them
        closure = positional[0] if positional else kwargs.get("closure")
        if positional[1:] or {*kwargs} - {"closure"}:
            raise UnsupportedError(
                f"step() of {type(optimizer).__name__} got more than a closure, while some rank has joined, which"
                " steps its shards without. Set what it needs in the optimizer's param_groups."
            )
        if closure is None:
            stepping.enter_context(send())
            return None
        return (itself, once(closure)), {}

    def once(closure: Callable[[], Any]) -> Callable[[], Any]:
        has_run = False

        def closure_and_send() -> Any:
            nonlocal has_run
            if has_run:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} runs its closure more than once in a step, and decides by values"
                    " of one rank's shards, which ranks that have joined do not know. Use an optimizer that runs it"
                    " once, or give every rank the same number of batches."
                )
            has_run = True
            with torch.enable_grad():
                loss = closure()
            stepping.enter_context(send())
            return loss

        return closure_and_send

    ends = ExitStack()
    ends.callback(optimizer.register_step_pre_hook(Hook(before)).remove)
    ends.callback(optimizer.register_step_post_hook(Hook(lambda *_: stepping.close())).remove)
    return ends.close


def _same(copied: Any) -> Any:
    return copied
