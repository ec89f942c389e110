"""An epoch that so many ranks have begun goes on with another number of them: each sample once, and as in one process.

A chain of jobs, each with a number of ranks of its own, of which all but the last are stopped somewhere in an epoch:
two of them in the same one, perhaps. One process makes the same steps.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.workers import Workers
from torch_join import UnpaddedDistributedSampler

EPOCHS, SEED = 3, 3


class Samples(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.values = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index], index


class Shares(UnpaddedDistributedSampler):
    """Deals out one order in unequal parts (1 : 2 : 3), so that nobody is certain of its length."""

    def unpad(self) -> None:
        super().unpad()
        self.num_samples = len([*iter(self)])

    def __iter__(self) -> Iterator[int]:
        alone = UnpaddedDistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        alone.set_epoch(self.epoch)
        order, whole = [*alone], self.num_replicas * (self.num_replicas + 1) // 2
        first, last = (len(order) * (rank * (rank + 1) // 2) // whole for rank in (self.rank, self.rank + 1))
        return iter(order[first:last])


class Drawn:
    """Indices as a generator of its own draws them, which goes on from epoch to epoch."""

    def __init__(self, samples: Samples, rank: int, num_replicas: int) -> None:
        self.samples, self.rank, self.num_replicas = samples, rank, num_replicas
        self.generator = torch.Generator().manual_seed(SEED)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.samples), generator=self.generator).tolist()
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return len(range(self.rank, len(self.samples), self.num_replicas))


class Buckets:
    """Batches of 1 to 4 samples, dealt out as wholes."""

    def __init__(self, samples: Samples, rank: int, num_replicas: int) -> None:
        self.samples, self.rank, self.num_replicas, self.epoch = samples, rank, num_replicas, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batches: list[list[int]] = []
        while order:
            size = len(order) % 4 + 1
            batches, order = [*batches, order[:size]], order[size:]
        return iter(batches[self.rank :: self.num_replicas])


KINDS = ("unpadded", "shares", "drawn", "buckets", "stateful", "samples alone")


@dataclass
class Chain:
    """Jobs with so many ranks, each but the last of which is stopped after a step.

    That is one of the epoch in which it has begun, or of one that is later by so many.
    """

    worlds: Sequence[int]
    stops: Sequence[int]
    count: int
    kind: str = "unpadded"
    size: int = 2
    window: int = 1
    workers: int = 0
    shuffle: bool = True
    seedable: bool = True  # of Accelerate
    rebalances: Sequence[bool] = (False, False, False)
    options: dict[str, Any] = field(default_factory=dict)
    later: Sequence[int] = (0, 0)
    sharded: str = ""  # the optimizer, or the model

    def stop(self, job: int, first: int) -> tuple[int, int] | None:
        """The epoch and the step after which a job is stopped that has begun in an epoch."""
        return (first + self.later[job], self.stops[job]) if job < len(self.stops) else None


def drawn(seed: int, kinds: Sequence[str], fewest: int = 1, sizes: int = 5, **chosen: Any) -> Chain:
    """Return any chain of three jobs, each of which has so many ranks at least, and four at most."""
    one = random.Random(seed)
    count, size, worlds = (
        one.randrange(8, 61),
        one.randrange(1, 1 + sizes),
        [one.randrange(fewest, 5) for _ in range(3)],
    )
    return Chain(
        worlds,
        [one.randrange(1 + count // size // world) for world in worlds[:2]],
        count,
        one.choice(kinds),
        size,
        shuffle=one.random() < 0.7,
        seedable=one.random() < 0.5 or 1 in worlds,
        options={"weighting": one.choice(["world", "active", "samples"])},
        later=[one.choice([0, 0, 1]) for _ in range(2)],
        **chosen,
    )


def loader_of(chain: Chain, rank: int, world: int) -> Any:
    samples = Samples(chain.count)
    if chain.kind == "buckets":
        return DataLoader(samples, batch_sampler=Buckets(samples, rank, world), num_workers=chain.workers)  # type: ignore[arg-type]
    if chain.kind == "drawn":
        sampler: Any = Drawn(samples, rank, world)
    else:
        kind = {"shares": Shares, "padded": DistributedSampler}.get(chain.kind, UnpaddedDistributedSampler)
        sampler = kind(samples, world, rank, chain.shuffle, SEED)
    loader = StatefulDataLoader if chain.kind == "stateful" else DataLoader
    size = None if chain.kind == "samples alone" else chain.size
    return loader(samples, size, sampler=sampler, num_workers=chain.workers)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss(model: Any, batch: Any, rows: int | None = None) -> Tensor:
    squares: Tensor = model(batch.reshape(-1, 3)).square()
    return squares.mean() if rows is None else squares.sum() / rows


def seen_in(batch: Any) -> list[int]:
    return batch[1].tolist() if isinstance(batch[1], Tensor) else [batch[1]]


def alone(chain: Chain, history: list[tuple[int, list[list[list[int]]]]]) -> list[Tensor]:
    """Make the same steps in one process."""
    net, samples = network(), Samples(chain.count)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for world, steps in history:
        for batches in steps:
            rows = sum(map(len, batches))
            for batch in batches:
                shares = {"world": 1 / world, "active": 1 / len(batches), "samples": len(batch) / rows}
                weight = shares[chain.options.get("weighting", "world")]
                (loss(net, samples.values[batch]) * weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def check(workers: Workers, chain: Chain, folder: Path, train: Callable[..., Any]) -> None:
    """Run the jobs of a chain by `train`: see that of tests/core/loops/test_other_ranks.py."""
    history: list[tuple[int, list[list[list[int]]]]] = []
    times: Counter[tuple[int, int]] = Counter()
    first, resumes, parameters = 0, False, []
    for job, world in enumerate(chain.worlds):
        ranks = workers.run(world, train, chain, job, str(folder), resumes)
        stop = chain.stop(job, first)
        if stop is None or not (folder / str(job)).exists():  # it was shorter
            stop = EPOCHS, 0
        steps: dict[tuple[int, int], list[list[int]]] = {}
        for seen, _ in ranks:
            for epoch, step, batch in seen:
                if (epoch, step) <= stop:
                    steps.setdefault((epoch, step), []).append(batch)
                    times.update((epoch, sample) for sample in batch)
        history.append((world, [steps[place] for place in sorted(steps)]))
        parameters, resumes = [found for _, found in ranks], True
        if stop[0] == EPOCHS:
            break
        first = stop[0]
    assert times == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(chain.count))
    if not any(chain.rebalances):  # later epochs are as if there had been no other job
        whole = workers.run(world, train, replace(chain, worlds=[world], stops=[]), 0, str(folder), False)
        for (mine, _), (theirs, _) in zip(ranks, whole, strict=True):
            assert [one for one in mine if one[0] > first] == [one for one in theirs if one[0] > first]
    for found in parameters:
        torch.testing.assert_close(found, alone(chain, history), rtol=0, atol=1e-10)
