"""A `Recipe` in a plain loop, with a model that FSDP shards."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

from tests.emulator import place
from tests.needs import has
from tests.support import inside, run
from tests.support.run import Batch, Run
from tests.support.sharded import EPOCHS, Block, Net, Recipe, Trained
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
    if recipe.api == "fsdp2" and recipe.no_sync and recipe.model in STRAYS:
        needed.append("fully_shard's reduction of what the last backward does not come to")
    options = recipe.options
    # An evaluation prefetches for the backward that does not come, and the state is then gathered in another dtype.
    gathers_twice = recipe.model == "skipping" and recipe.evaluation == "same with" and "precision" in options
    kept = options.get("prefetch") == "BACKWARD_POST" and "SHARD_GRAD_OP" in options.get("strategy", "")
    return all(map(has, needed)) and not (gathers_twice and kept)


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
    blocks = [*getattr(model, "blocks", [])]
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


class Training(run.Training):
    """A rank's part of a training."""

    def __init__(self, rank: int, recipe: Recipe) -> None:
        self.rank, self.recipe = rank, recipe
        super().__init__(recipe, shard(recipe.build(), recipe))
        if recipe.api == "fsdp1":
            self.scaler = recipe.make_scaler(ShardedGradScaler)
        self.losses: dict[int, float] = {}

    @property
    def model(self) -> Any:
        return self.net

    @model.setter
    def model(self, model: Any) -> None:
        self.net = model

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.optimizers = [optimizer]

    def joined(self) -> Join:
        recipe = self.recipe
        options: dict[str, Any] = {"may_break": recipe.may_break, "rebalance": recipe.rebalance}
        return Join([self.model, *self.given], weighting=recipe.option, timeout=LIMIT, **options)

    def run_epochs(self) -> Trained:
        recipe = self.recipe
        for epoch in range(recipe.epochs):
            data = recipe.batches(self.rank, epoch)
            self.begin_epoch(epoch)
            with self.joined() as join:
                for step, batch in enumerate(_loop(join, data, recipe)):
                    self.step(epoch, step, batch)
                    if step + 1 == recipe.stops:
                        break
                if recipe.evaluation == "same with":
                    self.losses[epoch] = self.evaluate(self.model, join.batches(data))
            if recipe.evaluation == "another with":
                with self.joined() as join:
                    self.losses[epoch] = self.evaluate(self.model, join.batches(data))
            self.end_epoch()
        return self.trained()

    def trained(self) -> Trained:
        # Of FSDP1 torch makes some up before the first step.
        moments = full_moments(self.model, *self.optimizers) if self.recipe.api == "fsdp2" else {}
        return Trained(full_state(self.model), moments, self.norms, self.losses, self.rates[0])

    def step(self, epoch: int, step: int, batch: Batch) -> None:
        self.begin_step(epoch, step)
        with self.micro_batch(self.recipe.ends_window(epoch, step)):
            for number, loss in enumerate(self.losses_of(epoch, step, batch)):
                if self.recipe.clear == "between" and number == 0 and self.recipe.begins_window(epoch, step):
                    self.clear(step)
                self.backward(loss)
        self.end_step(epoch, step)

    def begin_step(self, epoch: int, step: int) -> None:
        if self.recipe.clear == "between":
            self.recipe.before_step(self.model, epoch, step)
        else:
            super().begin_step(epoch, step)

    def clear(self, step: int) -> None:
        for optimizer in self.recipe.in_turn_to_clear(self.optimizers, step):
            clear(self.recipe.clears, self.model, optimizer)

    def losses_of(self, epoch: int, step: int, batch: Batch) -> Iterable[Tensor]:
        return self.recipe.losses(self.model, batch, self.rank, epoch, step)

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

    def clip(self) -> float:
        return clip(self.model, self.recipe.clip or 0.0)


def _loop(join: Join, data: list[Batch], recipe: Recipe) -> Iterable[Batch]:
    if recipe.loop == "plain":
        return data
    return join.batches(_without_length(data) if recipe.iterable else data)


def _without_length(data: list[Batch]) -> Iterator[Batch]:
    yield from data


def train(rank: int, recipes: list[Recipe]) -> list[Trained]:
    """Train by each recipe in turn."""
    found = []
    for recipe in recipes:
        try:
            found.append(Training(rank, recipe).run_epochs())
        except Exception as error:
            raise RuntimeError(f"in {recipe}") from error
        dist.barrier()
    return found


class Padded(Training):
    """What FSDP itself does: a rank that has run out of batches goes on with one whose losses count nothing."""

    def run_epochs(self) -> Trained:
        recipe = self.recipe
        longest = max(recipe.lengths)
        for epoch in range(EPOCHS):
            mine = recipe.batches(self.rank, epoch)
            # Its path through the model is that of the others.
            stand_ins = Recipe((longest, longest), dtype=recipe.dtype).batches(0, epoch)
            self.begin_epoch(epoch)
            for step, batches in enumerate(recipe.steps(epoch)):
                self.counts = recipe.world_size * recipe.weights(batches, epoch).get(self.rank, 0.0)
                self.step(epoch, step, batches.get(self.rank, stand_ins[step]))
            if recipe.evaluation:
                scores = [self.evaluate(self.model, [batch]) for batch in [*mine, *stand_ins[len(mine) :]]]
                self.losses[epoch] = sum(scores[: len(mine)])
            self.end_epoch()
        return self.trained()

    def update(self, epoch: int, step: int) -> None:
        own = inside.total_norm()

        def whole_norm(*args: Any) -> Any:
            norm = own(*args)  # to each rank's part of which older torch adds its epsilon
            return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)

        second = self.recipe.api == "fsdp2"
        with inside.with_total_norm(whole_norm) if second else nullcontext():
            super().update(epoch, step)

    def losses_of(self, epoch: int, step: int, batch: Batch) -> Iterable[Tensor]:
        return (self.counts * loss for loss in super().losses_of(epoch, step, batch))


def train_padded(rank: int, recipes: list[Recipe]) -> list[Trained]:
    return [Padded(rank, recipe).run_epochs() for recipe in recipes]


@dataclass(frozen=True)
class _Plain(Recipe):
    """A recipe that does a run on the run's own model and batches."""

    lengths_in, batch, evaluated, ends_window = Run.lengths_in, Run.batch, Run.evaluated, Run.ends_window
    length, build, optimizers, make_optimizer = Run.length, Run.build, Run.optimizers, Run.make_optimizer


def parameters(rank: int, run: Run, api: str = "fsdp2") -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    return [*Training(rank, _Plain(**vars(run), api=api)).run_epochs().state.values()]
