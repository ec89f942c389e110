"""Which sample is trained on how often, by identity: each cell of the table in docs/data.md."""

import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from lightning_join import DDPJoinStrategy, JoinCallback
from tests.covering import others_long
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.fabric import fabric_of
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.workers import Workers
from torch_join import Join, UnpaddedDistributedSampler

WORLD_SIZE, EPOCHS, SIZE = 3, 2, 14
OWN = (range(0), range(8), range(8, 14))  # each rank's own: rank 0 has none
FRONT_ENDS = ("plain", "lightning", "fabric", "accelerate", "trainer")
Seen = list[list[int]]  # the samples of each epoch, or of each rank in an epoch
Make = Callable[[int, int], Any]  # a loader, for a rank in an epoch
Expected = Callable[[int], Seen]  # by epoch, the samples of each rank


class Data(Dataset[Tensor]):
    """Says that it has so many more samples than it has."""

    def __init__(self, ids: range, more: int = 0) -> None:
        self.ids, self.more = ids, more

    def __len__(self) -> int:
        return max(0, len(self.ids) + self.more)

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([float(self.ids[place])])


class Stream(Data, IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in self.ids)


class Places(Data, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.ids)))


class Batches(DataLoader[Tensor]):
    """A loader with a length of its own making."""

    more = 0

    def __len__(self) -> int:
        return max(0, super().__len__() + self.more)


def whole(kind: Callable[[range], Any] = Data, **options: Any) -> Make:
    """All samples on each rank."""
    return lambda rank, epoch: DataLoader(kind(range(SIZE)), 2, **options)


def dealt(sampler: Any = UnpaddedDistributedSampler, own: Any = None, **options: Any) -> Make:
    """All samples, of which a sampler gives each rank its share."""
    data = Data(range(SIZE))
    return lambda rank, epoch: DataLoader(
        data, 2, sampler=sampler(data, WORLD_SIZE, rank, shuffle=False, **(own or {})), **options
    )


def own(kind: Callable[[range, int], Any] = Data, more: int = 0) -> Make:
    return lambda rank, epoch: DataLoader(kind(OWN[rank], more), 2)


class Rounds:
    """Batches of which a sampler gives each rank one of W, after it has filled the last round with the first ones."""

    def __init__(self, rank: int) -> None:
        batches = [[*range(first, first + 2)] for first in range(0, SIZE, 2)]
        self.own = (batches + batches[: -len(batches) % WORLD_SIZE])[rank::WORLD_SIZE]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


def rounds(rank: int, epoch: int) -> Any:
    return DataLoader(Data(range(SIZE)), batch_sampler=Rounds(rank))


def equal_parts(rank: int, epoch: int) -> Any:
    """A stream of this rank's part of the samples, which are cut off where they cannot be divided."""
    size = SIZE // WORLD_SIZE
    return DataLoader(Stream(range(size * rank, size * (rank + 1))), 2)


def own_sampler(more: int) -> Make:
    return lambda rank, epoch: DataLoader(Data(OWN[rank]), 2, sampler=Places(OWN[rank], more))


def own_loader(more: int) -> Make:
    def make(rank: int, epoch: int) -> Any:
        loader = Batches(Data(OWN[rank]), 2)
        loader.more = more
        return loader

    return make


def in_turn(rank: int, epoch: int) -> Any:
    """The shard of the next rank in the next epoch."""
    return DataLoader(Data(OWN[(rank + epoch) % WORLD_SIZE]), 2)


# ---------------------------------------------------------------- front ends


def numbers(batch: Tensor) -> list[int]:
    return [int(number) for number in batch.flatten().tolist()]


