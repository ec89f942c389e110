"""A rank that raises before any loop runs is named on the others, at once: not when its process has ended."""

import time
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_join import JoinCallback
from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.run import Batch
from tests.support.sharded_fits import KINDS, ShardedModule, build_sharded, on_cpus
from tests.support.workers import Workers, connect


class Raises(Module):
    """A hook of it raises, on one rank."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> int:
        return batch_idx

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


def raise_on_one_rank(module: Any, hook: str, culprit: int) -> None:
    plain = getattr(module, hook)

    def raising(*args: Any, **kwargs: Any) -> Any:
        if module.trainer.global_rank == culprit:
            raise ValueError("the shelf fell down")
        return plain(*args, **kwargs)

    setattr(module, hook, raising)


def run_raising(rank: int, function: str, hook: str, culprit: int, kind: str) -> None:
    case = Fit((2, 3))
    if kind in KINDS:
        connect()
        module: Any = ShardedModule(case)
        with on_cpus():
            trainer = build_sharded(kind, case)
    else:
        module = Raises(case)
        options = {"strategy": "ddp", "callbacks": [JoinCallback()]} if kind == "callback" else {}
        trainer = build_trainer(case, **options)
    raise_on_one_rank(module, hook, culprit)
    try:
        with on_cpus():
            getattr(trainer, function)(module)
    except ValueError:
        time.sleep(1.0)  # it lingers, as a notebook does
        raise


RUNS = [
    *[("fit", hook, 1, "ddp") for hook in ("setup", "configure_optimizers", "train_dataloader")],
    ("fit", "prepare_data", 0, "ddp"),
    ("validate", "setup", 0, "ddp"),
    ("fit", "configure_optimizers", 0, "callback"),
    *[("fit", "configure_optimizers", 1, kind) for kind in KINDS],
    *[pytest.param("fit", hook, 1, "ddp", marks=pytest.mark.long) for hook in ("configure_model", "on_fit_start")],
    *[pytest.param(function, "setup", 0, "ddp", marks=pytest.mark.long) for function in ("test", "predict")],
    pytest.param("validate", "configure_model", 1, "ddp", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("function", "hook", "culprit", "kind"), RUNS)
def test_a_rank_that_raises_in_the_set_up_is_named(
    workers: Workers, function: str, hook: str, culprit: int, kind: str
) -> None:
    outcomes = workers.outcomes(2, run_raising, function, hook, culprit, kind)
    assert outcomes[culprit].error == "ValueError: the shelf fell down", outcomes[culprit].trace
    survivor = outcomes[1 - culprit]
    assert f"PeerFailedError: Rank {culprit} failed, so rank {1 - culprit} cannot continue." in survivor.error
    assert f"Rank {culprit}: ValueError: the shelf fell down" in survivor.error
    assert survivor.seconds < outcomes[culprit].seconds  # it did not wait for the other's end
