"""A `Run`, or a `Script`, on Fabric."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_join  # noqa: F401  registers the strategies
from lightning_join.fabric import DDPJoinStrategy
from tests.support import inside
from tests.support.batches import loader_of
from tests.support.front_ends.accelerate import OnOwnBatches, Script, Stream, dataset, expected_of, plain, script_of
from tests.support.run import Run, difference, whole_state
from torch_join.integration import own_loops


def fabric_of(world_size: int, strategy: Any = None, **options: Any) -> Fabric:
    """Return a launched Fabric of the group that this worker is in."""
    strategy = DDPJoinStrategy() if strategy is None else strategy
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, **options)
    inside.remove_launcher(fabric)  # the processes are there
    fabric.launch()
    return fabric


@dataclass
class Trained:
    """What a rank has in the end."""

    parameters: list[Tensor]
    states: list[Any]  # that must be the same bits on all ranks
    seen: list[list[list[int]]]  # by epoch and step: the samples' numbers


def fabric_loader(script: Script, rank: int, epoch: Callable[[], int]) -> Any:
    """Return this rank's own shard, or all of the data, which Fabric shards."""
    if isinstance(script, OnOwnBatches):
        return loader_of(script, rank, epoch, script.iterable)
    if not script.lengths:
        return DataLoader(dataset(script.samples), script.batch_size, shuffle=True)
    data: Any = script.own_samples(rank)
    shuffles = not script.iterable and len(data) > 0
    return DataLoader(Stream(data, len(data)) if script.iterable else data, script.batch_size, shuffle=shuffles)


def train(
    rank: int, run: Run, strategy: Any = None, each: Callable[..., None] | None = None, **options: Any
) -> Trained:
    """Train as Fabric's documentation does; `each` gets all that there is after each step."""
    script = script_of(run)
    if strategy is None:
        strategy = DDPJoinStrategy(
            weighting=script.option,
            rebalance=script.rebalance,
            may_break=script.may_break,
            placeholder=script.placeholder,
        )
    fabric = fabric_of(script.world_size, strategy, **options)
    torch.manual_seed(5)
    net = script.build()
    model, optimizer = fabric.setup(net, script.make_optimizer(net.parameters(), sharded=True))
    scheduler: Any = script.but(scheduler=script.scheduler or "step").make_scheduler(optimizer)
    fabric.strategy.joinables = [scheduler]
    epoch = 0
    loader = fabric_loader(script, rank, lambda: epoch)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=not script.lengths)
    seen: list[list[list[int]]] = []
    for epoch in range(script.epochs):
        seen.append([])
        for step, batch in enumerate(loader):
            seen[-1].append(batch[0].tolist())
            syncs = (step + 1) % script.accumulate == 0 or fabric.strategy.at_last_step
            with fabric.no_backward_sync(model, enabled=not syncs):
                for loss in script.losses(model, batch, rank, epoch, step):
                    fabric.backward(loss / script.accumulate)
            if syncs:
                if script.clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=script.clip)
                optimizer.step()
                optimizer.zero_grad()
            if script.steps_scheduler(syncs):
                scheduler.step()
            if each is not None:
                each(fabric, model, optimizer, epoch, step)
        if script.scheduler == "epoch":
            scheduler.step()
    fabric.barrier()
    states = [plain(whole_state(rank, optimizer.optimizer)), plain(scheduler.state_dict())]
    return Trained([p.detach().clone() for p in net.parameters()], states, seen)


def check(script: Script, ranks: list[Trained]) -> float:
    """Compare the ranks with each other, to the bit, and with one process; return by how much they differ."""
    for one in ranks[1:]:
        assert one.states == ranks[0].states
        assert all(torch.equal(mine, first) for mine, first in zip(one.parameters, ranks[0].parameters, strict=True))
    expected = expected_of(script.but(step_scheduler_with_optimizer=False), [one.seen for one in ranks])
    return difference(ranks[0].parameters, expected.parameters)


def to_the_end(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as if this process ended with it."""
    return own_loops.to_the_end(function, rank, *args)


@contextmanager
def raising(kind: type[BaseException]) -> Iterator[list[str]]:
    """Put around what is to raise; gives the message."""
    found: list[str] = []
    try:
        yield found
    except kind as error:
        found.append(str(error))
    else:
        raise AssertionError("nothing was raised")


def parameters(rank: int, run: Run) -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    return to_the_end(rank, train, run).parameters  # type: ignore[no-any-return]
