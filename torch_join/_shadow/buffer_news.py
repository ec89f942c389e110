"""Keeps the buffers that DDP broadcasts in the same form on joined ranks as on active ranks.

A forward may replace a buffer by a longer one or one of another type (a rotary cache that grows), or drop it, in the
same way on all ranks that run it. A joined rank, which does not, needs buffers of that form when DDP broadcasts next.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._control.codec import brief, closed

_MOST_ELEMENTS = 1 << 40  # more than any device holds


@closed("buffer")
class Buffer(NamedTuple):
    """The description of a buffer, without its contents."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    persistent: bool

    def validate(self) -> None:
        """Raise a `ValueError` if no such buffer can exist."""
        is_short = len(self.shape) <= 64 and all(0 <= length <= _MOST_ELEMENTS for length in self.shape)
        if not is_short or math.prod(self.shape) > _MOST_ELEMENTS:
            raise ValueError(f"no buffer has the shape {brief(self.shape)}")


class BufferNews:
    """The forms of a model's buffers that joined ranks know."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the known forms, when a tail starts or ends."""
        self._known: list[Buffer] | None = None

    def begin(self, model: nn.Module) -> None:
        """Take the current forms as known, unless some were announced; so far they are equal on all ranks."""
        if self._known is None:
            self._known = _forms(model)

    def since(self, model: nn.Module) -> list[Buffer] | None:
        """Return the forms to announce, or `None` if they are known."""
        now = _forms(model)
        known, self._known = self._known, now
        return None if known == now else now


def _forms(model: nn.Module) -> list[Buffer]:
    return [
        Buffer(name, buffer.dtype, tuple(buffer.shape), buffer.device.type, _compat.is_persistent(*_owner(model, name)))
        for name, buffer in model.named_buffers()
    ]


def take(news: list[Buffer] | None, model: nn.Module, device: torch.device) -> None:
    """Give a model buffers of these forms, in this order; its own buffers stay if they fit.

    Args:
        news: The forms.
        model: The model.
        device: The device of its parameters.

    Raises:
        UnsupportedError: A buffer is in a module that this rank lacks.
    """
    if news is None or news == _forms(model):
        return
    own: dict[str, Tensor] = dict(model.named_buffers())
    for name in own.keys() - {form.name for form in news}:
        _compat.set_buffer(*_owner(model, name), None, True)
    for form in news:
        buffer = own.get(form.name)
        if buffer is None or (buffer.dtype, tuple(buffer.shape), buffer.device.type) != form[1:4]:
            place = device if device.type == form.device else torch.device(form.device)
            buffer = torch.zeros(form.shape, dtype=form.dtype, device=place)
        _compat.set_buffer(*_owner(model, form.name), buffer, form.persistent)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    try:
        return model.get_submodule(path), own
    except AttributeError:
        raise UnsupportedError(
            f"Active ranks registered the buffer {name!r} in a module created in the loop. Finished ranks do not have"
            " this buffer, which DDP broadcasts before the next forward. Create all modules before the loop, or use"
            " forward_sync_buffers=False."
        ) from None
