"""A `Run` by a script with Accelerate."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate_join import Accelerator, join_uneven_inputs
from tests.emulator import place
from tests.emulator.frameworks import accelerate_options
from tests.support import run as core
from tests.support.batches import loader_of
from tests.support.run import CLASSES, FEATURES, Batch, Expected, Run, Steps, whole_state

Seen = list[list[list[int]]]  # by epoch and step: the samples' numbers


@dataclass(frozen=True)
class Script(Run):
    """A run on numbered samples: so many of them, which Accelerate shards, or each rank's own, in `lengths` batches."""

    optimizer: str = "adamw"
    processes: int = 2  # where there are no lengths
    samples: int = 0
    batch_size: int = 3
    step_scheduler_with_optimizer: bool = True
    loader: dict[str, Any] = field(default_factory=dict)  # of Accelerate's DataLoaderConfiguration
    even: int = 0  # epochs on even inputs in the end, in no context
    own_function: bool = False  # join_uneven_inputs(accelerator) for Accelerate's own class

    @property
    def world_size(self) -> int:
        return len(self.lengths) or self.processes

    def own_samples(self, rank: int) -> TensorDataset:
        """Return a rank's shard, whose last batch is not full."""
        return dataset(self.batch_size * self.lengths[rank] - (self.lengths[rank] > 1), seed=1 + rank)

    def even_samples(self) -> TensorDataset:
        return dataset(4 * self.batch_size * self.world_size, 9)

    def all_samples(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return them by number."""
        sets = [dataset(self.samples)] if self.samples else []
        sets += [*map(self.own_samples, range(len(self.lengths))), self.even_samples()]
        return {int(number): (x.to(self.dtype), y.to(self.dtype)) for one in sets for number, x, y in one}

    def weights(self, batches: dict[int, Batch], epoch: int) -> dict[int, float]:
        run = self if epoch < self.epochs else self.but(weighting="world")
        return super(Script, run).weights(batches, epoch)

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        numbers, x, y = batch
        x, y = x.to(self.dtype), y.to(self.dtype)
        y = torch.where(numbers[:, None] % 9 == 4, torch.inf, y) if self.scaler else y
        return super().losses(model, (x, y), rank, epoch, step)

    def scheduled(self, when: str, synced: bool, skipped: bool) -> int:
        if self.scheduler != when or (self.step_scheduler_with_optimizer and (skipped or not synced)):
            return 0
        splits = self.loader.get("split_batches", False)
        return self.world_size if self.step_scheduler_with_optimizer and not splits else 1

    def steps_scheduler(self, synced: bool) -> bool:
        """Whether the script calls its scheduler's `step`."""
        return self.scheduler == "step"

    def loaders(self, rank: int, epoch: Any) -> tuple[Any, Any]:
        """Return what is given to `prepare`, and an even one; `epoch` tells which one it is."""
        return make_loader(self, rank), DataLoader(self.even_samples(), self.batch_size)


@dataclass(frozen=True)
class OnOwnBatches(Script):
    """A script that does a run on the run's own batches."""

    step_scheduler_with_optimizer: bool = False
    weights = Run.weights
    losses = Run.losses
    scheduled = Run.scheduled

    def steps_scheduler(self, synced: bool) -> bool:
        return bool(self.scheduled("step", synced, False))

    def loaders(self, rank: int, epoch: Any) -> tuple[Any, Any]:
        loader = loader_of(self, rank, epoch, self.iterable, DataLoaderShard)
        loader._is_accelerate_prepared = True
        return loader, loader


def script_of(run: Run) -> Script:
    return run if isinstance(run, Script) else OnOwnBatches(**vars(run))


class Stream(IterableDataset[Any]):
    def __init__(self, data: Dataset[Any], length: int) -> None:
        self.data = data
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(self.length))


def dataset(size: int, seed: int = 0) -> TensorDataset:
    """Return samples that know their number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(size, CLASSES, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(size) + 1000 * seed, x, y)


def plain(state: Any) -> Any:
    """Return a state dict with lists in place of tensors, to be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, Tensor) else state


class Lines(GeneralTracker):
    """Writes a line for each log."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Any:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        with open(self.path, "a") as file:
            file.write(f"{step} {values['x']}\n")


@contextmanager
def accelerator_of(rank: int, kind: type[accelerate.Accelerator] = Accelerator, **kwargs: Any) -> Iterator[Any]:
    """An accelerator for the group that this worker is in; leaves no trace of it in the process."""
    size = str(dist.get_world_size()) if dist.is_initialized() else "1"
    # Accelerate gives it to DDP for the number of the GPU, which ranks may share.
    local = place().index if place().type == "cuda" else rank
    names = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": size}
    if not dist.is_initialized():
        names = {"LOCAL_RANK": "-1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = dict(os.environ)  # of which Accelerate sets more
    os.environ.update(names)
    try:
        yield kind(**accelerate_options(), **kwargs)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def accelerator_for(rank: int, script: Script) -> AbstractContextManager[Any]:
    return accelerator_of(
        rank,
        accelerate.Accelerator if script.own_function else Accelerator,
        gradient_accumulation_steps=script.accumulate,
        step_scheduler_with_optimizer=script.step_scheduler_with_optimizer,
        dataloader_config=DataLoaderConfiguration(**{"use_seedable_sampler": True, **script.loader}),
    )


def make_loader(script: Script, rank: int) -> DataLoader[Any]:
    """Return a loader of all samples, to be sharded, or of this rank's own."""
    shuffle = not script.iterable
    if not script.lengths:
        data: Any = dataset(script.samples)
        if script.iterable:
            data, shuffle = Stream(data, script.samples), False
        return DataLoader(data, script.batch_size, shuffle=shuffle)
    data = script.own_samples(rank)
    if script.iterable:
        data = Stream(data, len(data))
    kwargs: dict[str, Any] = {"shuffle": True, "generator": torch.Generator()} if shuffle and len(data) else {}
    own: Any = DataLoaderShard(data, batch_size=script.batch_size, **kwargs)
    own._is_accelerate_prepared = True  # Accelerate must not shard it again
    return own  # type: ignore[no-any-return]


