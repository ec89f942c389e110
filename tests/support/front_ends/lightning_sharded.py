"""A `Recipe` by Lightning's Trainer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_join import FSDPJoinStrategy, JoinCallback, ModelParallelJoinStrategy
from tests.support.batches import loader_of
from tests.support.front_ends import lightning
from tests.support.front_ends.lightning import ANY_CHECKPOINT, build_trainer
from tests.support.front_ends.sharded import flat_options, full_moments, full_state, shard_fully
from tests.support.run import Batch
from tests.support.sharded import Block, Recipe, Trained
from tests.support.sharded_fits import Double, on_cpus, plain


class Module(lightning.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)  # type: ignore[arg-type]
        self.recipe = recipe
        self.losses: dict[int, float] = {}
        self.automatic_optimization = not recipe.framework.get("manual")

    def configure_model(self) -> None:
        if self.recipe.api == "fsdp1" or isinstance(self.net, FSDPModule):
            return
        mesh: Any = self.device_mesh
        if self.recipe.peers > 1:
            plan: Any = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            for block in self.net.blocks:
                parallelize_module(block, mesh["tensor_parallel"], plan)
        shard_fully(self.net, self.recipe.options, mesh["data_parallel"])

    def train_dataloader(self) -> Any:
        return self._loader(self.recipe.iterable)

    def val_dataloader(self) -> Any:
        return self._loader(True)

    def _loader(self, iterable: bool) -> Any:
        return loader_of(self.recipe, self.data_rank, lambda: self.current_epoch, iterable, StatefulDataLoader)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch, batch_idx)
        if self.recipe.framework.get("logs"):
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.losses[self.current_epoch] = 0.0

    def validation_step(self, batch: Batch, _: int) -> None:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses[self.current_epoch] += loss.item()
        if self.recipe.framework.get("logs"):
            self.log("val", loss, sync_dist=True, batch_size=len(batch[0]))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.recipe.clears == "zero_grad")

    @property
    def whole(self) -> Any:
        return self.trainer.model


def _strategy(recipe: Recipe) -> Any:
    framework = recipe.framework
    if recipe.api == "fsdp1":
        saves: dict[str, Any] = {"state_dict_type": "sharded" if framework.get("in shards") else "full"}
        if framework.get("policy"):
            saves["activation_checkpointing_policy"] = {Block}
        return FSDPJoinStrategy(
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            weighting=recipe.weighting,
            precision_plugin=Double("32-true"),
            **saves,
            **flat_options(recipe.options),
        )
    return ModelParallelJoinStrategy(
        data_parallel_size=recipe.world_size,
        tensor_parallel_size=recipe.peers,
        save_distributed_checkpoint=bool(framework.get("in shards")),
        weighting=recipe.weighting,
    )


def _fit(recipe: Recipe, callbacks: list[Any], checkpoint: str | None = None) -> Trained:
    framework = recipe.framework
    module = Module(recipe)
    strategy = _strategy(recipe)
    if framework.get("callback"):
        callbacks = [*callbacks, JoinCallback(weighting=recipe.weighting)]  # type: ignore[arg-type]
    trainer = build_trainer(
        recipe,
        strategy=strategy,
        limit_val_batches=None if recipe.evaluation else 0,
        # What a validation before the training has run, FSDP takes for used.
        num_sanity_val_steps=0 if "unused" in recipe.options else 1,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks and checkpoint is None and framework.get("saves")),
    )
    if framework.get("callback"):
        plain(strategy)
    trainer.fit(module, ckpt_path=checkpoint, **ANY_CHECKPOINT)
    optimizer = trainer.optimizers[0]
    whole: Any = trainer.strategy.model if recipe.api == "fsdp1" else module.net
    state, moments = full_state(whole), full_moments(whole, optimizer)
    return Trained(_short(state), _short(moments), {}, module.losses, optimizer.param_groups[0]["lr"])


def _short(found: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("net."): value for name, value in found.items()}


def train(_: int, recipe: Recipe, folder: str) -> list[Trained]:
    """Fit, and if the recipe says so once more, from a checkpoint that was written at one of the steps."""
    torch.manual_seed(0)
    step = recipe.framework.get("saves", 0)
    with on_cpus():
        if not step:
            return [_fit(recipe, [])]
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
        found = [_fit(recipe, [saving])]
        dist.barrier()
        if (path := Path(folder) / f"step={step}.ckpt").exists():
            found.append(_fit(recipe, [], str(path)))
        return found
