"""Shards of a class of the user's, by FSDP2's all-gather extension: they have no memory that could be read from."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree

from tests.support.workers import Workers
from torch_join import Join

aten = torch.ops.aten
VIEWS = {aten.view.default, aten.as_strided.default, aten.view.dtype, aten.slice.Tensor, aten.split.Tensor}
COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_zeros.default,
}


class Wrapped(Tensor):
    """A weight around another tensor, as those of libraries for low precision are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Wrapped":
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is aten.detach.default:
            return Wrapped(args[0].inner)
        args, kwargs = pytree.tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        found = function(*args, **kwargs)
        return pytree.tree_map_only(Tensor, Wrapped, found) if function in VIEWS | COPIES else found

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], (outputs[0],))


def clamp(rank: int, wraps: bool, changes: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4, bias=False)
    if wraps:
        model.weight = nn.Parameter(Wrapped(model.weight.detach().clone()))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model, optimizer]) as join:
        for step, x in enumerate(join.batches([torch.ones(2, 4)] * (2, 4)[rank])):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if step == 2 and changes:
                local = model.weight.to_local()
                (local.inner if wraps else local).data.clamp_(-0.01, 0.01)
    local = model.weight.to_local()
    return (local.inner if wraps else local).flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("wraps", [False, True])
def test_a_change_of_the_shards_is_seen(workers: Workers, wraps: bool) -> None:
    for outcome in workers.outcomes(2, clamp, wraps, True, timeout=10.0):
        assert "parameters were modified outside the optimizer step" in outcome.error, outcome


def test_such_shards_are_trained_like_others(workers: Workers) -> None:
    assert workers.run(2, clamp, True, False) == workers.run(2, clamp, False, False)
