"""`join.state_dict()` and `join.load_state_dict()`: every sample once per epoch, whatever stops and goes on.

A run saves at every step of every epoch. Others, with new objects, go on from some of these places; what they train on,
and end with, must be what the run that was not interrupted has.
"""

import multiprocessing
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.warned import warned
from tests.support.workers import WorkerError, Workers
from torch_join import Join, UnpaddedDistributedSampler, windows

EPOCHS, SIZE = 4, 2  # samples in a batch
Place = tuple[int, int]  # an epoch, and a step of it; step -1: after its loop


class Samples(Dataset[Tensor]):
    """Numbers: what is trained on, and which sample it is."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.count:
            raise IndexError
        return torch.tensor([float(self.first + index)], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """The same as a stream, in a new order each time if it `shuffles`: as drawn from a generator of its own."""

    def __init__(self, samples: Samples, shuffles: bool = False) -> None:
        self.samples, self.random = samples, random.Random(7) if shuffles else None

    def __iter__(self) -> Iterator[Tensor]:
        order = [*range(len(self.samples))]
        if self.random is not None:
            self.random.shuffle(order)
        return map(self.samples.__getitem__, order)


class Drawn(Sampler[int]):
    """Indices in an order that generators of numpy draw, which go on from epoch to epoch."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self.count = len(samples)
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


def leaves(batch: Any) -> Iterator[Tensor]:
    """Go through the tensors of a batch, or of a window of batches."""
    if isinstance(batch, Tensor):
        yield batch.reshape(-1)
    else:
        for part in batch:
            yield from leaves(part)


def sizes_of(lengths: tuple[int, ...]) -> list[int]:
    """Return how many samples the ranks have."""
    return [max(0, SIZE * length - 1) for length in lengths]


def loader_of(kind: str, rank: int, world_size: int, lengths: tuple[int, ...]) -> Any:
    """Return a loader of `lengths[rank]` batches, the last of which is smaller; or of all ranks' samples."""
    sizes = sizes_of(lengths)
    mine = Samples(sizes[rank], 1 + sum(sizes[:rank]))
    generator = torch.Generator().manual_seed(3)
    if kind == "list":
        rows = [*mine]
        return [torch.stack(rows[at : at + SIZE]) for at in range(0, len(rows), SIZE)]
    if kind == "sampler":
        sampler = UnpaddedDistributedSampler(Samples(sum(sizes), 1), world_size, rank, seed=5)
        return DataLoader(sampler.dataset, SIZE, sampler=sampler)
    if kind == "stream":
        return DataLoader(Stream(mine), SIZE)
    if kind == "shuffling stream":
        return DataLoader(Stream(mine, shuffles=True), SIZE)
    if kind == "stateful stream":
        return StatefulDataLoader(Stream(mine), SIZE)
    if "nodes" in kind:
        nodes = tn.Loader(tn.Batcher(tn.IterableWrapper([*mine]), SIZE, drop_last=False))
        return windows(nodes, 2) if kind == "windows of nodes" else nodes
    if not len(mine):  # shuffling takes a sample
        return StatefulDataLoader(mine, SIZE) if "stateful" in kind else DataLoader(mine, SIZE)
    if kind == "with replacement":
        return DataLoader(mine, SIZE, sampler=RandomSampler(mine, True, 40, generator))
    if kind == "stateful with replacement":
        return StatefulDataLoader(mine, SIZE, sampler=RandomSampler(mine, True, 40, generator))
    if kind == "stateful":
        return StatefulDataLoader(mine, SIZE, shuffle=True, generator=generator)
    if kind == "stateful, workers":
        return StatefulDataLoader(mine, SIZE, shuffle=True, generator=generator, num_workers=2)
    if kind == "windows of a stateful loader":
        return windows(StatefulDataLoader(mine, SIZE, shuffle=True, generator=generator), 2)
    if kind == "workers that stay":
        return DataLoader(mine, SIZE, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)
    if kind == "a numpy generator":
        return DataLoader(mine, SIZE, sampler=Drawn(mine, rank))
    shuffled = DataLoader(mine, SIZE, shuffle=True, generator=None if kind == "global" else generator)
    return {"windows": windows(shuffled, 2), "bar": Bar(shuffled)}.get(kind, shuffled)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        kind: Of loaders, see `loader_of`.
        lengths: The ranks' numbers of batches.
        options: Of `Join`.
        one_context: Whether one `with` is around all epochs.
    """

    kind: str
    lengths: tuple[int, ...] = (0, 4, 9)
    options: tuple[tuple[str, Any], ...] = ()
    one_context: bool = True


def path_of(folder: str, place: Place) -> Path:
    return Path(folder) / f"{place[0]}_{place[1]}.pt"


def train(rank: int, case: Case, folder: str, start: Place | None, **options: Any) -> dict[str, Any]:
    """See `_train`; these processes, which are daemons, may have none of their own, and a loader may."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        return _train(rank, case, folder, start, **options)


