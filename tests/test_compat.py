"""Notices when a private name that we rely on goes; the behaviour behind it is tested elsewhere."""

import inspect

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_join import _compat
from torch_join import _compat as torch_compat

TRAINER = pl.Trainer(
    accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, barebones=False
)

LOOP_ATTRIBUTES = {
    "fit_loop": """_combined_loader _data_fetcher _data_source _last_train_dl_reload_epoch _should_reload_train_dl
        _load_combined_loader_states _can_stop_early epoch_loop epoch_progress max_batches on_advance_start
        on_advance_end on_run_start setup_data""",
    "fit_loop.epoch_loop": """_build_kwargs _is_training_done _num_ready_batches_reached _results _should_accumulate
        _should_check_val_epoch _should_check_val_fx _skip_next_val automatic_optimization batch_idx batch_progress
        manual_optimization on_advance_end on_run_start restarted_on_last restarted_on_train_batch_end
        scheduler_progress update_lr_schedulers val_loop""",
    "fit_loop.epoch_loop.automatic_optimization": "_training_step optim_progress run",
    "fit_loop.epoch_loop.val_loop": """_combined_loader _data_source _evaluation_step _has_run
        _last_val_dl_reload_epoch _max_batches _results _seen_batches_per_dataloader _should_reload_val_dl _stage
        _store_dataloader_outputs _trainer_fn increment_progress_to_evaluation_end restarted_mid_evaluation""",
    "_signal_connector": "_sigterm_notifier_fn received_sigterm",
    "_logger_connector": "on_batch_end on_batch_start update_train_step_metrics",
}


@pytest.mark.parametrize("path", LOOP_ATTRIBUTES)
def test_lightnings_loops(path: str) -> None:
    part = TRAINER
    for name in path.split("."):
        part = getattr(part, name)
    known = {*dir(part), *vars(part)}
    assert set(LOOP_ATTRIBUTES[path].split()) <= known


def test_lightnings_trainer_and_strategy() -> None:
    assert {"_val_check_time_interval", "should_stop", "received_sigterm"} <= {*dir(TRAINER), *vars(TRAINER)}
    assert "trainer._last_val_time" in inspect.getsource(_compat.FitLoop.setup_data)
    names = inspect.getsource(DDPStrategy.__init__)
    for name in ("_ddp_comm_state", "_model_averaging_period", "_timeout", "_start_method", "_ddp_kwargs"):
        assert f"self.{name}" in names
    assert "_layer_sync" in inspect.getsource(DDPStrategy.setup)
    assert "_setup_model" in inspect.getsource(DDPStrategy.configure_ddp)


def test_lightnings_result_collection() -> None:
    source = inspect.getsource(_compat.ResultCollection)
    assert "has_reset" in source
    assert "_forward_cache" in source
    meta = _compat.Metadata(fx="f", name="n", reduce_fx="mean")  # type: ignore[arg-type]
    meta.sync = _compat.Sync(_should=True)
    assert (meta.sync.should, meta.sync.group, meta.sync.op) == (True, None, "mean")
    assert "_sync" in vars(meta)


def test_lightnings_closure_reads_the_loss_after_the_step() -> None:
    assert "step_output.closure_loss" in inspect.getsource(Closure.closure)


def test_torchmetrics() -> None:
    names = {*dir(Metric), *inspect.getsource(Metric.__init__).split()}
    assert "_copy_state_dict" in names
    assert {"self._update_count", "self._computed", "self._forward_cache"} <= {n.rstrip(":") for n in names}


def test_torchs_ddp() -> None:
    source = inspect.getsource(DistributedDataParallel)
    for name in ("_use_python_reducer", "_delay_all_reduce_params", "mixed_precision", "parameters_to_ignore"):
        assert f"self.{name}" in source
    assert "self.module(*inputs" in source, "DDP no longer calls `self.module`, which the shadow stands in for"
    assert callable(torch.distributed._broadcast_coalesced)
    assert isinstance(torch.distributed.distributed_c10d._world.pg_map, dict)


def test_torchs_join_config() -> None:
    disabled = torch_compat.disabled_join_config()
    assert (disabled.enable, disabled.is_first_joinable, disabled.throw_on_early_termination) == (False, False, False)
    assert {*disabled._fields} == {"enable", "throw_on_early_termination", "is_first_joinable"}
    source = inspect.getsource(TorchJoin.notify_join_context)
    assert "joinable._join_config" in source
    assert source.index("is_first_joinable") < source.index("dist.all_reduce")


def test_torchs_hooks_live_in_a_dictionary_that_autograd_reads() -> None:
    parameter = torch.ones(1, requires_grad=True)
    seen = []
    parameter.register_hook(lambda grad: seen.append(1))
    hooks = torch_compat.backward_hooks(parameter)
    kept = dict(hooks)
    hooks.clear()
    parameter.sum().backward()
    assert seen == []
    hooks.update(kept)
    parameter.sum().backward()
    assert seen == [1]


def test_torch_configures_joinables_after_it_has_asked_for_their_hooks() -> None:
    source = inspect.getsource(TorchJoin.__init__)
    assert source.index("join_hook(") < source.index("self._set_joinable_configs()")
    assert "joinable._join_config = _JoinConfig(" in inspect.getsource(TorchJoin._set_joinable_configs)
    # A word has the form of torch's count.
    assert "torch.zeros(1, device=self._device)" in inspect.getsource(TorchJoin._get_num_nonjoined_procs)
