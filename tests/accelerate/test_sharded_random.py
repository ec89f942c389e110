"""A random search over Accelerate's trainings of sharded models: each ends as one process does."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from accelerate_join import join_uneven_inputs
from tests.needs import has
from tests.support.batches import loader_of
from tests.support.front_ends.accelerate_sharded import Sharded, possible, sharding_accelerator
from tests.support.front_ends.sharded import Training, full_moments, full_state, tune
from tests.support.many import seeds
from tests.support.run import Batch
from tests.support.sharded import EPOCHS, Recipe, Trained
from tests.support.sharded_search import draw_for_accelerate
from tests.support.sharded_verdict import NOTHING, check, promised
from tests.support.workers import Workers

# torch says so where a model that recomputes by reentrant checkpoints is evaluated.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Accelerated(Training):
    """A rank's part of a training, with what an accelerator has prepared."""

    def __init__(self, accelerator: Any, rank: int, recipe: Recipe) -> None:
        self.accelerator, self.rank, self.recipe, self.run = accelerator, rank, recipe, recipe
        self.epoch = self.steps = 0
        self.scaler, self.norms, self.losses = None, {}, {}
        scaler = torch.amp.GradScaler if recipe.api == "fsdp2" else ShardedGradScaler
        if recipe.scaler:
            accelerator.scaler = recipe.make_scaler(scaler)
        net: Any = recipe.build()
        if not recipe.options.get("original", True):  # the optimizer is of flat parameters
            net = accelerator.prepare(net)
        optimizers = recipe.optimizers(net)
        # Accelerate steps a scheduler that goes with the optimizer once for each rank.
        times = recipe.world_size if recipe.framework["scheduler"] == "with optimizer" else 1
        schedulers = [made for each in optimizers if (made := recipe.make_scheduler(each, times)) is not None]
        self.model, *made = accelerator.prepare(net, *optimizers, *schedulers)
        self.optimizers, self.schedulers = made[: len(optimizers)], made[len(optimizers) :]
        if recipe.api == "fsdp2":
            tune(self.model, recipe.options)
        self.loader, self.others = self._loader(recipe.iterable), self._loader(False)

    def _loader(self, iterable: bool) -> Any:
        loader = loader_of(self.recipe, self.rank, lambda: self.epoch, iterable, DataLoaderShard)
        loader._is_accelerate_prepared = True
        return self.accelerator.prepare(loader)

    def joining(self) -> AbstractContextManager[Any]:
        recipe = self.recipe
        options: dict[str, Any] = {"weighting": recipe.weighting, "may_break": recipe.may_break}
        if recipe.framework["loop"] == "function":
            return join_uneven_inputs(self.accelerator, [self.model], **options)
        made: AbstractContextManager[Any] = self.accelerator.join_uneven_inputs(**options)
        return made

    def run_from(self, epoch: int, first: int, folder: str = "") -> Trained:
        """Train from a step on, and save where the recipe says so if there is a folder."""
        recipe, loop = self.recipe, self.recipe.framework["loop"]
        around_all = loop in ("context", "function")
        with self.joining() if around_all else nullcontext():
            for self.epoch in range(epoch, EPOCHS):
                with self.joining() if loop == "each epoch" else nullcontext():
                    self.run_epoch(first if self.epoch == epoch else 0, folder)
                    if recipe.evaluation == "same with":
                        self.losses[self.epoch] = self.evaluate(self.model, self._batches(self.others))
                if recipe.evaluation == "another with":
                    with nullcontext() if around_all or loop == "join_batches" else self.joining():
                        self.losses[self.epoch] = self.evaluate(self.model, self._batches(self.others))
        if recipe.stops and loop == "join_batches":  # the last loop's context ends with the next one
            for _ in self._batches([]):
                pass
        return self.trained()

    def _batches(self, loader: Any) -> Any:
        if self.recipe.framework["loop"] != "join_batches":
            return loader
        return self.accelerator.join_batches(loader, weighting=self.recipe.weighting, may_break=self.recipe.may_break)

    def run_epoch(self, first: int, folder: str) -> None:
        recipe = self.recipe
        loader = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for step, batch in enumerate(self._batches(loader), first):
            self.step(self.epoch, step, batch)
            if folder and recipe.framework.get("saves") == (self.epoch, step):
                self.accelerator.save_state(folder)
            if step + 1 == recipe.stops:
                break
        if recipe.scheduler == "epoch":
            for scheduler in self.schedulers:
                scheduler.step()

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        recipe, accelerator = self.recipe, self.accelerator
        with accelerator.accumulate(self.model):
            for loss in self.losses_of(epoch, step, batch):
                accelerator.backward(loss)
            if accelerator.sync_gradients and recipe.clip:
                self.norms[epoch, step] = self.clip()
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in [] if recipe.scheduler == "epoch" else self.schedulers:
                if accelerator.sync_gradients or recipe.framework["scheduler"] == "with optimizer":
                    scheduler.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=recipe.clears == "zero_grad")

    def clip(self) -> float:
        for optimizer in self.optimizers if self.recipe.scaler else ():
            self.accelerator.scaler.unscale_(optimizer.optimizer)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def trained(self) -> Trained:
        inner = [each.optimizer for each in self.optimizers]
        state, moments = full_state(self.model), full_moments(self.model, *inner)
        return Trained(state, moments, dict(self.norms), dict(self.losses), inner[0].param_groups[0]["lr"])


