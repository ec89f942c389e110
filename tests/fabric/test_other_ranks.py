"""A run of Fabric's that goes on with another number of ranks; see tests/support/other_ranks.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.many import seeds
from tests.support.other_ranks import EPOCHS, Chain, Samples, check, drawn, loader_of, loss, network, seen_in
from tests.support.workers import Workers


def _train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    fabric = fabric_of(chain.worlds[job], DDPJoinStrategy(**chain.options, rebalance=chain.rebalances[job]))
    net, first = network(), 0
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    if chain.kind == "injected":
        loader = fabric.setup_dataloaders(DataLoader(Samples(chain.count), chain.size, shuffle=chain.shuffle))
    else:
        own = loader_of(chain, rank, chain.worlds[job])
        loader = fabric.setup_dataloaders(own, use_distributed_sampler=False)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    if resumes:
        fabric.load(f"{folder}/{job - 1}", state)
        first = int(state["epoch"])
    seen: list[Any] = []
    for epoch in range(first, EPOCHS):
        if chain.kind == "buckets":  # Fabric tells samplers alone
            loader.batch_sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            loss_of_batch = loss(model, batch[0])
            fabric.backward(loss_of_batch)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((epoch, step, seen_in(batch)))
            if (epoch, step) == chain.stop(job, first):
                fabric.save(f"{folder}/{job}", {**state, "epoch": epoch})
    fabric.barrier()
    return seen, [p.detach() for p in net.parameters()]


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    return to_the_end(rank, _train, chain, job, folder, resumes)


CHAINS = {
    "what Fabric deals out": Chain((3, 2, 4), (2, 1), 41, "injected", options={"weighting": "samples"}, later=(1, 0)),
    "in order": Chain((2, 3), (0,), 23, "injected", shuffle=False),
    "unequal shares, in the tail": Chain((2, 3, 2), (4, 0), 41, "shares"),
    "rebalanced": Chain((3, 2), (6,), 50, "shares", rebalances=(True, True)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


@seeds(range(0), 100)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    kinds = ("injected", "unpadded", "shares", "drawn", "buckets")
    check(workers, drawn(seed, kinds, rebalances=[seed % 3 == 0] * 3), tmp_path, train)
