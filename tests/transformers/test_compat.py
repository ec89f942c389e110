"""The public names, and a notice of private ones that go; the behaviour behind them is tested elsewhere."""

import inspect
import subprocess
import sys

import transformers.trainer as hf
import trl
from accelerate.state import GradientState

import accelerate_join.transformers
from accelerate_join.transformers import JoinTrainerMixin


def test_public_names() -> None:
    assert accelerate_join.transformers.__all__ == ["JoinMonitor", "JoinTrainer", "JoinTrainerMixin"]


def test_transformers_is_imported_by_nobody_else() -> None:
    code = "import accelerate_join, sys; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_trainers_loop() -> None:
    source = inspect.getsource(hf.Trainer)
    for call in (
        "self._inner_training_loop",
        "self.set_initial_training_values(",
        "_dataloader = skip_first_batches(",
        "self.callback_handler.on_epoch_begin(",
        "self._maybe_log_save_evaluate(",
        "self.accelerator.pad_across_processes(labels",
        "self.training_step(model, inputs, num_items_in_batch)",
        "self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)",
        "self.accelerator.backward(loss",
        "self.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)",
        "self.gather_function(losses.repeat(batch_size))",
        "self.log(logs, start_time)",
    ):
        assert call in source, call
    for name in ("_add_dataloader", "_remove_dataloader", "end_of_dataloader"):
        assert hasattr(GradientState, name)


def test_what_trainers_keep() -> None:
    assert "_metrics" in inspect.getsource(trl.SFTTrainer)
    assert {"GRPOTrainer", "RLOOTrainer"} <= {*dir(trl)}
    assert JoinTrainerMixin.kept[0] == "_metrics"
