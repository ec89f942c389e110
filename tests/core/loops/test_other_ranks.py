"""A loop that so many ranks have begun goes on with another number of them; see tests/support/other_ranks.py."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.loops.resumed import train
from tests.covering import others_long
from tests.support.many import seeds
from tests.support.other_ranks import KINDS, Chain, Samples, check, drawn, loss, network
from tests.support.workers import Workers
from torch_join import Join, UnpaddedDistributedSampler, UnsupportedError
from torch_join._schedule.deals import redealt_loader
from torch_join._schedule.drawing import drawing

CHAINS = {
    "fewer": Chain((3, 2), (2,), 25, later=(1,)),
    "more, in the tail": Chain((2, 4), (3,), 25, "shares"),
    "one process": Chain((3, 1), (0,), 13, options={"weighting": "samples"}),
    "from one process": Chain((1, 3, 2), (1, 0), 20, "drawn", later=(1, 0)),
    "twice in one epoch": Chain((2, 3, 4), (1, 1), 41, "shares", options={"weighting": "active"}),
    "whole batches": Chain((3, 2, 2), (1, 0), 31, "buckets", workers=1),
    "windows": Chain((2, 3), (1,), 40, window=2, options={"weighting": "samples"}),
    "fewer samples than ranks": Chain((2, 4, 4), (0, 0), 7),
    "rebalanced": Chain((3, 2, 3), (6, 1), 50, "shares", rebalances=(True, True, True)),
    "rebalanced from here on": Chain((2, 3, 2), (2, 1), 50, "shares", rebalances=(False, True, False)),
    "a loader with a state": Chain((2, 3, 3), (1, 1), 30, "stateful"),
    "samples alone": Chain((2, 3), (1,), 11, "samples alone"),
    "ZeRO, saved while all have a batch": Chain((3, 2, 4), (1, 0), 37, sharded="zero"),
    "ZeRO, one process": Chain((3, 1), (1,), 37, sharded="zero"),
    "FSDP2, saved while all have a batch": Chain((2, 3, 2), (1, 0), 37, sharded="fsdp2"),
    "the same number": Chain((3, 2, 2), (1, 1), 30, "drawn"),
}


SOME = (
    *("more, in the tail", "from one process", "twice in one epoch", "whole batches", "windows", "rebalanced"),
    *("ZeRO, saved while all have a batch", "FSDP2, saved while all have a batch"),
)


@pytest.mark.parametrize("name", others_long(CHAINS, *SOME))
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


def refuse(rank: int, folder: str, what: str) -> None:
    """Save amid an epoch in one process, and go on in two."""
    world, samples = torch.distributed.get_world_size(), Samples(9)
    if what == "a shard of its own":
        loader: Any = DataLoader(samples, 2, shuffle=True)
    elif what == "batches of its own":
        loader = DataLoader(samples, batch_sampler=[[0, 1], [2], [3]])
    else:
        loader = DataLoader(samples, 2, sampler=UnpaddedDistributedSampler(samples))
    if what == "made for another number":
        loader.sampler.num_replicas = 1
    if what == "other samples" and world > 1:
        loader = DataLoader(Samples(10), 2, sampler=UnpaddedDistributedSampler(Samples(10)))
    net = DistributedDataParallel(network())
    with Join([net]) as join:
        if world > 1:
            join.load_state_dict(torch.load(f"{folder}/saved"))
        for step, (batch, _) in enumerate(join.batches(loader)):
            loss(net, batch).backward()  # type: ignore[no-untyped-call]
            net.zero_grad()
            if world == 1 and step == 1:
                torch.save(join.state_dict(), f"{folder}/saved")


class Overlapping(UnpaddedDistributedSampler):
    """Has the same samples on all ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.total_size))


class Thinning(UnpaddedDistributedSampler):
    """Leaves samples out where there are three ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 6 if self.num_replicas == 3 else 9, self.num_replicas))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a shard of its own", "Here some rank has its own data"),
        ("batches of its own", "Here some rank has its own data"),
        ("made for another number", "distributes samples to 1 ranks, but 2 ranks continue the epoch"),
        ("other samples", r"a different loader than this DataLoader \(samples: 9 then, 10 now\)"),
    ],
)
def test_what_is_left_and_not_known_is_refused(workers: Workers, what: str, message: str, tmp_path: Path) -> None:
    workers.run(1, refuse, str(tmp_path), what)
    for outcome in workers.outcomes(2, refuse, str(tmp_path), what):
        assert re.search(message, outcome.error), outcome.error


@pytest.mark.parametrize(("kind", "world"), [(Overlapping, 2), (Thinning, 3)])
def test_a_sampler_whose_ranks_do_not_share_out_the_samples_is_refused(kind: Any, world: int) -> None:
    loader = DataLoader(Samples(9), 2, sampler=kind(Samples(9), 2, 0))
    with pytest.raises(UnsupportedError, match=f"does not yield each sample on exactly one of {world}"):
        redealt_loader(loader, [{"world": world, "taken": [1] * world, "batch": 2}], drawing(loader), 2, is_new=True)


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_torchs_own_sampler_repeats_is_left_out(drop_last: bool) -> None:
    samples, left = Samples(11), []
    deals = [{"world": 4, "taken": [1, 1, 1, 1], "batch": 1}, {"world": 3, "taken": [1, 1, 0], "batch": 1}]
    for rank in range(2):
        sampler = DistributedSampler(samples, 2, rank, drop_last=drop_last)
        loader = DataLoader(samples, 1, sampler=sampler)
        left += [index for (index,) in redealt_loader(loader, deals, drawing(loader), 2, is_new=False).batch_sampler]
    order = [*DistributedSampler(samples, 1, 0)][: 8 if drop_last else 11]
    assert sorted(left) == sorted(order[6:])


@seeds(range(1), 300)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    one, chain = random.Random(seed), drawn(seed, KINDS)
    rebalances = [one.random() < 0.4 and chain.kind != "stateful" for _ in range(3)]
    for job in (1, 2):
        if chain.worlds[job] == chain.worlds[job - 1]:
            rebalances[job] = rebalances[job - 1]  # else it raises
    window = one.choice([1, 1, 1, 2, 3]) if chain.kind != "samples alone" else 1
    chain = replace(chain, window=window, workers=int(one.random() < 0.15), rebalances=rebalances)
    check(workers, chain, tmp_path, train)
