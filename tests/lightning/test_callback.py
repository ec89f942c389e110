"""JoinCallback: what `ddp_join` does, for a plain `ddp`, and nothing is left of it afterwards."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy, JoinCallback
from tests.needs import known
from tests.support.front_ends.lightning import (
    Fit,
    Module,
    Result,
    assert_exact,
    assert_same_bits,
    build_trainer,
    result_of,
)
from tests.support.run import Batch, difference, loss_of, reference
from tests.support.workers import Workers

ON_EXCEPTION = known(ModelCheckpoint, save_on_exception=True)


def loops(trainer: Any) -> list[Any]:
    loop = trainer.fit_loop.epoch_loop
    evaluation = [loop.val_loop, trainer.validate_loop, trainer.test_loop]
    parts = [trainer.strategy, trainer.fit_loop, loop, loop.automatic_optimization, loop.manual_optimization]
    parts += [trainer.predict_loop, trainer._signal_connector]
    return [*parts, *evaluation, *(each._results for each in (loop, *evaluation))]


def classes(trainer: pl.Trainer) -> list[Any]:
    """What joining changes in a trainer."""
    checkpoints = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]  # type: ignore[attr-defined]
    flags = [getattr(each, "save_on_exception", None) for each in checkpoints]
    names = [(type(part), sorted(vars(part))) for part in loops(trainer)]
    return [*names, list(trainer.callbacks), flags]  # type: ignore[attr-defined]


class Validated(Module):
    """Validates on rank 1 alone, and reads the number of steps in `setup`."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.trainer.strategy.joined is False  # type: ignore[attr-defined]

    def val_dataloader(self) -> DataLoader[Batch]:
        rows = [self.case.batch(9, 0, i) for i in range(2)] if self.trainer.global_rank == 1 else []
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", loss_of(self.net, batch), sync_dist=True, batch_size=len(batch[0]))

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def fit_with_callback(rank: int, case: Fit, strategy: Any, folder: str) -> tuple[Result, Result, float]:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, **ON_EXCEPTION)
    joins = JoinCallback(weighting=case.weighting, rebalance=case.rebalance)
    callbacks = [joins, OnExceptionCheckpoint(folder), saving]
    trainer = build_trainer(case, strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
    module = Validated(case)
    untouched = classes(trainer)
    trainer.fit(module)
    result = result_of(trainer, module)
    loss = float(trainer.callback_metrics["loss"])
    assert classes(trainer) == untouched
    trainer.test(module, verbose=False)
    assert float(trainer.callback_metrics["loss"]) == loss
    assert classes(trainer) == untouched
    again = Module(case)
    resumed = build_trainer(case, strategy=strategy, callbacks=[joins])
    resumed.fit(again, ckpt_path=str(last_of_epoch(case, folder)))
    return result, result_of(resumed, again), loss


def last_of_epoch(case: Fit, folder: str) -> Path:
    """The checkpoint of the second epoch's last step."""
    return Path(folder) / f"step={2 * case.length(0)}.ckpt"


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (Fit((2, 6), optimizer="zero", scheduler="onecycle-setup"), "ddp"),
        (Fit((0, 4, 6), model="norm", optimizer="adamw", weighting="active", iterable=True, clip=0.3), "ddp"),
        (
            Fit((7, 3), model="unused", weighting="samples", ragged=True, scheduler="step", rebalance=True),
            "ddp_find_unused_parameters_true",
        ),
    ],
    ids=["first", "empty", "unused"],
)
def test_it_trains_as_ddp_join_does(workers: Workers, case: Fit, strategy: str, tmp_path: Path) -> None:
    results = workers.run(case.world_size, fit_with_callback, case, strategy, str(tmp_path))
    expected = reference(case)
    assert_exact(case, [first for first, _, _ in results])
    assert_same_bits([second for _, second, _ in results])
    rows = [case.batch(9, 0, i) for i in range(2)]
    with torch.no_grad():
        loss = float(sum(loss_of(expected.net.eval(), batch) * len(batch[0]) for batch in rows))
    loss /= sum(len(batch[0]) for batch in rows)
    for _, resumed, its_loss in results:
        assert difference(resumed.parameters, expected.parameters) < 1e-10
        assert abs(its_loss - loss) < 1e-6
    for path in tmp_path.glob("step=*.ckpt"):
        saved = torch.load(path, "cpu", weights_only=False)
        for name, value in expected.history[saved["global_step"]].items():
            assert difference([saved["state_dict"][f"net.{name}"]], [value]) < 1e-10


