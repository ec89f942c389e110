"""Bad input gets a clear error on every rank, and nothing hangs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loops import _FitLoop
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_join import DDPJoinStrategy
from tests.support.front_ends.lightning import Fit, Module, build_trainer, fit
from tests.support.run import Batch
from tests.support.workers import Outcome, Workers
from torch_join import JoinValueError, PeerFailedError, UnsupportedError

# ---------------------------------------------------------------- arguments


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(JoinValueError, match=r"weighting='mean' is unknown. Use one of 'world', 'active', 'samples'"):
        DDPJoinStrategy(weighting="mean")


@pytest.mark.parametrize(("weighting", "divides"), [("active", True), ("world", False), ("samples", True)])
def test_a_contradicting_weighting_is_refused(weighting: str, divides: bool) -> None:
    with pytest.raises(JoinValueError, match=f"weighting='{weighting}' contradicts divide_by_initial_world_size"):
        DDPJoinStrategy(weighting=weighting, divide_by_initial_world_size=divides)


def test_torchs_name_for_the_weighting_is_understood() -> None:
    for given, chosen in (
        ({}, "world"),
        ({"divide_by_initial_world_size": True}, "world"),
        ({"divide_by_initial_world_size": True, "weighting": "world"}, "world"),
        ({"divide_by_initial_world_size": False}, "active"),
    ):
        assert DDPJoinStrategy(**given).options.weighting == chosen


@pytest.mark.parametrize("options", [{"model_averaging_period": 4}, {"ddp_comm_state": "state"}])
def test_post_local_sgd_is_refused(options: dict[str, Any]) -> None:
    if "ddp_comm_state" in options:
        options = {"ddp_comm_state": PostLocalSGDState(None, None, 3)}
    with pytest.raises(UnsupportedError, match="Post-local SGD"):
        DDPJoinStrategy(**options)


# ---------------------------------------------------------------- set-ups


class Iterates(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class Lbfgs(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Overlapping(Module):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.1)


class DifferentLoaders(Module):
    def val_dataloader(self) -> Any:
        return [self.train_dataloader()] * (1 + self.trainer.global_rank)

    def validation_step(self, *_: Any) -> None:
        pass


class ReturnsNothing(Module):
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch | None:
        return batch if self.trainer.global_rank == 0 or not self.trained else None


class OwnLoop(_FitLoop):
    pass


def fit_own_loop(rank: int, case: Fit) -> None:
    trainer = build_trainer(case)
    trainer.fit_loop.__class__ = OwnLoop
    trainer.fit(Module(case))


class Exhausts(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            next(iter([]))
        return super().training_step(batch, batch_idx)


class LogsToGroupInHook(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("x", 1.0, on_step=True, sync_dist=True, sync_dist_group=dist.group.WORLD)


class LogsUnsynced(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("step", loss)
        return loss


class LogsMetric(Module):
    """The rank that logs the metric has it as an attribute; the other one does not."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.metric = SumMetric()
        self.metric.update(1.0)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def assert_all_raise(outcomes: list[Outcome], *texts: str) -> None:
    for outcome in outcomes:
        for text in texts:
            assert text in outcome.error, outcome.trace or outcome.error


