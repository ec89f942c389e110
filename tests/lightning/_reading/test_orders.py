"""The rest of an epoch, and the next one, by samplers that keep no state: in one process, without steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata

from lightning_join._reading.fetcher import ReadAheadFetcher
from torch_join import UnpaddedDistributedSampler
from torch_join.integration import VERSION, Resuming

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # Lightning's
]
MODES = ("min_size", "max_size", "max_size_cycle")
LONG, SHORT = torch.arange(12), torch.arange(5)


def drawing(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def both(kind: Callable[..., DataLoader[Any]], seeded: bool = True, **options: Any) -> list[DataLoader[Any]]:
    """Return two that shuffle, each from a generator of its own or both from torch's."""
    generators = [drawing(3), drawing(4)] if seeded else [None, None]
    pairs = zip((LONG, SHORT), generators, strict=True)
    return [kind(data, 2, shuffle=True, generator=generator, **options) for data, generator in pairs]


def alone(data: torch.Tensor = LONG, seed: int | None = 3, **options: Any) -> DataLoader[Any]:
    """Return one whose order torch's sampler draws, which torchdata asks for it only as it is read."""
    sampler = RandomSampler(data, generator=None if seed is None else drawing(seed), **options)  # type: ignore[arg-type]
    return StatefulDataLoader(data, batch_size=None, sampler=sampler)  # type: ignore[arg-type]


def in_batches(seed: int | None = 3) -> DataLoader[Any]:
    sampler = RandomSampler(LONG, generator=None if seed is None else drawing(seed))  # type: ignore[arg-type]
    return StatefulDataLoader(LONG, batch_sampler=BatchSampler(sampler, 2, False))  # type: ignore[arg-type]


def dealt(sampler: Any) -> DataLoader[Any]:
    """Return what Lightning makes of a loader that shuffles: its own sampler draws an order from the other's."""
    return StatefulDataLoader(LONG, 2, sampler=DistributedSamplerWrapper(sampler, num_replicas=1, rank=0))  # type: ignore[arg-type]


def weighted() -> list[DataLoader[Any]]:
    sampler = WeightedRandomSampler([1.0] * 12, 12, generator=drawing(3))
    dealt = DistributedSamplerWrapper(sampler, num_replicas=1, rank=0)
    return [DataLoader(LONG, 2, sampler=dealt), both(DataLoader)[1]]  # type: ignore[arg-type]


STAY: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
KINDS: dict[str, Callable[[], Any]] = {
    "one, by torch's sampler": alone,
    "one, by torch's sampler and generator": lambda: alone(seed=None),
    "one, with replacement": lambda: alone(replacement=True, num_samples=40),
    "one, by a sampler of batches": in_batches,
    "one, by a sampler of batches, and torch's generator": lambda: in_batches(None),
    "one, with a generator of its own": lambda: both(StatefulDataLoader)[0],
    "one, by torch's generator": lambda: both(StatefulDataLoader, seeded=False)[0],
    "one, by Lightning's sampler around torchdata's": lambda: dealt(
        torchdata.RandomSampler(LONG, generator=drawing(3))
    ),
    "one, by Lightning's sampler around torch's": lambda: dealt(RandomSampler(LONG, generator=drawing(3))),  # type: ignore[arg-type]
    "one without a state": lambda: both(DataLoader)[0],
    "one without a state, by torch's generator": lambda: both(DataLoader, seeded=False)[0],
    "one, whose workers stay": lambda: both(DataLoader, **STAY)[0],
    "one, whose workers stay, by torch's generator": lambda: both(DataLoader, seeded=False, **STAY)[0],
    "two": lambda: both(DataLoader),
    "two, by torch's generator": lambda: both(DataLoader, seeded=False),
    "two, whose workers stay": lambda: both(DataLoader, **STAY),
    "two, weighted": weighted,
    "two with states": lambda: both(StatefulDataLoader),
    "two with states, by torch's samplers": lambda: [alone(), alone(SHORT, 4)],
}
CASES = [(kind, mode) for kind in KINDS for mode in (MODES if kind.startswith("two") else MODES[:1])]


def fetcher_of(kind: str, mode: Any) -> ReadAheadFetcher:
    fetcher = ReadAheadFetcher(Resuming(0, 1))
    fetcher.setup(CombinedLoader(KINDS[kind](), mode))
    iter(fetcher)
    return fetcher


def taken(fetcher: ReadAheadFetcher, most: int = 100) -> list[str]:
    found: list[str] = []
    while len(found) < most:
        fetcher.fill()
        if not fetcher.has_next():
            break
        found.append(str(fetcher.take()))
        torch.rand(3)  # as dropout does
    return found


def epoch_of(fetcher: ReadAheadFetcher) -> list[str]:
    iter(fetcher)
    fetcher.start()
    return taken(fetcher)


LOST = ("two, by torch's generator", "two with states, by torch's samplers")  # once one has started again


@pytest.mark.parametrize(("epoch", "step"), [(0, 1), (1, 2), (1, 6)])
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_what_is_left_is_what_would_have_come(kind: str, mode: str, epoch: int, step: int) -> None:
    torch.manual_seed(1)
    whole = fetcher_of(kind, mode)
    for _ in range(epoch):
        epoch_of(whole)
    iter(whole)
    whole.start()
    taken(whole, step)
    whole.fill()
    place, drawn = copy.deepcopy(whole.place()), torch.get_rng_state()
    expected = [taken(whole), epoch_of(whole)]
    assert place is not None
    if kind in LOST and "refused" in place:
        assert mode == "max_size_cycle"
        assert "The order of the second pass cannot be restored" in place["refused"]
        return
    resumed = fetcher_of(kind, mode)
    torch.set_rng_state(drawn)
    state = {"version": VERSION, "name": "", "step": step, "over": False, "places": [place], "others": {}}
    resumed.resuming.load(state)
    resumed.start()
    assert [taken(resumed), epoch_of(resumed)] == expected


class Transformed(Dataset[float]):
    """What a rank makes of its samples it draws from torch's generator, and from one of its own."""

    def __init__(self) -> None:
        self.own = drawing(7)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(1)) + float(torch.rand(1, generator=self.own))


@pytest.mark.parametrize("shuffles", [False, True])
def test_what_transforms_draw_goes_on_too(shuffles: bool) -> None:
    def made() -> ReadAheadFetcher:
        data = Transformed()
        sampler = UnpaddedDistributedSampler(data, 1, 0, shuffles, seed=3)
        fetcher = ReadAheadFetcher(Resuming(0, 1))
        fetcher.setup(CombinedLoader(StatefulDataLoader(data, 2, sampler=sampler)))
        iter(fetcher)
        return fetcher

    torch.manual_seed(1)
    whole = made()
    whole.start()
    assert whole.take() is not None
    place, drawn = copy.deepcopy(whole.place()), torch.get_rng_state()
    expected = taken(whole)
    resumed = made()
    resumed.resuming.load({"version": VERSION, "name": "", "step": 1, "over": False, "places": [place], "others": {}})
    resumed.start()
    torch.set_rng_state(drawn)
    assert taken(resumed) == expected
