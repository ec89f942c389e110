"""What a user may do wrong in a short training: a program for each front end, and a class for each fault."""

import logging
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import lightning_join
from tests.support.front_ends import lightning as fits
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.small import batches_of, network
from tests.support.warned import warned
from torch_join import Join, JoinMonitor
from torch_join._tail import remarks

LENGTHS = (1, 3)  # batches of two samples
EPOCHS = 2


class Fault:
    """None: a rank's training, in whose places others do something.

    Attributes:
        lengths: Each rank's number of batches.
        deals_out: Whether the front end deals out each rank's dataset.
        window: The number of batches between two steps of an optimizer.
        steps: How many batches this rank has trained on.
        weighting: What a batch counts.
        monitor: What notes the epochs, where the training is monitored.
    """

    lengths = LENGTHS
    deals_out = False
    window = 1
    weighting: Any = "world"
    monitor: Any = None

    def __init__(self, rank: int) -> None:
        self.rank, self.steps, self.net = rank, 0, network()

    def given(self) -> list[Any]:
        """What takes part besides."""
        return []

    def monitored(self) -> bool:
        return False

    def average(self) -> Any:
        """What the loop keeps, in a variable."""

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean()

    def set_rates(self, optimizer: Any) -> None:
        """Set what the optimizer's next step takes."""

    def begin(self, optimizer: Any) -> None:
        """Begin a step."""
        self.steps += 1
        self.set_rates(optimizer)

    @property
    def skips(self) -> bool:
        """Whether the loop goes to its next batch before this step's backward."""
        return False

    @property
    def saves(self) -> bool:
        """Whether a state is saved after this step's backward, before an optimizer's step."""
        return False


class Gather(Fault):
    def loss(self, out: Tensor) -> Tensor:
        return torch.cat([*all_gather(out)]).square().mean()  # type: ignore[no-untyped-call]


class Skips(Fault):
    """Each rank skips one batch of each epoch, but rank 0 the first and rank 1 the third."""

    lengths = (4, 4)

    @property
    def skips(self) -> bool:
        return self.steps % self.lengths[self.rank] == (1, 3)[self.rank]


class DealtAgain(Fault):
    deals_out = True


class DealtAgainAlike(Fault):
    """Shards of one length."""

    deals_out = True
    lengths = (4, 4)


class MonitorOnOne(Fault):
    def monitored(self) -> bool:
        return self.rank == 1


class Monitored(Fault):
    def monitored(self) -> bool:
        return True


class Counted(Monitored):
    weighting = "samples"


class Miscounts(Fault):
    """Rank 1 counts its second batch wrongly."""

    counted = 0

    def weighting(self, batch: Any) -> float:
        self.counted += 1
        return math.nan if (self.rank, self.counted) == (1, 2) else 2.0


class Window(Fault):
    window = 2

    @property
    def saves(self) -> bool:
        return True


class MockGiven(Fault):
    def given(self) -> list[Any]:
        return [Mock()]


class OwnRate(Fault):
    def set_rates(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / self.steps


class Raises(Fault):
    def loss(self, out: Tensor) -> Tensor:
        if self.steps == 2:
            raise RuntimeError("out of luck")
        return super().loss(out)


class AverageOnOne(Fault):
    def average(self) -> Any:
        return AveragedModel(self.net) if self.rank == 0 else None


class Unfreezes(Fault):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.net.bias.requires_grad_(False)

    def begin(self, optimizer: Any) -> None:
        super().begin(optimizer)
        if self.steps == 2:
            self.net.bias.requires_grad_(True)


_ALL: list[type[Fault]] = [Fault, *Fault.__subclasses__()]
FAULTS = {each.__name__: each for each in _ALL}


def loader_of(fault: Fault) -> DataLoader[Any]:
    """A rank's own samples."""
    own = batches_of(fault.rank, fault.lengths)
    return DataLoader(TensorDataset(torch.cat(own)), 2)


def trains(fault: Fault, model: Any, optimizer: Any, batches: Any, backward: Any, save: Any) -> None:
    """Train for an epoch, in a loop of the user's."""
    average = fault.average()
    for step, (x,) in enumerate(batches):
        fault.begin(optimizer)
        if fault.skips:
            continue
        backward(fault.loss(model(x)))
        if fault.saves:
            save()
        if (step + 1) % fault.window == 0:
            optimizer.step()
            optimizer.zero_grad()
        if average is not None:
            average.update_parameters(fault.net)
    del average


def options_of(fault: Fault) -> Any:
    fault.monitor = JoinMonitor() if fault.monitored() else None
    return {"weighting": fault.weighting, **({"monitor": fault.monitor} if fault.monitor else {})}


def in_join(fault: Fault, wrap: Any) -> None:
    model = wrap(fault.net)
    optimizer = torch.optim.SGD(fault.net.parameters(), 0.1)
    with Join([model, optimizer, *fault.given()], **options_of(fault)) as join:
        for _ in range(EPOCHS):
            trains(fault, model, optimizer, join.batches(loader_of(fault)), Tensor.backward, join.state_dict)


def plain(fault: Fault) -> None:
    in_join(fault, DistributedDataParallel)


def sharded(fault: Fault) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (len(LENGTHS),))
    in_join(fault, lambda net: fully_shard(net, mesh=mesh))