def _train(
    rank: int,
    case: Case,
    folder: str,
    start: Place | None,
    skew: int = 0,
    stop: Place | None = None,
    into: str | None = None,
) -> dict[str, Any]:
    """Train from a place on, or from the begin, and save everywhere then.

    Args:
        start: Where to go on.
        skew: By how many batches the places are wrong.
        stop: After which step to leave the loop by `break`, and to save there.
        into: Where to save if it goes on.

    Returns:
        By epoch and step, the samples that this rank has trained on; and the parameters.
    """
    into = folder if start is None else into
    torch.manual_seed(11)
    net = nn.Linear(1, 1).double()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = loader_of(case.kind, rank, len(case.lengths), case.lengths)
    seen: dict[Place, list[int]] = {}
    first = 0
    join = Join([ddp, optimizer, scheduler], **dict(case.options))
    if start is not None:
        saved = torch.load(path_of(folder, start), weights_only=True)
        for thing, state in zip((net, optimizer, scheduler), saved["states"], strict=True):
            thing.load_state_dict(state)
        first = start[0] + (start[1] < 0)
        if skew:
            for place in saved["join"]["places"]:
                place["taken"] = max(0, place["taken"] + skew)
        join.load_state_dict(saved["join"])

    def save(place: Place) -> None:
        state = join.state_dict()
        if into is not None and rank == min(join.active_ranks):
            states = [thing.state_dict() for thing in (net, optimizer, scheduler)]
            torch.save({"states": states, "join": state}, path_of(into, place))

    def run(epoch: int) -> None:
        if case.kind == "sampler":
            loader.sampler.set_epoch(epoch)
        if "told" in case.kind:
            loader.dataset.set_epoch(epoch)
        if case.kind == "global":
            torch.manual_seed(100 * epoch + rank)
        for batch in join.batches(loader):
            x = torch.cat([*leaves(batch)]).reshape(-1, 1)
            seen[epoch, join.step] = [int(number) for number in x.flatten().tolist()]
            torch.rand(3)  # what dropout does
            optimizer.zero_grad()
            (ddp(x / 10) - x / 7).square().mean().backward()
            optimizer.step()
            scheduler.step()
            save((epoch, join.step))
            if (epoch, join.step) == stop:
                break
        save((epoch, -1) if stop is None else stop)

    epochs = EPOCHS if stop is None else stop[0] + 1
    if case.one_context:
        with join:
            for epoch in range(first, epochs):
                run(epoch)
    else:
        for epoch in range(first, epochs):
            with join:
                run(epoch)
    return {"seen": seen, "parameters": [p.tolist() for p in net.parameters()]}


def skewed(rank: int, case: Case, folder: str, start: Place) -> dict[str, Any]:
    """Train from a place on that is wrong by a batch."""
    return train(rank, case, folder, start, skew=-1)


def check(workers: Workers, case: Case, folder: str, places: list[Place], train: Callable[..., Any] = train) -> None:
    """Compare runs that go on from places with the whole one."""
    world_size = len(case.lengths)
    whole = workers.run(world_size, train, case, folder, None)
    for epoch in range(EPOCHS):
        numbers = [number for run in whole for at, seen in run["seen"].items() if at[0] == epoch for number in seen]
        if "with replacement" not in case.kind:
            assert sorted(numbers) == [*range(1, 1 + sum(sizes_of(case.lengths)))]
    for place in places:
        resumed = workers.run(world_size, train, case, folder, place)
        compare_with(whole, resumed, place)


