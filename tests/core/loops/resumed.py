"""A plain loop that goes on from a place of another job: see tests/support/other_ranks.py, and its kinds of loaders."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.other_ranks import (
    BEHIND,
    EPOCHS,
    EVALUATED,
    SEED,
    Chain,
    loader_of,
    loss,
    network,
    own,
    own_loader,
    seen_in,
)
from torch_join import Join, windows

WHOLE = StateDictOptions(full_state_dict=True)


class Drawn(Sampler[int]):
    """Indices in an order that generators of numpy draw, which go on from epoch to epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.drawn = {"first": np.random.RandomState(seed), "second": (np.random.Generator(np.random.Philox(seed)),)}

    def __iter__(self) -> Iterator[int]:
        first: Any = self.drawn["first"]
        (second,) = self.drawn["second"]  # type: ignore[misc]
        return iter(second.permutation(first.permutation(self.count)).tolist())

    def __len__(self) -> int:
        return self.count


class Bar:
    """What a progress bar does: it holds a loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def kind_of_loader(chain: Chain, share: int) -> Any:
    """Return a loader of a rank's own samples, or of one of its later loops: see `Chain.numbers`."""
    kind, numbers, options = chain.kind, chain.numbers(share), dict[str, Any]()
    generator = torch.Generator().manual_seed(SEED)
    if "with replacement" in kind and numbers:  # which takes a sample, and shuffling does
        options["sampler"] = RandomSampler(numbers, True, 40, generator)
    elif kind == "a numpy generator":
        options["sampler"] = Drawn(len(numbers), share)
    elif "stream" not in kind:
        options["shuffle"] = kind != "list" and len(numbers) > 0
        options["generator"] = None if kind == "global" else generator
    if "workers" in kind:
        stays = kind == "workers that stay"
        options |= {"num_workers": 2 - stays, "persistent_workers": stays}
    loader = own_loader(chain, share, StatefulDataLoader if "stateful" in kind else DataLoader, **options)
    if kind == "list":
        return [*loader]
    return Bar(loader) if kind == "bar" else loader


def loaders_of(chain: Chain, rank: int, world: int) -> list[Any]:
    """Return the loaders of an epoch's loops, whose kinds stand one after the other, with semicolons."""
    if not chain.lengths:
        return [loader_of(chain, rank, world)]
    kinds = chain.kind.split("; ")
    return [kind_of_loader(replace(chain, kind=kind), number * world + rank) for number, kind in enumerate(kinds)]


def train(
    rank: int,
    chain: Chain,
    job: int,
    folder: str,
    resumes: bool,
    make: Callable[[Chain, int, int], list[Any]] = loaders_of,
    contexts: bool = False,
    breaks: bool = False,
    names: tuple[str, ...] = ("",),
    goes_to: bool = False,
    most: int = EVALUATED,
    skew: int = 0,
) -> tuple[list[Any], list[Tensor]]:
    """Run a job that saves where the next one goes on; return what this rank has trained on, and the parameters.

    Args:
        make: Makes the loaders of the epoch's loops.
        contexts: Whether each epoch has a `with` of its own.
        breaks: Whether it leaves the loop where it is stopped, by `break`, saves there, and ends.
        names: Of the loops; nothing is trained on in one of name `validation`.
        goes_to: Whether it leaves out, by itself, the loops before that in which the state was written.
        most: After how many steps the first loop is left by `break`.
        skew: By how many batches the places are wrong.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a loader has workers
    torch.manual_seed(11)
    net, world = network(), chain.worlds[job]
    ddp: Any = fully_shard(net) if chain.sharded == "fsdp2" else DistributedDataParallel(net)
    made: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    optimizer: Any = torch.optim.SGD(net.parameters(), **made)
    if chain.sharded == "zero":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **made)
    loaders, seen = make(chain, rank, world), list[Any]()
    first, to = 0, 0
    join = Join([ddp, optimizer], **{"rebalance": chain.rebalances[job], **chain.options})

    def load() -> None:
        nonlocal first, to
        saved = torch.load(f"{folder}/{job - 1}")
        if chain.sharded == "fsdp2":
            states = {"model_state_dict": saved["net"], "optim_state_dict": saved["optimizer"]}
            set_state_dict(net, optimizer, **states, options=WHOLE)
        else:
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
        for place in saved["join"]["places"] if skew else ():
            place["taken"] = max(0, place["taken"] + skew)
        join.load_state_dict(saved["join"])
        first, to = saved["epoch"], saved["loop"] if goes_to else 0

    def save(epoch: int, loop: int) -> None:
        if chain.sharded == "zero":
            optimizer.consolidate_state_dict(to=0)
        if chain.sharded == "fsdp2":
            model_state, its = get_state_dict(net, optimizer, options=WHOLE)
        else:
            mine = chain.sharded != "zero" or rank == 0
            model_state, its = net.state_dict(), optimizer.state_dict() if mine else {}
        saved = {"net": model_state, "optimizer": its, "epoch": epoch, "loop": loop, "join": join.state_dict()}
        if rank == min(join.active_ranks):
            torch.save(saved, f"{folder}/{job}")

    def step_on(batches: list[Any]) -> None:
        rows = sum(len(seen_in(batch)) for batch in batches)
        for batch in batches[:-1]:
            with ddp.no_sync():
                loss(ddp, batch[0], rows).backward()  # type: ignore[no-untyped-call]
        loss(ddp, batches[-1][0], rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def run(epoch: int, loop: int, stop: tuple[int, int] | None) -> bool:
        """Run a loop; return whether the job ends with it."""
        loader, trains = loaders[loop], names[loop] != "validation"
        if "told" in chain.kind:
            loader.dataset.set_epoch(epoch)
        for part in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if chain.kind == "global":
            torch.manual_seed(100 * epoch + rank)
        batches = join.batches(loader if chain.window == 1 else windows(loader, chain.window), name=names[loop])
        for step, given in enumerate(batches, 100 * loop if trains else EVALUATED):
            parts = [given] if chain.window == 1 else given
            seen.append((epoch, step, [sample for batch in parts for sample in seen_in(batch)]))
            torch.rand(3)  # what dropout does
            if trains:
                step_on(parts)
            else:
                with torch.no_grad():
                    loss(ddp, given[0])
            if (breaks and (epoch, step) == stop) or (not loop and join.step == most - 1):
                break
            if (epoch, step) == stop:
                save(epoch, loop)
            elif chain.lengths:
                join.state_dict()  # whoever asks for one changes nothing
        if ends := breaks and stop is not None and epoch == stop[0] and stop[1] < BEHIND:
            save(epoch, loop)
        return ends

    def run_epoch(epoch: int) -> bool:
        stop = chain.stop(job, start)
        for loop in range(to if epoch == start else 0, len(loaders)):
            if run(epoch, loop, stop):
                return True
        if (epoch, BEHIND) == stop:
            save(epoch + 1, 0)
        return False

    if resumes and contexts:
        load()
    with nullcontext() if contexts else join:
        if resumes and not contexts:
            load()
        start = first
        for epoch in range(start, EPOCHS):
            with join if contexts else nullcontext():
                if run_epoch(epoch):
                    break
    parameters = [p.detach() for p in net.parameters()]
    return seen, [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def list_of(rank: int, lengths: tuple[int, ...], kind: str = "list") -> Any:
    """Return a loader whose batches are numbers, one a row, of at most two rows."""
    chain = own(kind, lengths, [(0, 0)])
    loader = kind_of_loader(chain, rank)
    return [batch[:, :1] for batch, _ in loader] if kind == "list" else loader
