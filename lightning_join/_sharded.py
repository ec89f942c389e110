"""The strategies for sharded models: `Trainer(strategy="fsdp_join")`, `"model_parallel_join"`, `"deepspeed_join"`."""

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_join import _compat
from lightning_join._base_strategy import Joining
from lightning_join._collectives import ActiveCollectives
from torch_join import UnsupportedError
from torch_join.integration import (
    PlaceholderLockstep,
    follow_sharded_model,
    is_engine,
    is_sharded_model,
    leads_to,
    setting,
    sharded_lockstep_join,
)


class Sharded(Joining):
    """The common part of the strategies for sharded models: running a step."""

    def setup(self, trainer: "Trainer") -> None:
        super().setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.driver is None:
            if fitting and self.options.enable:
                self.take_joinables()
            return
        model, module = self.model, self.lightning_module
        assert model is not None
        assert module is not None
        if fitting and self.options.placeholder is not None:
            self.join = PlaceholderLockstep(self.driver, model, self.take_joinables())
            return
        if not (is_sharded_model(model) or is_engine(model)):  # a DeepSpeed engine averages in each ZeRO stage
            raise UnsupportedError(
                f"{type(module).__name__} has no module sharded by FSDP, so {type(self).__name__} would never average"
                " its gradients. Call `fully_shard` in configure_model (over the data-parallel dimension of"
                " self.device_mesh), or use strategy='ddp_join'."
            )
        if not fitting:
            follow_sharded_model(self.driver, model)
            return
        if not module.automatic_optimization:
            raise UnsupportedError(
                f"{type(module).__name__} uses manual optimization, which a finished rank cannot follow with a"
                " sharded model. Use automatic optimization, or strategy='ddp_join'."
            )
        self.join = sharded_lockstep_join(self.driver, model, self.take_joinables())

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self.join is None:
            return super().training_step(*args, **kwargs)
        if self.join.runs_placeholders:
            return self.run_step(super().training_step, *args, **kwargs)  # type: ignore[no-any-return]
        with self.join.active_step():
            output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if output is None or (isinstance(loss, Tensor) and not leads_to(loss)):
            what = "None" if output is None else "a loss that does not depend on the model"
            raise UnsupportedError(
                f"training_step returned {what}, but the other ranks' backward needs this rank's shards in every step."
                " Return a zero loss that depends on the model's output (`0.0 * output.sum()`), or remove such batches"
                " from the dataloader."
            )
        return output


class _WholeResultLauncher(_compat.MultiProcessingLauncher):
    """Returns the complete weights to the main process; Lightning's launcher returns only the shard of rank 0."""

    def _collect_rank_zero_results(self, trainer: "Trainer", results: Any) -> Any:
        strategy: Any = self._strategy
        with setting(strategy, _state_dict_type="full"):
            state = strategy.lightning_module_state_dict()
        module: Any = trainer.lightning_module
        module.state_dict = lambda: state  # replaced on this object, in a process that is about to end
        return super()._collect_rank_zero_results(trainer, results)


class FSDPJoinStrategy(Sharded, ActiveCollectives, FSDPStrategy):
    """FSDP that trains exactly on uneven dataloaders.

    A rank that runs out of batches stays in the fit loop until the last rank has finished: it takes part in each
    parameter all-gather and gradient reduction, and updates its shards.

    Args:
        *args: The positional arguments of `FSDPStrategy`.
        start_method: How to start processes, as in `DDPStrategy`.
        **kwargs: The options of `DDPJoinStrategy` (`weighting`, ...), and the keyword arguments of `FSDPStrategy`.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.

    Limits:
        `docs/sharded.md` lists the unsupported cases, which raise.
    """

    strategy_name = "fsdp_join"

    def __init__(
        self, *args: Any, start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen", **kwargs: Any
    ) -> None:
        self.start_method = start_method
        super().__init__(*args, **kwargs)

    def _configure_launcher(self) -> None:
        if self.start_method == "popen":
            super()._configure_launcher()
        else:
            self._launcher = _WholeResultLauncher(self, start_method=self.start_method)


class ModelParallelJoinStrategy(Sharded, ActiveCollectives, ModelParallelStrategy):
    """Model parallelism (`fully_shard`, also with tensor parallelism) that trains exactly on uneven dataloaders.

    All ranks of a tensor-parallel group must have the same batches.

    Args:
        *args: The positional arguments of `ModelParallelStrategy`.
        **kwargs: The options of `DDPJoinStrategy` (`weighting`, ...), and `ModelParallelStrategy`'s keyword arguments.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.

    Limits:
        `docs/sharded.md` lists the unsupported cases, which raise.
    """

    strategy_name = "model_parallel_join"


class DeepSpeedJoinStrategy(Sharded, ActiveCollectives, DeepSpeedStrategy):
    """DeepSpeed (ZeRO stages 0 to 3, with CPU offload) that trains exactly on uneven dataloaders.

    A rank that runs out of batches stays in the fit loop until the last rank has finished: it replays the active ranks'
    engine calls with zero gradients, and updates its shards.

    Args:
        *args: The positional arguments of `DeepSpeedStrategy`.
        **kwargs: The options of `DDPJoinStrategy` (`weighting`, ...), and the keyword arguments of `DeepSpeedStrategy`.

    Raises:
        JoinValueError: The weighting is unknown, or contradicts `divide_by_initial_world_size`.

    Limits:
        `docs/deepspeed.md` lists the unsupported cases, which raise.
    """

    strategy_name = "deepspeed_join"
