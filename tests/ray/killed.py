"""What workers do of which one kills itself in the tail of the first epoch, once."""

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import partial
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
Found = tuple[float, int, int]  # how far it is off, the step that was saved, and how many batches were trained on since


@dataclass(frozen=True)
class Killed:
    """A run of which a rank is killed at its begin of a step, after all have saved at the end of another one."""

    run: Fit = RUN
    saved: int = 2
    victim: tuple[int, int] = (1, 5)  # rank and step


def drawn(seed: int) -> Killed:
    pick = random.Random(seed)
    lengths = [pick.randint(0, 3), pick.randint(5, 8), pick.randint(0, 8)]
    pick.shuffle(lengths)
    rank, longest = max(enumerate(lengths), key=lambda each: each[1])
    step = pick.randint(2, longest - 1)
    run = Fit(tuple(lengths), epochs=2, ragged=True, weighting=pick.choice(("world", "active", "samples")))
    run = run.but(optimizer=pick.choice(("sgd", "adamw")), scheduler=pick.choice((None, "step")))
    return Killed(run, pick.randint(0, step - 1), (rank, step))


def _load() -> dict[str, Any] | None:
    """Return what the last report holds, with its folder."""
    if (checkpoint := ray.train.get_checkpoint()) is None:
        return None
    folder = tempfile.mkdtemp()
    checkpoint.to_directory(folder)
    found: dict[str, Any] = torch.load(f"{folder}/state.pt", weights_only=False)
    return {**found, "folder": folder}


def _kill_once(case: Killed, rank: int, epoch: int, step: int, is_new: bool) -> None:
    if is_new and epoch == 0 and (rank, step) == case.victim:
        time.sleep(2)  # until Ray has taken the report from all workers
        os.kill(os.getpid(), signal.SIGKILL)


def plain_killed(rank: int, case: Killed = Killed()) -> Found:
    run = case.run
    net, report, loaded = run.build(), Report(), _load()
    model, training = prepare_model(net), Training(run, net)
    trained, first = 0, -1
    if loaded is not None:
        net.load_state_dict(loaded["model"])
        for each, state in zip(training.given, loaded["states"], strict=True):
            each.load_state_dict(state)
        first = loaded["step"]
    with Join([model, *training.given, report], weighting=run.option) as join:
        if loaded is not None:
            join.load_state_dict(loaded["join"])
        for epoch in range(run.epochs):
            for batch in join.batches(run.batches(rank, epoch)):
                step = join.step
                _kill_once(case, rank, epoch, step, loaded is None)
                training.begin_step(epoch, step)
                for loss in run.losses(model, batch, rank, epoch, step):
                    training.backward(loss)
                training.end_step(epoch, step)
                trained += 1
                if (epoch, step) == (0, case.saved):
                    states = [each.state_dict() for each in training.given]
                    state = {"model": net.state_dict(), "states": states, "join": join.state_dict(), "step": step}
                    with tempfile.TemporaryDirectory() as folder:
                        torch.save(state, f"{folder}/state.pt")
                        leads = rank == join.active_ranks[0]
                        report({"step": step}, ray.train.Checkpoint.from_directory(folder) if leads else None)
    return difference([*net.parameters()], reference(run).parameters), first, trained


class _Killed(lightning.Module):
    def train_dataloader(self) -> Any:
        sampler = EpochSampler(self.case, self.data_rank)
        return StatefulDataLoader(Batches(self.case, self.data_rank), batch_size=None, sampler=sampler)


class _Reporting(pl.Callback):
    def __init__(self, case: Killed, rank: int, is_new: bool) -> None:
        self.case, self.rank, self.is_new = case, rank, is_new

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        _kill_once(self.case, self.rank, trainer.current_epoch, index, self.is_new)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.current_epoch, trainer.global_step) != (0, self.case.saved + 1):
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(f"{folder}/checkpoint.ckpt")
            torch.save({"step": trainer.global_step - 1}, f"{folder}/state.pt")
            ray.train.report({}, ray.train.Checkpoint.from_directory(folder) if self.rank == 0 else None)


def lightning_killed(rank: int, case: Killed = Killed()) -> Found:
    loaded = _load()
    trainer = lightning.build_trainer(
        case.run,
        strategy=RayDDPJoinStrategy(weighting=case.run.option),
        devices="auto",
        plugins=[RayLightningEnvironment()],
        callbacks=[_Reporting(case, rank, loaded is None)],
    )
    module = _Killed(case.run)
    path = None if loaded is None else f"{loaded['folder']}/checkpoint.ckpt"
    prepare_trainer(trainer).fit(module, ckpt_path=path, **lightning.ANY_CHECKPOINT)
    off = difference([*module.net.parameters()], reference(case.run).parameters)
    return off, -1 if loaded is None else loaded["step"], len(module.trained)


def __getattr__(name: str) -> Any:
    kind, _, seed = name.rpartition("_")
    if kind not in ("plain_killed", "lightning_killed"):
        raise AttributeError(name)
    return partial(globals()[kind], case=drawn(int(seed)))
