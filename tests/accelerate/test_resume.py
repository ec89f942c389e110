"""A script with Accelerate that goes on in other processes, or another number; see tests/support/other_ranks.py."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

from accelerate_join._loaders import dealer_of
from tests.covering import others_long
from tests.support.front_ends.accelerate import accelerator_of
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
from tests.support.workers import WorkerError, Workers
from torch_join import UnpaddedDistributedSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
SAMPLED = ("shares", "unpadded", "drawn")  # kinds of samplers that deal out themselves


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool, way: str = "in it") -> Any:
    """Run a job, which loads its state `before` the context or `in it`, or loops over `join_batches`.

    A loader with a state goes on by that, and counts its epochs; of another one, batches are skipped.
    """
    world, before = chain.worlds[job], chain.worlds[job - 1]
    keeps = chain.kind == "kept" or (bool(chain.lengths) and "skipped" not in chain.kind)
    options = {"even_batches": False, "use_seedable_sampler": chain.seedable, "split_batches": chain.kind == "split"}
    options["use_stateful_dataloader"] = keeps
    with accelerator_of(rank, dataloader_config=DataLoaderConfiguration(**options)) as accelerator:
        torch.manual_seed(7)
        np.random.seed(rank)
        net, samples = network(), Samples(chain.count)
        if "prepared" in chain.kind:
            loader: Any = accelerator.prepare(own_loader(chain, rank), own_shards=True)
        elif chain.lengths:
            options = {"device": accelerator.device, "use_stateful_dataloader": keeps}
            loader = own_loader(chain, rank, DataLoaderShard, **options)
            accelerator.register_for_checkpointing(loader)
        elif chain.kind in SAMPLED:
            sampler = loader_of(chain, rank, world).sampler
            loader = DataLoaderShard(samples, batch_size=chain.size, sampler=sampler)
            accelerator.register_for_checkpointing(loader)
        else:
            loader = accelerator.prepare(DataLoader(samples, chain.size, shuffle=chain.shuffle))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        seen: list[Any] = []
        first, taken, said = 0, 0, []
        options = {**chain.options, "rebalance": chain.rebalances[job]}

        def load() -> None:
            nonlocal first, taken
            if resumes:
                first, taken = torch.load(f"{folder}/{job - 1}")
                accelerator.load_state(f"{folder}/checkpoint {job - 1}")

        def save(place: tuple[int, int], epoch: int, taken: int) -> None:
            if place == chain.stop(job, first):
                accelerator.save_state(f"{folder}/checkpoint {job}")
                torch.save((epoch, taken), f"{folder}/{job}")

        def batches(epoch: int) -> Any:
            if keeps or not taken:
                return loader
            rest = accelerator.skip_first_batches(loader, taken)
            # Of a rank that has fewer than are skipped, too.
            assert "stream" in chain.kind or way == "join_batches" or len(rest) >= 0
            return rest

        if way != "in it":
            load()
        with nullcontext() if way == "join_batches" else accelerator.join_uneven_inputs([model], **options):
            if way == "in it":
                load()
            for epoch in range(loader.iteration, EPOCHS):
                if not keeps:
                    loader.set_epoch(epoch)
                taken = taken if epoch == first else 0
                rest = batches(epoch)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    iterator = enumerate(accelerator.join_batches(rest) if way == "join_batches" else rest)
                    item = next(iterator, None)
                said += [str(one.message) for one in caught if "skip_first_batches" in str(one.message)]
                while item is not None:
                    step, batch = item
                    accelerator.backward(loss(model, batch[0]))
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append((epoch, step, seen_in(batch)))
                    save((epoch, step), epoch, (taken if world == before else 0) + step + 1)
                    item = next(iterator, None)
                save((epoch, BEHIND), epoch + 1, 0)
        if chain.stops == (2, 1) and not chain.lengths:  # amid an epoch both times
            assert len(said) == (resumes and rank == 0)
        return seen, [p.detach() for p in net.parameters()]


CHAINS = {
    "what Accelerate deals out": Chain((3, 2, 4), (2, 1), 61, "injected", options={"weighting": "samples"}),
    "in order, in the tail": Chain((2, 3), (5,), 21, "injected", shuffle=False),
    "by torch's generator": Chain((2, 3, 3), (2, 0), 41, "injected", seedable=False, later=(1, 0)),
    "one process": Chain((3, 1, 2), (1, 1), 31, "injected"),
    "a loader of its own": Chain((2, 3, 2), (4, 0), 41, "shares"),
    "rebalanced": Chain((3, 2), (6,), 50, "shares", rebalances=(True, True)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_is_trained_on_once(workers: Workers, name: str, tmp_path: Path) -> None:
    check(workers, CHAINS[name], tmp_path, train)


# Kinds of loaders with samples of each rank's own, and what Accelerate deals out, with a state and without one.
KINDS = ("map", "torchdata", "stream", "shuffled stream", "hf stream", "drawn")
KINDS += (
    "map, prepared",
    "map, prepared, unseeded",
    "stream, prepared",
    "map, skipped",
    "shuffled stream, skipped",
    "drawn, skipped",
    "kept",
    "injected",
)
SHORT = (
    "map",
    "torchdata",
    "stream",
    "drawn",
    "map, prepared",
    "map, skipped",
    "shuffled stream, skipped",
    "kept",
)
PLACES = {
    "from the first batches on": [(0, 1), (0, 1), (1, 6), (0, BEHIND)],
    "at the end of epochs": [(0, 8), (1, 0), (0, 2), (0, 4)],
}


def chain_of(kind: str, lengths: tuple[int, ...], places: list[tuple[int, int]]) -> Chain:
    chain = own(kind, lengths, places, seedable=False)
    return chain if kind not in ("kept", "injected") else replace(chain, lengths=(), count=51)  # 9, 9 and 8 batches


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["before", "join_batches"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("lengths", [(0, 4, 9), (9, 0, 4), (4, 9, 0)], ids=str)
@pytest.mark.parametrize("kind", others_long(KINDS, *SHORT))
def test_the_same_ranks_go_on_as_if_nothing_had_been(
    workers: Workers, kind: str, lengths: tuple[int, ...], places: str, way: str, tmp_path: Path
) -> None:
    check(workers, chain_of(kind, lengths, PLACES[places]), tmp_path, partial(train, way=way))


def test_a_shard_that_torchs_global_generator_shuffles_goes_on_in_its_order(workers: Workers, tmp_path: Path) -> None:
    chain = chain_of("map, prepared, unseeded", (0, 4, 9), PLACES["from the first batches on"])
    check(workers, chain, tmp_path, partial(train, way="join_batches"))


def test_an_order_that_torchdata_would_lose_is_refused(workers: Workers, tmp_path: Path) -> None:
    chain = chain_of("map, prepared, one generator", (4, 9), [(0, 1)])
    with pytest.raises(WorkerError, match="its sampler draws from the same generator as the loader"):
        check(workers, chain, tmp_path, train)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_they_go_on_in_new_processes(workers: Workers, kind: str, tmp_path: Path) -> None:
    check_in_new_processes(workers, chain_of(kind, (0, 4, 9), [(1, 2)]), tmp_path, train)


REFUSED = (
    r"written in the middle of an epoch by 2 processes, and this job has a different number. The remaining samples are"
    r" known only if Accelerate .* split_batches, dispatch_batches or use_stateful_dataloader"
)


@pytest.mark.parametrize("kind", ["split", "kept"])
def test_batches_that_are_split_and_loaders_with_a_state_are_refused(
    workers: Workers, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=REFUSED):
        check(workers, Chain((2, 3), (1,), 36, kind, 6), tmp_path, train)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def skip_in_a_stream(rank: int) -> list[int]:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loader, seen = DataLoaderShard(Stream(), batch_size=1), []
        with accelerator.join_uneven_inputs([model]):
            for batch in accelerator.skip_first_batches(loader, 3):
                accelerator.backward(model(batch.float()[:, None]).sum())
                seen += batch.tolist()
        return seen


def test_a_stream_without_a_length_is_skipped_in(workers: Workers) -> None:
    assert workers.run(2, skip_in_a_stream) == [[3, 4, 5, 6]] * 2


def test_an_order_from_another_generator_is_refused(workers: Workers, tmp_path: Path) -> None:
    """One process draws from torch's own, and several from one that Accelerate makes."""
    with pytest.raises(WorkerError, match="in an order drawn from the generator of torch itself"):
        check(workers, Chain((1, 2), (1,), 20, "injected", seedable=False), tmp_path, train)


def deals_out_to(rank: int, numbers: list[int]) -> list[bool]:
    samples = Samples(9)
    with accelerator_of(rank):
        samplers = [UnpaddedDistributedSampler(samples, number, rank) for number in numbers]
        loaders = [DataLoaderShard(samples, batch_size=2, sampler=sampler) for sampler in samplers]
        return [dealer_of(loader) is not None for loader in loaders]


def test_a_sampler_for_another_number_of_ranks_says_nothing_of_these(workers: Workers) -> None:
    assert workers.run(2, deals_out_to, [2, 4]) == [[True, False]] * 2


@seeds(range(0), 200)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, drawn(seed, ("injected", "injected", *SAMPLED), owned=KINDS[:-2]), tmp_path, train)
