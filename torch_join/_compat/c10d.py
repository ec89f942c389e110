"""Intercepts calls of `c10d` operators before the backend, by private names of torch (seen in torch 2.13.0).

`tests/core/_collectives/test_tap.py` fails when one of them is gone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_join._base.names import TORCH, check_names


def overload(name: str) -> Any:
    """Return the `c10d` operator of this name (each has one overload)."""
    return getattr(torch.ops.c10d, name).default


# The dispatch keys below that of the tap, for `&` with a call's keyset. (Not a function: torch 2.11 would trace it when
# it compiles code that issues a collective, and no graph can have such an argument.)
BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def has_kernel(name: str) -> bool:
    """Whether an operator has a kernel at the dispatch key of the tap."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect"))


def c10d_library() -> Any:
    """Return an object that registers kernels of the `c10d` operators."""
    make: Any = torch.library.Library
    return make("c10d", "IMPL")


def destroy(library: Any) -> None:
    """Unregister everything that `library` has registered."""
    library._destroy()


@contextmanager
def changing_all_reduces(change: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """Call `change` with the tensors that each all-reduce inside sends; does nothing if a tap is installed."""
    if has_kernel("allreduce_"):
        yield
        return
    op, library = overload("allreduce_"), c10d_library()

    def kernel(keyset: Any, tensors: list[Tensor], *args: Any) -> Any:
        change(tensors)
        return op.redispatch(keyset & BELOW, tensors, *args)

    library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        destroy(library)


check_names(
    "torch",
    TORCH,
    {
        torch._C: "_dispatch_has_kernel_for_dispatch_key _dispatch_keyset_full_after DispatchKey",
        torch.library.Library: "_destroy impl",
    },
)