def fabric(fault: Fault) -> None:
    from lightning_join.fabric import DDPJoinStrategy

    it = fabric_of(len(LENGTHS), DDPJoinStrategy(joinables=fault.given(), **options_of(fault)))
    model, optimizer = it.setup(fault.net, torch.optim.SGD(fault.net.parameters(), 0.1))
    loader: Any = it.setup_dataloaders(loader_of(fault), use_distributed_sampler=fault.deals_out)
    with tempfile.TemporaryDirectory() as folder:
        save = partial(it.save, f"{folder}/a.ckpt", {"loader": loader})
        for _ in range(EPOCHS):
            trains(fault, model, optimizer, loader, it.backward, save)


def accelerate(fault: Fault) -> None:
    with accelerator_of(fault.rank) as accelerator, tempfile.TemporaryDirectory() as folder:
        model, optimizer = accelerator.prepare(fault.net, torch.optim.SGD(fault.net.parameters(), 0.1))
        own: Any = loader_of(fault)
        if fault.deals_out:
            own = accelerator.prepare(own)
        with accelerator.join_uneven_inputs(fault.given(), **options_of(fault)) as join:
            for _ in range(EPOCHS):
                loader = own if fault.deals_out else join.batches(own)
                trains(fault, model, optimizer, loader, accelerator.backward, partial(accelerator.save_state, folder))
        accelerator.end_training()


class LightningModule(fits.Module):
    fault: Fault

    def train_dataloader(self) -> Any:
        return loader_of(self.fault)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fault.begin(self.optimizers())
        return self.fault.loss(self.net(batch[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        if self.fault.saves:
            with tempfile.TemporaryDirectory() as folder:
                self.trainer.save_checkpoint(Path(folder) / "a.ckpt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


def lightning(fault: Fault) -> None:
    case = fits.Fit(LENGTHS, epochs=EPOCHS, accumulate=fault.window)
    module = LightningModule(case)
    module.net, module.fault = fault.net, fault
    fault.monitor = lightning_join.JoinMonitor() if fault.monitored() else None
    trainer = fits.build_trainer(
        case,
        strategy=lightning_join.DDPJoinStrategy(joinables=fault.given(), weighting=fault.weighting),
        callbacks=[fault.monitor] if fault.monitor else [],
        use_distributed_sampler=fault.deals_out,
    )
    trainer.fit(module)


def transformers(fault: Fault) -> None:
    from transformers import PretrainedConfig

    from accelerate_join.transformers import JoinMonitor, JoinTrainer
    from tests.support.front_ends.transformers import Fit, arguments_of

    class Trainer(JoinTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            fault.begin(self.optimizer)
            return fault.loss(model(inputs["x"]))

    class Net(nn.Module):
        accepts_loss_kwargs = False

        def __init__(self) -> None:
            super().__init__()
            self.net, self.config = fault.net, PretrainedConfig()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(fault.net.parameters(), 0.1)
    samples: Any = [{"x": x} for x in torch.cat(batches_of(fault.rank, fault.lengths))]
    fault.monitor = JoinMonitor() if fault.monitored() else None
    with accelerator_of(fault.rank), tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=Net(),
            args=arguments_of(
                Fit(fault.lengths, EPOCHS, accumulate=fault.window),
                folder,
                max_grad_norm=0.0,
                log_level_replica="passive",
            ),
            train_dataset=samples,
            callbacks=[fault.monitor] if fault.monitor else [],
            weighting=fault.weighting,
            own_shards=not fault.deals_out,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        ).train()


FRONT_ENDS = {each.__name__: each for each in (plain, sharded, fabric, accelerate, lightning, transformers)}


def run(rank: int, front_end: str, name: str) -> list[str]:
    """Do one fault's training; return what this rank was warned of."""
    with warned() as said:
        _train(front_end, FAULTS[name](rank))
    return said


def epochs_of(rank: int, front_end: str) -> list[list[tuple[int, int, float | None]]]:
    """Do a training; return each rank's batches, steps without one, and samples in each epoch that a monitor notes."""
    _train(front_end, fault := Counted(rank))
    return [[(each.batches, each.shadow_steps, each.counted) for each in epoch.ranks] for epoch in fault.monitor.epochs]


def _train(front_end: str, fault: Fault) -> None:
    program = FRONT_ENDS[front_end]
    to_the_end(fault.rank, _on_rank, program, fault) if front_end == "fabric" else program(fault)


# Whose log shows INFO: for the others what `logging.basicConfig(level=logging.INFO)` sets up.
LOGS = {"lightning": "lightning.pytorch", "fabric": "lightning.fabric", "transformers": "transformers"}


@contextmanager
def logged(name: str, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What a log is given of ours within this, from the first loop of a job on; `level` is that of `torch_join`'s."""
    lines: list[str] = []
    handler, log, ours = logging.Handler(), logging.getLogger(name), logging.getLogger("torch_join")
    handler.emit = lambda record: lines.append(record.getMessage()) if record.name == ours.name else None  # type: ignore[method-assign]
    before = log.level
    log.setLevel(logging.INFO)
    ours.setLevel(level)
    log.addHandler(handler)
    remarks.SEEN.clear()
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        ours.setLevel(logging.NOTSET)


def log_of(rank: int, front_end: str, level: int = logging.NOTSET, name: str = "Fault") -> list[str]:
    """Do a training, without a fault by default; return what this rank logs."""
    with logged(LOGS.get(front_end, ""), level) as lines:
        run(rank, front_end, name)
    return lines


def _on_rank(rank: int, program: Any, fault: Fault) -> None:
    program(fault)
