"""Ordinary scripts that touch the edges of the context."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, SubsetRandomSampler

from tests.support.front_ends.accelerate import Lines, Script, Stream, accelerator_of, dataset, make_loader
from tests.support.run import Run
from tests.support.workers import Workers
from torch_join import JoinError


def log_own(rank: int, lengths: tuple[int, ...], folder: str, guarded: bool) -> None:
    with accelerator_of(rank, log_with=Lines(f"{folder}/lines")) as accelerator:
        accelerator.init_trackers("project")
        model, loader = accelerator.prepare(Run().build(), make_loader(Script(lengths=lengths), rank))
        with accelerator.join_uneven_inputs():
            for step, (_, x, _) in enumerate(loader):
                model(x).sum().backward()
                if not guarded or accelerator.is_main_process:
                    accelerator.log({"x": rank}, step=step)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5, 2), (2, 5, 5), (4, 1, 6)])
def test_each_rank_logs_what_is_its_own(
    workers: Workers, lengths: tuple[int, ...], guarded: bool, tmp_path: Path
) -> None:
    workers.run(3, log_own, lengths, str(tmp_path), guarded)
    steps = lengths[0] if guarded else max(lengths)
    leaders = [min(r for r, length in enumerate(lengths) if length > step) for step in range(steps)]
    assert (tmp_path / "lines").read_text().splitlines() == [f"{s} {r}" for s, r in enumerate(leaders)]


def plateau(rank: int, even_batches: bool) -> list[float]:
    """Everybody steps a scheduler on a metric that was gathered in an uneven loop."""
    with accelerator_of(rank) as accelerator:
        net = Run().build()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        model, optimizer, train, test = accelerator.prepare(
            net, optimizer, DataLoader(dataset(8), 2), DataLoader(dataset(3, seed=1), 1)
        )
        rates = []
        with accelerator.join_uneven_inputs(even_batches=even_batches):
            for epoch in range(4):
                for _, x, y in train:
                    accelerator.backward((model(x) - y).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                found: list[int] = []
                with torch.no_grad():
                    for numbers, x, _ in test:
                        model(x)
                        found += accelerator.gather_for_metrics(numbers).tolist()
                scheduler.step(1.0 + epoch if len(found) == 3 else 9.0 - epoch)
                rates.append(optimizer.param_groups[0]["lr"])
        return rates


def test_a_decision_from_what_others_do_not_have(workers: Workers) -> None:
    for outcome in workers.outcomes(2, plateau, False):
        assert "The ranks' optimizers differ: lr of SGD is 0.05 on rank 0, 0.1 on rank 1" in outcome.error
    first, second = workers.run(2, plateau, True)
    assert first == second


def missed(rank: int) -> list[str]:
    with accelerator_of(rank) as accelerator, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(7), 1))
        with accelerator.join_uneven_inputs(even_batches=False), torch.no_grad():
            for _ in range(2):
                for numbers, x, _ in loader:
                    model(x)
                    accelerator.gather_for_metrics(numbers)
                    accelerator.gather(numbers)
    return [str(warning.message) for warning in caught]


def test_a_rank_that_misses_a_part_of_a_metric_is_told_so(workers: Workers) -> None:
    first, second = workers.run(2, missed)
    assert not any("has finished" in text for text in first)
    assert sum("Rank 1 has finished, so it does not receive the samples" in text for text in second) == 1


def pairs(rank: int, how: str) -> list[Any]:
    """Two prepared loaders at once, or one through `join.batches`."""
    with accelerator_of(rank, gradient_accumulation_steps=2) as accelerator:
        model, one, other = accelerator.prepare(
            Run().build(), make_loader(Script(lengths=(2, 5)), rank), DataLoader(dataset(12), 1)
        )
        seen = []
        with accelerator.join_uneven_inputs(even_batches=False) as join:
            loops: dict[str, Callable[[], Any]] = {
                "batches": lambda: ((batch, None) for batch in join.batches(one)),
                "zip": lambda: join.batches(zip(one, other, strict=False)),
                "plain zip": lambda: zip(one, other, strict=False),
            }
            for (numbers, x, _), _ in loops[how]():
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                seen.append(numbers.tolist())
        return [len(seen), accelerator.step]


def test_prepared_loaders_in_other_loops(workers: Workers) -> None:
    assert workers.run(2, pairs, "batches") == [[2, 0], [5, 0]]
    assert [steps for steps, _ in workers.run(2, pairs, "zip")] == [2, 5]
    for outcome in workers.outcomes(2, pairs, "plain zip"):
        assert "join.batches(zip(a, b))" in outcome.error


def prepare_again(rank: int) -> list[float]:
    with accelerator_of(rank) as accelerator:
        net = Run().build()
        model = accelerator.prepare(net)
        accelerator.free_memory()
        loader = make_loader(Script(lengths=(2, 4)), rank)
        again, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(net.parameters()), loader)
        if again is not model:  # as in older versions: a wrapper in another one
            with pytest.raises(JoinError, match="or prepare the model instead of its wrapper"):
                accelerator.join_uneven_inputs().__enter__()
            return []
        with accelerator.join_uneven_inputs():
            for _, x, _ in loader:
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        return [float(p.sum()) for p in net.parameters()]


def test_a_model_that_was_prepared_twice(workers: Workers) -> None:
    first, second = workers.run(2, prepare_again)
    assert first == second


def metrics(rank: int, samples: int, skip: int, iterable: bool) -> list[int]:
    config = DataLoaderConfiguration(dispatch_batches=False) if iterable else None
    with accelerator_of(rank, dataloader_config=config) as accelerator:
        data: Any = dataset(samples)
        if iterable:
            data = Sized(data, samples)
        model, loader = accelerator.prepare(Run().build(), DataLoader(data, 2))
        found: list[int] = []
        with accelerator.join_uneven_inputs(even_batches=True), torch.no_grad():
            for numbers, x, _ in accelerator.skip_first_batches(loader, skip) if skip else loader:
                model(x)
                found += accelerator.gather_for_metrics(numbers).tolist()
        return found


def subset(rank: int) -> list[int]:
    with accelerator_of(rank) as accelerator:
        sampler = SubsetRandomSampler([1, 3, 5, 7, 9])
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(12), 2, sampler=sampler))
        found: list[int] = []
        with accelerator.join_uneven_inputs(even_batches=True), torch.no_grad():
            for numbers, x, _ in loader:
                model(x)
                found += accelerator.gather_for_metrics(numbers).tolist()
        return found


def test_repeated_samples_of_a_subset_are_cut_off(workers: Workers) -> None:
    for found in workers.run(2, subset):
        assert sorted(found) == [1, 3, 5, 7, 9]


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("samples", [7, 8, 9])
def test_repeated_samples_are_cut_off(workers: Workers, samples: int) -> None:
    for found in workers.run(2, metrics, samples, 1, False):
        assert sorted(found) == list(range(4, samples))
    for found in workers.run(2, metrics, samples, 0, True):
        assert sorted(found) == list(range(samples))


def local_sgd(rank: int) -> None:
    with accelerator_of(rank) as accelerator:
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(5), 2))
        with (
            accelerator.join_uneven_inputs(even_batches=False),
            LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local,
        ):
            for _, x, _ in loader:
                model(x).sum().backward()
                local.step()


def test_local_sgd_is_refused(workers: Workers) -> None:
    assert all("LocalSGD averages parameters" in outcome.error for outcome in workers.outcomes(2, local_sgd))
