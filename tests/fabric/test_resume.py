"""A run of Fabric's that goes on in other processes, or with another number; see tests/support/other_ranks.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.many import seeds
from tests.support.other_ranks import (
    BEHIND,
    EPOCHS,
    Chain,
    Samples,
    check,
    check_in_new_processes,
    drawn,
    loader_of,
    loss,
    network,
    own,
    own_loader,
    seen_in,
)
from tests.support.workers import Workers


def _train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    """Run a job; where ranks have samples of their own, an epoch may have a second loop, over another loader."""
    fabric = fabric_of(chain.worlds[job], DDPJoinStrategy(**chain.options, rebalance=chain.rebalances[job]))
    net, first = network(), 0
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    if chain.kind == "injected":
        loaders = [fabric.setup_dataloaders(DataLoader(Samples(chain.count), chain.size, shuffle=chain.shuffle))]
    elif chain.kind == "nodes":
        loaders = [fabric.strategy.batches(own_loader(chain, rank))]
    else:
        kind = StatefulDataLoader if chain.kind == "torchdata" else DataLoader
        shares = [rank, len(chain.lengths) + rank] if chain.beside else [rank]
        own_loaders = [own_loader(chain, share, kind) for share in shares]
        loaders = own_loaders if chain.lengths else [loader_of(chain, rank, chain.worlds[job])]
        loaders = [fabric.setup_dataloaders(loader, use_distributed_sampler=False) for loader in loaders]
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    state |= {f"loader {number}": loader for number, loader in enumerate(loaders)}
    if resumes:
        fabric.load(f"{folder}/{job - 1}", state)
        first = int(state["epoch"])
    seen: list[Any] = []

    def save(epoch: int, step: int) -> None:
        if (epoch, step) == chain.stop(job, first):
            fabric.save(f"{folder}/{job}", {**state, "epoch": epoch + (step == BEHIND)})

    for epoch in range(first, EPOCHS):
        if chain.kind == "buckets":  # Fabric tells samplers alone
            loaders[0].batch_sampler.set_epoch(epoch)
        for number, loader in enumerate(loaders):
            for step, batch in enumerate(loader, 100 * number):
                loss_of_batch = loss(model, batch[0])
                fabric.backward(loss_of_batch)
                optimizer.step()
                optimizer.zero_grad()
                seen.append((epoch, step, seen_in(batch)))
                save(epoch, step)
        save(epoch, BEHIND)
    fabric.barrier()
    return seen, [p.detach() for p in net.parameters()]


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    return to_the_end(rank, _train, chain, job, folder, resumes)


PLACES = [(0, 1), (0, 1), (1, 8), (0, BEHIND)]
CHAINS = {
    "what Fabric deals out": Chain((3, 2, 4), (2, 1), 41, "injected", options={"weighting": "samples"}, later=(1, 0)),
    "in order": Chain((2, 3), (0,), 23, "injected", shuffle=False),
    "unequal shares, in the tail": Chain((2, 3, 2), (4, 0), 41, "shares"),
    "rebalanced": Chain((3, 2), (6,), 50, "shares", rebalances=(True, True)),
    "the same ranks": Chain((3, 3, 3), (2, 1), 23, "injected", later=(1, 0)),
    "own loaders": own("map", (0, 4, 9), PLACES, beside=(2, 1, 0)),
    "own loaders with a state": own("torchdata", (0, 4, 9), PLACES, beside=(2, 1, 0)),
    "nodes": own("nodes", (3, 0, 5), [(0, 1), (0, 1), (1, 4)]),
    "own loaders, rebalanced": own("map", (0, 4, 9), [(0, 1), (0, 1), (1, BEHIND)], rebalances=(True,) * 4),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["map", "torchdata", "nodes", "stream"])
def test_they_go_on_in_new_processes(workers: Workers, kind: str, tmp_path: Path) -> None:
    check_in_new_processes(workers, own(kind, (0, 4, 9), [(1, 2)]), tmp_path, train)


@seeds(range(1), 200)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    kinds = ("injected", "unpadded", "shares", "drawn", "buckets")
    chain = drawn(seed, kinds, owned=("map", "torchdata", "nodes", "stream"), rebalances=[seed % 3 == 0] * 3)
    check(workers, chain, tmp_path, train)


def refuse(rank: int, what: str) -> None:
    """Save a loader of which nobody knows how far it has come."""
    fabric, chain = fabric_of(2), own("torchdata", (2, 2), [(0, 0)])
    model = fabric.setup(network())
    first, second = (fabric.setup_dataloaders(own_loader(chain, rank, StatefulDataLoader)) for _ in range(2))
    for batch in fabric.strategy.batches(zip(first, second, strict=True)) if what == "zip" else first:
        fabric.backward(loss(model, batch[0][0] if what == "zip" else batch[0]))
        inner = fabric.setup_dataloaders(own_loader(chain, rank, StatefulDataLoader))
        fabric.save("/nowhere", {"loader": first if what == "zip" else inner})


@pytest.mark.parametrize(
    ("what", "message"), [("zip", "inside another iterable"), ("late", "that was set up inside a loop")]
)
def test_what_nobody_knows_raises_on_all_ranks(workers: Workers, what: str, message: str) -> None:
    for outcome in workers.outcomes(2, to_the_end, refuse, what, timeout=3.0):
        assert message in outcome.error or "failed, so rank" in outcome.error, outcome.error