class Failing(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and batch_idx == 4:
            raise KeyError("a bad sample")
        return super().training_step(batch, batch_idx)


def fit_failing(rank: int, case: Fit) -> str:
    callbacks = [JoinCallback(), ModelCheckpoint(".", **ON_EXCEPTION)]
    trainer = build_trainer(case, strategy="ddp", callbacks=callbacks, enable_checkpointing=True)
    untouched = classes(trainer)
    try:
        trainer.fit(Failing(case))
    except (KeyError, RuntimeError) as error:
        assert classes(trainer) == untouched
        return f"{type(error).__name__}: {error}"
    return ""


def test_nothing_is_left_of_it_after_an_error(workers: Workers) -> None:
    peer, own = workers.run(2, fit_failing, Fit((2, 6)))
    assert own == "KeyError: 'a bad sample'"
    assert peer.startswith("PeerFailedError: ")
    assert "rank 1" in peer.lower()
    assert "a bad sample" in peer


class Early(Callback):
    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        _ = trainer.estimated_stepping_batches


class OwnStrategy(DDPStrategy):
    pass


REFUSED = {  # the strategy, the callbacks, and what is said
    "two": ("ddp", lambda: [JoinCallback(), JoinCallback()], "JoinValueError: The trainer has two JoinCallbacks"),
    "joins": (
        "ddp_join",
        lambda: [JoinCallback()],
        "JoinTypeError: .* is already a DDPJoinStrategy. Remove the callback",
    ),
    "own": (
        OwnStrategy,
        lambda: [JoinCallback()],
        "JoinTypeError: .* a OwnStrategy, .* Use Trainer.strategy=",
    ),
    "data": ("ddp", lambda: [Early(), JoinCallback()], "JoinValueError: The dataloaders were set up before .* first"),
    "averaging": (
        lambda: DDPStrategy(model_averaging_period=2),
        lambda: [JoinCallback()],
        "UnsupportedError: Post-local SGD",
    ),
    "single": ("auto", lambda: [JoinCallback()], "^$"),
}


def fit_refused(rank: int) -> dict[str, str]:
    texts = {}
    for name, (strategy, callbacks, _) in REFUSED.items():
        case = Fit((2,), epochs=1)
        made = strategy() if callable(strategy) else strategy
        trainer = build_trainer(case, strategy=made, callbacks=callbacks())
        module, untouched, texts[name] = Validated(case), classes(trainer), ""
        try:
            trainer.fit(module)
        except RuntimeError as error:
            texts[name] = f"{type(error).__name__}: {error}"
        if name not in ("joins", "single"):
            assert classes(trainer) == untouched
    return texts


def test_what_it_refuses(workers: Workers) -> None:
    (texts,) = workers.run(1, fit_refused)
    for name, (_, _, expected) in REFUSED.items():
        assert re.search(expected, texts[name], re.DOTALL), (name, texts[name])


def test_its_arguments_are_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="weighting"):
        JoinCallback(weighting="none")


def test_the_plain_family_is_one_class() -> None:
    for name in StrategyRegistry.available_strategies():
        if name.startswith("ddp") and "join" not in name:
            assert type(StrategyRegistry.get(name)) is DDPStrategy, name
    assert issubclass(DDPJoinStrategy, DDPStrategy)
