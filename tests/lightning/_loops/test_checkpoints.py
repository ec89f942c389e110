"""Checkpoints that a joined rank 0 writes, and training resumed from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from tests.support.cases import (
    Case,
    Module,
    Result,
    assert_exact,
    assert_same_bits,
    build_trainer,
    difference,
    fit_recording,
    flatten,
    longest,
    reference,
    result_of,
)
from tests.support.workers import Workers


def fit_saving(rank: int, case: Case, folder: str) -> Result:
    module = Module(case)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = build_trainer(case, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module)
    return result_of(trainer, module)


def fit_resumed(rank: int, case: Case, path: str) -> Result:
    module = Module(case)
    trainer = build_trainer(case)
    trainer.fit(module, ckpt_path=path, weights_only=False)
    return result_of(trainer, module)


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 6), optimizer="sgd", scheduler="step"),
        Case((0, 4, 6), optimizer="adam", iterable=True),
        Case((2, 4), optimizer="zero"),
        Case((2, 6), model="norm", optimizer="adamw", scheduler="epoch"),
        Case((1, 4), model="norm", iterable=True, scheduler="epoch"),
        Case((3, 8), optimizer="adam", accumulate=2, clip=0.3),
        Case((1, 7), optimizer="adam", accumulate=2, iterable=True),
        Case((6, 2), optimizer="sgd", reload=1),
        Case(((2, 4), (3, 6), (4, 1)), optimizer="sgd"),
    ],
    ids=[
        "sgd",
        "iterable",
        "zero",
        "buffers",
        "buffers-iterable",
        "window",
        "window-iterable",
        "rank-0-last",
        "grows",
    ],
)
def test_files_equal_the_reference_and_resume_exactly(workers: Workers, case: Case, tmp_path: Path) -> None:
    whole = workers.run(case.world_size, fit_saving, case, str(tmp_path))
    assert_exact(case, whole)
    expected = reference(case)
    epochs = [-(-longest(case, epoch) // case.accumulate) for epoch in range(case.epochs)]
    ends = {sum(epochs[: epoch + 1]): epoch + 1 for epoch in range(case.epochs)}  # by step, the next epoch
    files = {int(path.stem.split("=")[1]): path for path in tmp_path.glob("*.ckpt")}
    assert sorted(files) == list(range(2, expected.steps + 1, 2))
    for step, path in files.items():
        saved = torch.load(path, "cpu", weights_only=False)
        assert saved["global_step"] == step
        for name, value in expected.history[step].items():
            assert difference([saved["state_dict"][f"net.{name}"]], [value]) < 1e-10, (step, name)
    for step in ends.keys() & files.keys():
        resumed = workers.run(case.world_size, fit_resumed, case, str(files[step]))
        for mine, before in zip(resumed, whole, strict=True):
            assert mine.trained == [(epoch, index) for epoch, index in before.trained if epoch >= ends[step]]
        assert_same_bits(resumed)
        assert resumed[0].global_step == expected.steps, step
        assert difference(resumed[0].parameters, whole[0].parameters) == 0, step
        assert difference(flatten(resumed[0].optimizer), flatten(whole[0].optimizer)) == 0
        assert difference(resumed[0].buffers, whole[0].buffers) == 0 if resumed[0].buffers else True
        assert resumed[0].lr == whole[0].lr


class SavesAtValidation(Module):
    """Validates on a rank that may have no validation batch, and resumes with what is left of the epoch."""

    def val_dataloader(self) -> DataLoader[Any]:
        batches = self.case.batches(self.trainer.global_rank, 0) if self.trainer.global_rank == 0 else []
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, *_: Any) -> None:
        pass


def fit_saving_at_validation(rank: int, case: Case, folder: str, strategy: str) -> list[tuple[int, int]]:
    module = SavesAtValidation(case)
    saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    options: dict[str, Any] = {"val_check_interval": 3, "strategy": strategy, "num_sanity_val_steps": 0}
    build_trainer(case, callbacks=[saving], enable_checkpointing=True, **options).fit(module)
    return module.trained


def fit_resumed_at_validation(rank: int, case: Case, path: str, strategy: str) -> tuple[list[tuple[int, int]], int]:
    module = SavesAtValidation(case)
    trainer = build_trainer(case, val_check_interval=3, strategy=strategy, num_sanity_val_steps=0)
    trainer.fit(module, ckpt_path=path, weights_only=False)
    return module.trained, trainer.global_step


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("world", [(6,), (2, 6), (6, 0)])
def test_resuming_from_a_validation_trains_what_was_left(
    workers: Workers, tmp_path: Path, world: tuple[int, ...], iterable: bool
) -> None:
    case = Case(world, epochs=2, iterable=iterable)
    whole = workers.run(len(world), fit_saving_at_validation, case, str(tmp_path), "ddp_join")
    files = {int(path.stem.split("=")[1]): path for path in tmp_path.glob("*.ckpt")}
    assert sorted(files) == [3, 6, 9, 12]
    for step, path in files.items():
        resumed = workers.run(len(world), fit_resumed_at_validation, case, str(path), "ddp_join")
        epoch, index = divmod(step, 6)
        # A loader without a state begins anew, as Lightning says. So a rank trains the number that it had left,
        # or, without a length, everything.
        if iterable:
            assert len({steps for _, steps in resumed}) == 1
        else:
            for (trained, steps), everything in zip(resumed, whole, strict=True):
                assert steps == 12, step
                assert trained == [place for place in everything if place >= (epoch, index)], step
        if len(world) == 1:
            assert resumed == workers.run(1, fit_resumed_at_validation, case, str(path), "ddp"), step


def fit_with_saving_on_exception(rank: int, case: Case, folder: str) -> tuple[Result, str, list[str]]:
    callbacks: list[Any] = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_on_exception=True)]
    trainer = build_trainer(case, callbacks=callbacks, enable_checkpointing=True)
    result, warned = fit_recording(trainer, Module(case))
    assert not callbacks[1].save_on_exception
    return result, warned, [type(callback).__name__ for callback in trainer.callbacks]


def test_saving_on_an_exception_is_skipped_with_a_warning(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(2, fit_with_saving_on_exception, Case((1, 2), epochs=1), str(tmp_path))
    assert all("OnExceptionCheckpoint" not in callbacks for _, _, callbacks in results)
    assert "OnExceptionCheckpoint cannot work with several ranks" in results[0][1]
    assert "ModelCheckpoint(save_on_exception=True) cannot work with several ranks" in results[0][1]


def test_saving_on_an_exception_stays_with_one_process(workers: Workers, tmp_path: Path) -> None:
    case = Case((2,), epochs=1)
    callbacks = workers.run(1, fit_alone_with_saving_on_exception, case, str(tmp_path))[0]
    assert "OnExceptionCheckpoint" in callbacks


def fit_alone_with_saving_on_exception(rank: int, case: Case, folder: str) -> list[str]:
    trainer = build_trainer(case, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    trainer.fit(Module(case))
    return [type(callback).__name__ for callback in trainer.callbacks]
