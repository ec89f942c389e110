"""Metrics, their batches, and what one process computes of them."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics import wrappers as wraps
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP

CLASSES = 4


def _product(stacked: Tensor) -> Tensor:
    return stacked.prod(0)


def _sum_of_list(listed: list[Tensor]) -> Tensor:
    return torch.stack([tensor.sum() for tensor in listed]).sum()


class Product(Metric):
    """A reduction in which a zero contribution, or a one, would show."""

    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("value", torch.tensor(2.0), dist_reduce_fx=_product)
        self.add_state("pieces", [], dist_reduce_fx=_sum_of_list)

    def update(self, x: Tensor) -> None:
        self.value = self.value * x.prod()
        self.pieces.append(x)

    def compute(self) -> Tensor:
        total = _sum_of_list(self.pieces) if isinstance(self.pieces, list) else self.pieces
        return self.value + total


class RankMean(Metric):
    """Its synced value is the mean over the ranks of each one's mean over all of its samples."""

    full_state_update = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=None)
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("count", torch.tensor(0), dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.total, self.count = self.total + x.sum(), self.count + len(x)
        self.mean = self.total / self.count

    def compute(self) -> Tensor:
        return self.mean


Batch = tuple[Tensor, ...]


History = list[list[Batch]]  # by rank


def values(make: torch.Generator, n: int) -> Batch:
    return (torch.rand(n, generator=make, dtype=torch.float64) + 0.5,)


def negative(make: torch.Generator, n: int) -> Batch:
    return (-torch.rand(n, generator=make, dtype=torch.float64) - 0.5,)


def pairs(make: torch.Generator, n: int) -> Batch:
    x = torch.randn(n, generator=make, dtype=torch.float64)
    return x, 0.5 * x + torch.randn(n, generator=make, dtype=torch.float64)


def wide_pairs(make: torch.Generator, n: int) -> Batch:
    x, y = pairs(make, 2 * n)
    return x.view(n, 2), y.view(n, 2)


def classes(make: torch.Generator, n: int) -> Batch:
    return torch.randn(n, CLASSES, generator=make), torch.randint(CLASSES, (n,), generator=make)


def scores(make: torch.Generator, n: int) -> Batch:
    return torch.rand(n, generator=make), torch.arange(n) % 2


def queries(make: torch.Generator, n: int) -> Batch:
    return torch.rand(n, generator=make), torch.arange(n) % 2, torch.randint(3, (n,), generator=make)


def collection(**options: Any) -> MetricCollection:
    kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassRecall, MulticlassConfusionMatrix)
    return MetricCollection([kind(CLASSES, **options) for kind in kinds], prefix="val_")


def single_process(build: Callable[..., Any], history: History) -> Any:
    metric = build().set_dtype(torch.float64)
    for batch in (batch for batches in history for batch in batches):
        metric.update(*batch)
    return metric.compute()


def mean_of_ranks(build: Callable[..., Any], history: History) -> Any:
    own = [single_process(build, [batches]) for batches in history if batches]
    return torch.stack(own).mean()


def product_of_ranks(build: Callable[..., Any], history: History) -> Any:
    given = [torch.cat([x for (x,) in batches]) for batches in history if batches]
    return torch.stack([2 * x.prod() for x in given]).prod() + torch.cat(given).sum()


@dataclass(frozen=True)
class Case:
    build: Callable[..., Any]
    data: Callable[[torch.Generator, int], Batch]
    expected: Callable[[Callable[..., Any], History], Any] = single_process

    def batch(self, rank: int, step: int) -> Batch:
        make = torch.Generator().manual_seed(1000 * rank + step + 7)
        return self.data(make, 3 + (rank + 2 * step) % 4)


CASES = {
    "sum": Case(SumMetric, values),
    "mean": Case(MeanMetric, values),
    "max": Case(MaxMetric, negative),
    "min": Case(MinMetric, values),
    "cat": Case(CatMetric, values),
    "accuracy": Case(lambda **o: MulticlassAccuracy(CLASSES, **o), classes),
    "mse": Case(MeanSquaredError, pairs),
    # torchmetrics 1.0 has none
    **(
        {"mse-wide": Case(lambda **o: MeanSquaredError(num_outputs=2, **o), wide_pairs)}
        if "num_outputs" in inspect.signature(MeanSquaredError).parameters
        else {}
    ),
    "auroc": Case(BinaryAUROC, scores),
    "spearman": Case(SpearmanCorrCoef, pairs),
    "pearson": Case(PearsonCorrCoef, pairs),
    "pearson-wide": Case(lambda **o: PearsonCorrCoef(num_outputs=2, **o), wide_pairs),
    "retrieval": Case(RetrievalMAP, queries),
    "custom": Case(Product, values, product_of_ranks),
    "mean-state": Case(RankMean, values, mean_of_ranks),
    "collection": Case(collection, classes),
    "classwise": Case(lambda **o: wraps.ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None, **o)), classes),
    "multioutput": Case(lambda **o: wraps.MultioutputWrapper(MeanSquaredError(**o), 2), wide_pairs),
    "composed": Case(lambda **o: MeanMetric(**o) + MaxMetric(**o), negative),
}


def history(case: Case, lengths: Sequence[int], steps: Iterable[int]) -> History:
    return [[case.batch(rank, s) for s in steps if s < length] for rank, length in enumerate(lengths)]


def assert_value(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, check_dtype=False)
