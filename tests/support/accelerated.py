"""One Accelerate script, described once, done twice: by several processes and by one plain one.

The reference knows nothing of this project nor of Accelerate: it gets the samples that each rank saw at each
step, and applies the formulas of the weightings to them in float64.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate_join import Accelerator, join_uneven_inputs
from tests.emulator import place
from tests.emulator.frameworks import accelerate_options

FEATURES, CLASSES = 4, 3


@dataclass(frozen=True)
class Script:
    """What is trained, and how.

    `samples` is the size of a dataset that Accelerate shards; `lengths` the number of batches by rank where the
    user has done that.
    """

    world_size: int = 2
    samples: int = 0
    lengths: Sequence[int] = ()
    batch_size: int = 3
    epochs: int = 3
    optimizer: str = "adamw"
    weighting: str = "world"
    accumulate: int = 1
    clip: float | None = None
    scheduler: str | None = None  # "step" in each step, "epoch" after each epoch
    step_scheduler_with_optimizer: bool = True
    scaler: bool = False  # a GradScaler, for which some samples overflow
    norm: bool = False
    loader: dict[str, Any] = field(default_factory=dict)  # of Accelerate's DataLoaderConfiguration
    iterable: bool = False  # without a length
    even: int = 0  # epochs on even inputs in the end, in no context
    own_function: bool = False  # join_uneven_inputs(accelerator) for Accelerate's own class
    may_break: bool = False
    rebalance: bool = False

    @property
    def option(self) -> Any:
        """What the processes' `weighting` is."""
        return count_of if self.weighting == "count" else self.weighting


def count_of(batch: Any) -> float:
    """Return what a batch counts where `weighting` is "count"; it must not be on an accelerator yet."""
    assert all(part.device.type == "cpu" for part in batch)
    return float(sum(number % 3 for number in batch[0].tolist())) / 7


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.norm = nn.BatchNorm1d(5, momentum=None) if norm else nn.Identity()
        self.second = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).tanh())  # type: ignore[no-any-return]


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


def network(norm: bool) -> Net:
    torch.manual_seed(0)
    return Net(norm).double()


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "zero":
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.05)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.05)


def make_scheduler(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)


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


def make_loader(script: Script, rank: int, even: bool = False) -> DataLoader[Any]:
    """Return what is given to `prepare`: to be sharded, or this rank's own shard."""
    shuffle = not script.iterable
    if even:
        return DataLoader(dataset(4 * script.batch_size * script.world_size, 9), script.batch_size)
    if not script.lengths:
        data: Any = dataset(script.samples)
        if script.iterable:
            data, shuffle = Stream(data, script.samples), False
        return DataLoader(data, script.batch_size, shuffle=shuffle)
    data = dataset(script.batch_size * script.lengths[rank] - (script.lengths[rank] > 1), seed=1 + rank)
    if script.iterable:
        data = Stream(data, len(data))
    kwargs: dict[str, Any] = {"shuffle": True, "generator": torch.Generator()} if shuffle and len(data) else {}
    own: Any = DataLoaderShard(data, batch_size=script.batch_size, **kwargs)
    own._is_accelerate_prepared = True  # Accelerate must not shard it again
    return own  # type: ignore[no-any-return]


