"""Collectives inside backward in Lightning: SyncBatchNorm, gathers with gradients, losses over all ranks."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_join import DDPJoinStrategy, ModelParallelJoinStrategy
from tests.core.backward.programs import Program, Ranks, assert_exact, loses_hooks
from tests.support.front_ends.lightning import Module, build_trainer
from tests.support.sharded_fits import KINDS as SHARDED
from tests.support.sharded_fits import build_strategy, on_cpus, whole
from tests.support.workers import Workers


class Gathering(Ranks):
    """Rows by Lightning's gather, totals by torch's differentiable all-reduce."""

    def rows(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(self.how.all_gather(parts[0], sync_grads=True))  # type: ignore[attr-defined]


class Synced(Module):
    """Trains a `Program`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ranks = Gathering(self.trainer.strategy.join, self.global_rank, self)  # type: ignore[union-attr,arg-type]
        return self.case.loss_on([self.net], batch, ranks, batch_idx)  # type: ignore[operator,no-any-return]


def fit(rank: int, program: Program, module: type[Synced] = Synced, **options: Any) -> list[Tensor]:
    model = module(program)  # type: ignore[arg-type]
    wrapper = {"bucket_cap_mb": 0.0005, **program.ddp, **options}
    strategy = DDPJoinStrategy(weighting=program.weighting, **wrapper)  # type: ignore[arg-type]
    build_trainer(program, strategy=strategy).fit(model)
    return [t.detach().clone() for t in (*model.net.parameters(), *model.net.buffers())]


KINDS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]] = {
    "norms": ((), ()),
    "norms, Adam, checkpoint": (("adam", "checkpoint"), ()),
    "norms, unused parameters": (("unused",), (("find_unused_parameters", True),)),
    "norms, static graph": ((), (("static_graph", True),)),
    "norms and gathers": (("contrast",), ()),
    "gathers": (("contrast", "no norm"), ()),
    "mean over ranks": (("no norm", "mean"), ()),
    "all of it": (("contrast", "mean", "checkpoint"), ()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
def test_parameters_are_those_of_one_process(workers: Workers, kind: str, weighting: str) -> None:
    options, wrapper = KINDS[kind]
    for lengths in ((2, 5), (0, 4, 2)):
        program = Program(lengths, weighting=weighting, options=frozenset(options), ddp=dict(wrapper))
        if loses_hooks(program):
            outcomes = workers.outcomes(program.world_size, fit, program, timeout=3.0)
            assert all("lost the hooks with which Join weights" in each.error for each in outcomes), outcomes
            continue
        assert_exact(program, workers.run(program.world_size, fit, program))


def test_accumulation(workers: Workers) -> None:
    program = Program((1, 4, 2), options=frozenset({"accumulates", "contrast", "mean"}))
    assert_exact(program, workers.run(3, fit, program))


class SyncedSharded(Synced):
    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelJoinStrategy) and not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.net.layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def fit_sharded(rank: int, program: Program, kind: str) -> list[Tensor]:
    module = SyncedSharded(program)
    names = [*dict(module.net.named_parameters()), *dict(module.net.named_buffers())]
    with on_cpus():
        trainer = build_trainer(program, strategy=build_strategy(kind, program))  # type: ignore[arg-type]
        trainer.fit(module)
        state = whole(trainer, module)  # type: ignore[arg-type]
    return [state[name] for name in names]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("options", [(), ("checkpoint",), ("mean", "no norm"), ("mean", "contrast")], ids=str)
def test_sharded_models(workers: Workers, kind: str, options: tuple[str, ...]) -> None:
    for lengths, weighting in (((2, 5), "world"), ((0, 4, 2), "active"), ((5, 1, 3), "samples")):
        program = Program(lengths, weighting=weighting, options=frozenset(options))
        assert_exact(program, workers.run(program.world_size, fit_sharded, program, kind))


# ---------------------------------------------------------------- what raises


class Skips(Synced):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 3 else loss


class Manual(Synced):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(("module", "says"), [(Skips, "training_step returned None"), (Manual, "manual optimization")])
def test_what_cannot_be_followed_raises(workers: Workers, module: type[Synced], says: str) -> None:
    outcomes = workers.outcomes(3, fit, Program((2, 5, 5)), module, timeout=3.0)
    assert any(says in outcome.error for outcome in outcomes)
    assert all(outcome.error for outcome in outcomes)
