"""Metrics of torchmetrics in a `Join`: the values are those of a single process."""

import copy
import inspect
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric, MetricCollection
from torchmetrics import wrappers as wraps
from torchmetrics.aggregation import CatMetric, MaxMetric, SumMetric

from tests.core._participants.metrics import CASES, CLASSES, assert_value, collection, history
from tests.support.inside import PASSING_ON, concatenates, deadlock_seconds
from tests.support.warned import warned
from tests.support.workers import Workers, connect
from torch_join import Join, JoinableMetric, JoinableModel, JoinableOptimizer, JoinValueError, UnsupportedError
from torch_join._compat import metrics as _compat_metrics

# torchmetrics says so of metrics that keep all samples.
pytestmark = pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets:UserWarning")


LENGTHS = [(0, 3), (2, 4, 0), (1, 3, 3)]


# ---------------------------------------------------------------- exactness


def _computed(rank: int, name: str, lengths: Sequence[int]) -> tuple[list[Any], list[Any], list[str]]:
    case = CASES[name]
    metric = case.build().set_dtype(torch.float64)
    during, after = [], []
    with warned("before") as said, Join([metric]) as join:
        for epoch in range(2):  # the second goes on with the state of the first
            for step in join.batches(range(lengths[rank])):
                metric.update(*case.batch(rank, 10 * epoch + step))
                during.append(metric.compute())
            after.append(metric.compute())
    return during, after, said


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_compute_in_and_after_the_tail(workers: Workers, name: str, lengths: tuple[int, ...]) -> None:
    case = CASES[name]
    results = workers.run(len(lengths), _computed, name, lengths)
    first = history(case, lengths, range(max(lengths)))
    both = [one + [case.batch(rank, 10 + step) for step in range(lengths[rank])] for rank, one in enumerate(first)]
    for rank, (during, after, said) in enumerate(results):
        assert not said
        for step in range(lengths[rank]):
            assert_value(during[step], case.expected(case.build, history(case, lengths, range(step + 1))))
        for value, seen in zip(after, (first, both), strict=True):
            assert_value(value, case.expected(case.build, seen))


def _stepped(rank: int, name: str, lengths: Sequence[int], loop: str) -> tuple[list[Any], Any]:
    case = CASES[name]
    metric = case.build(dist_sync_on_step=True).set_dtype(torch.float64)
    with Join([metric]) as join:
        steps = range(lengths[rank])
        found = [metric(*case.batch(rank, step)) for step in (join.batches(steps) if loop == "batches" else steps)]
        return found, metric.compute() if loop == "batches" else None


