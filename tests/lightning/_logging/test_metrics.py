"""Metrics of torchmetrics in Lightning on uneven inputs: the values are those of a single process."""

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassPrecision
from torchmetrics.wrappers import MinMaxMetric

from tests.support.front_ends.lightning import Fit, Module, build_trainer, fit
from tests.support.inside import Override
from tests.support.run import Batch
from tests.support.workers import Workers

pytestmark = pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets:UserWarning")


CLASSES = 4


def group(**options: Any) -> MetricCollection:
    kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassConfusionMatrix)
    return MetricCollection([kind(CLASSES, **options) for kind in kinds], prefix="val_")


# Max of negative and min of positive values, list states, states of several parts.
LOGGED: dict[str, Any] = {
    "mean": MeanMetric,
    "max": MaxMetric,
    "min": MinMetric,
    "accuracy": partial(MulticlassAccuracy, CLASSES),
    "auroc": BinaryAUROC,
}
BUILDS: dict[str, Any] = {**LOGGED, "confusion": partial(MulticlassConfusionMatrix, CLASSES), "group": group}


def batch_of(name: str, rank: int, step: int) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(100 * rank + step)
    n = 2 + (rank + step) % 3
    if name in ("mean", "min", "max"):
        numbers = torch.rand(n, generator=make, dtype=torch.float64) + 0.5
        return (-numbers if name == "max" else numbers,)
    if name == "auroc":
        return torch.rand(n, generator=make), torch.arange(n) % 2
    return torch.randn(n, CLASSES, generator=make), torch.randint(CLASSES, (n,), generator=make)


