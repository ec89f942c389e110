"""`join.stop_requested()`: a signal on one rank stops all at the same step, and the next job goes on there, exactly."""

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.support.front_ends.plain import Stream
from tests.support.run import TOLERANCE, Run, Training, difference, reference, same_bits
from tests.support.workers import Workers
from torch_join import Join

BEHIND = 100  # where a rank gets the signal between two loops


@dataclass(frozen=True)
class Stopped(Run):
    """Which rank gets which signal, and where."""

    signals: dict[int, tuple[int, int]] = field(default_factory=dict)
    number: int = signal.SIGTERM
    every: int = 1  # steps, between two questions; 0 for none

    def signal(self, rank: int, epoch: int, step: int) -> None:
        if self.signals.get(rank) == (epoch, step):
            os.kill(os.getpid(), self.number)


def job(rank: int, run: Stopped, saved: dict[str, Any] | None) -> tuple[dict[str, Any] | None, list[Tensor], Any]:
    """Train until a signal or the end; return what to go on with, the parameters, and where the loop was left."""
    net = run.build()
    model, training, left = DistributedDataParallel(net), Training(run, net), None
    options = {"may_break": run.may_break, "rebalance": run.rebalance}
    with Join([model, *training.given], weighting=run.option, **options) as join:
        first = 0
        assert run.every or not join.stop_requested()  # from here on the signals end nothing
        if saved is not None:
            net.load_state_dict(saved["model"])
            for each, state in zip(training.given, saved["states"], strict=True):
                each.load_state_dict(state)
            join.load_state_dict(saved["join"])
            first = saved["epoch"]
        for epoch in range(first, run.epochs):
            batches: Any = run.batches(rank, epoch)
            for batch in join.batches(DataLoader(Stream(batches), batch_size=None) if run.iterable else batches):
                step = join.step
                if saved is None:
                    run.signal(rank, epoch, step)
                training.begin_step(epoch, step)
                for loss in run.losses(model, batch, rank, epoch, step):
                    training.backward(loss)
                training.end_step(epoch, step)
                if run.every and step % run.every == 0 and join.stop_requested():
                    left = epoch, step
                    break
            if saved is None:
                run.signal(rank, epoch, BEHIND)
            if join.stop_requested():
                states, position = [each.state_dict() for each in training.given], join.state_dict()
                saved = {"model": net.state_dict(), "states": states, "join": position}
                saved["epoch"] = epoch + position["over"]
                return saved, [p.detach().clone() for p in net.parameters()], left
    assert not join.stop_requested()
    return None, [p.detach().clone() for p in net.parameters()], left


def two_jobs(rank: int, run: Stopped) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """Return where each job left its loop, and the parameters after both."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    saved, then, left = job(rank, run, None)
    assert saved is not None
    again, parameters, over = job(rank, run, saved)
    assert again is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    return [left, over], then, parameters


RUN = Stopped((2, 6, 0), epochs=2, scheduler="step", ragged=True)


@pytest.mark.parametrize(
    ("run", "left"),
    [
        (RUN.but(signals={1: (0, 1)}), [(0, 1), (0, 1), None]),
        (RUN.but(signals={1: (0, 4)}, number=signal.SIGUSR1), [None, (0, 4), None]),
        (RUN.but(signals={1: (1, 5)}, iterable=True), [None, (1, 5), None]),
        (RUN.but(signals={0: (0, 1), 1: (0, 1)}, weighting="samples"), [(0, 1), (0, 1), None]),
        # Behind a loop, and on a rank without a batch: heard in the next one.
        (RUN.but(signals={2: (0, BEHIND)}), [(1, 0), (1, 0), None]),
        (RUN.but(signals={0: (0, BEHIND)}, iterable=True), [(1, 0), (1, 0), None]),
        # Where nobody asks in a loop, between loops.
        (RUN.but(signals={2: (0, BEHIND)}, every=0), [None, None, None]),
        (RUN.but(signals={1: (0, 1)}, may_break=True), [(0, 1), (0, 1), None]),
        (RUN.but(signals={1: (0, 1)}, every=4), [None, (0, 4), None]),
        (RUN.but(lengths=(3, 3, 3), signals={2: (0, 1)}), [(0, 1)] * 3),
    ],
    ids=str,
)
def test_all_ranks_stop_at_one_step_and_go_on_there(workers: Workers, run: Stopped, left: list[Any]) -> None:
    found = workers.run(3, two_jobs, run)
    assert [where for (where, _), _, _ in found] == left
    expected = reference(run).parameters
    for (_, over), then, parameters in found:
        assert over is None
        assert same_bits(then, found[0][1])
        assert difference(parameters, expected) < TOLERANCE


def rebalanced(rank: int, run: Stopped) -> tuple[Any, list[Tensor]]:
    _, then, left = job(rank, run, None)
    return left, then


def test_ranks_that_train_on_others_batches_stop_too(workers: Workers) -> None:
    found = workers.run(3, rebalanced, RUN.but(rebalance=True, signals={2: (0, 1)}))
    assert [left for left, _ in found] == [(0, 1)] * 3
    assert all(same_bits(then, found[0][1]) for _, then in found)


def misused(rank: int, how: str) -> bool:
    net = RUN.build()
    model = DistributedDataParallel(net)
    with Join([model], enable=how != "disabled") as join:
        for step, (x, _) in enumerate(RUN.batches(rank, 0) if how == "plain" else join.batches(RUN.batches(rank, 0))):
            model(x).sum().backward()
            if how != "only one" or (rank == 1 and step == 1):
                join.stop_requested()
    return True


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("plain", "JoinError: join.stop_requested() inside a `with` whose loop is a plain `for`"),
        ("only one", "JoinError: Deadlock: these ranks wait for each other"),
        ("disabled", "JoinValueError: join.stop_requested() cannot be combined with enable=False"),
    ],
)
def test_misuse_raises(workers: Workers, how: str, error: str) -> None:
    outcomes = workers.outcomes(2, misused, how)
    assert any(outcome.error.startswith(error) for outcome in outcomes)
    assert all(outcome.error for outcome in outcomes)


def test_one_process_asks_itself() -> None:
    net = RUN.build()
    before = signal.getsignal(signal.SIGTERM)
    for enable in (True, False):
        with Join([net_optimizer(net)], enable=enable) as join:
            said = []
            for _ in join.batches([1, 2, 3]):
                said.append(join.stop_requested())
                if join.step == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
            assert said == [False, False, True]
            assert join.stop_requested()
        assert signal.getsignal(signal.SIGTERM) is before


def net_optimizer(net: Any) -> Any:
    return RUN.optimizers(net)[0]