def net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(1, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def plain(rank: int, make: Make) -> Seen:
    net, optimizer = net_and_optimizer()
    ddp, loader, seen = DistributedDataParallel(net), make(rank, 0), []
    with Join([ddp, optimizer]) as join:
        for _ in range(EPOCHS):
            seen.append([])
            for batch in join.batches(loader):
                ddp(batch).mean().backward()
                optimizer.step()
                seen[-1] += numbers(batch)
    return seen


class Module(pl.LightningModule):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        self.net, self.optimizer = net_and_optimizer()
        self.seen: Seen = []

    def train_dataloader(self) -> Any:
        return self.make(self.trainer.global_rank, self.trainer.current_epoch)

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.seen[-1] += numbers(batch)
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class Estimating(Module):
    def setup(self, stage: str) -> None:
        assert self.trainer.estimated_stepping_batches > 0  # it sets up the dataloader before the strategy is


def lightning(rank: int, make: Make, estimates: bool = False, **options: Any) -> Seen:
    module = (Estimating if estimates else Module)(make)
    case = Fit((1,) * WORLD_SIZE, epochs=EPOCHS)
    trainer = build_trainer(case, **{"use_distributed_sampler": True, **options})
    trainer.fit(module)
    assert trainer._accelerator_connector.use_distributed_sampler or "callbacks" not in options  # it was put back
    return module.seen


def fabric(rank: int, make: Make, **options: Any) -> Seen:
    each = fabric_of(WORLD_SIZE)
    model, optimizer = each.setup(*net_and_optimizer())
    loader, seen = each.setup_dataloaders(make(rank, 0), **options), []
    for _ in range(EPOCHS):
        seen.append([])
        for batch in loader:
            each.backward(model(batch).mean())
            optimizer.step()
            seen[-1] += numbers(batch)
    return seen


def accelerate(
    rank: int, make: Make, prepare: bool = True, dispatch: bool | None = None, own: bool = False, **options: Any
) -> Seen:
    loader, seen = make(rank, 0), []
    with accelerator_of(rank, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)) as accelerator:
        model, optimizer = accelerator.prepare(*net_and_optimizer())
        loader = accelerator.prepare(loader, own_shards=own) if prepare else loader
        for _ in range(EPOCHS):
            seen.append([])
            for batch in accelerator.join_batches(loader, **options):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                seen[-1] += numbers(batch)
    return seen


def trainer(rank: int, make: Make, prepare: bool = True, **options: Any) -> Seen:
    from accelerate_join.transformers import JoinTrainer
    from tests.support.front_ends import transformers as hf

    loader, seen = make(rank, 0), list[list[int]]()
    loader.collate_fn = lambda rows: {"x": torch.stack(rows)}

    class Seeing(JoinTrainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader) if prepare else loader

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            seen[-1].extend(numbers(inputs["x"]))
            return model(inputs["x"]).mean()

    net, optimizer = net_and_optimizer()
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        arguments = hf.arguments_of(hf.Fit((1,) * WORLD_SIZE, EPOCHS), folder)
        Seeing(net, arguments, callbacks=[hf.EpochCounter(seen)], optimizers=(optimizer, None), **options).train()
    return seen


# ---------------------------------------------------------------- what is expected, by rank in an epoch


def shares(order: list[int], most: int = SIZE) -> Seen:
    return [order[rank::WORLD_SIZE][:most] for rank in range(WORLD_SIZE)]


def in_order(epoch: int) -> Seen:
    return shares([*range(SIZE)])


def order_of(size: int, epoch: int) -> list[int]:
    """Return the order of the sampler that Lightning injects."""
    return [int(place) for place in torch.randperm(size, generator=torch.Generator().manual_seed(epoch))]


def shuffled(epoch: int, most: int = SIZE) -> Seen:
    return shares(order_of(SIZE, epoch), most)


def shards_dealt_again(epoch: int) -> Seen:
    return [[ids[place] for place in order_of(len(ids), epoch)[rank::WORLD_SIZE]] for rank, ids in enumerate(OWN)]


def padded(epoch: int) -> Seen:
    return [[0, 3, 6, 9, 12], [1, 4, 7, 10, 13], [2, 5, 8, 11, 0]]


def without_the_last(epoch: int) -> Seen:
    return shares([*range(12)])


def on_each(epoch: int) -> Seen:
    return [[*range(SIZE)]] * WORLD_SIZE


def own_shards(epoch: int) -> Seen:
    return [[*ids] for ids in OWN]


def first_of_own(*numbers: int) -> Expected:
    return lambda epoch: [[*ids[:number]] for ids, number in zip(OWN, numbers, strict=True)]