def _script(recipe: Recipe) -> Sharded:
    """Return what an accelerator is made of."""
    options = recipe.options
    plugin: dict[str, Any] = {"transformer_cls_names_to_wrap": ["Block"]}
    if recipe.framework["policy"]:
        plugin["activation_checkpointing"] = True
    if recipe.api == "fsdp1":
        plugin["use_orig_params"] = options.get("original", True)
        plugin["sharding_strategy"] = options.get("strategy", "FULL_SHARD")
        if "prefetch" in options:
            plugin |= {"forward_prefetch": True, "backward_prefetch": options["prefetch"]}
    else:
        plugin["reshard_after_forward"] = options.get("reshard", True)
        if options.get("offload"):
            plugin["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)
    mesh = dict(zip(("dp_replicate_size", "dp_shard_size"), options.get("mesh", ()), strict=False))
    return Sharded(
        processes=recipe.world_size,
        version=1 if recipe.api == "fsdp1" else 2,
        accumulate=recipe.accumulate,
        step_scheduler_with_optimizer=recipe.framework["scheduler"] == "with optimizer",
        sync_each_batch=not recipe.no_sync,
        sync_with_dataloader=recipe.rest != "goes on",
        plugin=plugin,
        mesh=mesh,
    )


def train_by_accelerate(rank: int, recipe: Recipe, folder: str) -> list[Trained]:
    """Train, and if a checkpoint can be gone on from, once more from there."""
    torch.manual_seed(0)
    with sharding_accelerator(rank, _script(recipe)) as accelerator:
        training = Accelerated(accelerator, rank, recipe)
        epoch, step = recipe.framework.get("saves", (0, 0))
        saves = "saves" in recipe.framework and recipe.ends_window(epoch, step)
        if recipe.optimizer == "plain":
            saves = saves and has("Accelerate's loading of a sharded optimizer without a state")
        found = [training.run_from(0, 0, folder if saves else "")]
        if saves and not (recipe.stops and step + 1 >= recipe.stops):
            accelerator.load_state(folder)
            training.norms, training.losses = {}, {}
            found.append(training.run_from(epoch, step + 1))
        return found


@seeds(range(2))
def test_a_few(workers: Workers, seed: int, tmp_path: Path) -> None:
    recipe = draw_for_accelerate(seed)
    if recipe.framework["loop"] == "join_batches" and promised(recipe) != NOTHING:
        # There an error outside of the loop, of a process that goes on, looks like a `break` to the others.
        recipe = recipe.but(framework={**recipe.framework, "loop": "each epoch"})
    possible(_script(recipe))
    check(workers, recipe, train_by_accelerate, recipe, str(tmp_path))