@dataclass
class Trained:
    """What a rank has in the end; `gathered` are numbers of samples from `gather_for_metrics`, by epoch."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    same: list[Any]  # what else must be the same bits on all ranks
    seen: Seen = field(default_factory=list)
    ends: list[list[bool]] = field(default_factory=list)  # by epoch and step: whether it was known to be the last
    gathered: list[list[int]] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights.values()]


class Session:
    """An accelerator, and what it has prepared."""

    def __init__(self, accelerator: Any, script: Script, rank: int) -> None:
        self.accelerator, self.script, self.rank, self.epoch = accelerator, script, rank, 0
        self.trained = Trained({}, {}, [])
        torch.manual_seed(5)
        self.prepare()

    def prepare(self) -> None:
        script, accelerator = self.script, self.accelerator
        if script.scaler:
            accelerator.scaler = script.make_scaler()
        self.net = script.build()
        optimizer: Any = script.make_optimizer(self.net.parameters(), sharded=True)
        scheduler = self.make_scheduler(optimizer)
        self.model = accelerator.prepare(self.net)
        self.optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
        loaders = script.loaders(self.rank, lambda: self.epoch)
        self.loader, self.even, self.scheduler = accelerator.prepare(*loaders, scheduler)

    def make_scheduler(self, optimizer: Any) -> Any:
        """Return one in any case."""
        return self.script.but(scheduler=self.script.scheduler or "step").make_scheduler(optimizer)

    def step(self, batch: Batch, step: int = 0) -> None:
        script, accelerator = self.script, self.accelerator
        with accelerator.accumulate(self.model):
            self.is_last = accelerator.gradient_state.end_of_dataloader
            for loss in script.losses(self.model, batch, self.rank, self.epoch, step):
                accelerator.backward(loss)
            if accelerator.sync_gradients and script.scaler:
                accelerator.scaler.unscale_(self.optimizer.optimizer)
            if accelerator.sync_gradients and script.clip is not None:
                accelerator.clip_grad_norm_(self.model.parameters(), script.clip)
            self.optimizer.step()
            if script.steps_scheduler(accelerator.sync_gradients):
                self.scheduler.step()
            self.optimizer.zero_grad()

    def run_epoch(self, batches: Any) -> None:
        trained = self.trained
        trained.seen.append([])
        trained.ends.append([])
        for step, batch in enumerate(batches):
            trained.seen[-1].append(batch[0].tolist())
            self.step(batch, step)
            trained.ends[-1].append(self.is_last)
        if self.script.scheduler == "epoch":
            self.scheduler.step()

    def whole_optimizer(self) -> Any:
        return plain(whole_state(self.rank, self.optimizer.optimizer))

    def state(self) -> Trained:
        """Return what there is; all ranks call this."""
        weights = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        return Trained(weights, {}, [self.whole_optimizer(), *self.same()])

    def same(self) -> list[Any]:
        accelerator, scaler = self.accelerator, self.accelerator.scaler
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        found = [plain(groups), plain(self.scheduler.state_dict()), accelerator.step, accelerator.sync_gradients]
        return [*found, self.loader.iteration, scaler.state_dict() if scaler is not None else None]

    def evaluate(self) -> None:
        """Nothing, but for scripts that do."""

    def run(self) -> Trained:
        script, accelerator = self.script, self.accelerator
        options: dict[str, Any] = {"even_batches": False, "weighting": script.option, "may_break": script.may_break}
        options |= {"rebalance": script.rebalance} if script.rebalance else {}
        options |= {"placeholder": script.placeholder}
        if script.own_function:
            context = join_uneven_inputs(accelerator, [self.model], **options)
        else:
            context = accelerator.join_uneven_inputs(**options)
        with context:
            for self.epoch in range(script.epochs):
                self.run_epoch(self.loader)
                self.evaluate()
        for _ in range(script.even):
            self.run_epoch(self.even)
        found, noted = self.state(), self.trained
        return Trained(found.weights, found.moments, found.same, noted.seen, noted.ends, noted.gathered)


def train(rank: int, run: Run) -> Trained:
    script = script_of(run)
    with accelerator_for(rank, script) as accelerator:
        return Session(accelerator, script, rank).run()


def expected_of(script: Script, seen: Sequence[Seen]) -> Expected:
    """Train one process on what the ranks saw."""
    samples = script.all_samples()

    def batch_of(numbers: list[int]) -> Batch:
        return (torch.tensor(numbers), *map(torch.stack, zip(*(samples[n] for n in numbers), strict=True)))

    def steps(epoch: int) -> Steps:
        mine = [each[epoch] for each in seen]
        longest = max(map(len, mine))
        return [{r: batch_of(its[step]) for r, its in enumerate(mine) if step < len(its)} for step in range(longest)]

    return core.reference(script, steps, len(seen[0]))


def parameters(rank: int, run: Run) -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    return train(rank, run).parameters