def shards_in_turn(epoch: int) -> Seen:
    return [[*OWN[(rank + epoch) % WORLD_SIZE]] for rank in range(WORLD_SIZE)]


def exactly(*by_rank: list[int]) -> Expected:
    return lambda epoch: [*by_rank]


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A loader in a front end.

    Attributes:
        line: The table's.
        expected: The samples of each rank in an epoch, in order; or of what all raise.
        warns: What a warning on some rank says.
    """

    line: str
    front_end: str
    make: Make
    expected: Expected | str
    options: Mapping[str, Any] = field(default_factory=dict)
    warns: str = ""

    @property
    def word(self) -> str:
        """What the table says of it."""
        if isinstance(self.expected, str):
            return "raises"
        times = Counter(i for ids in self.expected(0) for i in ids)
        return WORDS[min(times[i] for i in range(SIZE)), max(times.values())]


WORDS = {(1, 1): "once", (0, 1): "some never", (1, 2): "some twice", (3, 3): "on each rank"}

# What has a front end leave a loader as it is.
ALONE, UNPREPARED = {"use_distributed_sampler": False}, {"prepare": False}
AS_IT_IS: dict[str, dict[str, Any]] = dict(zip(FRONT_ENDS, ({}, ALONE, ALONE, UNPREPARED, UNPREPARED), strict=True))


def everywhere(line: str, make: Make, expected: Expected | str, **others: tuple[Expected, str]) -> list[Case]:
    """Return a case for each front end, which leaves the loader as it is; some may do something else, and warn."""
    return [
        Case(line, name, make, others.get(name, (expected, ""))[0], options, others.get(name, ("", ""))[1])
        for name, options in AS_IT_IS.items()
    ]


def in_lightning(line: str, make: Make, expected: Expected | str, **options: Any) -> Case:
    return Case(line, "lightning", make, expected, options)


NO_SAMPLER, STREAM, SHARDS = "one dataset, no sampler", "one stream, the same on each rank", "a shard for each rank"
OURS, TORCHS = "`UnpaddedDistributedSampler`", "`DistributedSampler`"
TORCHS_DROPPING, DROPPING = "`DistributedSampler(drop_last=True)`", "`DataLoader(drop_last=True)`"
ROUNDS = "a sampler that knows W and repeats batches until all ranks have the same number"
PARTS = "a stream in equal parts, such as Ray Data's `streaming_split(equal=True)`"
LIMIT, OVERFIT = "`limit_train_batches=0.5`", "`overfit_batches=2`"
RELOAD = "`reload_dataloaders_every_n_epochs=1`"
LONG, SHORT = (f"`__len__` of a stream, a sampler or a loader: too {how}" for how in ("large", "small"))
LONG_DATA, SHORT_DATA = (f"`__len__` of a dataset with indices: too {how}" for how in ("large", "small"))

TWICE = "which already gives this process 1 of every 3 samples. Accelerate would split these again among 3 processes"
DEALT_AGAIN = "each rank runs only 1 of every 3 samples in its shard"
FILLED_UP = "repeat samples to fill their last batches"
SAID, LEFT = "reported 6 batches but yielded only 4", "have batches left after 2 steps"
MINE = {"own_shards": True}
ACCELERATES = exactly([0, 1, 6, 7, 12, 13], [2, 3, 8, 9], [4, 5, 10, 11])
TOO_SHORT = {"lightning": (first_of_own(0, 4, 2), ""), "trainer": (first_of_own(0, 4, 4), LEFT)}

CASES = [
    Case(NO_SAMPLER, "plain", whole(), on_each),
    Case(NO_SAMPLER, "lightning", whole(), shuffled),
    Case(NO_SAMPLER, "fabric", whole(), in_order),
    Case(NO_SAMPLER, "accelerate", whole(), ACCELERATES),
    Case(NO_SAMPLER, "trainer", whole(), ACCELERATES),
    Case(
        NO_SAMPLER,
        "accelerate",
        whole(),
        exactly([0, 1, 6, 7, 12, 13], [2, 3, 8, 9, 0, 1], [4, 5, 10, 11, 2, 3]),
        {"even_batches": True},
    ),
    *everywhere(OURS, dealt(), in_order),
    Case(OURS, "lightning", dealt(), in_order),
    Case(OURS, "fabric", dealt(), in_order),
    Case(OURS, "accelerate", dealt(), TWICE),
    Case(OURS, "trainer", dealt(), TWICE),
    *everywhere(TORCHS, dealt(DistributedSampler), padded),
    Case(TORCHS, "lightning", dealt(DistributedSampler), padded),
    Case(TORCHS, "fabric", dealt(DistributedSampler), padded),
    Case(TORCHS, "accelerate", dealt(DistributedSampler), TWICE),
    Case(TORCHS, "accelerate", dealt(DistributedSampler), TWICE, {"dispatch": True}),
    Case(TORCHS, "trainer", dealt(DistributedSampler), TWICE),
    *everywhere(TORCHS_DROPPING, dealt(DistributedSampler, {"drop_last": True}), without_the_last),
    Case(TORCHS_DROPPING, "accelerate", dealt(DistributedSampler, {"drop_last": True}), TWICE),
    Case(TORCHS_DROPPING, "trainer", dealt(DistributedSampler, {"drop_last": True}), TWICE),
    Case(DROPPING, "plain", dealt(drop_last=True), without_the_last),
    Case(DROPPING, "lightning", whole(drop_last=True), lambda epoch: shuffled(epoch, 4)),
    Case(DROPPING, "fabric", whole(drop_last=True), without_the_last),
    Case(DROPPING, "accelerate", whole(drop_last=True), exactly([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])),
    Case(DROPPING, "trainer", whole(drop_last=True), exactly([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])),
    *everywhere(SHARDS, own(), own_shards),
    Case(SHARDS, "trainer", own(), own_shards, MINE),
    Case(SHARDS, "fabric", own(), own_shards, MINE),
    Case(SHARDS, "accelerate", own(), own_shards, MINE | {"own": True}),
    in_lightning(SHARDS, own(), own_shards, strategy=DDPJoinStrategy(own_shards=True)),
    in_lightning(SHARDS, own(), own_shards, strategy=DDPJoinStrategy(own_shards=True), estimates=True),
    in_lightning(SHARDS, own(), own_shards, strategy="ddp", callbacks=[JoinCallback(own_shards=True)], estimates=True),
    Case(SHARDS, "trainer", own(), exactly([], [2, 3], [12, 13]), warns=DEALT_AGAIN),
    Case(SHARDS, "lightning", own(), shards_dealt_again, warns=DEALT_AGAIN),
    Case(SHARDS, "fabric", own(), exactly([], [1, 4, 7], [10, 13]), warns=DEALT_AGAIN),
    Case(SHARDS, "accelerate", own(), exactly([], [2, 3], [12, 13]), warns=DEALT_AGAIN),
    *everywhere(STREAM, whole(Stream), on_each),
    Case(
        STREAM,
        "accelerate",
        whole(Stream),
        exactly([0, 1, 6, 7, 12], [2, 3, 8, 9, 13], [4, 5, 10, 11, 0]),
        {},
        FILLED_UP,
    ),
    *everywhere(ROUNDS, rounds, exactly([0, 1, 6, 7, 12, 13], [2, 3, 8, 9, 0, 1], [4, 5, 10, 11, 2, 3])),
    *everywhere(PARTS, equal_parts, exactly([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])),
    Case(
        STREAM,
        "trainer",
        whole(Stream),
        exactly([0, 1, 6, 7, 12], [2, 3, 8, 9, 13], [4, 5, 10, 11, 0]),
        {},
        "fills its last batches with repeated samples",
    ),
    in_lightning(LIMIT, own(), first_of_own(0, 4, 2), limit_train_batches=0.5, **ALONE),
    in_lightning(LIMIT, whole(), lambda epoch: shuffled(epoch, 2), limit_train_batches=0.5),
    in_lightning(LIMIT, own(), "The dataloaders of rank 2 cannot be used", limit_train_batches=0.3, **ALONE),
    in_lightning(OVERFIT, own(), first_of_own(0, 4, 4), overfit_batches=2, **ALONE),
    in_lightning(OVERFIT, whole(), lambda _: shares([*range(SIZE)], 4), overfit_batches=2),
    in_lightning(RELOAD, in_turn, shards_in_turn, reload_dataloaders_every_n_epochs=1, **ALONE),
    in_lightning(RELOAD, whole(), shuffled, reload_dataloaders_every_n_epochs=1),
    *everywhere(LONG, own(Stream, 4), own_shards, lightning=(own_shards, SAID), trainer=(own_shards, SAID)),
    *everywhere(LONG, own_sampler(4), own_shards, lightning=(own_shards, SAID), trainer=(own_shards, SAID)),
    *everywhere(LONG, own_loader(2), own_shards, lightning=(own_shards, SAID)),
    *everywhere(SHORT, own(Stream, -4), own_shards, **TOO_SHORT),
    *everywhere(SHORT, own_sampler(-4), own_shards, **TOO_SHORT),
    *everywhere(SHORT, own_loader(-2), own_shards, lightning=TOO_SHORT["lightning"]),
    *everywhere(LONG_DATA, lambda *_: DataLoader(Data(range(4), 2), 2), "IndexError"),
    *everywhere(SHORT_DATA, own(Data, -2), first_of_own(0, 6, 4)),
]


def train(rank: int, place: int) -> tuple[Seen, list[str]]:
    case = CASES[place]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = globals()[case.front_end](rank, case.make, **case.options)
    return seen, [str(each.message) for each in caught]


# By default a cell runs once, of however many cases it has.
FIRST = {(case.front_end, case.line, case.warns, str(case.options)): place for place, case in [*enumerate(CASES)][::-1]}


@pytest.mark.parametrize(
    "place",
    others_long(range(len(CASES)), *FIRST.values()),
    ids=[f"{case.front_end}-{case.line}" for case in CASES],
)
def test_how_often_each_sample_is_trained_on(workers: Workers, place: int) -> None:
    case = CASES[place]
    if case.front_end == "trainer":
        pytest.importorskip("transformers")  # which needs Python 3.11
    outcomes = workers.outcomes(WORLD_SIZE, train, place)
    if isinstance(case.expected, str):
        for outcome in outcomes:
            assert case.expected in outcome.error, outcome.trace
        return
    assert [outcome.error for outcome in outcomes] == [""] * WORLD_SIZE
    for epoch in range(EPOCHS):
        assert [outcome.value[0][epoch] for outcome in outcomes] == case.expected(epoch)
    said = [text for outcome in outcomes for text in outcome.value[1]]
    assert any(case.warns in text for text in ["", *said])
    assert any(DEALT_AGAIN in text for text in said) == (case.warns == DEALT_AGAIN)


def contradict(rank: int, front_end: str) -> Seen:
    if front_end == "fabric":
        return fabric(rank, own(), use_distributed_sampler=True, **MINE)
    return accelerate(rank, own(), **MINE)


@pytest.mark.parametrize(
    ("front_end", "said"),
    [
        ("accelerate", "that accelerator.prepare has already split among the processes"),
        ("fabric", "own_shards=True cannot be combined with use_distributed_sampler=True"),
    ],
)
def test_own_shards_that_are_dealt_out_raise(workers: Workers, front_end: str, said: str) -> None:
    for outcome in workers.outcomes(WORLD_SIZE, contradict, front_end):
        assert said in outcome.error


def table() -> dict[str, list[str]]:
    """Return the cells of each line of the table in docs/data.md, by its first one."""
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    head = "| | plain loops | Lightning | Fabric | Accelerate | Trainer |\n"
    lines = text.split(head)[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {name: others for name, *others in cells}


def test_the_table_says_what_is_tested() -> None:
    words: dict[str, list[set[str]]] = {case.line: [set() for _ in FRONT_ENDS] for case in CASES}
    for case in CASES:
        words[case.line][FRONT_ENDS.index(case.front_end)].add(case.word)
    said = {line: [{*re.findall(r"\*\*(.+?)\*\*", cell)} for cell in cells] for line, cells in table().items()}
    assert said == words