class Measured(Module):
    """Updates every kind of metric in each step; writes down what it computes."""

    def __init__(self, case: Fit, validated: tuple[int, ...]) -> None:
        super().__init__(case)
        self.validated = validated
        builds = {**BUILDS, "scalars": scalars}
        self.train_metrics = nn.ModuleDict({name: build().set_dtype(torch.float64) for name, build in builds.items()})
        self.val_metrics = copy.deepcopy(self.train_metrics)
        self.rare = SumMetric()  # one rank alone logs it
        self.own = SumMetric(sync_on_compute=False)
        self.each = MeanMetric(dist_sync_on_step=True)
        self.late = MaxMetric(dist_sync_on_step=True)
        self.window = SumMetric()
        self.peak = MinMaxMetric(MeanMetric())  # torchmetrics' own: it has a state of its own
        self.steps: list[tuple[str, int, float]] = []
        self.values: dict[str, Any] = {}
        self.copies: list[float] = []

    def val_dataloader(self) -> Any:
        return DataLoader(range(self.validated[self.trainer.global_rank]), batch_size=None)  # type: ignore[arg-type]

    def measure(self, metrics: nn.ModuleDict, step: int, prefix: str) -> None:
        for name, metric in metrics.items():
            metric.update(*batch_of(name, self.trainer.global_rank, step))
            if name in LOGGED:
                self.log(f"{prefix}_{name}", metric, on_step=False, on_epoch=True)
            elif name == "scalars":
                self.log_dict(metric, on_step=False, on_epoch=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        rank = self.trainer.global_rank
        self.measure(self.train_metrics, 10 * self.trainer.current_epoch + batch_idx, "train")
        self.rare.update(1.0)
        if rank == self.case.lengths.index(max(self.case.lengths)):
            self.log("rare", self.rare, on_step=False, on_epoch=True)
        self.own.update(1.0)
        self.log("own", self.own, on_step=False, on_epoch=True)
        self.window.update(1.0)
        self.peak.update(float(rank + 1))
        self.steps.append(("step", batch_idx, float(self.each(float(rank + 1)))))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.steps.append(("late", batch_idx, float(self.late(-1.0 - self.trainer.global_rank))))
        if batch_idx == 1:
            self.steps.append(("window", batch_idx, float(self.window.compute())))
            self.window.reset()

    def validation_step(self, index: Any, batch_idx: int) -> None:
        self.measure(self.val_metrics, int(index) + 5, "val")
        self.steps.append(("val", batch_idx, float(self.each(float(self.trainer.global_rank + 1)))))
        self.each.reset()

    def compute(self, metrics: nn.ModuleDict, prefix: str) -> None:
        for name, metric in metrics.items():
            self.values[f"{prefix}_{name}"] = metric.compute()
            if name in ("confusion", "group"):  # Lightning resets what was logged
                metric.reset()

    def on_train_epoch_end(self) -> None:
        self.compute(self.train_metrics, "train")
        self.values["window"] = float(self.window.compute())
        self.values["peak"] = {name: float(value) for name, value in self.peak.compute().items()}
        self.window.reset()
        self.values["late"] = float(self.late.compute())
        for twin in (copy.deepcopy(self).own, pickle.loads(pickle.dumps(self.own))):
            twin.reset()
            twin.update(2.0)
            self.copies.append(float(twin.compute()))

    def on_validation_epoch_end(self) -> None:
        self.compute(self.val_metrics, "val")


def scalars(**options: Any) -> MetricCollection:
    kinds = {"a": MulticlassAccuracy(CLASSES, **options), "b": MulticlassAccuracy(CLASSES, average="micro", **options)}
    return MetricCollection(kinds, prefix="group_")


def fit_measured(rank: int, case: Fit, validated: tuple[int, ...]) -> Any:
    module = Measured(case, validated)
    trainer = build_trainer(case, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    left = [name for m in module.modules() if isinstance(m, Metric) for name in ("forward", "reset") if name in vars(m)]
    left += [m for m in module.modules() if isinstance(m, Metric) and isinstance(m.update, Override)]
    warned = [
        str(w.message) for w in caught if "before the ``update``" in str(w.message) or "any rank" in str(w.message)
    ]
    if MinMaxMetric.__base__ is Metric:  # an older one has an update of its own to count
        warned = [text for text in warned if "MinMaxMetric" not in text]
    logged = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    counts = int(module.train_metrics["mean"]._update_count)
    return module.values, logged, module.steps, module.copies, left, warned, counts


def single_process(build: Any, history: list[list[tuple[Tensor, ...]]]) -> Any:
    # As Lightning moves it, by which torchmetrics forgets that inputs are to be float64.
    metric = build().set_dtype(torch.float64).to("cpu")
    for batch in (batch for batches in history for batch in batches):
        metric.update(*batch)
    return metric.compute()


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    else:
        tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("lengths", "validated"), [((0, 3), (2, 1)), ((2, 4, 0), (0, 1, 3))], ids=["two ranks", "three ranks"]
)
def test_metrics_equal_those_of_a_single_process(
    workers: Workers, lengths: tuple[int, ...], validated: tuple[int, ...]
) -> None:
    world_size, longest = len(lengths), max(lengths)
    results = workers.run(world_size, fit_measured, Fit(lengths, epochs=2), validated)
    builds = {**BUILDS, "scalars": scalars}
    for rank, (values, logged, steps, copies, left, warned, counts) in enumerate(results):
        assert not left
        assert not warned
        assert copies == [2.0] * 4
        assert counts == 0, "not reset at the epoch's end"
        for prefix, all_lengths, offset in (("train", lengths, 10), ("val", validated, 5)):
            for name, build in builds.items():
                history = [[batch_of(name, r, offset + s) for s in range(n)] for r, n in enumerate(all_lengths)]
                expected = single_process(build, history)
                assert_same(values[f"{prefix}_{name}"], expected)
                if name in LOGGED:
                    assert_same(logged[f"{prefix}_{name}"], expected)
                elif name == "scalars" and prefix == "train":  # both stages use these names; this comes last
                    assert_same({key: logged[key] for key in expected}, expected)
        assert logged["rare"] == sum(lengths)
        assert ("own" in logged) == (lengths[rank] > 0)
        active = [[r for r, n in enumerate(lengths) if n > step] for step in range(longest)]
        mean = [sum(r + 1 for r in ranks) / len(ranks) for ranks in active]
        assert [v for kind, _, v in steps if kind == "step"] == pytest.approx(mean[: lengths[rank]] * 2)
        assert [v for kind, _, v in steps if kind == "late"] == [-1.0 - min(ranks) for ranks in active] * 2
        assert [v for kind, _, v in steps if kind == "window"] == [sum(min(n, 2) for n in lengths)] * 2
        assert values["window"] == sum(max(n - 2, 0) for n in lengths)
        assert values["late"] == -1.0 - min(r for r, n in enumerate(lengths) if n)
        raw = sum(n * (r + 1) for r, n in enumerate(lengths)) / sum(lengths)
        assert values["peak"] == pytest.approx({"raw": raw, "max": raw, "min": raw})
        present = [[r + 1 for r, n in enumerate(validated) if n > step] for step in range(validated[rank])]
        assert [v for kind, _, v in steps if kind == "val"] == [sum(p) / len(p) for p in present] * 2


class SyncsItself(SumMetric):
    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        dist.all_reduce(self.sum_value)


class LeftAlone(Module):
    """Has a metric that has its own way of syncing."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.metric = SyncsItself()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.metric(1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.noted = float(self.metric.compute())
        self.metric.reset()


def test_a_metric_that_cannot_be_served_raises_only_where_it_is_needed(workers: Workers) -> None:
    case = Fit((1, 3), epochs=2)
    assert [result.noted for result in workers.run(2, fit, case, LeftAlone)] == [4.0, 4.0]
    joined, active = workers.outcomes(2, fit, case, LeftAlone, {"metric": SyncsItself(dist_sync_on_step=True)})
    assert "UnsupportedError: SyncsItself overrides" in active.error
    assert "synced in a step after ranks [0] finished" in active.error
    assert "PeerFailedError: Rank 1 failed" in joined.error
