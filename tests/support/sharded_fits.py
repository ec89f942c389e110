"""A `Fit` trained by Lightning's ranks with a model that FSDP shards, on CPUs."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch.strategies.fsdp as lightning_fsdp
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_join import FSDPJoinStrategy, ModelParallelJoinStrategy
from tests.emulator import place
from tests.support.front_ends.lightning import Fit, Module, Result, build_trainer, progress_of
from tests.support.front_ends.sharded import full_state

KINDS = ("fsdp", "model_parallel")
_wrap = FullyShardedDataParallel.__init__


def _on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
    _wrap(self, *args, **{**kwargs, "device_id": place()})


def _whole_state(module: Any, world_size: int, rank0_only: bool = True) -> AbstractContextManager[Any]:
    return FullyShardedDataParallel.state_dict_type(
        module,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


@contextmanager
def on_cpus() -> Iterator[None]:
    """Within this, what keeps FSDPStrategy from CPUs does not.

    Lightning gives no device where there is no GPU. Of a whole state that is "offloaded" to the CPU that it is on
    already, torch frees the storage (`offload_to_cpu=True`), and the process crashes.
    """
    with (
        mock.patch.object(FullyShardedDataParallel, "__init__", _on_the_cpu),
        mock.patch.object(lightning_fsdp, "_get_full_state_dict_context", _whole_state),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


class Double(FSDPPrecision):
    """Lightning's has no float64, and casts batches to float32."""

    mixed_precision_config = None  # type: ignore[assignment]

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data

    convert_output = convert_input

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    tensor_init_context = module_init_context = forward_context


class ShardedModule(Module):
    """Each layer is a unit of its own, and the whole is one."""

    def configure_model(self) -> None:
        if self.trainer.strategy.strategy_name.startswith("fsdp") or isinstance(self.net, FSDPModule):  # type: ignore[attr-defined]
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.net.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def build_strategy(kind: str, case: Fit, sharded: bool = False, **options: Any) -> Any:
    """Return a strategy that joins; `sharded` is how it saves."""
    options = {"weighting": case.option, "rebalance": case.rebalance, **options}
    if kind == "fsdp":
        options.setdefault("precision_plugin", Double("32-true"))
        saves: dict[str, Any] = {"state_dict_type": "sharded" if sharded else "full"}
        wraps = ModuleWrapPolicy({nn.Linear})
        return FSDPJoinStrategy(auto_wrap_policy=wraps, **saves, **options)
    sizes = {"data_parallel_size": case.world_size, "tensor_parallel_size": 1}
    saves = {"save_distributed_checkpoint": sharded}
    return ModelParallelJoinStrategy(**{**sizes, **saves, **options})


def plain(strategy: Any) -> Any:
    """Make a strategy that joins Lightning's own, as a user gives it to a trainer with a `JoinCallback`."""
    strategy.__class__ = FSDPStrategy if isinstance(strategy, FSDPStrategy) else ModelParallelStrategy
    for name in ("options", "joinables", "start_method"):
        vars(strategy).pop(name, None)
    return strategy


def build_sharded(kind: str, case: Fit, sharded: bool = False, strategy: Any = None, **overrides: Any) -> Any:
    """Return a trainer."""
    return build_trainer(case, strategy=strategy or build_strategy(kind, case, sharded), **overrides)


def whole(trainer: Any, module: Module) -> dict[str, Tensor]:
    """Return what all ranks' shards make together; all ranks call it."""
    model = trainer.strategy.model
    found = full_state(model if isinstance(model, FullyShardedDataParallel) else module)
    return {name.removeprefix("net."): value for name, value in found.items()}


def result_of(trainer: Any, module: Module) -> Result:
    state = whole(trainer, module)
    return Result(
        parameters=[state[name] for name, _ in _unwrapped(module)],
        buffers=[],
        optimizer={},
        **progress_of(trainer, module),
    )


def _unwrapped(module: Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.net.named_parameters():
        yield name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""), parameter


def fit(rank: int, kind: str, case: Fit, make: Any = ShardedModule, **overrides: Any) -> Result:
    with on_cpus():
        module = make(case)
        trainer = build_sharded(kind, case, **overrides)
        trainer.fit(module)
        return result_of(trainer, module)
