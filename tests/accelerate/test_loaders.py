"""What a prepared loader does in the context, and what Accelerate's own tests of this feature assert."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from tqdm.auto import tqdm

from tests.support.front_ends.accelerate import Stream, accelerator_of, dataset
from tests.support.run import Run
from tests.support.workers import Workers
from torch_join import JoinWarning


def override(rank: int, default: bool, fails: bool) -> list[Any]:
    config = DataLoaderConfiguration(even_batches=default)
    with accelerator_of(rank, dataloader_config=config) as accelerator:
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        data = TensorDataset(torch.ones(3, 1))
        loaders = accelerator.prepare(DataLoader(data, 1), DataLoader(data, 1))
        found = [loader.batch_sampler.even_batches for loader in loaders]
        for value in (None, not default):
            try:
                with accelerator.join_uneven_inputs([model], even_batches=value):
                    found += [loader.batch_sampler.even_batches for loader in loaders]
                    if fails:
                        raise KeyError("of the user's own")
            except KeyError:
                found.append("raised")
            found += [loader.batch_sampler.even_batches for loader in loaders]
        return found


@pytest.mark.parametrize("default", [False, True])
def test_even_batches_is_set_back(workers: Workers, default: bool) -> None:
    within, other = [default] * 2, [not default] * 2
    assert workers.run(2, override, default, False) == [within + within + within + other + within] * 2


def test_even_batches_is_set_back_after_an_exception(workers: Workers) -> None:
    within, other = [True] * 2, [False] * 2
    found = workers.outcomes(2, override, True, True)
    assert [outcome.value for outcome in found] == [
        [*within, *within, "raised", *within, *other, "raised", *within]
    ] * 2


def mix(rank: int) -> tuple[list[str], list[int]]:
    with accelerator_of(rank) as accelerator, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = dataset(6)
        model, _, stream = accelerator.prepare(Run().build(), DataLoader(data, 1), DataLoader(Stream(data, 5), 1))
        caught.clear()
        seen = []
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for numbers, x, _ in stream:
                model(x).sum().backward()
                seen += numbers.tolist()
        return [str(warning.message) for warning in caught if isinstance(warning.message, JoinWarning)], seen


def test_a_mix_of_kinds_warns(workers: Workers) -> None:
    (messages, seen), (others, rest) = workers.run(2, mix)
    assert len(messages) == len(others) == 1
    assert "only supported for map-style datasets" in messages[0]
    assert sorted(seen + rest) == [0, 0, 1, 2, 3, 4]  # Accelerate fills up what it dispatches


class Varying:
    """A batch sampler whose batches vary in size."""

    def __init__(self, sizes: list[int], batch_size: int | None = None) -> None:
        self.sizes = sizes
        if batch_size is not None:
            self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = iter(range(sum(self.sizes)))
        return ([next(numbers) for _ in range(size)] for size in self.sizes)


# Whether Accelerate wants to be told so as it prepares a batch sampler that has no batch size.
WANTS_UNEVEN = "even_batches=False" in inspect.getsource(BatchSamplerShard.__init__)


def sample(rank: int, sampler: Any, even_batches: bool, split: bool = False) -> list[int]:
    config = DataLoaderConfiguration(split_batches=split)
    config.even_batches = not WANTS_UNEVEN or hasattr(sampler, "batch_size")
    with accelerator_of(rank, dataloader_config=config) as accelerator:
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(30), batch_sampler=sampler))
        seen = []
        with accelerator.join_uneven_inputs(even_batches=even_batches):
            for numbers, x, _ in loader:
                model(x).sum().backward()
                seen += numbers.tolist()
        return seen


@pytest.mark.parametrize("sizes", [[2, 3, 1, 4, 2], [1], [5, 1, 1, 1]])
@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_of_varying_size(workers: Workers, sizes: list[int], world_size: int) -> None:
    seen = workers.run(world_size, sample, Varying(sizes), False)
    assert sorted(number for mine in seen for number in mine) == list(range(sum(sizes)))


@pytest.mark.parametrize(("sizes", "split"), [([2, 1, 2, 2], False), ([2, 1, 2], True)])
@pytest.mark.parametrize("even_batches", [False, True])
def test_batches_that_would_be_lost(workers: Workers, sizes: list[int], split: bool, even_batches: bool) -> None:
    for outcome in workers.outcomes(2, sample, Varying(sizes, batch_size=2), even_batches, split):
        assert (
            "Varying has batch_size=2, but its batch 1, which is not the last one, has a different size"
            in outcome.error
        )


@pytest.mark.parametrize("sizes", [[2, 2, 2, 1], [2, 2, 2], [2], [2, 2, 1]])
def test_batches_of_a_fixed_size(workers: Workers, sizes: list[int]) -> None:
    seen = workers.run(2, sample, Varying(sizes, batch_size=2), False)
    assert sorted(number for mine in seen for number in mine) == list(range(sum(sizes)))


def skip(rank: int, samples: int, count: int, options: dict[str, Any]) -> list[list[int]]:
    with accelerator_of(rank, dataloader_config=DataLoaderConfiguration(**options)) as accelerator:
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(samples), 2))
        seen: list[list[int]] = []
        with accelerator.join_uneven_inputs(even_batches=False):
            for batches in (accelerator.skip_first_batches(loader, count), loader):
                seen.append([])
                for numbers, x, _ in batches:
                    model(x).sum().backward()
                    seen[-1] += numbers.tolist()
        return seen


# Accelerate skips batches of each process, or of the loader that is dispatched.
@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 0), ({}, 1), ({}, 2), ({}, 3), ({}, 5), ({"dispatch_batches": True}, 1), ({"dispatch_batches": True}, 3)],
    ids=str,
)
def test_skipped_batches(workers: Workers, count: int, options: dict[str, Any]) -> None:
    results = workers.run(2, skip, 10 if not options else 8, count, options)
    everything = range(10 if not options else 8)
    skipped = (2 if options else 4) * count
    assert sorted(number for seen in results for number in seen[0]) == list(everything)[skipped:]
    assert sorted(number for seen in results for number in seen[1]) == list(everything)


def several(rank: int) -> list[tuple[list[int], list[int]]]:
    """Train and evaluate, each on loaders of its own, in one context."""
    with accelerator_of(rank, gradient_accumulation_steps=2) as accelerator:
        model, train, test = accelerator.prepare(
            Run().build(), DataLoader(dataset(9), 2), DataLoader(dataset(7, seed=1), 2)
        )
        found = []
        with accelerator.join_uneven_inputs(even_batches=False):
            for _ in range(2):
                seen, gathered = [], []
                for numbers, x, _ in tqdm(train, disable=rank > 0):
                    with accelerator.accumulate(model):
                        model(x).sum().backward()
                    seen += numbers.tolist()
                with torch.no_grad():
                    for numbers, x, _ in test:
                        model(x)
                        gathered += accelerator.gather_for_metrics(numbers).tolist()
                found.append((seen, gathered))
        return found


def test_several_loaders_in_one_context(workers: Workers) -> None:
    first, second = workers.run(2, several)
    for epoch in range(2):
        assert sorted(first[epoch][0] + second[epoch][0]) == list(range(9))
        assert sorted(first[epoch][1]) == list(range(1000, 1007))


class Shrinking(SequentialSampler):
    __module__ = "torch.utils.data.sampler"  # as if it were torch's: trusted

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def lie(rank: int, samples: int) -> None:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(Run().build())
        data = dataset(samples)
        own = DataLoaderShard(data, batch_size=1, sampler=Shrinking(data))
        with accelerator.join_uneven_inputs():
            for _, x, _ in own:
                model(x).sum().backward()


@pytest.mark.parametrize(("samples", "text"), [(8, "ended after 5 batches"), (5, ""), (6, "ended after 5 batches")])
def test_a_length_that_lies(workers: Workers, samples: int, text: str) -> None:
    outcomes = workers.outcomes(2, lie, samples)
    assert all((text in outcome.error) if text else not outcome.error for outcome in outcomes), outcomes


def throw(rank: int) -> int:
    steps = 0
    with accelerator_of(rank) as accelerator:
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(3), 1))
        text = "exhausted all inputs" if rank == 1 else "Throwing across all ranks"
        context = accelerator.join_uneven_inputs(even_batches=False, throw_on_early_termination=True)
        with pytest.raises(RuntimeError, match=text), context:
            for _, x, _ in loader:
                model(x).sum().backward()
                steps += 1
    return steps


def test_early_termination(workers: Workers) -> None:
    assert workers.run(2, throw) == [1, 1]
