"""Accelerate's FSDP, of both versions, on CPUs: one script, done by several processes.

What one process has, which it is compared with, is `reference`'s of `accelerated.py`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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

from accelerate_join import Accelerator, join_uneven_inputs
from tests.emulator import place
from tests.needs import has, known
from tests.support import accelerated
from tests.support.accelerated import (
    FEATURES,
    Net,
    Script,
    accelerator_of,
    make_loader,
    make_optimizer,
    make_scheduler,
    plain,
)


class First(nn.Linear):
    """A unit of its own; what else there is belongs to the root's."""


class ShardedNet(Net):
    """A network with units in it that FSDP shards, and parameters at its root."""

    def __init__(self, norm: bool) -> None:
        super().__init__(norm)
        self.first = First(FEATURES, 5)
        self.other = First(5, 5)

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
    dtype: torch.dtype = torch.float64


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


def network(script: Script) -> ShardedNet:
    torch.manual_seed(0)
    return ShardedNet(script.norm).to(getattr(script, "dtype", torch.float64))


def _network(script: Script, _: bool) -> ShardedNet:
    return network(script)


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


class Session:
    """An accelerator, and what it has prepared."""

    def __init__(self, accelerator: Any, script: Sharded, rank: int) -> None:
        self.accelerator: Accelerator = accelerator
        self.script = script
        torch.manual_seed(5)
        if script.scaler:
            kind = torch.amp.GradScaler if script.version == 2 else ShardedGradScaler  # as Accelerate does
            accelerator.scaler = kind(place().type, init_scale=8.0, growth_interval=3)
        net = network(script)
        if not script.plugin.get("use_orig_params", True):  # the optimizer is of flat parameters
            net = accelerator.prepare(net)
        optimizer = make_optimizer(script.optimizer, net.parameters())
        loaders = make_loader(script, rank), make_loader(script, rank, even=True)
        made = accelerator.prepare(net, optimizer, make_scheduler(optimizer), *loaders)
        self.model, self.optimizer, self.scheduler, self.loader, self.even = made

    def step(self, numbers: Tensor, x: Tensor, y: Tensor) -> None:
        script, accelerator = self.script, self.accelerator
        x, y = x.to(script.dtype), y.to(script.dtype)
        with accelerator.accumulate(self.model):
            loss = (self.model(x) - accelerated.target(script, numbers, y)).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients and script.scaler:
                accelerator.scaler.unscale_(self.optimizer.optimizer)
            if accelerator.sync_gradients and script.clip is not None:
                accelerator.clip_grad_norm_(self.model.parameters(), script.clip)
            self.optimizer.step()
            if script.scheduler == "step":
                self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
        """Return all weights, the optimizer's moments, and what must be the same bits on all ranks."""
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
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scaler = self.accelerator.scaler
        rest = [plain(groups), plain(self.scheduler.state_dict()), self.accelerator.step]
        return weights, moments, [*rest, self.loader.iteration, scaler.state_dict() if scaler is not None else None]


def _short(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


@dataclass
class Trained:
    """What a rank has in the end; `gathered` are numbers of samples from `gather_for_metrics`, by epoch."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    same: list[Any]
    seen: list[list[list[int]]]
    gathered: list[list[int]]


def train(rank: int, script: Sharded) -> Trained:
    with sharding_accelerator(rank, script) as accelerator:
        session = Session(accelerator, script, rank)
        seen: list[list[list[int]]] = []
        gathered: list[list[int]] = []

        def run_epoch(batches: Any) -> None:
            seen.append([])
            for numbers, x, y in batches:
                seen[-1].append(numbers.tolist())
                session.step(numbers, x, y)
            if script.scheduler == "epoch":
                session.scheduler.step()

        def evaluate() -> None:
            gathered.append([])
            with torch.no_grad():
                for numbers, x, _ in session.loader:
                    outputs = session.model(x.to(script.dtype))
                    found, _ = accelerator.gather_for_metrics((numbers, outputs))
                    gathered[-1] += found.tolist()

        options: dict[str, Any] = {"even_batches": False, "weighting": script.weighting, "may_break": script.may_break}
        function = join_uneven_inputs(accelerator, [session.model], **options)
        with function if script.own_function else accelerator.join_uneven_inputs(**options):
            for _ in range(script.epochs):
                run_epoch(session.loader)
                if script.evaluates:
                    session.model.eval()
                    evaluate()
                    session.model.train()
        for _ in range(script.even):
            run_epoch(session.even)
        return Trained(*session.state(), seen, gathered)


def reference(script: Sharded, seen: list[list[list[list[int]]]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the moments that one process has after what the ranks saw."""
    samples = {n: (x.to(script.dtype), y.to(script.dtype)) for n, (x, y) in accelerated.samples_of(script).items()}
    with (
        mock.patch.object(accelerated, "network", partial(_network, script)),
        mock.patch.object(accelerated, "samples_of", return_value=samples),
    ):
        net, optimizer, _ = accelerated.reference(script, seen)
    moments = {
        f"{name} {key}": value
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
    return {name: parameter.detach() for name, parameter in net.named_parameters()}, moments


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)