@dataclass
class Trained:
    """What a rank has in the end."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    states: list[Any]  # that must be the same bits on all ranks
    seen: list[list[list[int]]]  # by epoch and step: the samples' numbers
    ends: list[list[bool]]  # by epoch and step: whether it was known to be the last


def train(rank: int, script: Script) -> Trained:
    kind = accelerate.Accelerator if script.own_function else Accelerator
    config = DataLoaderConfiguration(**{"use_seedable_sampler": True, **script.loader})
    with accelerator_of(
        rank,
        kind,
        gradient_accumulation_steps=script.accumulate,
        step_scheduler_with_optimizer=script.step_scheduler_with_optimizer,
        dataloader_config=config,
    ) as accelerator:
        torch.manual_seed(5)
        if script.scaler:
            accelerator.scaler = torch.amp.GradScaler(place().type, init_scale=8.0, growth_interval=3)
        net = network(script.norm)
        optimizer: Any = make_optimizer(script.optimizer, net.parameters())
        scheduler: Any = make_scheduler(optimizer)
        model = accelerator.prepare(net)
        optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
        loader, even = accelerator.prepare(make_loader(script, rank), make_loader(script, rank, even=True))
        scheduler = accelerator.prepare(scheduler)
        seen: list[list[list[int]]] = []
        ends: list[list[bool]] = []

        def run_epoch(batches: Any) -> None:
            seen.append([])
            ends.append([])
            for numbers, x, y in batches:
                seen[-1].append(numbers.tolist())
                with accelerator.accumulate(model):
                    ends[-1].append(accelerator.gradient_state.end_of_dataloader)
                    loss = (model(x) - target(script, numbers, y)).pow(2).mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and script.scaler:
                        accelerator.scaler.unscale_(optimizer.optimizer)
                    if accelerator.sync_gradients and script.clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), script.clip)
                    optimizer.step()
                    if script.scheduler == "step":
                        scheduler.step()
                    optimizer.zero_grad()
            if script.scheduler == "epoch":
                scheduler.step()

        options: dict[str, Any] = {"even_batches": False, "weighting": script.option}
        options |= {"may_break": script.may_break, "rebalance": script.rebalance}
        if script.own_function:
            context = join_uneven_inputs(accelerator, [model], **options)
        else:
            context = accelerator.join_uneven_inputs(**options)
        with context:
            for _ in range(script.epochs):
                run_epoch(loader)
        for _ in range(script.even):
            run_epoch(even)
        whole = plain(optimizer.optimizer.state_dict()) if script.optimizer != "zero" else None
        for to in range(script.world_size) if script.optimizer == "zero" else ():
            optimizer.optimizer.consolidate_state_dict(to=to)  # each rank's own view of all shards
            whole = plain(optimizer.optimizer.state_dict()) if rank == to else whole
        states = [
            whole,
            plain(scheduler.state_dict()),
            accelerator.step,
            accelerator.sync_gradients,
            loader.iteration,
            accelerator.scaler.state_dict() if script.scaler else None,
        ]
        return Trained(
            [p.detach().clone() for p in net.parameters()], [b.clone() for b in net.buffers()], states, seen, ends
        )


def _step(scheduler: Any, times: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer has stepped before
        for _ in range(times):
            scheduler.step()


def target(script: Script, numbers: Tensor, y: Tensor) -> Tensor:
    return torch.where(numbers[:, None] % 9 == 4, torch.inf, y) if script.scaler else y


def weight_of(script: Script, batches: dict[int, list[int]], rank: int) -> float:
    if script.weighting == "world":
        return 1 / script.world_size
    if script.weighting == "active":
        return 1 / len(batches)
    sizes = {r: sum(n % 3 for n in its) if script.weighting == "count" else len(its) for r, its in batches.items()}
    return sizes[rank] / sum(sizes.values()) if any(sizes.values()) else 0.0


def samples_of(script: Script) -> dict[int, tuple[Tensor, Tensor]]:
    """Return all samples by number."""
    sets = [dataset(script.samples)] if script.samples else []
    sets += [dataset(script.batch_size * n - (n > 1), seed=1 + rank) for rank, n in enumerate(script.lengths)]
    sets.append(dataset(4 * script.batch_size * script.world_size, 9))
    return {int(number): (x, y) for one in sets for number, x, y in one}


def reference(script: Script, seen: Sequence[list[list[list[int]]]]) -> tuple[Net, Any, Any]:
    """Train one process on what the ranks saw; return the network, the optimizer and the scheduler."""
    net = network(script.norm)
    data = samples_of(script)
    adam = torch.optim.Adam(net.parameters(), lr=0.05)
    optimizer = adam if script.optimizer == "zero" else make_optimizer(script.optimizer, net.parameters())
    scheduler = make_scheduler(optimizer)
    skipped = False
    with_optimizer = script.step_scheduler_with_optimizer
    times = script.world_size if with_optimizer and not script.loader.get("split_batches", False) else 1
    for epoch in range(len(seen[0])):
        longest = max(len(mine[epoch]) for mine in seen)
        for step in range(longest):
            batches = {rank: mine[epoch][step] for rank, mine in enumerate(seen) if step < len(mine[epoch])}
            even = epoch >= script.epochs
            for rank, numbers in batches.items():
                x, y = (torch.stack(column) for column in zip(*(data[n] for n in numbers), strict=True))
                weight = 1 / script.world_size if even else weight_of(script, batches, rank)
                y = target(script, torch.tensor(numbers), y)
                loss = (net(x) - y).pow(2).mean() * weight / script.accumulate
                if weight:
                    loss.backward()
                else:  # infinite or not
                    for p in net.parameters():
                        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            syncs = (step + 1) % script.accumulate == 0 or step + 1 == longest
            if syncs:
                if script.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), script.clip)
                skipped = not all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
                if not skipped:
                    optimizer.step()
                optimizer.zero_grad()
            if script.scheduler == "step" and (not with_optimizer or (syncs and not skipped)):
                _step(scheduler, times)
        if script.scheduler == "epoch" and not (with_optimizer and skipped):
            _step(scheduler, times)
    return net, optimizer, scheduler