@pytest.mark.covering(1)
@pytest.mark.parametrize("loop", ["batches", "plain"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_synced_over_the_active_ranks(workers: Workers, name: str, loop: str) -> None:
    case, lengths = CASES[name], (2, 4, 0)
    for rank, (found, total) in enumerate(workers.run(3, _stepped, name, lengths, loop)):
        for step in range(lengths[rank]):
            assert_value(found[step], case.expected(case.build, history(case, lengths, [step])))
        if loop == "batches":
            assert_value(total, case.expected(case.build, history(case, lengths, range(4))))


def _windows(rank: int, lengths: Sequence[int], loop: str) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(CLASSES, CLASSES))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics, found = collection(), []
    context: Any
    if loop == "torch's":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        context = TorchJoin([JoinableModel(model), JoinableMetric(metrics), JoinableOptimizer(optimizer)])
    else:
        context = Join([model, optimizer, *metrics.values(copy_state=False)])
    with context as join:
        steps = range(lengths[rank])
        for step in join.batches(steps) if loop == "batches" else steps:
            x, y = CASES["accuracy"].batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            metrics.update(x, y)
            if step % 2:
                found.append(metrics.compute())
                metrics.reset()
    return found


@pytest.mark.parametrize("loop", ["batches", "plain", "torch's"])
def test_a_reset_in_the_tail_resets_joined_ranks(workers: Workers, loop: str) -> None:
    lengths, case = (3, 6, 0), CASES["collection"]
    found = workers.run(3, _windows, lengths, loop)[1]
    for window, value in enumerate(found):
        assert_value(value, case.expected(collection, history(case, lengths, [2 * window, 2 * window + 1])))
    assert len(found) == 3


def _after_a_plain_loop(rank: int, lengths: Sequence[int], what: str) -> Any:
    connect()
    model = DistributedDataParallel(nn.Linear(CLASSES, CLASSES))
    metric = SumMetric()
    with deadlock_seconds(0.3), Join([model, metric], timeout=timedelta(seconds=60)) as join:
        for step in range(lengths[rank]):
            metric.update(1.0)
            model(torch.ones(1, CLASSES)).sum().backward()
            if what == "every step":
                assert float(metric.compute()) == sum(min(step + 1, length) for length in lengths)
        if what == "compute":
            return float(metric.compute())
        if what == "batches":
            for _ in join.batches(range(2)):
                metric.update(1.0)
    return float(metric.compute())


@pytest.mark.parametrize("what", ["compute", "batches"])
@pytest.mark.parametrize("lengths", [(1, 3), (3, 2), (0, 2), (2, 4, 1)], ids=str)
def test_what_ranks_do_together_after_a_plain_loop_is_told(
    workers: Workers, lengths: tuple[int, ...], what: str
) -> None:
    outcomes = workers.outcomes(len(lengths), _after_a_plain_loop, lengths, what)
    errors = [outcome.error for outcome in outcomes]
    first = lengths.index(min(lengths))
    for error in errors:
        assert error.startswith("JoinError: Deadlock: these ranks wait for each other")
        assert f"rank {first} is in a meeting of all ranks" in error
        assert "use `for batch in join.batches(loader)`" in error
    assert max(outcome.seconds for outcome in outcomes) < 8


@pytest.mark.parametrize("what", ["compute", "batches", "after", "every step"])
def test_after_a_plain_loop_of_even_lengths_nothing_raises(workers: Workers, what: str) -> None:
    assert workers.run(2, _after_a_plain_loop, (3, 3), what) == [10.0 if what == "batches" else 6.0] * 2


@pytest.mark.parametrize("what", ["after", "every step"])
def test_compute_after_the_with_or_in_a_plain_loop(workers: Workers, what: str) -> None:
    assert workers.run(2, _after_a_plain_loop, (1, 3), what) == [4.0] * 2


def _forward_alone(rank: int, path: str) -> bool:
    model, metric = DistributedDataParallel(nn.Linear(1, 1)), SumMetric()
    with Join([model, metric], timeout=timedelta(seconds=10), may_break=True) as join:
        for step in join.batches(range(2 + rank)):
            if step == 1:
                if rank == 0:
                    metric(1.0)  # resets itself within
                    Path(path).touch()
                end = time.monotonic() + 5
                while not Path(path).exists() and time.monotonic() < end:
                    time.sleep(0.01)
                came = Path(path).exists()
            model(torch.ones(1, 1)).sum().backward()
    return came


def test_a_forward_waits_for_no_other_rank(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, _forward_alone, str(tmp_path / "done")) == [True, True]


# ---------------------------------------------------------------- manners


def _nobody(rank: int) -> tuple[list[str], Any]:
    metric = MaxMetric()
    with warned() as said, Join([metric]):
        value = metric.compute()
    return said, value


def test_a_metric_that_nobody_has_updated_warns_once(workers: Workers) -> None:
    (said, value), (quiet, _) = workers.run(2, _nobody)
    assert any("before any rank updated" in text for text in said)
    assert not quiet
    assert value == -torch.inf


def _left_behind(rank: int, fails: bool) -> tuple[bool, bool, bool, float]:
    metric = SumMetric(dist_sync_on_step=True)
    metric.persistent(True)
    before = dict(vars(metric))
    try:
        with Join([metric]) as join:
            for _ in join.batches(range(rank + 1)):
                metric.update(rank + 1)
            copies = copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))
            if fails:
                raise KeyError
    except KeyError:
        pass
    restored = vars(metric).keys() == before.keys() and all(
        vars(metric)[name] is before[name] for name in ("compute", "update", "_reductions")
    )
    own = all(c._sync_dist.__func__ is Metric._sync_dist and c._sync_dist.__self__ is c for c in copies)
    for c in copies:
        c.reset()
    return restored, own, metric.update_called, float(metric.sum_value)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind_and_states_stay_where_they_are(workers: Workers, fails: bool) -> None:
    assert workers.run(2, _left_behind, fails) == [(True, True, True, 1.0), (True, True, True, 4.0)]