def compare_with(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], place: Place) -> None:
    """Compare, by rank, a run that goes on from a place with the whole one."""
    for rank, (run, one) in enumerate(zip(resumed, whole, strict=True)):
        after = {at: numbers for at, numbers in one["seen"].items() if _is_after(at, place)}
        assert run["seen"] == after, (place, rank)
    for run, one in zip(resumed, whole, strict=True):
        assert run["parameters"] == one["parameters"], place


def _is_after(at: Place, place: Place) -> bool:
    return at[0] > place[0] or (at[0] == place[0] and 0 <= place[1] < at[1])


EVEN_STEP, IN_THE_TAIL, ALONE, LAST, AFTER = (0, 1), (1, 3), (1, 5), (0, 8), (0, -1)
KINDS = (
    "list",
    "shuffled",
    "global",
    "with replacement",
    "sampler",
    "stream",
    "shuffling stream",
    "bar",
    "stateful",
    "stateful, workers",
    "stateful stream",
    "nodes",
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("half", [0, 1])  # of the places
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_where_it_was_interrupted(workers: Workers, tmp_path: Path, kind: str, half: int) -> None:
    places = [(0, 0), (0, 1), (1, 3), (1, 4), (0, 8), (1, -1)]
    if kind == "sampler":  # whose ranks have four batches each
        places = [(0, 0), (1, 2), (0, 3), (0, -1)]
    if "workers" in kind:
        places = [(1, 4), (0, 8)]
    check(workers, Case(kind), str(tmp_path), places[half::2])


@pytest.mark.covering(1)
@pytest.mark.parametrize("half", [0, 1])  # of the places
@pytest.mark.parametrize(
    ("kind", "options", "one_context"),
    [
        ("sampler", {"may_break": True}, False),
        ("shuffled", {"weighting": "samples"}, True),
        ("stateful", {"weighting": "samples", "may_break": True}, False),
        ("stateful stream", {"may_break": True}, True),
        ("windows", {"weighting": "active"}, False),
        ("windows of a stateful loader", {}, True),
        ("windows of nodes", {}, True),
        ("workers that stay", {}, True),
        ("a numpy generator", {"weighting": "active"}, True),
    ],
)
def test_it_goes_on_under_other_options(
    workers: Workers, tmp_path: Path, kind: str, options: dict[str, Any], one_context: bool, half: int
) -> None:
    case = Case(kind, (3, 0, 5), tuple(options.items()), one_context)
    places = (
        [(0, 1), (1, 2), (0, 2), (0, -1)]
        if "windows" in kind or kind == "sampler"
        else [(0, 2), (1, 3), (0, 4), (2, -1)]
    )
    check(workers, case, str(tmp_path), places[half::2])


@pytest.mark.covering(1)
@pytest.mark.parametrize("half", [0, 1])  # of the places
@pytest.mark.parametrize(
    ("kind", "lengths", "options"),
    [
        ("list", (0, 4, 9), {}),
        ("shuffled", (9, 1, 4), {"weighting": "samples"}),
        ("stream", (1, 0, 9), {}),
        ("stream", (2, 7, 3), {"weighting": "samples"}),
        ("list", (4, 4, 4), {"weighting": "samples"}),
    ],
)
def test_it_goes_on_where_batches_are_rebalanced(
    workers: Workers, tmp_path: Path, kind: str, lengths: tuple[int, ...], options: dict[str, Any], half: int
) -> None:
    case = Case(kind, lengths, (("rebalance", True), *options.items()))
    last = -(-sum(lengths) // len(lengths)) - 1
    check(workers, case, str(tmp_path), [(0, 0), (0, 1), (1, 2), (1, last - 1), (0, last), (1, -1)][half::2])


def test_a_place_that_is_off_by_a_batch_is_noticed(workers: Workers, tmp_path: Path) -> None:
    case, place = Case("stream"), (1, 4)
    whole = workers.run(3, train, case, str(tmp_path), None)
    resumed = workers.run(3, skewed, case, str(tmp_path), place)
    for run, one in zip(resumed[1:], whole[1:], strict=True):
        assert run["seen"] != {at: numbers for at, numbers in one["seen"].items() if _is_after(at, place)}
    with pytest.raises(WorkerError, match="said its length was 4 and goes on after that"):
        workers.run(3, train, Case("list"), str(tmp_path), None)
        workers.run(3, skewed, Case("list"), str(tmp_path), place)


def refuse(rank: int, what: str) -> None:
    """Do something that cannot be done."""
    ddp = DistributedDataParallel(nn.Linear(1, 1).double())
    state: dict[str, Any] = {}
    with Join([ddp], rebalance=what == "no longer rebalanced") as join:
        for batch in join.batches(loader_of("list", rank, 2, (4, 1) if "rebalanced" in what else (4, 3))):
            ddp(batch).sum().backward()
            if join.step == ("rebalanced" not in what) and (rank == 0 or what != "some"):
                state = join.state_dict()
            if join.step == 2 and what == "in a loop":
                join.load_state_dict(state)
        if what == "another world":
            join.load_state_dict({**state, "places": state["places"][:1]})
        if what == "another version":
            join.load_state_dict({**state, "version": 99})
        if "rebalanced" in what:
            again = Join([ddp], rebalance=what == "now rebalanced")
            again.load_state_dict(state)
    if "rebalanced" in what:
        with again:
            for batch in again.batches(loader_of("list", rank, 2, (4, 1))):
                ddp(batch).sum().backward()
        return
    with Join([ddp]) as join:
        if what != "some ranks load" or rank == 1:
            join.load_state_dict(state)
        kind = "shuffled" if what == "another loader" else "list"
        for batch in join.batches(loader_of(kind, rank, 2, (4, 4) if what == "longer" else (4, 3))):
            ddp(batch).sum().backward()


class Secret(Sampler[int]):
    """Draws by nothing that has a state."""

    def __init__(self) -> None:
        self.random = random.SystemRandom()

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def refuse_order(rank: int, what: str) -> int:
    """Ask for a place in an order that nobody could have again; return how many batches there were."""
    samples = Samples(4)
    loaders: dict[str, Any] = {
        "zip": zip(DataLoader(samples), DataLoader(samples), strict=True),
        "out of order": DataLoader(samples, num_workers=1, in_order=False),
        "in a worker": DataLoader(Stream(samples, shuffles=True), num_workers=1, persistent_workers=True),
        "not asked": DataLoader(samples, sampler=Secret()),
    }
    with (
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),  # type: ignore[attr-defined]
        Join([DistributedDataParallel(nn.Linear(1, 1))]) as join,
    ):
        for _ in join.batches(loaders[what]):
            if what != "not asked":
                join.state_dict()
        return join.step


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("zip", "A place in a zip, which is an iterator"),
        ("out of order", "A place in a DataLoader with in_order=False"),
        ("in a worker", "whose order is drawn from loader.dataset.random: a worker has a copy"),
        ("not asked", ""),
    ],
)
def test_an_order_that_nobody_could_have_again(workers: Workers, what: str, message: str) -> None:
    for outcome in workers.outcomes(2, refuse_order, what, timeout=3.0):
        assert message in outcome.error or "failed, so rank" in outcome.error, outcome.error
        assert bool(outcome.error) == bool(message)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("some", r"join.state_dict\(\) was called on rank 0 and not on rank 1, which went on without it"),
        ("in a loop", r"join.load_state_dict\(\) was called in a loop"),
        (
            "another world",
            "in the middle of a loop by 1 ranks, and there are 2 now. What is left can be dealt out anew where",
        ),
        ("another version", "version 99"),
        ("some ranks load", "rank 0: at none; rank 1: at step 2"),
        ("another loader", r"another loader than this DataLoader \(batches: . then, unknown now"),
        ("now rebalanced", "with rebalance=True was to go on from a state that was written without it"),
        ("no longer rebalanced", "without rebalance=True was to go on from a state that was written with it"),
        ("longer", r"another loader than this list \(batches: 3 then, 4 now\)"),
    ],
)
def test_what_cannot_be_resumed_raises_on_all_ranks(workers: Workers, what: str, message: str) -> None:
    found = [outcome.error for outcome in workers.outcomes(2, refuse, what, timeout=10.0)]
    assert re.search(message, " ".join(found)), found
    for error in found:
        assert re.search(message, error) or "failed, so rank" in error, found


