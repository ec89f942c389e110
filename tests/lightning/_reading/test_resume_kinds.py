"""Training resumed from inside an epoch, with dataloaders of other libraries that have a state of their own kind.

LitData's and Hugging Face's are stand-ins that keep and apply a state as those do (litdata 0.2.76, datasets 5.2).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchdata.nodes as tn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.lightning._loops.test_resume import Reader, Reading, Sample, Samples, SavesEverywhere, build
from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit
from tests.support.workers import Workers
from torch_join import UnsupportedError
from torch_join._schedule.stateful import begin_anew


class Nodes(Reader):
    """Reads with torchdata's nodes."""

    kind = ""

    def loader(self, data: Samples) -> Any:
        node: Any = tn.SamplerWrapper(SequentialSampler(range(len(data))))
        if self.kind == "iterable":
            node = tn.IterableWrapper(range(len(data)))
        if self.kind == "batches":
            node = tn.Unbatcher(tn.Batcher(node, 2, drop_last=False))
        if self.kind == "parallel":
            return tn.Loader(tn.ParallelMapper(node, data.__getitem__, num_workers=2, method="thread"))
        node = tn.Mapper(node, data.__getitem__)
        return tn.Loader(tn.Prefetcher(node, 2) if self.kind == "prefetched" else node)


class Shuffling(Reader):
    """Reads in an order that torch's sampler draws, which keeps no state, from a generator given to the loader."""

    def loader(self, data: Samples) -> Any:
        generator = torch.Generator().manual_seed(data.rank)
        return StatefulDataLoader(data, batch_size=None, shuffle=len(data) > 0, generator=generator)  # type: ignore[arg-type]


