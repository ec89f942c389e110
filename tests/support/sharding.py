"""The training of a `Recipe` by the ranks of a sharded model, in a plain loop."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from tests.emulator import place
from tests.needs import has
from tests.support import inside
from tests.support.sharded import EPOCHS, Batch, Block, Net, Recipe, Step, Trained, weights
from tests.support.sharded_search import STRAYS
from torch_join import Join

LIMIT = timedelta(seconds=60)
# How long a run may take, and a collective: on busy cores to import FSDP, and dynamo with it, takes half a minute.
PATIENCE: dict[str, Any] = {"deadline": 180.0, "timeout": 60.0}


def shard(net: Net, recipe: Recipe) -> Any:
    """Shard a model over all ranks, each block by itself."""
    return (shard_fully if recipe.api == "fsdp2" else _wrap)(net, recipe.options)


def fits_torch(recipe: Recipe) -> bool:
    """Whether FSDP itself can do it, on even inputs."""
    needed = []
    if recipe.options.get("unused"):
        needed.append("FSDPModule.set_reduce_scatter_unused_params")
    if recipe.api == "fsdp2" and recipe.no_sync and recipe.kind in STRAYS:
        needed.append("fully_shard's reduction of what the last backward does not come to")
    return all(map(has, needed))


def _mesh(shape: tuple[int, ...]) -> Any:
    return init_device_mesh(place().type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def shard_fully(net: Net, options: dict[str, Any], mesh: Any = None) -> Any:
    """Shard by `fully_shard`, where the options have no mesh over this one."""
    known: dict[str, Any] = {"mesh": _mesh(options["mesh"]) if "mesh" in options else mesh}
    if "precision" in options:
        known["mp_policy"] = MixedPrecisionPolicy(**options["precision"])
    if "reshard" in options:
        known["reshard_after_forward"] = options["reshard"]
    if options.get("offload"):
        known["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for module in (each for each in net.modules() if isinstance(each, Block)):
        fully_shard(module, **known)
    model: Any = fully_shard(net, **known)
    tune(model, options)
    return model


def tune(model: Any, options: dict[str, Any]) -> None:
    """Set what `fully_shard` has methods for."""
    blocks = [*model.blocks]
    for index, block in enumerate(blocks) if options.get("prefetch") else []:
        block.set_modules_to_forward_prefetch(blocks[index + 1 :])
        block.set_modules_to_backward_prefetch(blocks[:index][::-1])
    if options.get("unused"):
        model.set_reduce_scatter_unused_params(True)
    for block in blocks if options.get("compiled") else []:
        block.compile(backend=options["compiled"])


def flat_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what of the options `FullyShardedDataParallel` is made with."""
    known: dict[str, Any] = {"use_orig_params": options.get("original", True)}
    if "strategy" in options:
        known["sharding_strategy"] = ShardingStrategy[options["strategy"]]
    if "mesh" in options:
        known["device_mesh"] = _mesh(options["mesh"])
    if "precision" in options:
        known["mixed_precision"] = MixedPrecision(**options["precision"])
    if "prefetch" in options:
        known["forward_prefetch"] = True
        known["backward_prefetch"] = BackwardPrefetch[options["prefetch"]] if options["prefetch"] else None
    if options.get("offload"):
        known["cpu_offload"] = CPUOffload(True)
    return known


def _wrap(net: Net, options: dict[str, Any]) -> Any:
    for block in net.blocks if options.get("compiled") else []:
        block.compile(backend=options["compiled"])
    policy = ModuleWrapPolicy({Block})
    return FSDP(net, device_id=place(), auto_wrap_policy=policy, **flat_options(options))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor; all ranks call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather a model; all ranks call this."""
    if not isinstance(model, FSDP):
        return {name: whole(value) for name, value in model.state_dict().items()}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _as_placed(value: Any, parameter: Tensor) -> Any:
    """Return a parameter's state, which lies as the parameter does.

    Older torch (2.6) forgets, in what some optimizers compute, how one dimension lies that is sharded twice: its own
    full state dicts have the rows in another order then.
    """
    if not (isinstance(value, DTensor) and isinstance(parameter, DTensor)) or value.shape != parameter.shape:
        return value
    mesh, placements, local = parameter.device_mesh, parameter.placements, value.to_local()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def full_moments(model: nn.Module, *optimizers: Any) -> dict[str, Tensor]:
    """Gather optimizers' states; all ranks call this."""
    found: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        if isinstance(model, FSDP):
            found |= get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
        else:
            for name, p in model.named_parameters():
                found[name] = {key: _as_placed(value, p) for key, value in optimizer.state.get(p, {}).items()}
    return {
        f"{name.replace('_checkpoint_wrapped_module.', '')}.{key}": whole(value)
        for name, state in found.items()
        for key, value in sorted(state.items())
        if isinstance(value, Tensor)
    }


