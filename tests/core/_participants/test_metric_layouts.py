"""Metrics whose states hold tensors of any layout: a one-element tensor may have any stride and is contiguous."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from tests.support.workers import Workers
from torch_join import Join

LAYOUTS = {
    "column": lambda n: torch.arange(2.0 * n).view(n, 2)[:, 1],
    "column of columns": lambda n: torch.arange(6.0 * n).view(n, 3, 2)[:, ::2, 1],
    "expanded": lambda n: torch.tensor([5.0]).expand(n),
    "empty": lambda n: torch.arange(6.0).view(3, 2)[:0, 1],
    "transposed": lambda n: torch.arange(3.0 * n).view(3, n).t(),
    "conjugate": lambda n: torch.tensor([1 + 2j, 3 - 1j] * n).view(n, 2).conj()[:, 1],
}


class Kept(Metric):
    """Keeps all it is given, in a list or in one tensor."""

    def __init__(self, name: str, listed: bool) -> None:
        super().__init__()
        self.name, self.listed = name, listed
        start: Any = [] if listed else LAYOUTS[name](1)
        self.add_state("kept", default=start, dist_reduce_fx="cat" if listed else None)

    def update(self, n: int) -> None:
        made = LAYOUTS[self.name](n)
        self.kept: Any = [*self.kept, made] if self.listed else made

    def compute(self) -> list[Any]:
        kept = self.kept if isinstance(self.kept, list) else [self.kept]
        return torch.cat([one.reshape(-1) for one in kept]).resolve_conj().tolist()  # type: ignore[no-any-return]


def computed(rank: int, name: str, listed: bool, sizes: tuple[tuple[int, ...], ...]) -> list[Any]:
    metric: Any = Kept(name, listed)
    with Join([metric]) as join:
        for n in join.batches(list(sizes[rank])):
            metric.update(n)
        return metric.compute()  # type: ignore[no-any-return]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("listed", [True, False])
def test_a_state_of_any_layout_is_synced(workers: Workers, name: str, listed: bool) -> None:
    """The last batch of each rank has one sample, as the second of rank 1 that has no other."""
    sizes = ((3, 1), (1,), ())
    found = workers.run(3, computed, name, listed, sizes)
    parts: list[Tensor] = []
    for mine in sizes:
        if mine:
            parts += [LAYOUTS[name](n).reshape(-1) for n in (mine if listed else mine[-1:])]
    assert found == [torch.cat(parts).resolve_conj().tolist()] * 3
