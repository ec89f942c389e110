"""Sharded models: precision plugins, activation checkpointing, two dimensions, `enable=False`, one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.emulator import place
from tests.needs import needs
from tests.support import sharded_fits as sharded
from tests.support.cases import Case, Net, Result, assert_exact, difference, reference
from tests.support.sharded_fits import KINDS, ShardedModule, build_strategy
from tests.support.workers import Workers


class Recomputes(Net):
    def forward(self, x: torch.Tensor, use_extra: bool = False) -> Any:
        return checkpoint(super().forward, x, use_extra, use_reentrant=False)


class Recomputing(ShardedModule):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.__class__ = Recomputes


class Float(ShardedModule):
    """In float32, with batches in it."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.float()

    def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
        return [each.float() for each in batch]


def fit_variants(rank: int, kind: str, case: Case) -> dict[str, Result]:
    options: dict[str, Any] = {"activation_checkpointing_policy": {nn.Linear}} if kind == "fsdp" else {}
    found = {
        "recomputing": sharded.fit(rank, kind, case, Recomputing),
        "policy": sharded.fit(rank, kind, case, strategy=build_strategy(kind, case, **options)),
    }
    if kind == "fsdp":
        for precision in ("32-true", "bf16-mixed"):
            strategy = build_strategy(kind, case, precision_plugin=FSDPPrecision(precision))  # type: ignore[arg-type]
            found[precision] = sharded.fit(rank, kind, case, Float, strategy=strategy)
    else:
        for precision in ("32-true", "bf16-mixed"):
            found[precision] = sharded.fit(rank, kind, case, Float, precision=precision)
    return found


BARS = {"recomputing": 1e-10, "policy": 1e-10, "32-true": 1e-5, "bf16-mixed": 0.05}


@pytest.mark.parametrize("kind", KINDS)
def test_precision_and_recomputation(workers: Workers, kind: str) -> None:
    case = Case((2, 5), optimizer="sgd", scheduler="step")
    expected = list(reference(case).net.parameters())
    for found in workers.run(2, fit_variants, kind, case, deadline=180):
        assert found.keys() == BARS.keys()
        for name, result in found.items():
            assert difference([p.double() for p in result.parameters], expected) < BARS[name], name


class TwoDimensions(ShardedModule):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        plan = {"first": ColwiseParallel(use_local_output=False), "last": RowwiseParallel()}
        parallelize_module(self.net, mesh["tensor_parallel"], plan)  # type: ignore[arg-type]
        fully_shard(self.net.first, mesh=mesh["data_parallel"])
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        place = self.device_mesh["data_parallel"].get_local_rank()  # type: ignore[index]
        return DataLoader(self.case.batches(place, self.current_epoch), batch_size=None)  # type: ignore[arg-type]


def fit_two_dimensions(rank: int, case: Case) -> Result:
    strategy = build_strategy("model_parallel", case, tensor_parallel_size=2)
    reloads = {"reload_dataloaders_every_n_epochs": 1}
    return sharded.fit(rank, "model_parallel", case, TwoDimensions, strategy=strategy, devices=4, **reloads)


@needs("fully_shard over tensor parallelism in uneven parts")
def test_two_dimensions(workers: Workers) -> None:
    case = Case((2, 5), scheduler="step")
    results = workers.run(4, fit_two_dimensions, case, deadline=180)
    assert_exact(case, [results[0], results[2]])
    for result in results:
        assert difference(result.parameters, results[0].parameters) == 0


class Hybrid(ShardedModule):
    def configure_model(self) -> None:
        if self.trainer.strategy.strategy_name.startswith("model_parallel"):  # type: ignore[attr-defined]
            mesh = init_device_mesh(place().type, (2, 2), mesh_dim_names=("replicas", "shards"))
            fully_shard(self.net.first, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def fit_hybrid(rank: int, kind: str, cases: list[Case]) -> list[Result]:
    options: dict[str, Any] = {}
    if kind == "fsdp":
        options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": init_device_mesh(place().type, (2, 2))}
    return [sharded.fit(rank, kind, case, Hybrid, strategy=build_strategy(kind, case, **options)) for case in cases]


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_shards(workers: Workers, kind: str) -> None:
    cases = [
        Case((2, 5, 0, 4), scheduler="step"),
        Case((5, 2, 4, 0), optimizer="adamw", weighting="samples", ragged=True, accumulate=2),
    ]
    for case, *results in zip(cases, *workers.run(4, fit_hybrid, kind, cases, deadline=180), strict=True):
        assert_exact(case, results)


def fit_plain(rank: int, kind: str, case: Case) -> tuple[Result, Any]:
    strategy = build_strategy(kind, case, enable=False)
    result = sharded.fit(rank, kind, case, strategy=strategy)
    return result, strategy.driver


@pytest.mark.parametrize("lengths", [(3, 3), (3,)], ids=["two ranks", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_joining_it_is_lightnings_own(workers: Workers, kind: str, lengths: tuple[int, ...]) -> None:
    case = Case(lengths, scheduler="step")
    plain = workers.run(len(lengths), fit_plain, kind, case)
    assert [driver for _, driver in plain] == [None] * len(lengths)
    assert_exact(case, [result for result, _ in plain])
    assert_exact(case, workers.run(len(lengths), sharded.fit, kind, case))