def clear(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clear all gradients in one of the ways in which people do."""
    if how == "zero_grad":
        optimizer.zero_grad()
    elif how == "zero_grad to zero":
        optimizer.zero_grad(set_to_none=False)
    elif how == "model.zero_grad":
        model.zero_grad()
    for p in model.parameters():
        if how == "None":
            p.grad = None
        elif p.grad is not None and how == "data.zero_":
            p.grad.data.zero_()
        elif p.grad is not None and how == "zero_":
            p.grad.zero_()
        elif p.grad is not None and how == "zeros":
            p.grad = torch.zeros_like(p.grad)


def clip(model: Any, limit: float) -> float:
    """Clip the gradients, and return what their norm was."""
    norm = (
        model.clip_grad_norm_(limit) if isinstance(model, FSDP) else nn.utils.clip_grad_norm_(model.parameters(), limit)
    )
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class Training:
    """A rank's part of a training."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        self.rank, self.recipe = rank, recipe
        self.model = shard(recipe.model(), recipe)
        self.optimizer = recipe.make_optimizer(self.model.parameters())
        self.scheduler = recipe.make_scheduler(self.optimizer)
        self.scaler: Any = None
        if recipe.scaled:
            make = ShardedGradScaler if recipe.api == "fsdp1" else torch.amp.GradScaler
            self.scaler = make(place().type, init_scale=recipe.scaled, growth_interval=2)
        self.norms: dict[Step, float] = {}
        self.losses: dict[int, list[float]] = {}

    def joined(self) -> Join:
        things = [self.model, self.optimizer, self.scheduler, self.scaler]
        recipe = self.recipe
        return Join(
            [thing for thing in things if thing is not None],
            weighting=recipe.weighting,  # type: ignore[arg-type]
            may_break=recipe.may_break,
            timeout=LIMIT,
        )

    def run(self) -> Trained:
        recipe = self.recipe
        for epoch in range(EPOCHS):
            data = recipe.batches(epoch, self.rank)
            with self.joined() as join:
                for step, batch in enumerate(_loop(join, data, recipe.loop)):
                    self.step(epoch, step, batch)
                    if step + 1 == recipe.stops:
                        break
                if recipe.evaluates == "same with":
                    self.losses[epoch] = self.evaluate(join.batches(data))
            if recipe.evaluates == "another with":
                with self.joined() as join:
                    self.losses[epoch] = self.evaluate(join.batches(data))
        return self.trained()

    def trained(self) -> Trained:
        # Of FSDP1 torch makes some up before the first step.
        moments = full_moments(self.model, self.optimizer) if self.recipe.api == "fsdp2" else {}
        return Trained(full_state(self.model), moments, self.norms, self.losses, self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> list[float]:
        self.model.eval()
        found = [functional.mse_loss(self.model(x), y).item() for x, y in batches]
        self.model.train()
        return found

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        recipe = self.recipe
        begins, ends = recipe.begins_window(epoch, step), recipe.ends_window(epoch, step)
        if begins and recipe.where == "before":
            clear(recipe.clears, self.model, self.optimizer)
        with self.micro_batch(ends):
            for number, loss in enumerate(self.losses_of(batch)):
                if begins and number == 0 and recipe.where == "between":
                    clear(recipe.clears, self.model, self.optimizer)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if ends:
            self.update(epoch, step)
            if recipe.where == "after":
                clear(recipe.clears, self.model, self.optimizer)

    def losses_of(self, batch: Batch) -> Iterable[Tensor]:
        return self.recipe.losses(self.model, batch, self.rank)

    def micro_batch(self, ends: bool) -> AbstractContextManager[Any]:
        recipe, model = self.recipe, self.model
        if recipe.no_all_reduce:
            model.set_requires_all_reduce(ends)
        if recipe.options.get("reshard backward") is False:
            model.set_reshard_after_backward(ends)
        if recipe.no_sync and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(ends)
        elif recipe.no_sync and not ends:
            return model.no_sync()  # type: ignore[no-any-return]
        return nullcontext()

    def update(self, epoch: int, step: int) -> None:
        if self.recipe.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.norms[epoch, step] = clip(self.model, self.recipe.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def _loop(join: Join, data: list[Batch], how: str) -> Iterable[Batch]:
    if how == "plain":
        return data
    if how == "iterable":
        return join.batches(_without_length(data))
    return join.batches(data)


def _without_length(data: list[Batch]) -> Iterator[Batch]:
    yield from data


def train(rank: int, recipes: list[Recipe]) -> list[Trained]:
    """Train by each recipe in turn."""
    found = []
    for recipe in recipes:
        try:
            found.append(Training(rank, recipe).run())
        except Exception as error:
            raise RuntimeError(f"in {recipe}") from error
        dist.barrier()
    return found


class Padded(Training):
    """What FSDP itself does: a rank that has run out of batches goes on with one whose losses count nothing."""

    def run(self) -> Trained:
        recipe = self.recipe
        longest = max(recipe.lengths)
        for epoch in range(EPOCHS):
            data = [recipe.batches(epoch, rank) for rank in range(recipe.world_size)]
            # Its path through the model is that of the others.
            stand_ins = Recipe((longest, longest), dtype=recipe.dtype).batches(epoch, 0)
            for step in range(recipe.stops or longest):
                rows = {rank: len(mine[step][0]) for rank, mine in enumerate(data) if step < len(mine)}
                counts = weights(recipe.weighting, recipe.world_size, rows)
                is_here = self.rank in counts
                self.counts = recipe.world_size * counts.get(self.rank, 0.0)
                self.step(epoch, step, data[self.rank][step] if is_here else stand_ins[step])
            if recipe.evaluates:
                mine = data[self.rank]
                found = self.evaluate([*mine, *stand_ins[len(mine) :]])
                self.losses[epoch] = found[: len(mine)]
        return self.trained()

    def update(self, epoch: int, step: int) -> None:
        own = inside.total_norm()

        def whole_norm(*args: Any) -> Any:
            norm = own(*args)  # to each rank's part of which older torch adds its epsilon
            return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)

        second = self.recipe.api == "fsdp2"
        with inside.with_total_norm(whole_norm) if second else nullcontext():
            super().update(epoch, step)

    def losses_of(self, batch: Batch) -> Iterable[Tensor]:
        return (self.counts * loss for loss in super().losses_of(batch))


def train_padded(rank: int, recipes: list[Recipe]) -> list[Trained]:
    return [Padded(rank, recipe).run() for recipe in recipes]
