"""Notices when a private name that we rely on goes; the behaviour behind it is tested elsewhere."""

import inspect
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, SequentialSampler
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_join import _compat
from lightning_join._loops.takeover import CLASSES
from tests.needs import has

TRAINER = pl.Trainer(
    accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, barebones=False
)

STAGES = ("pre_backward", "backward", "post_backward")


def loop_run(loop: Any) -> Any:
    """Return what Lightning's loop runs without gradients."""
    return inspect.getclosurevars(loop.run).nonlocals["loop_run"]


# What Lightning's loops come by, in this order: where ours says and hears what ranks have to agree on.
DOORS = {
    _compat.TrainingEpochLoop.advance: """next(data_fetcher) batch_progress.is_last_batch=data_fetcher.done
        precision_plugin.convert_input( ._on_before_batch_transfer( "batch_to_device" increment_ready(
        on_batch_start( callback_hooks(trainer,"on_train_batch_start" module_hook(trainer,"on_train_batch_start"
        response==-1 increment_started( automatic_optimization.run( manual_optimization.run( increment_processed(
        self.update_lr_schedulers("step" callback_hooks(trainer,"on_train_batch_end"
        module_hook(trainer,"on_train_batch_end" on_batch_end(""",
    _compat.FitLoop.on_advance_end: """monitoring_callbacks=False module_hook(trainer,"on_train_epoch_end")
        monitoring_callbacks=True""",
    _compat.FitLoop.setup_data: """barrier( _process_dataloader( self._combined_loader=combined_loader
        len(dl)ifhas_len_all_ranks( self._load_combined_loader_states() self._data_fetcher= self.max_batches=""",
    loop_run(_compat.EvaluationLoop): """setup_data() skip reset() on_run_start() next(data_fetcher)
        _store_dataloader_outputs() is_last_batch=data_fetcher.done _evaluation_step( exceptStopIteration
        _store_dataloader_outputs() on_run_end()""",
    _compat.EvaluationLoop.setup_data: """barrier( _process_dataloader( self._combined_loader=combined_loader
        self._max_batches=[] len(dl)ifhas_len_all_ranks(""",
    loop_run(_compat.PredictionLoop): """setup_data() skip reset() on_run_start() next(data_fetcher)
        is_last_batch=data_fetcher.done _predict_step( exceptStopIteration on_run_end()""",
    _compat.PredictionLoop.setup_data: """barrier( self.max_batches=[] _process_dataloader(
        len(dl)ifhas_len_all_ranks( self._combined_loader=combined_loader""",
    vars(_compat.AutomaticOptimization)["_training_step"]: """"training_step", training_step_outputisNone
        self.output_result_cls.from_training_step_output(""",
}


@pytest.mark.parametrize("function", DOORS, ids=lambda function: function.__qualname__)
def test_what_lightnings_loops_come_by(function: Any) -> None:
    source = re.sub(r"\s+", "", inspect.getsource(function))
    for door in DOORS[function].split():
        assert door in source, f"{door} is not there, or before the one that it came after"
        source = source.split(door, 1)[1]


# Nobody comes by these with all that is needed: Lightning's own collective in each step, which a meeting replaces; the
# values of a dataloader, which every rank stores for each, in order.
REPLACED = {"_broadcast_sigterm_tensor", "_store_dataloader_outputs"}


def test_no_body_of_a_loop_is_written_again() -> None:
    replaced = set()
    loops = {its: ours for its, ours in CLASSES.items() if issubclass(its, _compat.FitLoop.__base__)}
    assert len(loops) == 6
    for its, ours in loops.items():
        for cls in ours.__mro__[: ours.__mro__.index(its)]:
            for name, member in vars(cls).items():
                function = member.fget if isinstance(member, property) else member
                if not name.startswith("__") and name in dir(its) and inspect.isfunction(function):
                    source = inspect.getsource(function)
                    if not re.search(rf"super\(|{its.__name__.lstrip('_')}\.{name}\.fget\(", source):
                        replaced.add(name)
    assert replaced == {name for name in REPLACED if any(hasattr(its, name) for its in loops)}


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
    shards = inspect.getsource(type(TRAINER._data_connector)._requires_distributed_sampler)
    assert "self.trainer._accelerator_connector.use_distributed_sampler" in shards
    assert _compat.connector(TRAINER).use_distributed_sampler
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
    setup = inspect.getsource(call._call_setup_hook)
    assert setup.index('_call_callback_hooks(trainer, "setup"') < setup.index(
        '_call_lightning_module_hook(trainer, "setup"'
    )
    handler = inspect.getsource(call._call_and_handle_interrupt).split("except BaseException")[1]
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
