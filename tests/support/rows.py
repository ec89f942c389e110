"""What steps give for samples, of many kinds, and what is gathered of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Boxes(NamedTuple):
    corners: torch.Tensor
    labels: list[str]


def rows_of(indices: Sequence[int]) -> Any:
    """What a step gives for samples: dtypes of several sizes, nested, and objects."""
    at = torch.tensor([*indices], dtype=torch.int64)
    return {
        "x": at.double()[:, None] + torch.arange(3) / 10,
        "deep": (
            at.to(torch.bfloat16),
            Boxes(at.reshape(-1, 1, 1) > 3, [f"name {index}" * index for index in indices]),
        ),
        "objects": [{"at": index, "tensor": torch.full((index,), index)} for index in indices],
        "complex": torch.complex(at.float(), -at.float()).conj(),
        "nothing": at.new_empty((len(at), 0)),
    }


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare type by type and bit by bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert [*ours] == [*theirs]
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs
