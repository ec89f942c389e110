"""An epoch that a job has begun goes on in another one: each sample once, and as in one process.

A chain of jobs, each with a number of ranks of its own, of which all but the last are stopped somewhere in an epoch:
two of them in the same one, perhaps. One process makes the same steps. Where all have as many ranks, these may have
samples of their own, and what each rank trains on is what it would have trained on in one job.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torchdata.nodes as tn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulSampler

from tests.support.batches import Drawn as DrawnTwice
from tests.support.workers import Workers
from torch_join import UnpaddedDistributedSampler

EPOCHS, SEED = 3, 3
BEHIND = 1000  # in place of a step: after the epoch's loop
EVALUATED = 500  # from here on, steps that nothing is trained on in


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


class Stream(IterableDataset[int]):
    """Numbers of samples in an order that follows from the epoch; it has no length, and no state."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for index in range(len(self.numbers)):
            yield self.numbers[(index + self.epoch) % len(self.numbers)]


class ShuffledStream(IterableDataset[int]):
    """The same in an order that a generator of its own draws."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.random = numbers, random.Random(SEED)

    def __iter__(self) -> Iterator[int]:
        yield from self.random.sample(self.numbers, len(self.numbers))


class Collate:
    """Makes a batch of numbers of samples, or of rows that hold these; with names, if it has some."""

    def __init__(self, samples: Samples, names: Sequence[str] = ()) -> None:
        self.samples, self.names = samples, names

    def __call__(self, rows: Sequence[Any]) -> Any:
        numbers = torch.tensor([int(row["number"]) if isinstance(row, dict) else row for row in rows])
        batch = self.samples.values[numbers], numbers
        return dict(zip(self.names, batch, strict=True)) if self.names else batch


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
    lengths: Sequence[int] = ()  # where each rank has samples of its own: its batches
    beside: Sequence[int] = ()  # and those of a second loader, and so on
    once: bool = True  # whether each sample comes once in an epoch

    def numbers(self, share: int) -> range:
        """Return samples of a rank's own, or, after those of all, of its second loader; the last batch is not full."""
        sizes = [self.size * length - (length > 1 and self.window == 1) for length in (*self.lengths, *self.beside)]
        return range(sum(sizes[:share]), sum(sizes[: share + 1]))

    def stop(self, job: int, first: int) -> tuple[int, int] | None:
        """The epoch and the step after which a job is stopped that has begun in an epoch."""
        return (first + self.later[job], self.stops[job]) if job < len(self.stops) else None


def own(kind: str, lengths: Sequence[int], places: Sequence[tuple[int, int]], **chosen: Any) -> Chain:
    """Return a chain of jobs with as many ranks each, which have batches of their own.

    Args:
        kind: Of loaders.
        lengths: The ranks' numbers of batches.
        places: Where jobs are stopped: so many epochs after that in which they have begun, after a step.
        **chosen: What else is said of a chain.
    """
    later, stops = zip(*places, strict=True)
    jobs = len(stops) + 1
    chosen = {"rebalances": (False,) * jobs, **chosen}
    chain = Chain([len(lengths)] * jobs, stops, 0, kind, later=later, lengths=lengths, **chosen)
    return replace(chain, count=chain.numbers(len(chain.lengths) + len(chain.beside)).stop)


def drawn(
    seed: int, kinds: Sequence[str], fewest: int = 1, sizes: int = 5, owned: Sequence[str] = (), **chosen: Any
) -> Chain:
    """Return any chain of three jobs, each of which has so many ranks at least, and four at most.

    With a chance of one in two it is one of `owned`, whose ranks have samples of their own.
    """
    one = random.Random(seed)
    if owned and one.random() < 0.5:
        lengths = one.choice([(0, 4, 9), (4, 9, 0), (9, 0, 4), (3, 3, 3), (1, 5, 2), (2, 6), (0, 3), (5, 1)])
        options = {"weighting": one.choice(["world", "active", "samples"])}
        places = [(one.choice([0, 0, 1]), one.choice([*range(max(lengths)), BEHIND])) for _ in range(2)]
        return own(one.choice(owned), lengths, places, options=options)
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


def data_of(kind: str, numbers: Sequence[int]) -> Any:
    """Return numbers of samples as a data set."""
    if "hf stream" in kind:
        import datasets

        rows = datasets.Dataset.from_dict({"number": [-1, -1, *numbers]})  # it takes no empty one
        return rows.to_iterable_dataset(num_shards=2).filter(_is_kept)  # a buffer that shuffles is lost
    if "shuffled stream" in kind:
        return ShuffledStream(numbers)
    return Stream(numbers) if "stream" in kind else numbers


def _is_kept(row: Any) -> bool:
    return bool(row["number"] >= 0)


def own_loader(chain: Chain, share: int, make: Any = DataLoader, names: Sequence[str] = (), **options: Any) -> Any:
    """Return a loader of a rank's own samples, or its second one: see `Chain.numbers`."""
    numbers, collate = chain.numbers(share), Collate(Samples(chain.count), names)
    if chain.kind == "nodes":
        batcher = tn.Batcher(tn.IterableWrapper([*numbers]), chain.size, drop_last=False)
        return tn.Loader(tn.Mapper(batcher, collate))
    if numbers and "stream" not in chain.kind and not options.keys() & {"sampler", "shuffle"}:  # each takes a sample
        generator = None if "unseeded" in chain.kind else torch.Generator().manual_seed(share)
        if "one generator" in chain.kind:
            options["generator"] = generator
        if "drawn" in chain.kind:
            options["sampler"] = DrawnTwice(numbers, share, eagerly=bool(names))
        else:
            kind = StatefulSampler if "torchdata" in chain.kind else RandomSampler
            options["sampler"] = kind(numbers, generator=generator)
    return make(data_of(chain.kind, numbers), batch_size=chain.size, collate_fn=collate, **options)


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


def check_in_new_processes(workers: Workers, chain: Chain, folder: Path, train: Callable[..., Any]) -> None:
    """Run the first job of a chain in these processes, and what comes next in others."""
    others = Workers(max(chain.worlds))
    try:
        check(workers, chain, folder, train, others)
    finally:
        others.close()


def check(
    workers: Workers, chain: Chain, folder: Path, train: Callable[..., Any], others: Workers | None = None
) -> None:
    """Run the jobs of a chain by `train`, all but the first in `others`: see that of tests/core/loops/resumed.py."""
    history: list[tuple[int, list[list[list[int]]]]] = []
    times: Counter[tuple[int, int]] = Counter()
    trained: list[list[tuple[int, list[int]]]] = [[] for _ in range(max(chain.worlds))]  # by rank: epochs and batches
    first, resumes, parameters = 0, False, []
    for job, world in enumerate(chain.worlds):
        pool = workers if job == 0 or others is None else others
        ranks = pool.run(world, train, chain, job, str(folder), resumes)
        stop = chain.stop(job, first)
        if stop is None or not (folder / str(job)).exists():  # it was shorter
            stop = EPOCHS, 0
        steps: dict[tuple[int, int], list[list[int]]] = {}
        for rank, (seen, _) in enumerate(ranks):
            for epoch, step, batch in seen:
                if (epoch, step) <= stop:
                    steps.setdefault((epoch, step), []).append(batch)
                    times.update((epoch, sample) for sample in batch)
                    trained[rank].append((epoch, batch))
        history.append((world, [steps[place] for place in sorted(steps) if place[1] < EVALUATED]))
        parameters, resumes = [found for _, found in ranks], True
        if stop[0] == EPOCHS:
            break
        first = stop[0] + (stop[1] == BEHIND)
    assert not chain.once or times == Counter(
        (epoch, sample) for epoch in range(EPOCHS) for sample in range(chain.count)
    )
    is_same = len({*chain.worlds}) == 1
    if is_same or not any(chain.rebalances):  # later epochs, at least, are as if there had been no other job
        whole = workers.run(world, train, replace(chain, worlds=[world], stops=[]), 0, str(folder), False)
        for mine, found, (theirs, expected) in zip(trained, parameters, whole, strict=False):
            since = 0 if is_same else first + 1
            assert [it for it in mine if it[0] >= since] == [(it[0], it[2]) for it in theirs if it[0] >= since]
            if is_same:
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for found in parameters:
        torch.testing.assert_close(found, alone(chain, history), rtol=0, atol=1e-10)
