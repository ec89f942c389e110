"""Checkpoints that a joined rank 0 writes, and training resumed from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.needs import known
from tests.support.front_ends.lightning import Fit, Module, assert_exact, assert_same_bits, fit
from tests.support.run import difference, flatten, reference
from tests.support.workers import Workers


def saving(folder: Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
    """Options of a trainer that keeps all checkpoints."""
    every = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)
    return {"callbacks": [*callbacks, every], "enable_checkpointing": True}


def files_in(folder: Path) -> dict[int, Path]:
    """Its checkpoints, by step."""
    return {int(path.stem.split("=")[1]): path for path in folder.glob("*.ckpt")}


@pytest.mark.parametrize(
    "case",
    [
        Fit((2, 6), optimizer="sgd", scheduler="step"),
        Fit((0, 4, 6), optimizer="adam", iterable=True),
        Fit((2, 4), optimizer="zero"),
        Fit((2, 6), model="norm", optimizer="adamw", scheduler="epoch"),
        Fit((1, 4), model="norm", iterable=True, scheduler="epoch"),
        Fit((3, 8), optimizer="adam", accumulate=2, clip=0.3),
        Fit((1, 7), optimizer="adam", accumulate=2, iterable=True),
        Fit((6, 2), optimizer="sgd", reload=1),
        Fit(((2, 4), (3, 6), (4, 1)), optimizer="sgd"),
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
def test_files_equal_the_reference_and_resume_exactly(workers: Workers, case: Fit, tmp_path: Path) -> None:
    whole = workers.run(case.world_size, fit, case, Module, {}, saving(tmp_path, every_n_train_steps=2))
    assert_exact(case, whole)
    expected = reference(case)
    epochs = [-(-case.length(epoch) // case.accumulate) for epoch in range(case.epochs)]
    ends = {sum(epochs[: epoch + 1]): epoch + 1 for epoch in range(case.epochs)}  # by step, the next epoch
    files = files_in(tmp_path)
    assert sorted(files) == list(range(2, expected.steps + 1, 2))
    for step, path in files.items():
        saved = torch.load(path, "cpu", weights_only=False)
        assert saved["global_step"] == step
        for name, value in expected.history[step].items():
            assert difference([saved["state_dict"][f"net.{name}"]], [value]) < 1e-10, (step, name)
    for step in ends.keys() & files.keys():
        resumed = workers.run(case.world_size, fit, case, Module, {}, {}, files[step])
        for mine, before in zip(resumed, whole, strict=True):
            assert mine.trained == [(epoch, index) for epoch, index in before.trained if epoch >= ends[step]]
        assert_same_bits(resumed)
        assert resumed[0].global_step == expected.steps, step
        assert difference(resumed[0].parameters, whole[0].parameters) == 0, step
        assert difference(flatten(resumed[0].optimizer), flatten(whole[0].optimizer)) == 0
        assert difference(resumed[0].buffers, whole[0].buffers) == 0 if resumed[0].buffers else True
        assert resumed[0].lr == whole[0].lr


class NotesCallbacks(Module):
    def on_train_end(self) -> None:
        self.noted = [type(callback).__name__ for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        saves = getattr(self.trainer.checkpoint_callback, "save_on_exception", False)
        assert self.trainer.world_size == 1 or not saves


@pytest.mark.parametrize("lengths", [(1, 2), (2,)])
def test_saving_on_an_exception_is_skipped_with_a_warning(
    workers: Workers, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    on_exception = known(ModelCheckpoint, save_on_exception=True)
    options = saving(tmp_path, OnExceptionCheckpoint(tmp_path), **on_exception)
    results = workers.run(len(lengths), fit, Fit(lengths, epochs=1), NotesCallbacks, {}, options)
    alone = len(lengths) == 1  # which may save as ever
    assert all(("OnExceptionCheckpoint" in result.noted) == alone for result in results)
    for text, saves in (("OnExceptionCheckpoint", True), ("ModelCheckpoint(save_on_exception=True)", on_exception)):
        assert (f"{text} does not work with several ranks" in results[0].warned) == (not alone and bool(saves))
