"""The trainings of a `Recipe` by what drives an engine: Lightning's Trainer, Fabric, and Accelerate."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from accelerate_join import join_batches, join_uneven_inputs
from lightning_join import DeepSpeedJoinStrategy
from lightning_join.fabric import DeepSpeedJoinStrategy as FabricJoinStrategy
from tests.support import inside
from tests.support.front_ends.deepspeed import (
    TIMEOUT,
    Batch,
    Net,
    Recipe,
    Trained,
    config_of,
    deepspeed_of,
    outcome,
)

# Lightning divides a loss by the window, and the engine does so again, on even inputs too; and what is left of an
# epoch's last window is lost in some stages. With the end of its loop Accelerate ends a window, and it steps a
# scheduler once for each process.
EXPECTED: dict[str, dict[str, Any]] = {
    "lightning": {"divides": 2},
    "fabric": {},
    "accelerate": {"ends_windows": True, "scheduled_times": 2},
}
_BACKEND = "_prepare_backend"  # of Accelerate: it knows none for DeepSpeed without accelerators


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def on_cpus() -> Iterator[None]:
    """Within, Lightning takes CPUs for what DeepSpeed runs on, and Accelerate knows how many processes there are."""
    modules = ("lightning.pytorch.strategies.deepspeed", "lightning.fabric.strategies.deepspeed")
    with ExitStack() as stack:
        for module in modules:
            without = {
                "CUDAAccelerator": object,
                "_validate_device_index_selection": _nothing,
                "argparse": SimpleNamespace(Namespace=_nothing),
            }
            stack.enter_context(mock.patch.multiple(module, **without))
        for strategy in (DeepSpeedStrategy, FabricStrategy):
            stack.enter_context(mock.patch.object(strategy, "_set_node_environment_variables", _nothing))
        kind = mock.Mock(return_value=("gloo", DistributedType.DEEPSPEED))
        stack.enter_context(mock.patch.object(PartialState, _BACKEND, kind))
        stack.enter_context(mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


# ------------------------------------------------------------ Lightning


class Module(pl.LightningModule):
    def __init__(self, recipe: Recipe, rank: int, val: tuple[int, ...]) -> None:
        super().__init__()
        self.recipe, self.rank, self.val = recipe, rank, val
        self.net = Net(recipe.model)
        self.logged: list[float] = []

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(self.recipe.batches(self.rank), batch_size=None)

    def val_dataloader(self) -> Any:
        recipe = Recipe(self.val, seed=self.recipe.seed + 50)
        return DataLoader(recipe.batches(self.rank), batch_size=None)

    def training_step(self, batch: Batch, step: int) -> Tensor:
        self.net.step = step
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log("val", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True, batch_size=len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.logged.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.recipe.make_scheduler(optimizer), "interval": "step"},
        }


class Keep(pl.Callback):
    """Keeps what there is when the training ends, where the engine is still there."""

    def __init__(self, deepspeed: Any) -> None:
        self.deepspeed = deepspeed

    def on_train_end(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.model
        self.kept = outcome(self.deepspeed, engine, module.net)


def trainer_of(recipe: Recipe, keep: Keep, strategy: Any = None, **options: Any) -> pl.Trainer:
    config = config_of(recipe)
    del config["gradient_clipping"], config["gradient_accumulation_steps"]  # Lightning sets both
    if strategy is None:
        strategy = DeepSpeedJoinStrategy(config=config, weighting=recipe.option, timeout=TIMEOUT)
    given = {
        "accelerator": "cpu",
        "devices": len(recipe.lengths),
        "strategy": strategy,
        "max_epochs": recipe.epochs,
        "accumulate_grad_batches": recipe.accumulate,
        "gradient_clip_val": recipe.clip or None,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**given, **options, "callbacks": [keep, *options.get("callbacks", [])]})


def lightning(rank: int, recipe: Recipe, val: tuple[int, ...] = (), **options: Any) -> Trained:
    with deepspeed_of(rank) as deepspeed, on_cpus():
        keep = Keep(deepspeed)
        fit: dict[str, Any] = options.pop("fit", {})
        trainer = trainer_of(recipe, keep, limit_val_batches=None if val else 0, **options)
        trainer.fit(Module(recipe, rank, val), **fit)
        return keep.kept


# ------------------------------------------------------------ Fabric


def fabric(rank: int, recipe: Recipe, each: Callable[..., None] | None = None) -> Trained:
    with deepspeed_of(rank) as deepspeed, on_cpus():
        strategy = FabricJoinStrategy(config=config_of(recipe), weighting=recipe.option, timeout=TIMEOUT)
        fabric = Fabric(accelerator="cpu", devices=len(recipe.lengths), strategy=strategy)
        inside.remove_launcher(fabric)  # the processes are there
        fabric.launch()
        net = Net(recipe.model)
        own = recipe.make_optimizer(net.parameters())
        model, optimizer, scheduler = fabric.setup(net, own, scheduler=recipe.make_scheduler(own))
        loader = fabric.setup_dataloaders(
            DataLoader(recipe.batches(rank), batch_size=None), use_distributed_sampler=False
        )
        for _ in range(recipe.epochs):
            for net.step, (x, y) in enumerate(loader):
                fabric.backward(functional.mse_loss(model(x), y), model=model)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()  # type: ignore[union-attr]
                if each is not None:
                    each(fabric, model)
        fabric.barrier()
        return outcome(deepspeed, strategy.model, net)


# ------------------------------------------------------------ Accelerate


def accelerate(
    rank: int, recipe: Recipe, within: bool = False, each: Callable[..., None] | None = None, **options: Any
) -> Trained:
    with deepspeed_of(rank) as deepspeed, on_cpus(), mock.patch.dict(os.environ, LOCAL_RANK=str(rank)):
        try:
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(recipe)))
            net = Net(recipe.model)
            own = recipe.make_optimizer(net.parameters())
            engine, optimizer, scheduler = accelerator.prepare(net, own, recipe.make_scheduler(own))
            loader: Any = DataLoaderShard(recipe.batches(rank), batch_size=None)
            loader._is_accelerate_prepared = True  # Accelerate must not shard it again
            loader = accelerator.prepare(loader)
            options |= {"weighting": recipe.option, "timeout": TIMEOUT}

            def go_through(batches: Any) -> None:
                for net.step, (x, y) in enumerate(batches):
                    with accelerator.accumulate(engine):
                        loss = functional.mse_loss(engine(x), y)
                        accelerator.backward(loss)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                        accelerator.gather_for_metrics(loss.detach())
                    if each is not None:
                        each(accelerator, engine)

            if within:
                with join_uneven_inputs(accelerator, **options):
                    for _ in range(recipe.epochs):
                        go_through(loader)
            else:
                for _ in range(recipe.epochs):
                    go_through(join_batches(accelerator, loader, **options))
            found = outcome(deepspeed, engine, net)
            found.counters = (*found.counters, scheduler.scheduler.last_epoch, accelerator.step)
            return found
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def all_of(rank: int, cases: list[tuple[str, Recipe]]) -> list[Trained]:
    """Train by each, one after the other."""
    fronts = {"lightning": lightning, "fabric": fabric, "accelerate": accelerate}
    found = []
    for front, recipe in cases:
        torch.manual_seed(0)
        found.append(fronts[front](rank, recipe))
    return found