COUNTED = "UnsupportedError: A weighting function cannot be used with accumulate_grad_batches > 1"
SETUPS: dict[str, tuple[Any, Fit, dict[str, Any], tuple[str, ...]]] = {
    "iterator": (Iterates, Fit((2, 3)), {}, ("UnsupportedError", "`dataloader_iter`", "Take `batch` instead")),
    "windows": (Module, Fit((2, 3), weighting="count", accumulate=2), {}, (COUNTED,)),
    "windows-scheduled": (
        Module,
        Fit((2, 3), weighting="count"),
        {"callbacks": [GradientAccumulationScheduler({1: 2})]},
        (COUNTED,),
    ),
    "lbfgs": (Lbfgs, Fit((2, 3)), {}, ("UnsupportedError", "LBFGS")),
    "overlap": (Overlapping, Fit((2, 3)), {}, ("UnsupportedError", "overlap_with_ddp=False")),
    "limit": (
        Module,
        Fit((20, 3)),
        {"limit_train_batches": 0.1},
        ("DataloaderError", "The dataloaders of rank 1 cannot be used", "0.1 * 3 < 1"),
    ),
    "limit-stream": (
        Module,
        Fit((20, 3), iterable=True),
        {"limit_train_batches": 0.5},
        ("DataloaderError", "ranks 0, 1", "`1.0` or an int"),
    ),
    "interval": (
        Module,
        Fit((2, 5)),
        {"val_check_interval": 6},
        ("JoinValueError", "`val_check_interval` (6)", "training batches (5)"),
    ),
    "interval-rebalanced": (
        Module,
        Fit((2, 8), rebalance=True),
        {"val_check_interval": 6},
        ("JoinValueError", "`val_check_interval` (6)", "training batches (5)"),
    ),
    "interval-stream": (
        Module,
        Fit((2, 5), iterable=True),
        {"val_check_interval": 0.5},
        ("DataloaderError", "dataloaders of ranks 0, 1 have no length"),
    ),
    "transfer": (ReturnsNothing, Fit((4, 2)), {}, ("UnsupportedError", "Moving batch 1", "returned None")),
    "log-to-group-in-hook": (LogsToGroupInHook, Fit((2, 3)), {}, ("UnsupportedError", "on_step=False")),
    "monitor-epoch": (
        LogsUnsynced,
        Fit((0, 3)),
        {"callbacks": [EarlyStopping("loss", strict=False)]},
        ("The monitored value 'loss' is missing on rank 0", "on_epoch=True, sync_dist=True"),
    ),
    "monitor-step": (
        LogsUnsynced,
        Fit((3, 0)),
        {"callbacks": [EarlyStopping("step", strict=False)]},
        ("The monitored value 'step' is missing on rank 1",),
    ),
    "val-loaders": (DifferentLoaders, Fit((2, 3)), {}, ("DataloaderError", "they have [1, 2] (by rank)")),
}


@pytest.mark.parametrize("name", SETUPS)
def test_what_cannot_work_raises_on_every_rank(workers: Workers, name: str) -> None:
    kind, case, options, texts = SETUPS[name]
    assert_all_raise(workers.outcomes(2, fit, case, kind, {}, options, timeout=20.0), *texts)


def test_a_loop_of_the_users_own_is_refused(workers: Workers) -> None:
    outcomes = workers.outcomes(2, fit_own_loop, Fit((2, 3)))
    assert_all_raise(outcomes, "UnsupportedError", "a custom OwnLoop")


@pytest.mark.parametrize("kind", [Lbfgs, Iterates], ids=["lbfgs", "iterator"])
def test_one_process_needs_no_such_limits(workers: Workers, kind: Any) -> None:
    outcome = workers.outcomes(1, fit, Fit((2,), epochs=1), kind)[0]
    assert outcome.error == "", outcome.trace


def test_stop_iteration_in_a_step_does_not_end_the_epoch_of_one_rank(workers: Workers) -> None:
    survivor, culprit = workers.outcomes(2, fit, Fit((4, 6)), Exhausts)
    assert "JoinError: A step or a hook raised StopIteration" in culprit.error
    assert "PeerFailedError: Rank 1 failed" in survivor.error


HOOKS = [
    *("on_train_epoch_start", "on_before_batch_transfer", "on_train_batch_start", "on_before_zero_grad"),
    *("on_after_backward", "lr_scheduler_step", "on_train_batch_end", "on_validation_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"),
]


