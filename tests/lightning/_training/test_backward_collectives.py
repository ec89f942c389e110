"""Collectives inside backward in Lightning: SyncBatchNorm, gathers with gradients, losses over all ranks."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed.nn.functional as dnn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy, ModelParallelJoinStrategy
from tests.core.backward.programs import ROWS, Net, Program, contrast, optimizer_of
from tests.core.backward.test_exact import OnlyBackward, assert_exact, loses_hooks
from tests.emulator.frameworks import lightning_accelerator
from tests.support.sharded_fits import KINDS as SHARDED
from tests.support.sharded_fits import build_strategy, on_cpus, whole
from tests.support.workers import Workers


class Synced(pl.LightningModule):
    """Trains a `Program`; "contrast" by Lightning's gather, "mean" by torch's differentiable all-reduce."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.net = Net(program)
        self.shadow_steps = 0

    def train_dataloader(self) -> DataLoader[Any]:
        rank, epoch = self.trainer.global_rank, self.trainer.current_epoch
        batches = [self.program.batch(rank, step, epoch) for step in range(self.program.lengths[rank])]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x, batch_idx)
        loss = (out - y).square().mean()
        active = list(self.trainer.strategy.join.active_ranks)  # type: ignore[union-attr]
        if "contrast" in self.program.options:
            everyone: Any = self.all_gather(out[:ROWS], sync_grads=True)
            loss = loss + contrast(out[:ROWS], everyone.flatten(0, 1), active.index(self.global_rank) * ROWS)
        if "mean" in self.program.options:
            loss = loss + (dnn.all_reduce(out.mean(0)) / len(active)).square().sum()  # type: ignore[no-untyped-call]
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.program, self.net)


def trainer_of(program: Program, strategy: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator=lightning_accelerator(),
        devices=program.world_size,
        strategy=strategy,
        max_epochs=program.epochs,
        accumulate_grad_batches=2 if "accumulates" in program.options else 1,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(rank: int, program: Program, module: type[Synced] = Synced, **options: Any) -> list[Tensor]:
    model = module(program)
    wrapper = {"bucket_cap_mb": 0.0005, **dict(program.wrapper), **options}
    trainer_of(program, DDPJoinStrategy(weighting=program.weighting, **wrapper)).fit(model)  # type: ignore[arg-type]
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
        program = Program(lengths, weighting, frozenset(options), wrapper=wrapper)
        if loses_hooks(program):
            outcomes = workers.outcomes(program.world_size, fit, program, timeout=3.0)
            assert all("has lost the hooks of a parameter" in each.error for each in outcomes), outcomes
            continue
        assert_exact(program, workers.run(program.world_size, fit, program))


class Accumulating(Synced):
    """As Lightning does, each batch of a window counts for half, also the last one of an odd epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 2


def test_accumulation(workers: Workers) -> None:
    program = Program((1, 4, 2), options=frozenset({"accumulates", "contrast", "mean"}))
    assert_exact(program, workers.run(3, fit, program, Accumulating))


class SyncedSharded(Synced):
    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelJoinStrategy) and not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in (self.net.first, self.net.second):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def fit_sharded(rank: int, program: Program, kind: str) -> list[Tensor]:
    module = SyncedSharded(program)
    names = [*dict(module.net.named_parameters()), *dict(module.net.named_buffers())]
    with on_cpus():
        trainer = trainer_of(program, build_strategy(kind, program))  # type: ignore[arg-type]
        trainer.fit(module)
        state = whole(trainer, module)  # type: ignore[arg-type]
    return [state[name] for name in names]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("options", [(), ("checkpoint",), ("mean", "no norm"), ("mean", "contrast")], ids=str)
def test_sharded_models(workers: Workers, kind: str, options: tuple[str, ...]) -> None:
    for lengths, weighting in (((2, 5), "world"), ((0, 4, 2), "active"), ((5, 1, 3), "samples")):
        program = Program(lengths, weighting, frozenset(options))
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


class Hidden(Synced):
    """A collective in the midst of backward, of which nothing in forward tells, where one rank alone is left."""

    def on_fit_start(self) -> None:
        self.net.second.register_forward_hook(self._after_second)

    def _after_second(self, _: Any, __: Any, output: Tensor) -> Tensor:
        alone = len(self.trainer.strategy.join.active_ranks) == 1  # type: ignore[union-attr]
        return OnlyBackward.apply(output) if alone else output  # type: ignore[no-any-return,no-untyped-call]


HIDDEN = Program((2, 5), options=frozenset({"no norm"}))


def test_what_forward_does_not_show_raises_and_names_the_switch(workers: Workers) -> None:
    joined, active = workers.outcomes(2, fit, HIDDEN, Hidden, timeout=3.0)
    assert "UnsupportedError: all_reduce in backward" in active.error
    assert "backward_collectives=True" in active.error
    assert joined.error


def test_with_the_switch_it_is_right(workers: Workers) -> None:
    assert_exact(HIDDEN, workers.run(2, partial(fit, backward_collectives=True), HIDDEN, Hidden))


def test_every_backward_may_go_in_pieces(workers: Workers) -> None:
    program = Program((2, 5, 0), "samples", frozenset({"no norm", "adam"}))
    assert_exact(program, workers.run(3, partial(fit, backward_collectives=True), program))


@pytest.mark.parametrize(("module", "says"), [(Skips, "training_step returned None"), (Manual, "manual optimization")])
def test_what_cannot_be_followed_raises(workers: Workers, module: type[Synced], says: str) -> None:
    outcomes = workers.outcomes(3, fit, Program((2, 5, 5)), module, timeout=3.0)
    assert any(says in outcome.error for outcome in outcomes)
    assert all(outcome.error for outcome in outcomes)