class Rows(IterableDataset[Sample]):
    """Streams of LitData: in an order of each epoch's own; begin where they were told to until they forget it."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.epoch = samples, 1
        self.given: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        place = self.given or {"epoch": self.epoch, "index": 0}
        for index in range(place["index"], len(self)):
            yield self.samples[(index + place["epoch"]) % len(self)]  # type: ignore[misc]


class StreamingDataLoader(DataLoader[Any]):
    """LitData's: forgets that it was resumed when it is read past its end, and not before."""

    __module__ = "litdata.streaming.dataloader"

    def __init__(self, dataset: Rows) -> None:
        self.current_epoch = self.yielded = 0
        self.restore, self.rows = False, dataset
        super().__init__(dataset, batch_size=None)

    def __iter__(self) -> Any:
        if not self.restore:
            self.yielded, self.rows.given = 0, None
            self.current_epoch += 1
        self.rows.epoch = self.current_epoch
        for batch in super().__iter__():
            self.yielded += 1
            yield batch
        self.restore = False

    def state_dict(self) -> dict[str, Any]:
        if self.rows.given is not None:
            self.rows.given["epoch"] = self.rows.epoch  # before the first batch: one that is not the resumed one
        place = {"epoch": self.rows.epoch, "index": self.yielded}
        return {"dataset": place, "current_epoch": self.current_epoch, "num_samples_yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_epoch, self.yielded = state["current_epoch"], state["num_samples_yielded"]
        self.rows.given = state["dataset"]
        self.restore = 0 < self.yielded < len(self.rows)


class Lit(Reader):
    def loader(self, data: Samples) -> Any:
        return StreamingDataLoader(Rows(data))


class EpochStream(IterableDataset[Sample]):
    """Hugging Face's: applies the state that it was given to every iterator of that epoch."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.epoch, self.index = samples, 0, 0
        self.given: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        resumes = self.given is not None and self.given["epoch"] == self.epoch
        self.index = self.given["index"] if resumes and self.given else 0
        while self.index < len(self.samples):
            self.index += 1
            yield self.samples[self.index - 1]  # type: ignore[misc]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = dict(state)


class Hugging(Reader):
    calls = True

    def __init__(self, run: Reading) -> None:
        super().__init__(run)
        self.streams: list[EpochStream] = []

    def loader(self, data: Samples) -> Any:
        self.streams.append(EpochStream(data))
        return StatefulDataLoader(self.streams[-1], batch_size=None)  # type: ignore[arg-type]

    def on_train_epoch_start(self) -> None:
        for stream in self.streams if self.calls else ():
            stream.set_epoch(self.current_epoch)


class Forgets(Hugging):
    calls = False


KINDS: dict[str, Any] = {
    f"nodes-{kind}": Nodes for kind in ("sampled", "iterable", "batches", "parallel", "prefetched")
}
KINDS |= {"shuffling": Shuffling, "lit": Lit, "hugging": Hugging, "hugging-forgets": Forgets}


def whole_and_resumed(rank: int, run: Reading, kind: str, folder: str, names: list[str], options: Any) -> list[Any]:
    found: list[Any] = []
    for name in ("", *names):
        module = KINDS[kind](run)
        module.kind = kind.partition("-")[2]
        trainer = build(run, **options, **({} if name else {"callbacks": [SavesEverywhere(folder)]}))
        try:
            trainer.fit(module, ckpt_path=f"{folder}/{name}.ckpt" if name else None, **ANY_CHECKPOINT)
            found.append(module.seen)
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def assert_what_was_left(results: list[list[Any]], names: list[str]) -> None:
    for rank, (whole, *resumed) in enumerate(results):
        for name, seen in zip(names, resumed, strict=True):
            where, epoch, index = name.split("-")
            place = int(epoch), int(index) + (where == "after")
            assert seen == [it for it in whole if it[:2] >= place], (name, rank)


NAMES = ["before-0-2", "after-0-2", "after-0-3", "after-0-5", "after-1-1"]
RUNS = {
    "sized": (Reading(Fit((4, 6), epochs=3)), {}),
    "early": (Reading(Fit((6, 4), epochs=3), early=True), {}),
    "side-by-side": (Reading(Fit((4, 6), epochs=3), mode="max_size"), {}),
    "limited": (Reading(Fit((4, 6), epochs=3)), {"limit_train_batches": 5}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hugging-forgets"])
def test_what_was_left(workers: Workers, tmp_path: Path, kind: str, name: str) -> None:
    run, options = RUNS[name]
    names = [each for each in NAMES if not (options and each == "after-0-5")]
    results = workers.run(2, whole_and_resumed, run, kind, str(tmp_path), names, options, deadline=120.0)
    assert [len(whole) for whole, *_ in results] == [
        3 * min(n, options.get("limit_train_batches", n)) for n in run.case.lengths
    ]
    assert_what_was_left(results, names)


def test_a_stream_that_would_repeat_what_it_was_resumed_with_raises(workers: Workers, tmp_path: Path) -> None:
    run = RUNS["sized"][0]
    names = ["after-0-2", "after-1-2", "end-1-5", "after-2-2"]
    for whole, *resumed in workers.run(2, whole_and_resumed, run, "hugging-forgets", str(tmp_path), names, {}):
        for message in resumed[:2]:
            assert "The EpochStream of a train dataloader was resumed in the middle of an epoch" in message
            assert "Call the dataset's `set_epoch(epoch)` before each epoch (in Lightning, in" in message
        # Where no epoch follows one that is resumed, nothing is repeated.
        assert resumed[2] == [it for it in whole if it[0] == 2]
        assert resumed[3] == [it for it in whole if it[:2] >= (2, 3)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_the_state_of_a_stream_in_a_worker_ends_with_its_epoch() -> None:
    stream = EpochStream(Samples(Fit((2,)), 0))
    begin_anew([StatefulDataLoader(stream, batch_size=None, num_workers=1)], [0])  # type: ignore[arg-type]
    for options in ({}, {"num_workers": 1, "persistent_workers": True}):
        with pytest.raises(UnsupportedError, match="EpochStream"):
            begin_anew([StatefulDataLoader(stream, batch_size=None, **options)], [0])  # type: ignore[arg-type]
