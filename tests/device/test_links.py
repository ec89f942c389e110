"""In jobs that send nothing from the CPU, ranks are connected from the first thing on, since their device is known."""

import gc
from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from accelerate_join import join_uneven_inputs
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.inside import is_linked
from tests.support.workers import Workers
from torch_join import Join, JoinableModel


def is_connected() -> bool:
    return any(map(is_linked, gc.get_objects()))


class Look(pl.Callback):
    connected = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.connected = is_connected()


def in_join(rank: int) -> bool:
    with Join([DistributedDataParallel(nn.Linear(3, 2))]):
        return is_connected()


def in_torchs(rank: int) -> bool:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    with TorchJoin([JoinableModel(ddp)]):
        ddp(torch.ones(2, 3)).sum().backward()
        return is_connected()


def in_a_fit(rank: int) -> bool:
    case, look = Fit((1, 2)), Look()
    build_trainer(case, callbacks=[look]).fit(Module(case))
    return look.connected


def in_accelerates(rank: int) -> bool:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(nn.Linear(3, 2))
        with join_uneven_inputs(accelerator, [model]):
            return is_connected()


def of_an_optimizer(rank: int) -> bool:
    """Nothing that is given tells the device: it is the current one."""
    with Join([torch.optim.SGD([nn.Parameter(torch.ones(2, device="cpu"))], 0.1)]):
        return is_connected()


@pytest.mark.parametrize("way", [in_join, in_torchs, in_a_fit, in_accelerates, of_an_optimizer])
def test_ranks_are_connected(devices: Workers, way: Callable[[int], bool]) -> None:
    assert devices.run(2, way) == [True, True]
