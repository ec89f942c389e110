"""`JoinMonitor` in plain loops: numbers of loops whose sleeps and batches are known, and what is no epoch."""

import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.core._monitor.epochs import make_epochs
from tests.support import inside
from tests.support.report import summary_of
from tests.support.workers import Workers
from torch_join import Join, JoinMonitor, JoinTypeError, JoinValueError
from torch_join.integration import Channel, EpochRecord

BODY, READING = 0.04, 0.02  # seconds of sleep, of a step
LENGTHS = (2, 6, 0)  # rank 0 is the first to run out of some


class Slow:
    """Batches that take a while to read; without a length where it is a stream."""

    def __init__(self, length: int, stream: bool) -> None:
        self.data = list(torch.arange(4.0 * length).reshape(length, 4, 1))
        if not stream:
            self.__class__ = Sized

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.data:
            time.sleep(READING)
            yield batch


class Sized(Slow):
    def __len__(self) -> int:
        return len(self.data)


def train(
    rank: int,
    lengths: tuple[int, ...],
    folder: str = "",
    *,
    epochs: int = 2,
    passes: int = 1,
    stream: bool = False,
    leaves: tuple[int, ...] = (),
    evaluates: bool = False,
    monitored: tuple[bool, ...] = (),
    sharded: bool = False,
    **options: Any,
) -> tuple[list[EpochRecord], list[float], int]:
    """Return what the monitor has, how long each loop took, and how often ranks met.

    Args:
        passes: How many loops there are in a `with`.
        leaves: By rank, after which batch it leaves the loop.
        evaluates: Whether each epoch is followed by a loop without backward.
        monitored: By rank, whether it has a monitor.
        sharded: Whether FSDP shards the model.
    """
    net = nn.Linear(1, 1)
    model: Any = fully_shard(net, mesh=init_device_mesh("cpu", (len(lengths),))) if sharded else None
    model = model or DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    monitor = JoinMonitor(folder or None) if (not monitored or monitored[rank]) else None
    took = []
    count = [0]

    def counting(own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return own(*args, **kwargs)

        return call

    with (
        mock.patch.object(Channel, "gather", counting(Channel.gather)),
        mock.patch.object(Channel, "arrive", counting(Channel.arrive)),
    ):
        for _ in range(epochs):
            loader: Iterable[Tensor] = Slow(lengths[rank], stream)
            if options.get("rebalance") or not stream:
                loader = list(loader)
            begin = time.monotonic()
            with Join([model, optimizer], monitor=monitor, timeout=timedelta(seconds=20), **options) as join:
                for _ in range(passes):
                    for index, batch in enumerate(join.batches(loader)):
                        optimizer.zero_grad()
                        model(batch).sum().backward()
                        optimizer.step()
                        time.sleep(BODY)
                        if leaves and index + 1 == leaves[rank]:
                            break
                took.append(time.monotonic() - begin)
                if evaluates:
                    with torch.no_grad():
                        for batch in join.batches(loader):
                            model(batch)
    return [] if monitor is None else monitor.epochs, took, count[0]


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_the_numbers_of_each_epoch(workers: Workers, stream: bool, tmp_path: Path) -> None:
    results = workers.run(3, _train, LENGTHS, {"folder": str(tmp_path / "new"), "stream": stream, "evaluates": True})
    longest = max(LENGTHS)
    (epochs, took, _) = results[0]
    assert len(epochs) == 2  # and no evaluation
    assert all(theirs == epochs for theirs, *_ in results)
    for number, epoch in enumerate(epochs):
        assert (epoch.epoch, epoch.batches, epoch.steps, epoch.even_steps, epoch.steps_to_save) == (number, 8, 6, 3, 3)
        assert epoch.skew == pytest.approx(6 * 3 / 8)
        assert epoch.seconds_to_save == pytest.approx(epoch.seconds / 2)
        for rank, length in zip(epoch.ranks, LENGTHS, strict=True):
            assert (rank.batches, rank.shadow_steps) == (length, longest - length)
            assert rank.joined_at == (length if length < longest else None)
            # On busy cores all takes longer, but for what it sleeps.
            assert rank.active_seconds >= length * (BODY + READING * stream)
            assert rank.reading_seconds is not None
            assert rank.active_seconds - rank.reading_seconds >= length * BODY * 0.99
            assert rank.reading_seconds >= length * READING * stream
            assert rank.seconds <= took[number]
            assert rank.idle_seconds >= (longest - length) * BODY * 0.9  # by the longest rank's clock
            assert not rank.left
        assert epoch.ranks[2].active_seconds == epoch.ranks[1].idle_seconds == 0
        assert epoch.idle_share == pytest.approx(epoch.idle_seconds / sum(rank.seconds for rank in epoch.ranks))
        assert epoch.idle_seconds == pytest.approx(sum(rank.idle_seconds for rank in epoch.ranks))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["join-report.html"]


def _train(rank: int, lengths: tuple[int, ...], options: dict[str, Any]) -> Any:
    return train(rank, lengths, **options)


def test_nothing_is_sent_in_steps(workers: Workers) -> None:
    met = {}
    for monitored in (False, True):
        for length in (3, 9):
            lengths, monitors = (length, length), (monitored, monitored)
            found = workers.run(2, _train, lengths, {"epochs": 1, "monitored": monitors})
            met[length, monitored] = [count for *_, count in found]
    for length in (3, 9):
        assert [count + 1 for count in met[length, False]] == met[length, True]
    assert met[3, True] == met[9, True]


def test_a_loop_that_ranks_leave(workers: Workers) -> None:
    """Rank 1 goes on for longer; nobody knows of the time after its last batch."""
    options = {"epochs": 1, "leaves": (1, 4), "may_break": True}
    for epochs, *_ in workers.run(2, _train, (6, 6), options):
        (epoch,) = epochs
        assert [(rank.batches, rank.left) for rank in epoch.ranks] == [(1, True), (4, True)]
        assert epoch.seconds == epoch.ranks[1].active_seconds
        assert epoch.ranks[0].idle_seconds >= 2 * BODY
        assert epoch.ranks[1].idle_seconds == 0


def counts(rank: int) -> list[list[float | None]]:
    """Leave the loop in its third step, before a forward; return what each rank counted."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    monitor = JoinMonitor()
    for weighting in ("samples", "world"):
        with Join([model], weighting=weighting, may_break=True, monitor=monitor) as join:
            for step, batch in enumerate(join.batches([torch.ones(rows + rank, 1) for rows in (1, 2, 4, 8)])):
                if step == 2:
                    break
                model(batch).sum().backward()
    return [[rank.counted for rank in epoch.ranks] for epoch in monitor.epochs]


def test_it_counts_each_batch_that_was_taken(workers: Workers) -> None:
    for world_size in (1, 2):
        for found in workers.run(world_size, counts):
            assert found == [[7.0, 10.0][:world_size], [None, None][:world_size]]


def test_a_sharded_model(workers: Workers) -> None:
    for epochs, *_ in workers.run(3, _train, LENGTHS, {"sharded": True, "evaluates": True}):
        assert [[rank.batches for rank in epoch.ranks] for epoch in epochs] == [[*LENGTHS]] * 2


def test_rebalanced(workers: Workers) -> None:
    for epochs, *_ in workers.run(2, _train, (9, 1), {"rebalance": True, "epochs": 1, "passes": 2}):
        assert len(epochs) == 2
        for epoch in epochs:
            assert [(rank.batches, rank.given, rank.received) for rank in epoch.ranks] == [(5, 4, 0), (5, 0, 4)]
            assert (epoch.donated, epoch.donated_bytes, epoch.steps_saved, epoch.steps_to_save) == (4, 4 * 16, 4, 0)
            assert epoch.skew == pytest.approx(9 * 2 / 10)


def test_all_ranks_give_one_or_none(workers: Workers) -> None:
    for outcome in workers.outcomes(2, _train, (2, 2), {"monitored": (True, False)}):
        assert "Pass the same ones" in outcome.error
        assert "a monitor" in outcome.error


def alone(rank: int, enable: bool) -> Any:
    model = nn.Linear(1, 1)
    monitor = JoinMonitor()
    with Join([torch.optim.SGD(model.parameters(), 0.1)], enable, monitor=monitor) as join:
        for grad in (True, False):
            with nullcontext() if grad else torch.no_grad():
                for _ in join.batches([1, 2, 3]):
                    time.sleep(BODY)
    return monitor.epochs


@pytest.mark.parametrize("enable", [False, True])
def test_one_process(workers: Workers, enable: bool) -> None:
    (epochs,) = workers.run(1, alone, enable)
    epoch = epochs[0]
    # With no model there is no telling what is an evaluation, but by its `no_grad`.
    assert len(epochs) == 1
    assert (epoch.batches, epoch.steps_to_save, epoch.ranks[0].joined_at) == (3, 0, None)
    assert epoch.seconds >= 3 * BODY
    assert epoch.idle_share < 0.1


def alone_with_errors(rank: int, enable: bool) -> Any:
    monitor = JoinMonitor()
    for batches, leaves, fails in (
        ([], False, False),
        ([1], False, True),
        ([1, 2], True, False),
        ([1, 2, 3], False, False),
    ):
        try:
            with Join([torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)], enable, monitor=monitor) as join:
                for _ in join.batches(batches):
                    if fails:
                        raise KeyError
                    if leaves:
                        break
        except KeyError:
            pass
    return monitor.epochs


@pytest.mark.parametrize("enable", [False, True])
def test_one_process_without_batches_or_with_an_error(workers: Workers, enable: bool) -> None:
    (epochs,) = workers.run(1, alone_with_errors, enable)
    assert [(epoch.batches, epoch.ranks[0].left) for epoch in epochs] == [(1, True), (3, False)]


def refused(rank: int) -> list[str]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    found = []
    for options in (
        {"enable": False, "monitor": JoinMonitor()},
        {"monitor": "report.html"},
        {"monitor": JoinMonitor()},
    ):
        try:
            with Join([model], **options):  # type: ignore[arg-type]
                model(torch.ones(1))
        except (JoinValueError, JoinTypeError) as error:
            found.append(str(error))
    return found


def test_what_is_refused(workers: Workers) -> None:
    for found in workers.run(2, refused):
        for message, part in zip(
            found, ("combined with enable=False", "not 'report.html'", "In a plain `for`"), strict=True
        ):
            assert part in message


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monitor = JoinMonitor(tmp_path / "file" / "report.html")
    monitor.write()  # nothing
    monitor.epochs += make_epochs(2, 1)
    with pytest.warns(UserWarning, match="JoinMonitor cannot write .* Training continues"):
        monitor.write()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.write()
    monitor = JoinMonitor("no such\0path.html")
    monitor.epochs += make_epochs(2, 1)
    with pytest.warns(UserWarning, match="JoinMonitor cannot write .* Training continues"):
        monitor.write()
    with pytest.raises(JoinTypeError, match=r"report must be the path of the page .* got True"):
        JoinMonitor(True)  # type: ignore[arg-type]


def test_writing_takes_its_share_of_the_time(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=write_often, args=(tmp_path / "report.html",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "2 ranks, 12 epochs" in summary_of(tmp_path / "report.html")


def write_often(path: Path) -> None:
    monitor, counted = JoinMonitor(path), 0
    with inside.reports_put_off():
        for record in make_epochs(2, 12):
            monitor.epochs.append(record)
            monitor.write_in_time()
            counted += path.exists()
    assert not counted


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = JoinMonitor("Report.HTML")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monitor.epochs += [*make_epochs(2, 1), *make_epochs(3, 2)]  # of another number of ranks
    monitor.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Report.HTML", "elsewhere"]
    assert "3 ranks, 2 epochs" in summary_of(tmp_path / "Report.HTML")


def test_as_a_callback_of_a_trainer_it_names_the_one_that_is() -> None:
    with pytest.raises(AttributeError, match="A trainer's callback is lightning_join"):
        JoinMonitor().on_train_start()
