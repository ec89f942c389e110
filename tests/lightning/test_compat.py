"""Notices when a private name that we rely on goes; the behaviour behind it is tested elsewhere."""

import inspect
import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, SequentialSampler
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_join import _compat
from tests.needs import has

TRAINER = pl.Trainer(
    accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, barebones=False
)

STAGES = ("pre_backward", "backward", "post_backward")
LOOP_ATTRIBUTES = {
    "fit_loop": """_combined_loader _data_fetcher _data_source _last_train_dl_reload_epoch _should_reload_train_dl
        _combined_loader_states_to_load _can_stop_early epoch_loop epoch_progress max_batches on_advance_start
        on_advance_end on_run_start setup_data""",
    "fit_loop.epoch_loop": """_build_kwargs _is_training_done _num_ready_batches_reached _results _should_accumulate
        _should_check_val_epoch _should_check_val_fx _skip_next_val automatic_optimization batch_idx batch_progress
        manual_optimization on_advance_end on_run_start restarted_on_last restarted_on_train_batch_end
        scheduler_progress update_lr_schedulers val_loop""",
    "fit_loop.epoch_loop.automatic_optimization": "_make_backward_fn _skip_backward _training_step optim_progress run",
    "fit_loop.epoch_loop.manual_optimization": "_output advance optim_step_progress run",
    "fit_loop.epoch_loop.val_loop": """_combined_loader _data_source _evaluation_step _has_run
        _last_val_dl_reload_epoch _max_batches _results _seen_batches_per_dataloader _should_reload_val_dl _stage
        _store_dataloader_outputs _trainer_fn increment_progress_to_evaluation_end restarted_mid_evaluation""",
    "predict_loop": """_combined_loader _data_fetcher _data_source _predict_step max_batches on_run_end on_run_start
        reset setup_data""",
    "_signal_connector": "_sigterm_notifier_fn received_sigterm",
    "_logger_connector": "on_batch_end on_batch_start update_eval_step_metrics update_train_step_metrics",
}


@pytest.mark.parametrize("path", LOOP_ATTRIBUTES)
def test_lightnings_loops(path: str) -> None:
    part = TRAINER
    for name in path.split("."):
        part = getattr(part, name)
    known = {*dir(part), *vars(part)}
    assert set(LOOP_ATTRIBUTES[path].split()) <= known


def test_what_predict_records_and_deals_out() -> None:
    batches = _compat.IndexBatchSampler(BatchSampler(SequentialSampler(range(3)), 2, drop_last=False))
    assert [next(each) for each in [iter(batches)] * 2] == [[0, 1], [2]]
    assert batches.seen_batch_indices == [[0, 1], [2]]
    assert isinstance(batches.sampler, SequentialSampler)
    inner = SequentialSampler(range(3))
    dealing = UnrepeatedDistributedSamplerWrapper(inner, num_replicas=1, rank=0, shuffle=False)
    assert _compat.wrapped_sampler(dealing) is inner
    dealing.dataset = type(dealing.dataset)(SequentialSampler(range(3)))
    assert [*dealing] == [0, 1, 2]


def test_lightnings_trainer_and_strategy() -> None:
    assert {"should_stop", "received_sigterm"} <= {*dir(TRAINER), *vars(TRAINER)}
    if has("a val_check_interval in seconds"):
        assert "_val_check_time_interval" in vars(TRAINER)
        assert "trainer._last_val_time" in inspect.getsource(_compat.FitLoop.setup_data)
    names = inspect.getsource(DDPStrategy.__init__)
    for name in ("_ddp_comm_state", "_model_averaging_period", "_timeout", "_start_method", "_ddp_kwargs"):
        assert f"self.{name}" in names
    assert "_layer_sync" in inspect.getsource(DDPStrategy.setup)
    assert "_setup_model" in inspect.getsource(DDPStrategy.configure_ddp)
    wraps = inspect.getsource(DDPStrategy._setup_model)  # as `ddp_arguments` says
    assert "device_ids = self.determine_ddp_device_ids()" in wraps
    assert "DistributedDataParallel(module=model, device_ids=device_ids, **self._ddp_kwargs)" in wraps
    assert "_lightning_optimizers" in inspect.getsource(_compat.ManualOptimization.on_run_start)


