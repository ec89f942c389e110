"""One process runs as under plain `ddp`; and, with several, what Lightning's users see is what they see there."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_join import DDPJoinStrategy, JoinCallback
from tests.lightning.reading import Reading, fit_whole
from tests.support.front_ends.lightning import (
    ANY_CHECKPOINT,
    Fit,
    Module,
    Result,
    assert_same_bits,
    build_trainer,
    result_of,
)
from tests.support.joinables import Logged
from tests.support.run import Batch
from tests.support.workers import Workers
from torch_join import UnsupportedError


class Everything(Module):
    """Uses what several processes cannot."""

    validation_step = None  # type: ignore[assignment]

    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.left = False

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        self.left = batch_idx == 2
        return -1 if self.left else None

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Iterates(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Evaluates(Everything):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.log("rows", len(batch[0]), sync_dist=True)


def fit_alone(rank: int, kind: type[Module], strategy: str, with_callback: bool) -> tuple[Result, list[str]]:
    case = Fit((4,), scheduler="step", iterable=kind is Iterates)
    module = kind(case)
    callbacks = [JoinCallback()] if with_callback else []
    trainer = build_trainer(case, strategy=strategy, callbacks=callbacks, profiler=(profiler := SimpleProfiler()))
    trainer.fit(module)
    strategies = ("[Strategy]DDPStrategy", "[Strategy]DDPJoinStrategy", "[Strategy]_UpgradedStrategy")
    names = [name for name in profiler.recorded_durations if "Callback" not in name]
    for strategy_name in strategies:
        names = [name.replace(strategy_name, "[Strategy]") for name in names]
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._signal_connector)
    assert [type(loop).__name__ for loop in loops] == ["_FitLoop", "_TrainingEpochLoop", "_SignalConnector"]
    return result_of(trainer, module), names


@pytest.mark.parametrize("with_callback", [False, True], ids=["strategy", "callback"])
@pytest.mark.parametrize("kind", [Everything, Iterates, Evaluates])
def test_it_is_plain_ddp(workers: Workers, kind: type[Module], with_callback: bool) -> None:
    ((plain, names),) = workers.run(1, fit_alone, kind, "ddp", False)
    ((ours, its_names),) = workers.run(1, fit_alone, kind, "ddp" if with_callback else "ddp_join", with_callback)
    assert_same_bits([plain, ours])
    assert ours.trained == plain.trained
    assert its_names == names


class Counts(Module):
    def configure_joinables(self) -> list[Logged]:
        self.counter = Logged("alone")
        return [self.counter]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.counter.count()
        return super().training_step(batch, batch_idx)


def fit_counting_alone(rank: int) -> list[str]:
    module = Counts(Fit((2,), epochs=1))
    trainer = build_trainer(module.case)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    assert module.counter.total == 4  # another one than in the first fit
    return module.counter.log


def test_joinables_are_configured_and_their_post_hooks_run(workers: Workers) -> None:
    (log,) = workers.run(1, fit_counting_alone)
    assert log == ["post alone True"] * 2


class Validated(Module):
    def validation_step(self, *_: Any) -> None:
        pass


def resume_alone(rank: int, folder: str) -> list[Any]:
    case, found = Fit((3,), epochs=2), []
    for name in ("after-0-1", "end-0-3", "after-0-1"):
        module = Validated(case)
        trainer = build_trainer(case)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if len(found) == 2:
                    trainer.validate(module, [], ckpt_path=f"{folder}/{name}.ckpt", **ANY_CHECKPOINT)
                else:
                    trainer.fit(module, ckpt_path=f"{folder}/{name}.ckpt", **ANY_CHECKPOINT)
                found.append((module.trained, "\n".join(str(each.message) for each in caught)))
            except UnsupportedError as error:
                found.append(str(error))
    return found


def test_a_checkpoint_of_several_ranks(workers: Workers, tmp_path: Path) -> None:
    workers.run(2, fit_whole, Reading(Fit((3, 4), epochs=2)), str(tmp_path))
    ((middle, end, evaluated),) = workers.run(1, resume_alone, str(tmp_path))
    assert "written in the middle of an epoch by 2 ranks" in middle
    assert "this job has one process" in middle
    assert end[0] == [(1, 0), (1, 1), (1, 2)]
    assert "the states of its dataloaders are ignored" in end[1]
    assert evaluated[0] == []


# ---------------------------------------------------------------- several processes


class SizedStream(IterableDataset[Batch]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return iter(self.rows)


class Told(Module):
    """Has what Lightning has something to say about."""

    validation_step = test_step = None  # type: ignore[assignment]

    def train_dataloader(self) -> Any:
        rows: list[Any] = self.case.batches(self.trainer.global_rank, 0)
        return DataLoader(SizedStream([*rows, None]), batch_size=None)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def predict_dataloader(self) -> Any:
        return self.train_dataloader()


class Validates(Told):
    def validation_step(self, batch: Batch | None, batch_idx: int) -> None:  # type: ignore[override]
        pass


def fit_told(rank: int, kind: type[Told], strategy: str) -> tuple[list[str], set[str]]:
    case = Fit((3, 3), epochs=1)
    trainer = build_trainer(case, strategy=strategy, profiler=(profiler := SimpleProfiler()), num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(case))
    texts = [
        str(each.message) for each in caught if "IterableDataset" in str(each.message) or "None" in str(each.message)
    ]
    return texts, {name for name in profiler.recorded_durations if "_next" in name}


@pytest.mark.parametrize("kind", [Told, Validates])
def test_warnings_and_profilers_names_are_lightnings(workers: Workers, kind: type[Told]) -> None:
    plain, ours = (workers.run(2, fit_told, kind, strategy)[0] for strategy in ("ddp", "ddp_join"))
    assert (
        ours[1]
        == plain[1]
        == {
            "[_TrainingEpochLoop].train_dataloader_next",
            *(["[_EvaluationLoop].val_next"] if kind is Validates else []),
        }
    )
    sized = [text for text in plain[0] if "has `__len__` defined" in text]
    assert len(sized) > 0
    assert sized[0] in ours[0]
    assert any(text.startswith("train_dataloader yielded None. If this was on purpose, ignore") for text in ours[0])


def test_an_error_before_the_module_is_attached_is_lightnings_own(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DDPJoinStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(MisconfigurationException, match="datamodule"):
        trainer.fit(Module(Fit((1,))), train_dataloaders=[0], datamodule=pl.LightningDataModule())


# ---------------------------------------------------------------- without a trainer


def test_a_strategy_without_a_trainer_does_what_ddp_does(tmp_path: Path) -> None:
    """It may be asked for its sampler's arguments, and load checkpoints, as soon as it knows the module."""
    module = Module(Fit((1,)))
    path = tmp_path / "file.ckpt"
    torch.save({"state_dict": module.state_dict()}, path)
    for kind in (DDPStrategy, DDPJoinStrategy):
        options = {"parallel_devices": [torch.device("cpu")], "cluster_environment": LightningEnvironment()}
        strategy = kind(accelerator=CPUAccelerator(), **options)
        strategy.connect(module)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
        assert strategy.load_checkpoint(path).keys() == {"state_dict"}
        strategy.teardown()
