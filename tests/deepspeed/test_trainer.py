"""`JoinTrainer(deepspeed=...)` against a plain `Trainer` in one process on the unions of the batches."""

import os
import tempfile
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
from accelerate.state import AcceleratorState, GradientState

if find_spec("transformers") is None:
    pytest.skip("transformers needs Python 3.11", allow_module_level=True)

from tests.deepspeed.fronts import on_cpus
from tests.support.front_ends.deepspeed import TOLERANCE, Recipe, config_of, deepspeed_of
from tests.support.front_ends.transformers import (
    EpochCounter,
    Fit,
    Net,
    Recording,
    Samples,
    Trained,
    arguments_of,
    by_trainer,
    count_labels,
    data_of,
    outcome,
)
from tests.support.workers import Workers


def config_for(stage: int) -> dict[str, Any]:
    """Return an engine's configuration; what Trainer knows better it fills in."""
    config = config_of(Recipe(stage=stage))
    config.update(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto")
    return config


def fit_of(stage: int, lengths: tuple[int, ...], **options: Any) -> Fit:
    arguments = {"use_cpu": False, "deepspeed": config_for(stage), "lr_scheduler_type": "linear", "warmup_steps": 1}
    return Fit(lengths, extra={**arguments, **options.pop("arguments", {})}, **options)


FITS = {
    "stage 1": fit_of(1, (1, 4), accumulate=2),
    "stage 2, no batch": fit_of(2, (0, 3), counts=False, weighting="samples"),
    "stage 3": fit_of(3, (1, 4), counts=False, weighting=count_labels, accumulate=2),
    "stage 3, rank 0 last": fit_of(3, (4, 1)),
}


class Floats(Recording):
    """Trains in float32, as the engine does, evaluates in the tail of an epoch, and keeps the whole model."""

    def __init__(self, *args: Any, model: Any, **kwargs: Any) -> None:
        super().__init__(*args, model=model.float(), **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            kept = self.seen[-1][-1]
            kept["x"] = kept["x"].double()
        return found


def fit_one(rank: int, fit: Fit) -> Trained:
    seen: list[list[Any]] = []
    Floats.seen = seen
    names = {"LOCAL_RANK": str(rank), "ACCELERATE_USE_DEEPSPEED": "true"}
    with (
        deepspeed_of(rank) as deepspeed,
        on_cpus(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, names),
    ):
        try:
            trainer = Floats(
                model=Net(fit.counts),
                args=arguments_of(fit, folder),
                train_dataset=data_of(fit, rank),
                eval_dataset=Samples(500 + 10 * rank, 3 + 2 * rank),
                callbacks=[EpochCounter(seen)],
                weighting=fit.weighting,
                own_shards=True,
            )
            trainer.train()
            trained = outcome(trainer, seen)
            trained.metrics = trainer.evaluate()["eval_loss"]
            parameters = [*trainer.model.parameters()]
            is_sharded = trainer.deepspeed.zero_optimization_stage() == 3
            with deepspeed.zero.GatheredParameters(parameters, enabled=is_sharded):
                trained.parameters = [parameter.detach().clone() for parameter in parameters]
            return trained
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def fit_all(rank: int, fits: list[Fit]) -> list[Trained]:
    return [fit_one(rank, fit) for fit in fits]


def test_a_trainer_trains_as_one_process_does(workers: Workers) -> None:
    fits = list(FITS.values())
    found = workers.run(2, fit_all, fits, deadline=180.0)
    for place, (name, fit) in enumerate(FITS.items()):
        ranks = [each[place] for each in found]
        plain = dict(fit.extra, use_cpu=True)
        del plain["deepspeed"]
        expected = workers.run(1, expected_of, fit.but(extra=plain), ranks, store="")[0]
        assert ranks[0].metrics == ranks[1].metrics
        for one, other, theirs in zip(*(each.parameters for each in (*ranks, expected)), strict=True):
            assert (one == other).all(), name
            assert (one.double() - theirs).abs().max() <= TOLERANCE, (name, (one.double() - theirs).abs().max())


def expected_of(_: int, fit: Fit, found: list[Trained]) -> Trained:
    return by_trainer(fit, found)
