"""What workers of Ray Train do, one function after the other."""

import importlib
import os
import random
import tempfile
import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any

import ray.train
import ray.train.collective
import torch
import torch.distributed as dist
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import prepare_data_loader, prepare_model
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_join
from accelerate_join import join_batches
from lightning_join.ray import RayDDPJoinStrategy, RayFSDPJoinStrategy
from tests.ray import job
from tests.support import sharded_fits
from tests.support.drawn import ANY, draw
from tests.support.front_ends import lightning
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.lightning import Fit, Result
from tests.support.run import Batch, Run, Training, difference, reference
from torch_join import Join
from torch_join.ray import Report

Reported = list[tuple[dict[str, Any], str, int]]
OF = [each for each in ANY if each != "transformers" or find_spec(each)]
RUN = Run((2, 6, 4), epochs=2, scheduler="step", ragged=True)


def _reported_since(count: int) -> Reported:
    """Return metrics, folder and writer of the checkpoints that were reported after the first ones."""
    found = []
    for one in ray.train.get_all_reported_checkpoints()[count:]:
        with one.checkpoint.as_directory() as folder:
            found.append((one.metrics, os.path.basename(one.checkpoint.path), int(torch.load(f"{folder}/by.pt"))))
    return found


def _report_a_checkpoint(report: Report, rank: int, first: int, epoch: int, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == first:
            torch.save(torch.tensor(rank), f"{folder}/by.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        metrics = {"epoch": epoch, "step": step, "of": rank}
        report(metrics, checkpoint, checkpoint_dir_name=f"{epoch}-{step}")


def _train(rank: int, run: Run, in_step: Any = None, *given: Any) -> float:
    """Train in a plain loop; return how far the parameters are from those of one process."""
    net = run.build()
    model = prepare_model(net)
    training = Training(run, net)
    with Join([model, *training.given, *given], weighting=run.option) as join:
        for epoch in range(run.epochs):
            training.begin_epoch(epoch)
            for step, batch in enumerate(join.batches(run.batches(rank, epoch))):
                training.begin_step(epoch, step)
                for loss in run.losses(model, batch, rank, epoch, step):
                    training.backward(loss)
                training.end_step(epoch, step)
                if in_step is not None:
                    in_step(join, epoch, step)
            training.end_epoch()
    return difference([*net.parameters()], reference(run).parameters)


def reports_in_the_tail(rank: int) -> tuple[float, Reported]:
    count = len(ray.train.get_all_reported_checkpoints())
    report = Report()

    def in_step(join: Join, epoch: int, step: int) -> None:
        if step % 2:
            _report_a_checkpoint(report, rank, join.active_ranks[0], epoch, step)

    off = _train(rank, RUN, in_step, report)
    report({"over": True})  # outside of the `with`
    return off, _reported_since(count)


def reports_in_accelerates_loop(rank: int) -> tuple[float, Reported]:
    count, run, report = len(ray.train.get_all_reported_checkpoints()), Run((1, 0, 3), optimizer="sgd"), Report()
    with accelerator_of(rank) as accelerator:
        net = run.build()
        model, optimizer = accelerator.prepare(net, *run.optimizers(net))
        for epoch in range(run.epochs):
            for step, batch in enumerate(join_batches(accelerator, run.batches(rank, epoch), [report])):
                optimizer.zero_grad()
                for loss in run.losses(model, batch, rank, epoch, step):
                    accelerator.backward(loss)
                optimizer.step()
                _report_a_checkpoint(report, rank, 0 if step < 1 else 2, epoch + 10, step)
        return difference([*net.parameters()], reference(run).parameters), _reported_since(count)


def _calls_in_the_tail(rank: int, call: Any) -> float:
    return _train(rank, RUN.but(lengths=(1, 4, 2)), lambda *_: call())


report_itself = partial(_calls_in_the_tail, call=lambda: ray.train.report({"loss": 1.0}))
barrier = partial(_calls_in_the_tail, call=lambda: ray.train.collective.barrier())
broadcast = partial(_calls_in_the_tail, call=lambda: ray.train.collective.broadcast_from_rank_zero(1))


def report_itself_on_even_inputs(rank: int) -> float:
    return _train(rank, RUN.but(lengths=(2, 2, 2)), lambda *_: ray.train.report({"loss": 1.0}))


def all_rows(rank: int, size: int = 4, weighting: str = "samples") -> tuple[float, list[list[int]], list[int]]:
    """Return how far parameters are from those of one process on the batches that there were, and whose rows these."""
    run = Run((0, 0, 0), epochs=2, weighting=weighting)
    shard = ray.train.get_dataset_shard("rows")
    net = run.build()
    model, training = prepare_model(net), Training(run, net)
    mine: list[list[list[int]]] = []
    with Join([model, *training.given], weighting=run.option) as join:
        for epoch in range(run.epochs):
            mine.append([])
            for step, rows in enumerate(join.batches(shard.iter_torch_batches(batch_size=size))):
                mine[-1].append(rows["id"].tolist())
                training.begin_step(epoch, step)
                (model(_batch(mine[-1][-1])[0]) - _batch(mine[-1][-1])[1]).pow(2).mean().backward()
                training.end_step(epoch, step)
    everyone: list[Any] = [None] * run.world_size
    dist.all_gather_object(everyone, mine)
    steps = lambda epoch: [  # noqa: E731
        {r: _batch(each[epoch][i]) for r, each in enumerate(everyone) if i < len(each[epoch])}
        for i in range(max(len(each[epoch]) for each in everyone))
    ]
    expected = reference(run, steps, run.epochs).parameters
    read = [[row for each in everyone for batch in each[epoch] for row in batch] for epoch in range(run.epochs)]
    return difference([*net.parameters()], expected), read, [len(each[0]) for each in everyone]


def _batch(ids: list[int]) -> Batch:
    numbers = torch.tensor(ids, dtype=torch.float64)[:, None]
    return torch.sin(numbers * torch.arange(1, 5)), torch.cos(numbers * torch.arange(1, 4))


def drawn(rank: int, seed: int) -> tuple[str, float]:
    """Do any run by any front end, or on any share of Ray Data; return what it was, and how far it is off."""
    pick = random.Random(seed)
    if pick.random() < 0.15:
        size, weighting = pick.randint(1, 9), pick.choice(("world", "active", "samples"))
        off, read, _ = all_rows(rank, size, weighting)
        assert [sorted(rows) for rows in read] == [[*range(61)]] * 2
        return f"Ray Data: {size}, {weighting}", off
    front_end, run = draw(seed, OF, (job.WORKERS,))
    parameters = importlib.import_module(f"tests.support.front_ends.{front_end}").parameters
    return f"{front_end}: {run}", difference(parameters(rank, run), reference(run).parameters)


def __getattr__(name: str) -> Any:
    kind, _, seed = name.rpartition("_")
    if kind != "drawn":
        raise AttributeError(name)
    return partial(drawn, seed=int(seed))


def prepares_shards(rank: int) -> list[str]:
    """Return what is warned of where Ray deals out what is a rank's own already."""
    data = TensorDataset(torch.arange(50.0)[:, None])
    shard = Subset(data, range((0, 20, 45)[rank], (20, 45, 50)[rank]))
    model = prepare_model(torch.nn.Linear(1, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join([model]) as join:
            for (batch,) in join.batches(prepare_data_loader(DataLoader(shard, batch_size=3))):
                model(batch).sum().backward()
            for (batch,) in join.batches(prepare_data_loader(DataLoader(data, batch_size=3))):
                model(batch).sum().backward()
    return [str(one.message) for one in caught]


# ---------------------------------------------------------------- Lightning

FIT = Fit((2, 7, 0), epochs=2, scheduler="step", ragged=True)


def _fit(case: Fit, prepared: bool = True, make: Any = lightning.Module, **options: Any) -> Result:
    trainer = lightning.build_trainer(case, **{"devices": "auto", **options})
    module = make(case)
    (prepare_trainer(trainer) if prepared else trainer).fit(module)
    return lightning.result_of(trainer, module)


def prepared(rank: int) -> Result:
    return _fit(FIT, strategy=RayDDPJoinStrategy(), plugins=[RayLightningEnvironment()])


def by_name(rank: int) -> Result:
    return _fit(FIT, prepared=False, strategy="ddp_join")


def by_callback(rank: int) -> Result:
    strategy, joins = RayDDPStrategy(), lightning_join.JoinCallback()
    result = _fit(FIT, strategy=strategy, plugins=[RayLightningEnvironment()], callbacks=[joins])
    assert type(strategy) is RayDDPStrategy
    return result


def sharded(rank: int) -> Result:
    with sharded_fits.on_cpus():
        ours = sharded_fits.build_strategy("fsdp", FIT)
        strategy = RayFSDPJoinStrategy(auto_wrap_policy=ours.kwargs["auto_wrap_policy"], state_dict_type="full")
        strategy.precision_plugin = sharded_fits.Double("32-true")
        trainer = lightning.build_trainer(FIT, strategy=strategy, devices="auto", plugins=[RayLightningEnvironment()])
        module = sharded_fits.ShardedModule(FIT)
        prepare_trainer(trainer).fit(module)
        return sharded_fits.result_of(trainer, module)


class _Numbered(lightning.Module):
    """Trains on one dataset of 50 samples, which Lightning deals out."""

    def setup(self, stage: str) -> None:
        self.read: list[int] = []

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(50)), batch_size=3, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read += batch[0].tolist()
        out: Tensor = self.net(_batch(self.read[-len(batch[0]) :])[0])
        return out.pow(2).mean()


def _read(rank: int, strategy: Any, prepared: bool) -> list[int]:
    module = _Numbered(FIT)
    options = {"strategy": strategy, "devices": "auto", "use_distributed_sampler": True, "max_epochs": 1}
    trainer = lightning.build_trainer(FIT, plugins=[RayLightningEnvironment()] if prepared else [], **options)
    (prepare_trainer(trainer) if prepared else trainer).fit(module)
    return module.read


def each_sample_prepared(rank: int) -> list[int]:
    return _read(rank, RayDDPJoinStrategy(), prepared=True)


def each_sample_by_name(rank: int) -> list[int]:
    return _read(rank, "ddp_join", prepared=False)


class _Reporting(lightning.Module):
    """Reports in a hook, which all ranks run in each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        ray.train.report({"step": self.trainer.global_step})


class _ReportingInItsStep(lightning.Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ray.train.report({"loss": 1.0})
        return super().training_step(batch, batch_idx)


def reports_in_hooks(rank: int) -> Result:
    return _fit(FIT, make=_Reporting, strategy=RayDDPJoinStrategy(), plugins=[RayLightningEnvironment()])


def reports_in_a_training_step(rank: int) -> Result:
    return _fit(FIT, make=_ReportingInItsStep, strategy=RayDDPJoinStrategy(), plugins=[RayLightningEnvironment()])
