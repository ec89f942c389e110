"""Sharded models: checkpoints, whole and in shards, also of a rank 0 that has joined, and what is resumed from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support import sharded_fits as sharded
from tests.support.front_ends.lightning import ANY_CHECKPOINT, Fit, Result, assert_exact, assert_same_bits
from tests.support.run import difference, reference
from tests.support.sharded_fits import KINDS, ShardedModule, build_sharded, on_cpus
from tests.support.workers import Workers


class Stateful(ShardedModule):
    """Its loaders know where they are."""

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(self.case.batches(self.trainer.global_rank, 0), batch_size=None)  # type: ignore[arg-type]


def fit_saving(rank: int, kind: str, case: Fit, in_shards: bool, folder: str) -> tuple[Result, list[Result]]:
    """Fit, and then resume from some of the files; all in one launch."""
    with on_cpus():
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        module = Stateful(case)
        trainer = build_sharded(kind, case, in_shards, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(module)
        result = sharded.result_of(trainer, module)
        resumed = []
        for step in resumed_at(case):
            module = Stateful(case)
            trainer = build_sharded(kind, case, in_shards)
            trainer.fit(module, ckpt_path=str(Path(folder) / f"step={step}.ckpt"), **ANY_CHECKPOINT)
            resumed.append(sharded.result_of(trainer, module))
        return result, resumed


def resumed_at(case: Fit) -> list[int]:
    """In the tail of the first epoch, and at its end."""
    return [case.length(0) - 2, case.length(0)]


CASES = {
    "first": Fit((2, 6), epochs=2, scheduler="step"),
    "last": Fit((6, 1), epochs=2, optimizer="sgd", weighting="samples", ragged=True),
    "empty": Fit((0, 3, 4), epochs=2, optimizer="adamw", scheduler="epoch"),
}


class Same(Fit):
    """The same batches in each epoch."""

    def batch(self, rank: int, epoch: int, index: int) -> Any:
        return super().batch(rank, 0, index)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "in_shards"), [("first", False), ("first", True), ("last", False), ("empty", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_while_ranks_have_joined(workers: Workers, kind: str, in_shards: bool, name: str, tmp_path: Path) -> None:
    case = Same(**vars(CASES[name]))
    ranks = workers.run(case.world_size, fit_saving, kind, case, in_shards, str(tmp_path), deadline=180)
    assert_exact(case, [result for result, _ in ranks])
    expected = reference(case)
    files = sorted(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    assert len(files) == expected.steps // 2
    for path in files:
        assert path.is_dir() == in_shards
        if not in_shards:
            saved = torch.load(path, "cpu", weights_only=False)
            for key, value in expected.history[saved["global_step"]].items():
                assert difference([saved["state_dict"][f"net.{key}"]], [value]) < 1e-10
    for index, step in enumerate(resumed_at(case)):
        resumed = [others[index] for _, others in ranks]
        assert_same_bits(resumed)
        epoch, first = divmod(step, case.length(0))
        for (whole, _), mine in zip(ranks, resumed, strict=True):
            assert mine.trained == [place for place in whole.trained if place >= (epoch, first)]
            assert mine.global_step == expected.steps
            assert mine.lr == expected.lr
            assert difference(mine.parameters, whole.parameters) == 0