class Evaluated(Module):
    def val_dataloader(self) -> Any:
        return DataLoader([self.case.batch(0, 0, 0)], batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass


class ExhaustsIn(Evaluated):
    """Raises `StopIteration` out of a hook, on one rank."""

    hook: str

    def setup(self, stage: str) -> None:
        setattr(self, self.hook, self.exhaust)

    def exhaust(self, *args: Any, **_: Any) -> Any:
        if self.trainer.global_rank == 1:
            next(iter(()))
        return args[0] if args else None


@pytest.mark.parametrize("hook", HOOKS)
def test_stop_iteration_in_a_hook_does_not_end_a_loop_of_one_rank(workers: Workers, hook: str) -> None:
    case = Fit((3, 4), scheduler="step")
    survivor, culprit = workers.outcomes(
        2, fit, case, ExhaustsIn, {"hook": hook}, {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    )
    assert "JoinError: A step or a hook raised StopIteration" in culprit.error, culprit
    assert "PeerFailedError: Rank 1 failed" in survivor.error, survivor


class HearsOfAnother(Module):
    """On rank 1, something else than the fit's own channel tells that rank 2 has failed: a `Join` over some ranks."""

    def hear(self) -> None:
        if self.global_rank == 1:
            raise PeerFailedError("Rank 2 failed, so rank 1 cannot continue. Rank 2: it is ill", 2, "it is ill")


class HearsInAStep(HearsOfAnother):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.hear()
        return super().training_step(batch, batch_idx)


class HearsBeforeAnEpoch(HearsOfAnother):
    def on_train_epoch_start(self) -> None:
        self.hear()


@pytest.mark.parametrize("kind", [HearsInAStep, HearsBeforeAnEpoch])
def test_a_failure_that_something_else_knows_is_told_by_its_cause(workers: Workers, kind: Any) -> None:
    other, hears, _ = workers.outcomes(3, fit, Fit((6, 6, 0), epochs=1), kind)
    assert "PeerFailedError: Rank 2 failed, so rank 1 cannot continue. Rank 2: it is ill" in hears.error, hears.trace
    assert "PeerFailedError: Rank 2 failed, so rank 0 cannot continue. Rank 2: it is ill" in other.error, other.trace


def test_a_metric_that_a_rank_does_not_have_raises(workers: Workers) -> None:
    lacking, other = workers.outcomes(2, fit, Fit((0, 1), epochs=1), LogsMetric)
    assert "UnsupportedError: Other ranks logged a metric as 'metric'" in lacking.error, lacking.trace
    assert "Create the metric in the LightningModule's __init__, on every rank" in lacking.error
    assert "PeerFailedError: Rank 0 failed" in other.error, other.trace


def test_a_monitored_value_that_is_synced_is_on_every_rank(workers: Workers) -> None:
    outcomes = workers.outcomes(2, fit, Fit((0, 3)), LogsSynced, {}, {"callbacks": [EarlyStopping("loss")]})
    assert [o.error for o in outcomes] == ["", ""]


class LogsSynced(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trained:  # as where outputs were kept, on ranks that had some
            self.log("late", 1.0, sync_dist=True)


class Evaluates(Module):
    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    def test_step(self, *_: Any) -> None:
        pass


def evaluate_with_synced_norms(rank: int, case: Fit) -> None:
    build_trainer(case, sync_batchnorm=True).test(Evaluates(case), verbose=False)


def test_evaluation_has_none_of_the_limits_of_training(workers: Workers) -> None:
    assert [o.error for o in workers.outcomes(2, evaluate_with_synced_norms, Fit((2, 3)))] == ["", ""]


# ---------------------------------------------------------------- early termination


THROWS = {"throw_on_early_termination": True}


class Counts(Callback):
    """Tells with an error how many batches this rank has trained on."""

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        error.args = (f"{error} After {len(module.trained)}.",)


@pytest.mark.parametrize("lengths", [(3, 7), (7, 3), (0, 4, 7), (4, 7, 4)])
@pytest.mark.parametrize("iterable", [False, True])
def test_throw_on_early_termination(workers: Workers, lengths: tuple[int, ...], iterable: bool) -> None:
    case, shortest = Fit(lengths, iterable=iterable, ddp=THROWS), min(lengths)
    outcomes = workers.outcomes(len(lengths), fit, case, Module, {}, {"callbacks": [Counts()]})
    for rank, outcome in enumerate(outcomes):
        text = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        text = f"Rank {rank} exhausted all inputs." if lengths[rank] == shortest else text
        assert outcome.error == f"EarlyTerminationError: {text} After {shortest}."


def test_even_inputs_do_not_throw(workers: Workers) -> None:
    assert [len(result.trained) for result in workers.run(2, fit, Fit((3, 3), ddp=THROWS))] == [9, 9]
