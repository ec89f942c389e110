"""Training resumed from a place that each hook has saved, in real libraries' loaders, alone and combined.

Each sample is trained on once per epoch, over several epochs after that, and the bits are those of no interruption.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as pl
import pytest
import torch
import torchdata.nodes as tn
import webdataset as wds
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from tests.covering import others_long
from tests.lightning._loops.test_resume import Reader, Reading, Samples, build
from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit, result_of
from tests.support.workers import Workers
from torch_join import JoinError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
EPOCHS = 5
# Lightning's hooks of training that all ranks run, in a step and around it.
HOOKS = ["on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"]
HOOKS += ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"]
KINDS = ["hf-map", "hf-stream", "hf-stream-told", "hf-stream-shuffled", "webdataset", "stateful", "nodes"]
MODES = [None, "min_size", "max_size", "max_size_cycle"]


def row_of(data: Samples, row: Any) -> Any:
    return data[int(row["number"])]


def number_of(data: Samples, row: Any) -> Any:
    return data[int(row[0])]


class Paired(Reader):
    """Reads with a library."""

    def __init__(self, run: Reading, kind: str, folder: str) -> None:
        super().__init__(run)
        self.kind, self.folder, self.made = kind, folder, 0
        self.streams: list[Any] = []

    def train_dataloader(self) -> Any:
        rank, mode = self.trainer.global_rank, self.reads.mode
        loader = self.loader(Samples(self.case, rank))
        if mode is None:
            return loader
        # The other one is shorter on one rank and longer on another.
        other = Fit([length // 2 if rank % 2 else length + 1 for rank, length in enumerate(self.case.lengths_in(0))])
        return CombinedLoader([loader, self.loader(Samples(other, rank))], mode)  # type: ignore[arg-type]

    def loader(self, data: Samples) -> Any:
        numbers, rank = [*range(len(data))], data.rank
        self.made += 1
        if self.kind == "nodes":
            return tn.Loader(tn.Mapper(tn.IterableWrapper(numbers), data.__getitem__))
        if self.kind == "webdataset":
            path = f"{self.folder}/{rank}-{self.made}.tar"
            with wds.TarWriter(path) as writer:
                for number in numbers:
                    writer.write({"__key__": str(number), "txt": str(number)})
            stream = wds.WebDataset(path, shardshuffle=False, empty_check=False, nodesplitter=iter)
            return StatefulDataLoader(
                stream.decode().to_tuple("txt"), batch_size=None, collate_fn=partial(number_of, data)
            )
        if self.kind.startswith("hf-stream"):
            rows = datasets.Dataset.from_dict({"number": [-1, -1, *numbers]})  # it takes no empty one
            rows = rows.to_iterable_dataset(num_shards=2).filter(is_kept)
            if self.kind == "hf-stream-shuffled":
                rows = rows.shuffle(seed=5, buffer_size=4)
            self.streams.append(rows)
            return StatefulDataLoader(rows, batch_size=None, collate_fn=partial(row_of, data))
        generator = torch.Generator().manual_seed(rank)
        if self.kind == "hf-map":
            rows = datasets.Dataset.from_dict({"number": numbers})
            sampler: Any = RandomSampler(rows, generator=generator) if numbers else None
            return StatefulDataLoader(rows, batch_size=None, sampler=sampler, collate_fn=partial(row_of, data))
        sampler = RandomSampler(data, generator=generator) if numbers else None
        return StatefulDataLoader(data, batch_size=None, sampler=sampler)

    def on_train_epoch_start(self) -> None:
        for stream in self.streams if self.kind == "hf-stream-told" else ():
            stream.set_epoch(self.current_epoch)


def is_kept(row: Any) -> bool:
    return bool(row["number"] >= 0)


class SavesIn(pl.Callback):
    """Saves in some hooks, in some steps of two epochs."""

    def __init__(self, folder: str, steps: list[int]) -> None:
        self.folder, self.steps = folder, steps
        self.saved: list[tuple[str, int, int, str]] = []
        for hook in HOOKS:
            setattr(self, hook, partial(self.save, hook))

    def save(self, hook: str, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        epoch, step = trainer.current_epoch, max(trainer.fit_loop.batch_idx, 0)
        if epoch not in (0, 1) or ("epoch" not in hook and "train_start" not in hook and step not in self.steps):
            return
        name = f"{hook}-{epoch}-{step}"
        try:
            trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")
            error = ""
        except JoinError as raised:
            error = str(raised)
        self.saved.append((hook, epoch, step, error))


def whole_and_resumed(rank: int, run: Reading, kind: str, folder: str, choose: Callable[[Any], list[Any]]) -> Any:
    saves = SavesIn(folder, [0, 2, 3, 5, 8])
    module = Paired(run, kind, folder)
    trainer = build(run, callbacks=[saves])
    trainer.fit(module)
    found = [(module.seen, result_of(trainer, module))]
    places = choose(saves.saved)
    for hook, epoch, step, _ in places:
        again = Paired(run, kind, folder)
        trainer = build(run)
        trainer.fit(again, ckpt_path=f"{folder}/{hook}-{epoch}-{step}.ckpt", **ANY_CHECKPOINT)
        found.append((again.seen, result_of(trainer, again)))
    return saves.saved, places, found


def spread(saved: list[Any], hook: str | None = None) -> list[Any]:
    """Return the places that one hook has saved, or a few of each."""
    good = [place for place in saved if not place[-1]]
    return [place for place in good if place[0] == hook] if hook else good[::5]


@pytest.mark.covering(1)
@pytest.mark.parametrize("hook", others_long(HOOKS, *HOOKS[1:7]))
@pytest.mark.parametrize("lengths", [(0, 4, 9), (9, 0, 4), (4, 9, 0)], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_left(
    workers: Workers, kind: str, mode: str | None, lengths: tuple[int, ...], hook: str, tmp_path: Path
) -> None:
    run = Reading(Fit(lengths, epochs=EPOCHS, optimizer="adam"), mode=mode)
    results = workers.run(3, whole_and_resumed, run, kind, str(tmp_path), partial(spread, hook=hook), deadline=120.0)
    saved, places, _ = results[0]
    assert all((it[0], it[1]) == (places, saved) or it[0] == saved for it in results)
    assert places
    wrong = []
    for number, (where, epoch, step, _) in enumerate(places, start=1):
        ended = where in ("on_train_batch_end", "on_train_epoch_end")
        for rank, (_, _, found) in enumerate(results):
            whole, seen = found[0][0], found[number][0]
            at = (epoch + 1, 0) if where == "on_train_epoch_end" else (epoch, step + ended)
            if where in ("on_train_start", "on_train_epoch_start"):
                at = (epoch, 0)
            if seen != [it for it in whole if it[:2] >= at]:
                wrong.append(f"{where}-{epoch}-{step}: {rank} {[it for it in whole if it[:2] >= at][:8]} {seen[:8]}")
            pairs = zip(found[0][1].parameters, found[number][1].parameters, strict=True)
            # Where DDP has rebuilt its buckets, three ranks' gradients add up in another order.
            apart = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
            if apart > 1e-12 or found[0][1].global_step != found[number][1].global_step:
                wrong.append(f"{where}-{epoch}-{step}: {rank} {apart}")
    assert not wrong, "\n".join(wrong)


def whole(rank: int, run: Reading, kind: str, folder: str) -> Any:
    module = Paired(run, kind, folder)
    build(run, callbacks=[SavesIn(folder, [2])]).fit(module)
    return module.seen


def resumed(rank: int, run: Reading, kind: str, folder: str, name: str) -> Any:
    module = Paired(run, kind, folder)
    build(run).fit(module, ckpt_path=f"{folder}/{name}.ckpt", **ANY_CHECKPOINT)
    return module.seen


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_in_new_processes(workers: Workers, kind: str, tmp_path: Path) -> None:
    run, others = Reading(Fit((0, 4, 9), epochs=EPOCHS, optimizer="adam")), Workers(3)
    all_seen = workers.run(3, whole, run, kind, str(tmp_path), deadline=120.0)
    try:
        found = others.run(3, resumed, run, kind, str(tmp_path), "on_train_batch_end-1-2", deadline=120.0)
    finally:
        others.close()
    assert found == [[it for it in seen if it[:2] >= (1, 3)] for seen in all_seen]
