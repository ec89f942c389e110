"""Callables that this package installs in users' objects."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache, update_wrapper
from typing import Any

import torch

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat


def _nothing(*_: Any, **__: Any) -> None:
    pass


@cache
def _untraced() -> Callable[..., Any]:
    # Created on first use, since importing dynamo takes long; torch's optimizers have imported it by then.
    return untraced(lambda call, args, kwargs: call(*args, **kwargs))


def untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable for `call` that dynamo never compiles, and that adds no frame that dynamo could compile.

    Calls are slower than those of a `Hook`. Use it for callbacks registered for all modules, or all optimizers, in a
    tail: dynamo would recompile a `Hook` for each type of module.
    """
    return torch.compiler.disable(call)  # type: ignore[no-any-return, no-untyped-call]


class Hook:
    """A callable that stays with its object: a copy or a pickle of that object gets a replacement.

    `torch.compile` does not trace it, since hooks that act between ranks are not part of a graph.

    Args:
        call: The function to call.
        copied: The replacement in copies; a method of the object becomes the copy's. Its attributes stay visible.
    """

    def __init__(self, call: Callable[..., Any], copied: Callable[..., Any] = _nothing) -> None:
        update_wrapper(self, copied)  # LR schedulers leave a mark on `step`
        self._call = call
        self._copied = copied
        self._untraced = _untraced()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Without compiled code, the check that keeps dynamo away would be most of a hook's cost in a step.
        if torch.compiler.is_dynamo_compiling() or _compat.compiles_frames():
            return self._untraced(self._call, args, kwargs)
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self._copied,)


def around_steps(
    optimizer: Any, send: Callable[[], AbstractContextManager[None]], is_quiet: Callable[[], bool]
) -> Callable[[], None]:
    """Call `send` right before each optimizer step, after its closure; the context closes after the step.

    Args:
        optimizer: The optimizer.
        send: Announces the step to joined ranks, and returns a context for it.
        is_quiet: Whether a step is not announced.

    Returns:
        A function that removes these hooks.
    """
    stepping = ExitStack()

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stepping.close()  # left open by a step that has raised
        if is_quiet():
            return None
        itself, *positional = args  # torch passes the optimizer first
        closure = positional[0] if positional else kwargs.get("closure")
        if positional[1:] or {*kwargs} - {"closure"}:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() got arguments other than a closure after some rank finished. That"
                " rank steps its shards without them. Set the values in the optimizer's param_groups."
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
                    f"{type(optimizer).__name__} may run its closure more than once per step, depending on the values"
                    " of one rank's shards, which finished ranks do not have. Use an optimizer that runs its closure"
                    " once, or give every rank the same number of batches."
                )
            has_run = True
            with torch.enable_grad():
                loss = closure()
            stepping.enter_context(send())
            return loss

        return closure_and_send

    cleanup = ExitStack()
    cleanup.callback(optimizer.register_step_pre_hook(Hook(before)).remove)
    cleanup.callback(optimizer.register_step_post_hook(Hook(lambda *_: stepping.close())).remove)
    return cleanup.close


def _same(copied: Any) -> Any:
    return copied