RIGHT = ("adversaries", "turns", "left out")


def save_each_step(rank: int, way: str, lengths: tuple[int, ...]) -> None:
    """Ask for a place after each batch, where two models are trained in turns, or one over windows of two batches."""
    first: Any
    first, second = (DistributedDataParallel(nn.Linear(1, 1).double()) for _ in range(2))
    if way == "sharded":
        first = fully_shard(nn.Linear(1, 1).double(), mesh=init_device_mesh("cpu", (len(lengths),)))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    with Join([first, second, *optimizers]) as join:
        for x in join.batches(loader_of("list", rank, len(lengths), lengths)):
            if way == "adversaries":  # the second loss leaves gradients in the first model, which has stepped
                for number in range(2):
                    optimizers[number].zero_grad()
                    (second(first(x)) if number else first(x)).sum().backward()
                    optimizers[number].step()
            elif way in ("turns", "left out"):  # gradients of the first model are left, for its next zero_grad
                number = join.step % 2 if way == "turns" else 0
                optimizers[number].zero_grad()
                (second(first(x)) if number else first(x)).sum().backward()
                if way == "turns" or join.step != 1:
                    optimizers[number].step()
            else:
                if way == "sharded":
                    first.set_requires_gradient_sync(join.step % 2 == 1)
                with first.no_sync() if way == "unsynced" and join.step % 2 == 0 else nullcontext():
                    first(x).sum().backward()
                if join.step % 2 == 1:
                    optimizers[0].step()
                    optimizers[0].zero_grad()
            if way in RIGHT or join.step >= 1:
                join.state_dict()
            elif way == "synced":
                with warned("It may be amid a window of accumulation") as found:
                    join.state_dict()
                assert len(found) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(0, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("way", [*RIGHT, "synced", "unsynced", "sharded"])
def test_a_place_within_a_window_is_refused(workers: Workers, way: str, lengths: tuple[int, ...]) -> None:
    for outcome in workers.outcomes(2, save_each_step, way, lengths, timeout=3.0):
        if way in RIGHT:
            assert not outcome.error, outcome.error
        else:
            assert re.search("at step 2 of a loop, where rank . holds gradients that its optim", outcome.error)


def check_in_new_processes(workers: Workers, train: Callable[..., Any], kind: str, folder: str) -> None:
    """Compare a run that goes on in other processes with the whole one."""
    case, place = Case(kind), (1, 2)
    whole, others = workers.run(3, train, case, folder, None), Workers(3)
    try:
        compare_with(whole, others.run(3, train, case, folder, place), place)
    finally:
        others.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_in_new_processes(workers: Workers, tmp_path: Path, kind: str) -> None:
    check_in_new_processes(workers, train, kind, str(tmp_path))


def go_on_from_old(rank: int, path: str) -> list[list[float]]:
    samples = torch.arange(8.0).view(8, 1)
    loader = DataLoader(samples, 2, shuffle=True, generator=torch.Generator().manual_seed(5))
    with Join([DistributedDataParallel(nn.Linear(1, 1))]) as join:
        join.load_state_dict(torch.load(path))
        return [batch.flatten().tolist() for batch in join.batches(loader)]


def test_a_state_of_version_0_2_0(workers: Workers) -> None:
    """Amid a loop whose batches were drawn from a generator of seed 1; the next release reads it no more."""
    path = Path(__file__).parent / "written" / "state_0_2_0.pt"
    assert workers.run(1, go_on_from_old, str(path)) == [[[7.0, 1.0], [5.0, 2.0]]]
    for outcome in workers.outcomes(2, go_on_from_old, str(path)):
        assert "in the middle of a loop by 1 ranks, and there are 2 now" in outcome.error
