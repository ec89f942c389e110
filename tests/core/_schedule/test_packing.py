"""Batches as bytes: what is put together again is what was taken apart, and shares nothing with it."""

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.inside import over_the_wire
from torch_join import JoinTypeError
from torch_join._schedule.packing import pack

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Any
    y: Any = 3
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Plain:
    """A batch of a class of the user's, as one with a `pin_memory` or a `to`."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.itself = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and torch.equal(self.x, other.x) and other.itself is other

    __hash__ = None  # type: ignore[assignment]


class Counted(Tensor):
    """A subclass without a dispatch of its own."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).tolist())


def assert_same(got: Tensor, given: Tensor) -> None:
    assert (type(got), got.dtype, got.shape, got.layout) == (type(given), given.dtype, given.shape, given.layout)
    assert got.requires_grad == given.requires_grad
    assert bits(got) == bits(given)


TENSORS: dict[str, Callable[[], Tensor]] = {
    **{str(dtype): lambda dtype=dtype: numbers(3, 4, dtype=dtype) for dtype in DTYPES},  # type: ignore[misc]
    "a number": lambda: torch.tensor(3.5),
    "one element": lambda: numbers(1, 1, 1),
    "one element of another's": lambda: numbers(4, 5)[:1, 2:3],
    "transposed": lambda: numbers(3, 5).t(),
    "permuted": lambda: numbers(2, 3, 4).permute(1, 2, 0),
    "channels last": lambda: numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": lambda: numbers(2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
    "every third": lambda: numbers(20)[::3],
    "a column": lambda: numbers(6, 5)[:, 2],
    "flipped": lambda: numbers(7).flip(0),
    "the end of a large one": lambda: numbers(1000)[990:],
    "overlapping": lambda: numbers(10).unfold(0, 4, 2),
    "expanded": lambda: numbers(5, 1).expand(5, 7),
    "expanded in front": lambda: numbers(4).expand(3, 4),
    "a number, expanded": lambda: torch.tensor(2.0).expand(3, 4),
    "expanded, permuted": lambda: numbers(2, 1, 3).expand(2, 4, 3).permute(2, 0, 1),
    "expanded to one": lambda: numbers(3).expand(1, 3),
    "expanded to nothing": lambda: numbers(3, 1).expand(3, 0),
    "empty": lambda: torch.empty(0),
    "empty of a shape": lambda: torch.empty(0, 3, dtype=torch.int64),
    "empty, transposed": lambda: torch.empty(3, 0).t(),
    "conjugate": lambda: numbers(3, dtype=torch.complex64).conj(),
    "conjugate, transposed": lambda: numbers(3, 2, dtype=torch.complex128).mH,
    "imaginary part of a conjugate": lambda: numbers(3, dtype=torch.complex64).conj().imag,
    "large": lambda: numbers(300, 300),
    "large, transposed": lambda: numbers(300, 200).t(),
    "with nan": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "leaf that needs a gradient": lambda: numbers(3, 4).div(7).requires_grad_(),
    "parameter": lambda: nn.Parameter(numbers(2, 2)),
    "buffer": lambda: nn.Buffer(numbers(2, 2)),
    "subclass": lambda: numbers(2, 2).as_subclass(Counted),
    "of inference mode": lambda: made_for_inference(),
}


def made_for_inference() -> Tensor:
    with torch.inference_mode():
        return numbers(3) * 2


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back(name: str) -> None:
    given = TENSORS[name]()
    assert_same(over_the_wire(given), given)
    nested = over_the_wire({"x": [given, (given.detach().clone(), 3)]})
    assert_same(nested["x"][0], given)


def test_no_more_travels_than_there_is() -> None:
    def travels(batch: Any) -> int:
        return sum(map(len, pack(batch)[1]))

    assert travels(numbers(1000)[990:]) == 40
    assert travels(numbers(5, 1).expand(5, 1000)) == 20
    assert travels(torch.tensor(1.0).expand(1000)) == 4
    same = numbers(100)
    assert travels({"x": same, "y": [same, same]}) == 400
    assert travels([torch.empty(0), np.empty((0, 3))]) == 0


def test_what_is_one_object_stays_one() -> None:
    x, array = numbers(3), np.ones(3)
    got = over_the_wire({"x": x, "again": [x, x], "array": array, "too": array})
    assert got["x"] is got["again"][0] is got["again"][1]
    assert got["array"] is got["too"]
    assert got["x"] is not x


def test_received_tensors_share_no_memory_and_no_version() -> None:
    small, large = [numbers(3) for _ in range(4)], [numbers(200, 200) for _ in range(2)]
    got = over_the_wire([*small, *large])
    storages = [tensor.untyped_storage().data_ptr() for tensor in got]
    assert len({*storages}) == len(got)
    versions = [tensor._version for tensor in got]
    got[0].add_(1)
    got[4].add_(1)
    assert [tensor._version - was for tensor, was in zip(got, versions, strict=True)] == [1, 0, 0, 0, 1, 0]
    assert all(tensor._base is None for tensor in got)
    for mine, given in ((got[1], small[1]), (got[5], large[1])):
        assert_same(mine, given)