def test_lightnings_backward_is_what_manual_optimization_repeats() -> None:
    calls = re.findall(r"self\.(?:precision_plugin\.)?\w+\(", inspect.getsource(Strategy.backward))
    assert calls == ["self.pre_backward(", *(f"self.precision_plugin.{n}(" for n in STAGES), "self.post_backward("]
    assert "self.trainer.strategy.backward(loss, None" in inspect.getsource(pl.LightningModule.manual_backward)
    assert "_strategy.optimizer_step(" in inspect.getsource(LightningOptimizer.step)


def test_what_the_callbacks_read_and_undo() -> None:
    assert not _compat.has_dataloaders(TRAINER)
    assert _compat.epoch_end_step(TRAINER) == -1
    # A callback's `setup` comes before the module's, and a run that raises tears no callback down.
    setup = inspect.getsource(_compat.call._call_setup_hook)
    assert setup.index('_call_callback_hooks(trainer, "setup"') < setup.index(
        '_call_lightning_module_hook(trainer, "setup"'
    )
    handler = inspect.getsource(_compat.call._call_and_handle_interrupt).split("except BaseException")[1]
    assert "_interrupt(trainer" in handler
    assert "trainer._teardown()" in handler
    assert "_call_teardown_hook" not in handler


def test_what_lightning_keeps_out_of_pickles_and_profiles() -> None:
    assert 'state["_lightning_optimizers"] = []' in inspect.getsource(Strategy.__getstate__)
    for loop, name in (
        (_compat.TrainingEpochLoop, "train_dataloader_next"),
        (_compat.EvaluationLoop, "{self._stage.dataloader_prefix}_next"),
        (_compat.PredictionLoop, "predict_next"),
    ):
        for hook in (loop._on_before_fetch, loop._on_after_fetch):
            assert name in inspect.getsource(hook)


def test_torchdatas_nodes_begin_anew_at_their_end() -> None:
    source = inspect.getsource(Loader.__iter__)
    assert "if self.restart_on_stop_iteration and not self._it.has_next():" in source


def test_torchdatas_loaders_keep_a_state_until_they_have_begun_at_it() -> None:
    assert "self.next_iter_state = state_dict" in inspect.getsource(StatefulDataLoader.load_state_dict)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own
def test_lightnings_states_of_dataloaders() -> None:
    assert "_combined_loader_states_to_load" in inspect.getsource(_compat.FitLoop.on_load_checkpoint)
    assert "super().on_save_checkpoint()" in inspect.getsource(_compat.FitLoop.on_save_checkpoint)
    loader = CombinedLoader([[1], [1, 2]], "max_size_cycle")
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert _compat.get_cycled(loader) == [True, False]
    assert loader._state_dicts() == []
    loader._load_state_dicts([])


def test_lightnings_result_collection() -> None:
    source = inspect.getsource(_compat.ResultCollection)
    assert "has_reset" in source
    assert "_forward_cache" in source
    meta = _compat.Metadata(fx="f", name="n", reduce_fx="mean")  # type: ignore[arg-type]
    meta.sync = _compat.Sync(_should=True)
    assert (meta.sync.should, meta.sync.group, meta.sync.op) == (True, None, "mean")
    assert "_sync" in vars(meta)
    assert _compat.default_dtype() == torch.float32
    assert "self.update_metrics(key, value, batch_size)" in inspect.getsource(_compat.ResultCollection.log)


def test_lightnings_closure_reads_the_loss_after_the_step() -> None:
    assert "step_output.closure_loss" in inspect.getsource(Closure.closure)
    assert "return self._result.loss" in inspect.getsource(Closure.__call__)


def test_lightnings_averaging_and_tuning() -> None:
    source = inspect.getsource(pl.callbacks.StochasticWeightAveraging)
    for name in ("module.momentum = None", "module.num_batches_tracked *= 0", "trainer.fit_loop._skip_backward = True"):
        assert name in source
    assert 'outputs["loss"]' in inspect.getsource(_compat.LRCallback.on_train_batch_end)
