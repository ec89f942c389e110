"""`training_step` returns `None`, or a constant, on some ranks, or on all."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.emulator import place
from tests.support.front_ends.lightning import Fit, assert_same_bits, fit
from tests.support.joint import JointModule, joint_reference, returns_none
from tests.support.run import Batch, Net, difference, flatten, loss_of
from tests.support.workers import Workers


class Silent(JointModule):
    """Has no loss at some steps, and otherwise a dictionary."""

    nothing = "None"

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx % 2:
            self(batch[0])  # a call of the module itself is not its step
        none = returns_none(self.case, self.trainer.global_rank, *self.moment)
        if not none:
            return {"loss": loss_of(self.net, batch), "extra": batch_idx}
        constant = torch.tensor(7.0, requires_grad=True)
        return {"None": None, "leaf": constant, "dictionary": {"loss": constant * 2, "extra": 3}}[self.nothing]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        joined = self.trainer.strategy.joined  # type: ignore[attr-defined]
        none = returns_none(self.case, self.trainer.global_rank, *self.moment)
        self.noted.append((not joined and none, dict(outputs)))


def losses(case: Fit) -> Any:
    def of(net: Net, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor | None]:
        return {
            rank: None if returns_none(case, rank, epoch, step) else loss_of(net, batch)
            for rank, batch in batches.items()
        }

    return of


CASES = [
    Fit((5, 5), optimizer="adamw", clip=0.5),
    Fit((2, 6), optimizer="sgd", accumulate=2, scheduler="step", weighting="active"),
    Fit((6, 0, 3), accumulate=3, weighting="samples", ragged=True, hooked=True),
    Fit((2, 5, 7), optimizer="sgd", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    Fit((0, 3, 8), accumulate=3, weighting="samples", ragged=True, hooked=True, rebalance=True),
    Fit((2, 8, 0), optimizer="sgd", iterable=True, rebalance=True),
]


@pytest.mark.parametrize(
    ("case", "nothing"), [*[(case, "None") for case in CASES], *zip(CASES, ["leaf", "dictionary"] * 3, strict=True)]
)
def test_a_step_without_a_loss_counts_as_zero(workers: Workers, case: Fit, nothing: str) -> None:
    expected = joint_reference(case, losses(case))
    results = workers.run(case.world_size, fit, case, Silent, {"nothing": nothing})
    assert_same_bits(results)
    for result in results:
        assert difference(result.parameters, expected.parameters) < 1e-10
        ours, theirs = flatten(result.optimizer), flatten(expected.optimizer)
        assert len(ours) == len(theirs)
        assert difference(ours, theirs) < 1e-10
        assert (result.lr, result.global_step) == (expected.lr, expected.steps)
        assert any(none for none, _ in result.noted) or not result.trained
        for none, outputs in result.noted:
            assert (outputs == {}) if none and nothing == "None" else "loss" in outputs or none


def test_one_process_skips_as_lightning_does(workers: Workers) -> None:
    case = Fit((6,), optimizer="adamw", accumulate=2)
    (result,) = workers.run(1, fit, case, Silent)
    expected = joint_reference(case, losses(case))
    assert difference(result.parameters, expected.parameters) < 1e-10
    assert result.global_step == expected.steps


class SingleSilent(Silent):
    def __init__(self, case: Fit) -> None:
        super().__init__(case)
        self.float()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step((batch[0].float(), batch[1].float()), batch_idx)

    def on_train_end(self) -> None:
        self.noted = self.trainer.precision_plugin.scaler.state_dict()  # type: ignore[attr-defined]


def test_a_grad_scaler_is_updated_where_some_rank_has_a_loss(workers: Workers) -> None:
    case = Fit((0, 3, 6))
    expected = joint_reference(case, losses(case))
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler(place().type, init_scale=4.0))
    for result in workers.run(3, fit, case, SingleSilent, {}, {"plugins": [plugin]}):
        assert (result.noted["_growth_tracker"], result.global_step) == (expected.training.updates, expected.steps)
    assert expected.training.updates < expected.steps


def test_a_first_step_without_a_loss_is_refused_under_static_graph(workers: Workers) -> None:
    for outcome in workers.outcomes(2, fit, Fit((2, 3), ddp={"static_graph": True}), Silent):
        assert "UnsupportedError: The first step under static_graph=True had no loss" in outcome.error
