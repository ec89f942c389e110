"""The training of a `Recipe` by Lightning's ranks."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
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
from tests.emulator.frameworks import lightning_accelerator
from tests.support.batches import Batches, Places, Stream
from tests.support.cases import ANY_CHECKPOINT
from tests.support.sharded import EPOCHS, Batch, Block, Recipe, Trained
from tests.support.sharded_fits import Double, on_cpus, plain
from tests.support.sharding import flat_options, full_moments, full_state, shard_fully


class Module(pl.LightningModule):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.net = recipe.model()
        self.losses: dict[int, list[float]] = {}
        self.automatic_optimization = not recipe.framework.get("manual")

    def configure_model(self) -> None:
        if self.recipe.api == "fsdp1" or isinstance(self.net, FSDPModule):
            return
        mesh: Any = self.device_mesh
        if self.recipe.team > 1:
            plan: Any = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            for block in self.net.blocks:
                parallelize_module(block, mesh["tensor_parallel"], plan)
        shard_fully(self.net, self.recipe.options, mesh["data_parallel"])

    @property
    def place(self) -> int:
        """This rank's among those that have batches of their own."""
        return self.trainer.global_rank // self.recipe.team

    def train_dataloader(self) -> Any:
        return self._loader(self.recipe.loop == "iterable")

    def val_dataloader(self) -> Any:
        return self._loader(True)

    def _loader(self, iterable: bool) -> Any:
        data = Batches(self.recipe, self.place)
        if iterable:
            return StatefulDataLoader(Stream(data, lambda: self.current_epoch), batch_size=None)
        return StatefulDataLoader(data, batch_size=None, sampler=Places(data, lambda: self.current_epoch))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        (loss,) = self.recipe.losses(self.net, batch, self.place)
        if self.recipe.framework.get("logs"):
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss * self.recipe.window  # by which Lightning divides it

    def on_validation_epoch_start(self) -> None:
        self.losses[self.current_epoch] = []

    def validation_step(self, batch: Batch, _: int) -> None:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses[self.current_epoch].append(loss.item())
        if self.recipe.framework.get("logs"):
            self.log("val", loss, sync_dist=True, batch_size=len(batch[0]))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.recipe.clears == "zero_grad")

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.trainer.model.parameters())  # type: ignore[union-attr]
        if (scheduler := self.recipe.make_scheduler(optimizer)) is None:
            return optimizer
        interval = "epoch" if self.recipe.per_epoch else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


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
        tensor_parallel_size=recipe.team,
        save_distributed_checkpoint=bool(framework.get("in shards")),
        weighting=recipe.weighting,
    )


def _fit(recipe: Recipe, callbacks: list[Any], checkpoint: str | None = None) -> Trained:
    framework = recipe.framework
    module = Module(recipe)
    strategy = _strategy(recipe)
    if framework.get("callback"):
        callbacks = [*callbacks, JoinCallback(weighting=recipe.weighting)]  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator=lightning_accelerator(),
        devices=recipe.world_size * recipe.team,
        strategy=strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=recipe.window,
        gradient_clip_val=recipe.clip or None,
        gradient_clip_algorithm=recipe.clip_by if recipe.clip else None,
        limit_train_batches=recipe.stops or None,
        limit_val_batches=None if recipe.evaluates else 0,
        # What a validation before the training has run, FSDP takes for used.
        num_sanity_val_steps=0 if "unused" in recipe.options else 1,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks and checkpoint is None and framework.get("saves")),
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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


def train_by_lightning(_: int, recipe: Recipe, folder: str) -> list[Trained]:
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
