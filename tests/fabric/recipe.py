"""One script on Fabric, described as in `tests.support.accelerated`, whose reference it is compared with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_join  # noqa: F401  registers the strategies
from lightning_join.fabric import DDPJoinStrategy
from tests.support import accelerated, inside
from tests.support.accelerated import Net, Script, Stream, dataset, make_optimizer, make_scheduler, network, plain
from torch_join.integration import own_loops

TOLERANCE = 1e-10


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


def loader_of(script: Script, rank: int) -> DataLoader[Any]:
    """Return this rank's own shard, or all of the data, which Fabric shards."""
    if not script.lengths:
        return DataLoader(dataset(script.samples), script.batch_size, shuffle=True)
    data: Any = dataset(script.batch_size * script.lengths[rank] - (script.lengths[rank] > 1), seed=1 + rank)
    if script.iterable:
        data = Stream(data, len(data))
    shuffles = not script.iterable and len(data) > 0
    return DataLoader(data, script.batch_size, shuffle=shuffles)


def train(
    rank: int, script: Script, strategy: Any = None, each: Callable[..., None] | None = None, **options: Any
) -> Trained:
    """Train as Fabric's documentation does; `each` gets all that there is after each step."""
    if strategy is None:
        strategy = DDPJoinStrategy(weighting=script.option, rebalance=script.rebalance, may_break=script.may_break)
    fabric = fabric_of(script.world_size, strategy, **options)
    torch.manual_seed(5)
    net = network(script.norm)
    model, optimizer = fabric.setup(net, make_optimizer(script.optimizer, net.parameters()))
    scheduler: Any = make_scheduler(optimizer)
    fabric.strategy.joinables = [scheduler]
    loader = fabric.setup_dataloaders(loader_of(script, rank), use_distributed_sampler=not script.lengths)
    seen: list[list[list[int]]] = []
    for epoch in range(script.epochs):
        seen.append([])
        for step, (numbers, x, y) in enumerate(loader):
            seen[-1].append(numbers.tolist())
            syncs = (step + 1) % script.accumulate == 0 or fabric.strategy.at_last_step
            with fabric.no_backward_sync(model, enabled=not syncs):
                loss = (model(x) - y).pow(2).mean() / script.accumulate
                fabric.backward(loss)
            if syncs:
                if script.clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=script.clip)
                optimizer.step()
                optimizer.zero_grad()
            if script.scheduler == "step":
                scheduler.step()
            if each is not None:
                each(fabric, model, optimizer, epoch, step)
        if script.scheduler == "epoch":
            scheduler.step()
    fabric.barrier()
    whole = plain(optimizer.optimizer.state_dict()) if script.optimizer != "zero" else None
    return Trained([p.detach().clone() for p in net.parameters()], [whole, plain(scheduler.state_dict())], seen)


def reference(script: Script, seen: list[list[list[list[int]]]]) -> Net:
    """Train one process on what the ranks saw."""
    return accelerated.reference(replace(script, step_scheduler_with_optimizer=False), seen)[0]


def check(script: Script, ranks: list[Trained]) -> float:
    """Compare the ranks with each other, to the bit, and with one process; return by how much they differ."""
    for one in ranks[1:]:
        assert one.states == ranks[0].states
        assert all(torch.equal(mine, first) for mine, first in zip(one.parameters, ranks[0].parameters, strict=True))
    net = reference(script, [one.seen for one in ranks])
    pairs = zip(ranks[0].parameters, net.parameters(), strict=True)
    return max(float((mine - theirs.detach()).abs().max()) for mine, theirs in pairs)


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
