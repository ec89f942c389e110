"""A script with Accelerate that goes on with another number of processes; see tests/support/other_ranks.py."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

from accelerate_join._loaders import dealer_of
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.many import seeds
from tests.support.other_ranks import EPOCHS, Chain, Samples, check, drawn, loader_of, loss, network, seen_in
from tests.support.workers import WorkerError, Workers
from torch_join import UnpaddedDistributedSampler

OWN = ("shares", "unpadded", "drawn")  # kinds of samplers that deal out themselves


def train(rank: int, chain: Chain, job: int, folder: str, resumes: bool) -> Any:
    world, before = chain.worlds[job], chain.worlds[job - 1]
    options = {"even_batches": False, "use_seedable_sampler": chain.seedable, "split_batches": chain.kind == "split"}
    options["use_stateful_dataloader"] = chain.kind == "kept"
    with accelerator_of(rank, dataloader_config=DataLoaderConfiguration(**options)) as accelerator:
        torch.manual_seed(7)
        net, samples = network(), Samples(chain.count)
        if chain.kind in OWN:
            own = loader_of(chain, rank, world)
            loader: Any = DataLoaderShard(samples, batch_size=chain.size, sampler=own.sampler)
            accelerator.register_for_checkpointing(loader)
        else:
            loader = accelerator.prepare(DataLoader(samples, chain.size, shuffle=chain.shuffle))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        seen: list[Any] = []
        first, skipped, said = 0, 0, []
        options = {**chain.options, "rebalance": chain.rebalances[job]}
        with accelerator.join_uneven_inputs([model], **options):
            if resumes:
                first, skipped = torch.load(f"{folder}/{job - 1}")
                accelerator.load_state(f"{folder}/checkpoint {job - 1}")
            for epoch in range(first, EPOCHS):
                loader.set_epoch(epoch)
                rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    iterator = enumerate(rest)
                    item = next(iterator, None)
                said += [str(one.message) for one in caught if "skip_first_batches" in str(one.message)]
                while item is not None:
                    step, batch = item
                    accelerator.backward(loss(model, batch[0]))
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append((epoch, step, seen_in(batch)))
                    if (epoch, step) == chain.stop(job, first):
                        accelerator.save_state(f"{folder}/checkpoint {job}")
                        taken = skipped if world == before else 0
                        torch.save((epoch, taken + step + 1), f"{folder}/{job}")
                    item = next(iterator, None)
                skipped = 0
        if chain.stops == (2, 1):  # amid an epoch both times
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


@pytest.mark.parametrize("kind", ["split", "kept"])
def test_batches_that_are_split_and_loaders_with_a_state_are_refused(
    workers: Workers, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match="split_batches, dispatch_batches or use_stateful_dataloader"):
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
    with pytest.raises(WorkerError, match="in an order that they drew from the generator of torch itself"):
        check(workers, Chain((1, 2), (1,), 20, "injected", seedable=False), tmp_path, train)


def deals_out_to(rank: int, numbers: list[int]) -> list[bool]:
    samples = Samples(9)
    with accelerator_of(rank):
        samplers = [UnpaddedDistributedSampler(samples, number, rank) for number in numbers]
        loaders = [DataLoaderShard(samples, batch_size=2, sampler=sampler) for sampler in samplers]
        return [dealer_of(loader) is not None for loader in loaders]


def test_a_sampler_for_another_number_of_ranks_says_nothing_of_these(workers: Workers) -> None:
    assert workers.run(2, deals_out_to, [2, 4]) == [[True, False]] * 2


@seeds(range(0), 100)
def test_any_chain_of_jobs(workers: Workers, seed: int, tmp_path: Path) -> None:
    check(workers, drawn(seed, ("injected", "injected", *OWN)), tmp_path, train)