def test_a_received_tensor_can_be_changed_in_place_and_saved_for_backward() -> None:
    w = torch.ones(3, requires_grad=True)
    x, y = over_the_wire((numbers(3), numbers(3)))
    loss = (w * x).sum()
    y.zero_()  # of another tensor of the batch: x, which the backward needs, is as it was
    loss.backward()
    assert w.grad is not None
    assert torch.equal(w.grad, x)
    x.resize_(6)
    assert x.shape == (6,)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:Sparse CSC", "ignore:Sparse BSR")
def test_sparse_tensors_come_back() -> None:
    dense = torch.eye(4) * torch.arange(4)
    for given in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))):
        got = over_the_wire({"x": given})["x"]
        assert got.layout == given.layout
        assert torch.equal(got.to_dense(), dense)


# ---------------------------------------------------------------- numpy


ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    **{
        kind: lambda kind=kind: np.arange(12).reshape(3, 4).astype(kind)  # type: ignore[misc]
        for kind in ("f8", "f4", "f2", "c8", "i8", "i1", "u2", "?", ">i4", "M8[s]", "m8[D]", "S3", "U4")
    },
    "Fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "transposed": lambda: np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "every third": lambda: np.arange(20)[::3],
    "backwards": lambda: np.arange(5)[::-1],
    "a number": lambda: np.array(3.5),
    "empty": lambda: np.empty((0, 2), dtype=np.int32),
    "empty object": lambda: np.empty(0, dtype=object),
    "objects": lambda: np.array(["x", None, (1, 2)], dtype=object),
    "read-only": lambda: read_only(np.arange(6)),
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "records": lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "large": lambda: np.arange(100_000),
}


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back(name: str) -> None:
    given = ARRAYS[name]()
    before = given.copy()
    got = over_the_wire({"x": [given]})["x"][0]
    assert (type(got), got.dtype, got.shape) == (type(given), given.dtype, given.shape)
    assert np.array_equal(got, before)
    assert got.flags.f_contiguous or not given.flags.f_contiguous
    assert got.flags.writeable == (name != "read-only")
    assert not np.shares_memory(got, given)


# ---------------------------------------------------------------- nests


def test_nests_come_back() -> None:
    x = numbers(2, 2)
    batch = {
        "tuple": (x, 1),
        "named": Pair(x, "y"),
        "ordered": OrderedDict([("b", x), ("a", None)]),
        "sample": Sample(x, more={"deep": [Frozen(x)]}),
        "plain": Plain(x),
        "text": ["a word", b"bytes", bytearray(b"more")],
        "numbers": [1, 2.5, 3j, True, None, float("inf"), 2**70],
        "others": [{1, 2}, frozenset("ab"), slice(1, 2), range(3), int, torch.float16, torch.device("cpu"), len],
    }
    got = over_the_wire(batch)
    assert list(got) == list(batch)
    assert isinstance(got["named"], Pair)
    assert type(got["ordered"]) is OrderedDict
    assert list(got["ordered"]) == ["b", "a"]
    assert got["plain"] == Plain(x)
    assert (got["text"], got["numbers"], got["others"]) == (batch["text"], batch["numbers"], batch["others"])
    for tensor in (got["tuple"][0], got["named"].x, got["ordered"]["b"], got["sample"].x):
        assert_same(tensor, x)
    assert_same(got["sample"].more["deep"][0].x, x)
    assert got["sample"].y == 3


@pytest.mark.parametrize("batch", [None, (), [], {}, 0, "", "text", 3.5, float("-inf"), b""])
def test_batches_without_tensors_come_back(batch: Any) -> None:
    got = over_the_wire(batch)
    assert got == batch
    assert type(got) is type(batch)


def test_a_list_that_holds_itself_comes_back() -> None:
    batch: list[Any] = [numbers(2)]
    batch.append(batch)
    got = over_the_wire(batch)
    assert got[1] is got
    assert_same(got[0], batch[0])


def test_like_batches_have_the_same_skeleton() -> None:
    def batch(seed: int) -> Any:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "y": np.full(3, seed), "z": [Sample(x.clone())], "w": x.bool()}

    assert pack(batch(1))[0] == pack(batch(2))[0]
    assert pack(numbers(2))[0] != pack(numbers(3))[0]
    assert pack(numbers(2))[0] != pack(numbers(2, dtype=torch.int32))[0]


# ---------------------------------------------------------------- what cannot be sent to another rank


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("it holds an open file")


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: {"f": lambda: 0}, "dict cannot be sent to another rank"),
    "generator": (lambda: (i for i in ()), "generator cannot be sent to another rank"),
    "an open file": (lambda: [sys.stdout], "list cannot be sent to another rank"),
    "a class that raises": (lambda: (Unpicklable(),), "tuple cannot be sent to another rank.*it holds an open file"),
    "a nested tensor": (lambda: [nested()], "list cannot be sent to another rank.*nested tensor"),
    "a tensor without contents": (
        lambda: torch.empty(3, device="meta"),
        "Tensor cannot be sent to another rank.*on meta",
    ),
    "a jagged tensor": (lambda: [jagged()], "list cannot be sent to another rank.*nested tensor"),
    # The gradient of what it was computed from would be lost.
    "a tensor with a graph": (lambda: torch.ones(2, requires_grad=True) * 2, "cannot be sent to another rank"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises(JoinTypeError, match=says):
        pack(make())
