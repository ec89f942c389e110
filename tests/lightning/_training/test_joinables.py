"""Joinables of the user's own in Lightning's steps."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy
from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.joinables import Counter, Logged
from tests.support.run import Batch
from tests.support.workers import Workers


class Counts(Module):
    """Counts once in each step with one joinable, and in every other one twice with another; and in validation."""

    def __init__(self, case: Fit, validation: tuple[int, ...]) -> None:
        super().__init__(case)
        self.validation = validation
        self.log_: list[str] = []
        self.every, self.other, self.seen = (Logged(name, self.log_) for name in ("every", "other", "seen"))
        self.configured = 0

    def configure_joinables(self) -> list[Joinable]:
        self.configured += 1
        return [self.other, self.seen]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.every.count()
        loss = super().training_step(batch, batch_idx)
        for _ in range(2 if batch_idx % 2 else 0):
            self.other.count()
        return loss

    def val_dataloader(self) -> Any:
        length = self.validation[self.trainer.global_rank]
        return DataLoader([self.case.batch(0, 0, 0)] * length, batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, *_: Any) -> None:
        if not self.trainer.sanity_checking:
            self.seen.count()


def fit_counting(
    rank: int, case: Fit, validation: tuple[int, ...], strategy: str
) -> tuple[tuple[int, ...], list[str], int]:
    module = Counts(case, validation)
    joins = DDPJoinStrategy(joinables=[module.every])
    build_trainer(case, strategy=joins if strategy == "join" else strategy).fit(module)
    return (module.every.total, module.other.total, module.seen.total), module.log_, module.configured


def total(lengths: tuple[int, ...], rank: int, times: Any = lambda index: 1) -> int:
    return sum(times(i) * sum(n > i for n in lengths) for i in range(lengths[rank]))


@pytest.mark.parametrize(("lengths", "validation"), [((0, 2, 5), (2, 0, 3)), ((4, 2), (1, 3)), ((3, 3), (2, 2))])
def test_totals_are_of_the_active_ranks(
    workers: Workers, lengths: tuple[int, ...], validation: tuple[int, ...]
) -> None:
    results = workers.run(len(lengths), fit_counting, Fit(lengths, epochs=2), validation, "join")
    for rank, (totals, log, configured) in enumerate(results):
        per_epoch = total(lengths, rank), total(lengths, rank, lambda i: 2 * (i % 2)), total(validation, rank)
        assert totals == tuple(2 * each for each in per_epoch), rank
        assert configured == 1
        # Main hooks come in the order of the notices, once for each; post-hooks at the epoch's end.
        steps = [
            name
            for index in range(lengths[rank], max(lengths))
            for name in ("main every", *(["main other"] * (2 if index % 2 else 0)))
        ]
        checks = ["main seen"] * (max(validation) - validation[rank])
        last = lengths[rank] == max(lengths)
        posts = [f"post {name} {last}" for name in ("every", "other", "seen")]
        assert log == (steps + checks + posts) * 2


def test_plain_ddp_ignores_the_modules_joinables(workers: Workers) -> None:
    for (every, other, seen), log, configured in workers.run(2, fit_counting, Fit((2, 2), epochs=1), (1, 1), "ddp"):
        assert (every, other, seen, log, configured) == (4, 4, 2, [], 0)


class Configures(Module):
    kind = ""

    def configure_joinables(self) -> Any:
        if self.kind == "different":
            return [Counter()] * self.trainer.global_rank
        if self.kind == "other":
            return [nn.Linear(1, 1)]
        return list(self.trainer.strategy.joinables)  # type: ignore[attr-defined]


def fit_wrong(rank: int, kind: str) -> None:
    module = Configures(case := Fit((2, 3)))
    module.kind = kind
    build_trainer(case, strategy=DDPJoinStrategy(joinables=[Counter()])).fit(module)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("different", "JoinValueError: The ranks passed different joinables"),
        (
            "other",
            "JoinTypeError: joinables must be custom torch.distributed.algorithms.Joinable objects, got Linear",
        ),
        ("twice", "JoinValueError: A Counter was passed as a joinable twice"),
    ],
)
def test_wrong_joinables_are_refused_on_all_ranks(workers: Workers, kind: str, text: str) -> None:
    for outcome in workers.outcomes(2, fit_wrong, kind):
        assert text in outcome.error, outcome.trace
