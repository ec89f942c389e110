"""What workers do of which one kills itself in the tail of the first epoch, once."""

import os
import signal
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import prepare_model
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_join.ray import RayDDPJoinStrategy
from tests.support.batches import Batches
from tests.support.front_ends import lightning
from tests.support.front_ends.lightning import EpochSampler, Fit
from tests.support.run import Training, difference, reference
from torch_join import Join
from torch_join.ray import Report

RUN = Fit((2, 8, 4), epochs=2, scheduler="step", ragged=True)


def _load() -> dict[str, Any] | None:
    """Return what the last report holds, with its folder."""
    if (checkpoint := ray.train.get_checkpoint()) is None:
        return None
    folder = tempfile.mkdtemp()
    checkpoint.to_directory(folder)
    found: dict[str, Any] = torch.load(f"{folder}/state.pt", weights_only=False)
    return {**found, "folder": folder}


def _kill_once(rank: int, epoch: int, step: int, is_new: bool) -> None:
    if is_new and rank == 1 and (epoch, step) == (0, 5):
        time.sleep(2)  # until Ray has taken the report of step 2 from all workers
        os.kill(os.getpid(), signal.SIGKILL)


def plain_killed(rank: int) -> tuple[float, int, int]:
    net, report, loaded = RUN.build(), Report(), _load()
    model, training = prepare_model(net), Training(RUN, net)
    trained, first = 0, -1
    if loaded is not None:
        net.load_state_dict(loaded["model"])
        for each, state in zip(training.given, loaded["states"], strict=True):
            each.load_state_dict(state)
        first = loaded["step"]
    with Join([model, *training.given, report]) as join:
        if loaded is not None:
            join.load_state_dict(loaded["join"])
        for epoch in range(RUN.epochs):
            for batch in join.batches(RUN.batches(rank, epoch)):
                step = join.step
                _kill_once(rank, epoch, step, loaded is None)
                training.begin_step(epoch, step)
                for loss in RUN.losses(model, batch, rank, epoch, step):
                    training.backward(loss)
                training.end_step(epoch, step)
                trained += 1
                if (epoch, step) == (0, 2):
                    states = [each.state_dict() for each in training.given]
                    state = {"model": net.state_dict(), "states": states, "join": join.state_dict(), "step": step}
                    with tempfile.TemporaryDirectory() as folder:
                        torch.save(state, f"{folder}/state.pt")
                        leads = rank == join.active_ranks[0]
                        report({"step": step}, ray.train.Checkpoint.from_directory(folder) if leads else None)
    return difference([*net.parameters()], reference(RUN).parameters), first, trained


class _Killed(lightning.Module):
    def train_dataloader(self) -> Any:
        sampler = EpochSampler(self.case, self.data_rank)
        return StatefulDataLoader(Batches(self.case, self.data_rank), batch_size=None, sampler=sampler)


class _Reporting(pl.Callback):
    def __init__(self, rank: int, is_new: bool) -> None:
        self.rank, self.is_new = rank, is_new

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        _kill_once(self.rank, trainer.current_epoch, index, self.is_new)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.current_epoch, trainer.global_step) != (0, 3):
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(f"{folder}/checkpoint.ckpt")
            torch.save({"step": trainer.global_step - 1}, f"{folder}/state.pt")
            ray.train.report({}, ray.train.Checkpoint.from_directory(folder) if self.rank == 0 else None)


def lightning_killed(rank: int) -> tuple[float, int, int]:
    loaded = _load()
    trainer = lightning.build_trainer(
        RUN,
        strategy=RayDDPJoinStrategy(),
        devices="auto",
        plugins=[RayLightningEnvironment()],
        callbacks=[_Reporting(rank, loaded is None)],
    )
    module = _Killed(RUN)
    path = None if loaded is None else f"{loaded['folder']}/checkpoint.ckpt"
    prepare_trainer(trainer).fit(module, ckpt_path=path, **lightning.ANY_CHECKPOINT)
    off = difference([*module.net.parameters()], reference(RUN).parameters)
    return off, -1 if loaded is None else loaded["step"], len(module.trained)
