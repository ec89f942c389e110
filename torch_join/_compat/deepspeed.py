"""DeepSpeed's private names, and its features that are refused. Imported only for an engine, since it takes seconds.

`tests/deepspeed/test_compat.py` fails when one of them is gone.
"""

from importlib.metadata import version
from typing import Any

from torch import Tensor

from torch_join._base.errors import JoinWarning, UnsupportedError
from torch_join._base.hyperparameters import group_options, take_group_options
from torch_join._base.names import check_names, naming_missing

SEEN = "0.19"
_FAMILY = SEEN.split(".")

with naming_missing(SEEN, "deepspeed"):
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

# The start and the end of a module's forward, and of its backward.
PHASES = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "post_sub_module_backward_function",
)
FORWARD_ENDS = 1
# The method that reduces a full bucket in stage 3; Python puts the class's name in front.
REDUCE_BUCKET_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

check_names(
    "deepspeed",
    SEEN,
    {
        DeepSpeedEngine: (
            "_backward_epilogue _backward_prologue _running_engine_backward backward step zero_grad"
            " set_gradient_accumulation_boundary save_checkpoint load_checkpoint save_16bit_model"
            " coalesce_grad_reduction inside_no_sync_ctxt pipeline_parallelism has_moe_layers autotp_size"
            " sequence_parallel_size zenflow_config is_deepcompile_enabled is_compiled managed_gradient_accumulation"
            " enable_backward_allreduce gradient_average zero_quantized_gradients flops_profiler_enabled"
            " random_ltd_enabled curriculum_learning_enabled zero_optimization_stage"
            " zero_nvme_offload_optimizer zero_offload_param"
        ),
        ZeROOptimizer: "clear_backward_seen_flag reenter_backward_if_needed _grad_acc_post_hooks",
        DeepSpeedZeroOptimizer: "process_gradients reduce_ipg_grads bit16_groups _grad_acc_hooks",
        DeepSpeedZeroOptimizer_Stage3: f"reduce_ready_partitions_and_remove_grads parameter_offload {REDUCE_BUCKET_3}",
        DeepSpeedZeRoOffload: f"get_param_coordinator {' '.join(PHASES)}",
        PartitionedParameterCoordinator: "reset_step",
        parameter_offload: "FWD_MODULE_STACK",
    },
)


def check_engine(engine: Any) -> None:
    """Raise if an engine's collectives depend on more than its events and its state.

    Raises:
        UnsupportedError: They do.
    """
    offload = engine.zero_offload_param()
    refused = {
        "pipeline parallelism": engine.pipeline_parallelism,
        "mixture-of-experts layers, which exchange each rank's tokens": engine.has_moe_layers,
        "tensor parallelism": engine.autotp_size() > 1,
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "ZenFlow": bool(engine.zenflow),
        "DeepCompile": engine.is_deepcompile_enabled(),
        "engine.compile()": engine.is_compiled,
        "sparse gradients": any(getattr(module, "sparse", False) for module in engine.module.modules()),
        "managed_gradient_accumulation=False": not engine.managed_gradient_accumulation(),
        "a 1-bit optimizer, which communicates in its step": not engine.enable_backward_allreduce,
        'gradient_allreduce_op "sum"': not engine.gradient_average,
        "quantized gradients": engine.zero_quantized_gradients(),
        "a curriculum, which counts forwards": engine.curriculum_learning_enabled(),
        "random-LTD, which counts forwards": engine.random_ltd_enabled(),
        "the flops profiler": engine.flops_profiler_enabled(),
        "NVMe": engine.zero_nvme_offload_optimizer() or getattr(offload, "device", None) == "nvme",
        "a hybrid engine": "Hybrid" in type(engine).__name__,
    }
    for what, is_used in refused.items():
        if is_used:
            raise UnsupportedError(
                f"DeepSpeed with {what} cannot train on uneven inputs, because a finished rank cannot follow the"
                " others. Turn it off, or train without Join and give every rank the same number of batches."
            )
    if version("deepspeed").split(".")[:2] != _FAMILY:
        JoinWarning.warn(
            f"DeepSpeed {version('deepspeed')} has everything that Join needs, but was not tested; {SEEN}.* was."
            " First compare a short run with one on even inputs."
        )


def is_in_backward(engine: Any) -> bool:
    """Whether `engine.backward` is running: hooks on the engine's outputs see other backwards too."""
    return bool(engine._running_engine_backward)


def options_of(engine: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters with which an engine steps; none if it only evaluates."""
    optimizer = engine.optimizer
    return group_options(optimizer) if hasattr(optimizer, "param_groups") else []


def take_options(engine: Any, options: list[dict[str, Any]]) -> None:
    """Set the hyperparameters to another rank's `options_of`."""
    if options:
        take_group_options(engine.optimizer, options)


def offload_of(engine: Any) -> Any:
    """Return the object that gathers parameters in stage 3; an engine without an optimizer has it in place of one."""
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def externals_of(module: Any) -> list[tuple[Any, bool]]:
    """Return the parameters of other modules that a module uses, and whether they come from its output."""
    return [(p, bool(p.is_external_param)) for p in getattr(module, "_external_params", {}).values()]


def add_external(module: Any, parameter: Any, dangles: bool) -> None:
    """Make DeepSpeed gather another module's parameter together with a module's own."""
    parameter.is_external_param = dangles
    if id(parameter) not in getattr(module, "_external_params", {}):
        register_external_parameter(module, parameter)


def end_forward(module: Any) -> None:
    """Do what the hook after a module's forward does besides calling its phase's function."""
    parameter_offload.FWD_MODULE_STACK.pop()


def has_gradient_hooks(engine: Any) -> bool:
    """Whether each gradient is processed by a hook; with some options in stage 1, the epilogue processes them all."""
    return bool(getattr(engine.optimizer, "_grad_acc_hooks", True))


def take_gradient(engine: Any, parameter: Tensor, group: int) -> None:
    """Do what DeepSpeed's gradient hook does, except counting, which only torch-style backwards need."""
    optimizer = engine.optimizer
    optimizer.reenter_backward_if_needed()
    if engine.zero_optimization_stage() == 3:
        optimizer.reduce_ready_partitions_and_remove_grads(parameter)
    else:
        optimizer.process_gradients(parameter, group)


def groups_of(engine: Any) -> dict[int, int]:
    """Return, by the `id` of each parameter, its group in stages 1 and 2."""
    return {id(p): index for index, group in enumerate(engine.optimizer.bit16_groups) for p in group}
