"""Packs batches as bytes: any nested structure that can be pickled. Tensors and arrays are sent from their own memory.

The processes of the group are trusted, as in torch, whose object collectives unpickle too.

Contract of pickle's protocol 5: It calls `persistent_id` for every object, and `persistent_load` for those that have
one. It requests the buffers that `buffer_callback` has taken in the same order.
"""

import io
import pickle
from collections.abc import Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_join._base.errors import JoinTypeError
from torch_join._base.specs import TensorSpec, flaw, raw_bytes, storage_view


class _Described(NamedTuple):
    place: int  # the index of its bytes in the contents of the batch
    spec: TensorSpec
    pinned: bool


class Skeleton(NamedTuple):
    """A batch without contents.

    Attributes:
        sizes: The size of each content in bytes.
        arrays: The indices of the contents that belong to arrays and other buffers, not to tensors.
        pickled: The rest of the batch, pickled.
    """

    sizes: list[int]
    arrays: list[int]
    pickled: bytes


def pack(batch: Any) -> tuple[bytes, list[Tensor]]:
    """Split a batch into skeleton and contents.

    Returns:
        The pickled skeleton, which is equal for batches of equal form. And the contents, as one-dimensional bytes, in
            the batch's own memory where its layout allows.

    Raises:
        JoinTypeError: The batch cannot be sent to another rank.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(batch)
    except Exception as error:
        raise JoinTypeError(
            f"A batch of type {type(batch).__name__} cannot be sent to another rank: {error}"
        ) from error
    skeleton = Skeleton([len(content) for content in pickler.contents], pickler.arrays, file.getvalue())
    return pickle.dumps(tuple(skeleton)), pickler.contents


def unpack(skeleton: Skeleton, contents: Sequence[Tensor]) -> Any:
    """Rebuild a batch; tensors from an accelerator go to this rank's current device.

    Args:
        skeleton: The batch without contents.
        contents: One-dimensional bytes; each has its own storage, which the batch then uses.
    """
    return _Unpickler(skeleton, contents).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take)
        self.contents: list[Tensor] = []
        self.arrays: list[int] = []
        self._known: dict[int, tuple[Tensor, _Described]] = {}  # keeps the tensors, so that no `id` is reused

    def persistent_id(self, value: Any) -> _Described | None:
        if not isinstance(value, Tensor):
            return None
        if value.is_nested or value.grad_fn is not None:
            raise JoinTypeError(f"it has {'a nested tensor' if value.is_nested else 'a tensor with a graph'}")
        # Subclasses, attributes and `requires_grad` hold more information, which ordinary pickling keeps.
        if type(value) is not Tensor or value.requires_grad or vars(value) or flaw(value) is not None:
            if value.device.type != "cpu":
                raise JoinTypeError(
                    f"it has a {type(value).__name__} on {value.device}, a device that other ranks lack"
                )
            return None
        if id(value) not in self._known:
            spec = TensorSpec.of(value)
            described = _Described(len(self.contents), spec, value.is_pinned())
            self.contents.append(raw_bytes(storage_view(value, spec)).cpu())
            self._known[id(value)] = value, described
        return self._known[id(value)][1]

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.UntypedStorage):
            return NotImplemented
        # Pickle it as a tensor of its bytes, since the usual pickled form of a storage cannot be read again.
        return methodcaller("untyped_storage"), (torch.empty(0, dtype=torch.uint8, device=value.device).set_(value),)

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes == 0:
            return True  # keep it in the skeleton
        self.arrays.append(len(self.contents))
        self.contents.append(torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8))
        return False


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: Skeleton, contents: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton.pickled), buffers=[contents[place].numpy() for place in skeleton.arrays])
        self._contents = contents
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, described: _Described) -> Tensor:
        place, spec, pinned = described
        if place not in self._made:
            tensor = _make(spec, self._contents[place])
            self._made[place] = tensor.pin_memory() if pinned and torch.accelerator.is_available() else tensor
        return self._made[place]


def _make(spec: TensorSpec, content: Tensor) -> Tensor:
    storage = content.untyped_storage()
    if not spec.expanded:
        # Not a view of the bytes: views of one tensor share its version counter.
        return torch.empty(0, dtype=spec.dtype).set_(storage, 0, spec.shape, spec.stride).to(spec.device)
    tensor = spec.create()
    travelled = torch.empty(0, dtype=spec.dtype).set_(storage)
    storage_view(tensor, spec).copy_(travelled.view(spec.storage_shape))
    return tensor
