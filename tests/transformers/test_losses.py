"""Losses that depend on no parameter, or run backwards of their own; and which loss is shown."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.faults import logged
from tests.support.front_ends.transformers import Fit, Net, Recording, Trained, by_trainer, train
from tests.support.workers import Workers

PLAIN = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def by_hand(found: list[Trained], is_constant: Callable[[int, int], bool] = lambda *_: False) -> list[Tensor]:
    """Train in one process on what the ranks have seen, where some losses are constant."""
    net = Net(counts=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for each in zip(*(trained.seen for trained in found), strict=True):
        for step in range(max(map(len, each))):
            optimizer.zero_grad()
            for rank, batches in enumerate(each):
                if step < len(batches) and not is_constant(rank, step):
                    (net(**batches[step])["loss"] / len(each)).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def assert_as(found: list[Trained], expected: list[Tensor]) -> None:
    for trained in found:
        for mine, first, right in zip(trained.parameters, found[0].parameters, expected, strict=True):
            assert torch.equal(mine, first)
            assert float((mine - right).abs().max()) < 1e-10


def skips(rank: int, step: int) -> bool:
    return rank == 1 and step in (1, 2)


class Skipping(Recording):
    """Has a constant loss on one rank, in two steps one after the other."""

    requires_grad = True

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        step = len(self.seen[-1])
        loss = super().compute_loss(*args, **kwargs)
        return torch.zeros((), requires_grad=self.requires_grad) if skips(dist.get_rank(), step) else loss


class SkippingWithoutGradient(Skipping):
    requires_grad = False


@pytest.mark.parametrize("lengths", [(4, 4), (2, 4)])
def test_constant_losses_in_two_steps(workers: Workers, lengths: tuple[int, ...]) -> None:
    found = workers.run(2, train, Fit(lengths, counts=False, extra=PLAIN), Skipping)
    assert_as(found, by_hand(found, skips))


def test_a_loss_that_requires_no_gradient_is_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(
        2, train, Fit((4, 4), counts=False, extra=PLAIN), SkippingWithoutGradient, timeout=3.0
    ):
        assert "The loss of rank 1 does not require grad" in outcome.error


class Cached(Recording):
    """Embeds sample by sample, and runs a backward of each in that of its loss."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        x, labels = inputs["x"], inputs["labels"]
        self.seen[-1].append({"x": x.clone(), "labels": labels.clone()})
        with torch.no_grad():
            found = torch.cat([model(x=part)["logits"] for part in x.split(1)])
        found.requires_grad_()
        losses = nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses.view_as(labels).sum(1) / (labels != -100).sum(1)).mean()
        loss.backward()

        def again(gradient: Tensor) -> None:
            assert found.grad is not None
            with torch.enable_grad():
                for part, cached in zip(x.split(1), found.grad.split(1), strict=True):
                    ((model(x=part)["logits"] * cached).sum() * gradient).backward()

        loss = loss.detach().requires_grad_()
        loss.register_hook(again)
        return loss


@pytest.mark.parametrize(
    ("lengths", "accumulate", "weighting"), [((4, 4), 1, "world"), ((5, 2), 2, "active"), ((0, 5, 3), 3, "samples")]
)
def test_a_loss_that_runs_backwards_of_its_own(
    workers: Workers, lengths: tuple[int, ...], accumulate: int, weighting: str
) -> None:
    fit = Fit(lengths, accumulate=accumulate, weighting=weighting, counts=False, extra={"max_grad_norm": 0.3})
    found = workers.run(len(lengths), train, fit, Cached)
    assert_as(found, by_trainer(fit, found).parameters)


def shown(found: list[Trained], name: str) -> list[list[float]]:
    return [[log[name] for log in trained.logs if name in log] for trained in found]


@pytest.mark.parametrize("every", [1, 3, 500])
def test_the_train_loss_is_that_of_one_process(workers: Workers, every: int) -> None:
    fit = Fit((5, 0, 8), accumulate=2, counts=False, weighting="samples", extra={"logging_steps": every})
    found = workers.run(3, train, fit)
    first, *others = shown(found, "train_loss")
    assert others == [first, first]
    assert first == pytest.approx(shown([by_trainer(fit, found)], "train_loss")[0], abs=1e-6)


class Ones(Recording):
    """Each item has a loss of 1; a step of the last rank has none that is finite."""

    not_finite = -1

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        step = len(self.seen[-1])
        loss = 0 * super().compute_loss(model, inputs, *args, **kwargs)
        if num_items_in_batch is not None:
            return loss + (inputs["labels"] != -100).sum() / num_items_in_batch
        return loss + (torch.nan if step == self.not_finite else 1)


class NotFinite(Ones):
    not_finite = 4


@pytest.mark.parametrize("lengths", [(2, 6), (6, 2), (6, 6)])
def test_a_window_of_a_ranks_own_items_is_one_loss(workers: Workers, lengths: tuple[int, ...]) -> None:
    own = {**PLAIN, "average_tokens_across_devices": False}
    found = workers.run(2, train, Fit(lengths, accumulate=4, epochs=1, extra=own), Ones)
    assert shown(found, "loss") == [[pytest.approx(1, abs=1e-4)] * 2] * 2


@pytest.mark.parametrize("lengths", [(2, 6), (6, 2), (6, 6)])
def test_in_place_of_a_loss_that_is_not_finite_the_mean_is_shown(workers: Workers, lengths: tuple[int, ...]) -> None:
    fit = Fit(lengths, epochs=1, counts=False, extra={**PLAIN, "logging_steps": 6, "learning_rate": 0.0})
    found = workers.run(2, train, fit, NotFinite)
    assert shown(found, "loss") == [[pytest.approx((5 + 4 / 5) / 6, abs=1e-4)]] * 2


def log_of(rank: int, fit: Fit) -> list[str]:
    with logged("transformers") as lines:
        train(rank, fit)
    return lines


@pytest.mark.parametrize("counts", [False, True])
def test_a_log_says_what_the_steps_of_a_tail_weigh(workers: Workers, counts: bool) -> None:
    extra = {**PLAIN, "log_level_replica": "passive"}
    _, lines = workers.run(2, log_of, Fit((1, 3), counts=counts, extra=extra))
    text = "The trainer divides each step's loss by its number of items" if counts else "steps are scaled by 1/2"
    assert text in lines[0]
