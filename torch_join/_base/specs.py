"""The description of a tensor without its contents; and its contents as bytes, as they lie in memory."""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class TensorSpec:
    """The description of a tensor, without its contents.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: The type of its device.
        stride: The strides of a dense tensor with the same layout.
        expanded: The dimensions along which all elements share memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    stride: tuple[int, ...]
    expanded: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Describe `tensor`."""
        stride = (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type, stride, expanded_dimensions(tensor))

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of `storage_view`, in which the contents are sent."""
        return tuple(1 if d in self.expanded else self.shape[d] for d in self._order)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the contents; elements that share memory count once."""
        return math.prod(self.storage_shape) * self.dtype.itemsize

    @property
    def _order(self) -> list[int]:
        return sorted(range(len(self.shape)), key=lambda d: -self.stride[d])

    def create(self, device: torch.device | None = None) -> Tensor:
        """Create such a tensor, on `device` if that is of the right type."""
        place = device if device is not None and device.type == self.device else self.device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)

    def fits(self, tensor: Any) -> bool:
        """Whether `tensor` can hold the contents of such a tensor, bit for bit and in place."""
        return (
            isinstance(tensor, Tensor)
            and flaw(tensor) is None
            and tuple(tensor.shape) == self.shape
            and tensor.dtype == self.dtype
            and tensor.device.type == self.device
            and not tensor.is_inference()
            and expanded_dimensions(tensor) in ((), self.expanded)
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


def flaw(tensor: Tensor) -> str | None:
    """Return why the contents of `tensor` cannot be copied as bytes, or `None` if they can."""
    if is_lazy(tensor):
        return "is not initialized (run a forward first)"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}"
    if tensor.is_quantized or tensor.device.type == "meta":
        return "is quantized" if tensor.is_quantized else "is on the meta device"
    return None


def expanded_dimensions(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions along which all elements of `tensor` share memory."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(dimension for dimension, (size, stride) in enumerate(sizes) if stride == 0 and size > 1)


def storage_view(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """View `tensor` without repeated elements, in the memory order of `spec`; contiguous if memory has that order."""
    view = tensor.detach()
    for dimension in expanded_dimensions(tensor):
        view = view.narrow(dimension, 0, 1)
    return view.permute(spec._order)


def flat_elements(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, in one dimension: a view if memory has that order, else a copy."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous with any stride, but then its bytes cannot be viewed.
    return dense.as_strided((dense.numel(),), (1,))


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in order, as bytes: a view if memory has that order, else a copy."""
    return flat_elements(tensor).view(torch.uint8)


def copied_bytes(data: Tensor) -> bytes:
    """Return a copy of the bytes that `raw_bytes` returned for a tensor on the CPU."""
    # Not by `tensor.numpy()`: numpy may not be installed.
    return ctypes.string_at(data.data_ptr(), data.numel())


def raw_words(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` in order, viewed as the longest integers that fit, so that there are few."""
    data = raw_bytes(tensor)
    for word in (torch.int64, torch.int32, torch.int16):
        if data.numel() % word.itemsize == 0 and data.storage_offset() % word.itemsize == 0:
            return data.view(word)
    return data