class OwnSync(SumMetric):
    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        """Gather in a way that nobody else knows."""


class Words(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [])

    def update(self, word: str) -> None:
        self.words.append(word)

    def compute(self) -> int:
        return len(self.words)


def _refused(rank: int, kind: str) -> str:
    metric = SumMetric()
    given: dict[str, Callable[[], list[Any]]] = {
        "MinMaxMetric": lambda: [wraps.MinMaxMetric(metric)],
        "Running": lambda: [wraps.Running(metric, 2)],
        "BootStrapper": lambda: [wraps.BootStrapper(metric)],
        "MetricTracker": lambda: [wraps.MetricTracker(metric, maximize=True)],
        "dist_sync_fn": lambda: [SumMetric(dist_sync_fn=lambda tensor, group: [tensor])],
        "_sync_dist": lambda: [OwnSync()],
        "process group": lambda: [SumMetric(process_group=dist.new_group([0, 1]))],
        "twice": lambda: [metric, MetricCollection([metric])],
        "Words": lambda: [Words()],
    }
    with pytest.raises((UnsupportedError, JoinValueError)) as caught:
        joinables = given[kind]()
        with Join(joinables):
            joinables[0].update("word")
            joinables[0].compute()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("MinMaxMetric", "MinMaxMetric keeps state of its own"),
        ("Running", "Running keeps state of its own"),
        ("BootStrapper", "BootStrapper keeps state of its own"),
        ("MetricTracker", "MetricTracker creates new metrics during training"),
        ("dist_sync_fn", "SumMetric has its own dist_sync_fn"),
        ("_sync_dist", "OwnSync overrides"),
        ("process group", "SumMetric syncs over a different process group"),
        ("twice", "passed to Join twice"),
        ("Words", "Words has a state 'words' that is not a tensor"),
    ],
)
def test_what_cannot_be_made_right_is_refused(workers: Workers, kind: str, text: str) -> None:
    assert all(text in said for said in workers.run(2, _refused, kind))


def test_torchmetrics_private_names() -> None:
    metric = SumMetric()
    assert {"_reductions", "_is_synced", "_cache", "_update_count", "_to_sync", "_computed", "_should_unsync"} <= vars(
        metric
    ).keys()
    source = inspect.getsource(Metric)
    assert "self._sync_dist(dist_sync_fn, process_group=process_group)" in source
    assert "self._is_synced = True" in source
    assert inspect.getmodule(Metric).__name__ == "torchmetrics.metric"  # type: ignore[union-attr]
    assert not _compat_metrics.has_own_sync(metric)
    assert concatenates(CatMetric()._reductions["value"])  # type: ignore[arg-type]
    assert _compat_metrics.is_own_gather(torchmetrics.utilities.distributed.gather_all_tensors)
    transformations = getattr(wraps, "transformations", None)  # older torchmetrics has none
    newer = {"BinaryTargetTransformer", "LambdaInputTransformer"} if transformations is None else set()
    for name in PASSING_ON - {"CompositionalMetric"} - newer:
        assert any(hasattr(module, name) for module in (wraps, transformations))
