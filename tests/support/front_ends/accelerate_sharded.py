"""A `Script` with Accelerate's FSDP, of both versions, on CPUs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.emulator import place
from tests.needs import has, known
from tests.support.front_ends import accelerate
from tests.support.front_ends.accelerate import Script, Trained, accelerator_of
from tests.support.run import CLASSES, FEATURES, TOLERANCE


class First(nn.Linear):
    """A unit of its own; what else there is belongs to the root's."""


class ShardedNet(nn.Module):
    """A network with units in it that FSDP shards, and parameters at its root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.second = First(FEATURES, 5), First(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.other(self.first(x).tanh()).tanh())  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sharded(Script):
    """A script, and how its model is sharded."""

    version: int = 2
    plugin: dict[str, Any] = field(default_factory=dict)  # options of Accelerate's plugin
    sync_each_batch: bool = False
    sync_with_dataloader: bool = True
    mesh: dict[str, int] = field(default_factory=dict)  # sizes of Accelerate's `ParallelismConfig`
    evaluates: bool = False  # in a second loop of the same context

    def build(self) -> ShardedNet:
        torch.manual_seed(0)
        return ShardedNet().to(self.dtype)


def possible(script: Sharded) -> Sharded:
    """Return it; skip the test where Accelerate has no such sharding."""
    needed = {"Accelerate's fsdp_version=2": script.version == 2, "Accelerate's ParallelismConfig": bool(script.mesh)}
    for feature, is_used in needed.items():
        if is_used and not has(feature):
            pytest.skip(f"needs {feature}")
    return script


def _barrier(_: Any) -> None:
    torch.distributed.barrier()


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Have Accelerate take FSDP's plugin on CPUs: it does so for several accelerators only."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    own: Callable[..., None] = AcceleratorState.__init__
    fsdp: Callable[..., None] = FullyShardedDataParallel.__init__

    def state(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        fsdp(self, *args, **{**kwargs, "device_id": place()})  # a device of CUDA is its default

    with (
        mock.patch.object(AcceleratorState, "__init__", state),
        mock.patch.object(FullyShardedDataParallel, "__init__", wrapper),
        # Which asks for a device of its own where it believes in one.
        mock.patch.object(PartialState, "wait_for_everyone", _barrier),
    ):
        yield


@contextmanager
def sharding_accelerator(rank: int, script: Sharded, **kwargs: Any) -> Iterator[Any]:
    """An accelerator with FSDP's plugin."""
    options: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["First"],
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    }
    options |= known(FullyShardedDataParallelPlugin, fsdp_version=script.version)
    options |= {"use_orig_params": True} if script.version == 1 else {}
    accumulation = GradientAccumulationPlugin(
        script.accumulate,
        sync_each_batch=script.sync_each_batch,
        sync_with_dataloader=script.sync_with_dataloader,
    )
    with warnings.catch_warnings(), fsdp_on_cpu():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*|.*state_dict.*|.*TypedStorage.*")
        plugin = FullyShardedDataParallelPlugin(**{**options, **script.plugin})
        kwargs = {"fsdp_plugin": plugin, "gradient_accumulation_plugin": accumulation, **kwargs}
        if script.mesh:
            from accelerate.parallelism_config import ParallelismConfig

            kwargs["parallelism_config"] = ParallelismConfig(**script.mesh)
        with accelerator_of(rank, step_scheduler_with_optimizer=script.step_scheduler_with_optimizer, **kwargs) as made:
            yield made


class Session(accelerate.Session):
    """An accelerator that shards."""

    script: Sharded

    def prepare(self) -> None:
        script, accelerator = self.script, self.accelerator
        if script.scaler:  # of the kind that Accelerate takes
            accelerator.scaler = script.make_scaler(torch.amp.GradScaler if script.version == 2 else ShardedGradScaler)
        net = script.build()
        if not script.plugin.get("use_orig_params", True):  # the optimizer is of flat parameters
            net = accelerator.prepare(net)
        optimizer = script.make_optimizer(net.parameters())
        loaders = script.loaders(self.rank, lambda: self.epoch)
        made = accelerator.prepare(net, optimizer, self.make_scheduler(optimizer), *loaders)
        self.model, self.optimizer, self.scheduler, self.loader, self.even = made

    def state(self) -> Trained:
        options = StateDictOptions(full_state_dict=True)
        whole = get_model_state_dict(self.model, options=options)
        weights = {_short(name): value.clone() for name, value in whole.items()}
        optimizer = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=options)
        moments = {
            f"{_short(name)} {key}": value.clone()
            for name, state in optimizer["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        return Trained(weights, moments, self.same())

    @torch.no_grad()
    def evaluate(self) -> None:
        if not self.script.evaluates:
            return
        self.model.eval()
        gathered: list[int] = []
        for numbers, x, _ in self.loader:
            found, _ = self.accelerator.gather_for_metrics((numbers, self.model(x.to(self.script.dtype))))
            gathered += found.tolist()
        self.trained.gathered.append(gathered)
        self.model.train()


def _short(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


def train(rank: int, script: Sharded) -> Trained:
    with sharding_accelerator(rank, script) as accelerator:
        return Session(accelerator, script, rank).run()


def expected_of(script: Sharded, seen: list[accelerate.Seen]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the moments that one process has after what the ranks saw."""
    expected = accelerate.expected_of(script, seen)
    (optimizer,) = expected.training.optimizers
    named = dict(expected.net.named_parameters())
    moments = {
        f"{name} {key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
    return {name: parameter.detach() for name, parameter in named.items()}, moments


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def check(script: Sharded, found: list[Trained], tolerance: float = TOLERANCE) -> None:
    for trained in found[1:]:
        assert trained.weights.keys() == found[0].weights.keys()
        assert all(torch.equal(value, found[0].weights[name]) for name, value in trained.weights.items())
        assert trained.same == found[0].same
    weights, moments = expected_of(script, [trained.seen for trained in found])
    assert difference(found[0].weights, weights) < tolerance
    assert not moments or difference(found[0].moments, moments) < tolerance  # torch makes some up for a reader
