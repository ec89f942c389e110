"""Models that live on several ranks: a finished rank runs the step itself, on a placeholder that counts zero."""

import copy
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from tests.covering import others_long
from tests.support import inside
from tests.support.experts import Batch
from tests.support.front_ends.experts import Stream
from tests.support.joinables import Counter
from tests.support.workers import WorkerError, Workers
from torch_join import Join, JoinMonitor, JoinTypeError, JoinValueError
from torch_join._schedule.placeholders import without_rows


def stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return [first.double(), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)).double()]


def flat(copy_of: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * copy_of + step)
    rows = 4 * (1 + copy_of)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (rows,), generator=generator)


def pipeline(rank: int, schedule: Any, wrap: str, weighting: str, lengths: tuple[int, int]) -> tuple[int, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "copies"))
    place, mine = mesh["pipe"].get_local_rank(), mesh["copies"].get_local_rank()
    net = module = stages()[place]
    if wrap == "ddp":
        module = DistributedDataParallel(net, process_group=mesh["copies"].get_group(), find_unused_parameters=True)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=mesh["copies"], reshard_after_forward=False)
    stage = PipelineStage(module, place, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    runs, optimizer = schedule(stage, 2, loss_fn=cross_entropy), torch.optim.Adam(net.parameters(), lr=0.05)
    with Join([module, optimizer], weighting=weighting, placeholder="last") as join:
        for x, y in join.batches([flat(mine, step) for step in range(lengths[mine])]):
            optimizer.zero_grad()
            runs.step(*(() if place else (x,)), **({"target": y} if place else {}))
            optimizer.step()
    return place, [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


@pytest.mark.parametrize(
    ("schedule", "wrap", "weighting", "lengths"),
    [
        (ScheduleGPipe, "fsdp", "world", (3, 5)),
        (Schedule1F1B, "fsdp", "samples", (4, 1)),
        (ScheduleGPipe, "ddp", "samples", (0, 3)),
        (Schedule1F1B, "ddp", "active", (3, 2)),
    ],
)
def test_pipelines(workers: Workers, schedule: Any, wrap: str, weighting: str, lengths: tuple[int, int]) -> None:
    net = nn.Sequential(*stages())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(max(lengths)):
        batches = [flat(each, step) for each, length in enumerate(lengths) if step < length]
        rows = sum(len(x) for x, _ in batches)
        optimizer.zero_grad()
        for x, y in batches:
            weights = {"world": 1 / 2, "active": 1 / len(batches), "samples": len(x) / rows}
            (cross_entropy(net(x), y) * weights[weighting]).backward()
        optimizer.step()
    for place, parameters in workers.run(4, pipeline, schedule, wrap, weighting, lengths):
        for mine, expected in zip(parameters, net[place].parameters(), strict=True):
            assert (mine - expected).abs().max() <= 1e-10


# ---------------------------------------------------------------- what is of the data, in a model that is whole


def network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 1)).double()


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def statistics(rank: int, placeholder: Any, placed: str, broadcasts: bool = True) -> list[Tensor]:
    """Train where rank 0, whose buffers DDP broadcasts, is first to end; return parameters and statistics."""
    net = network(norm=True)
    ddp = DistributedDataParallel(net, broadcast_buffers=broadcasts)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given, here = (placeholder, {}) if placed == "join" else (None, {"placeholder": placeholder})
    with Join([ddp, optimizer], placeholder=given, weighting="active") as join:
        for epoch in range(2):
            data = [rows_of(rank, 10 * epoch + step) for step in range((2, 5)[rank])]
            for x in join.batches(data, **here):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
    return [each.detach().clone() for each in net.state_dict().values()]


@pytest.mark.parametrize(("placeholder", "placed"), [("rows", "join"), ("last", "loop"), ("last", "join")])
def test_statistics_are_as_where_a_finished_rank_mirrors(workers: Workers, placeholder: Any, placed: str) -> None:
    expected, _ = workers.run(2, statistics, None, "loop")
    for rank in workers.run(2, statistics, placeholder, placed):
        for mine, theirs in zip(rank, expected, strict=True):
            assert (mine.double() - theirs).abs().max() <= 1e-10


def test_statistics_of_each_rank_are_of_its_own_batches(workers: Workers) -> None:
    names = [*network(norm=True).state_dict()]
    tracked = [rank[names.index("1.num_batches_tracked")] for rank in workers.run(2, statistics, "last", "join", False)]
    assert tracked == [4, 10]


def contrast(rank: int, lengths: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Train by each rank's rows against those of all that have some; let an L-BFGS decide by all ranks' loss."""
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    scheduler, values = StepLR(optimizer, 2, 0.5), []
    with Join([ddp, optimizer, scheduler], placeholder="last", weighting="active") as join:
        for x in join.batches([rows_of(rank, step) for step in range(lengths[rank])]):

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                rows = join.all_gather(ddp(x), sync_grads=True)
                mine = rows[0 if join.joined else join.active_ranks.index(rank)]
                loss = (mine - rows.mean((0, 1))).square().mean() + mine.mean()
                loss.backward()
                value = join.weigh(loss.detach())
                dist.all_reduce(value)
                return value / len(lengths)

            values.append(float(optimizer.step(closure)))
            scheduler.step()
    return values, nn.utils.parameters_to_vector(net.parameters()).tolist()


def test_rows_of_all_ranks_and_decisions_together(workers: Workers) -> None:
    lengths, net = (0, 3, 2), network()
    optimizer, values = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2), []
    scheduler = StepLR(optimizer, 2, 0.5)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            rows = torch.stack([net(rows_of(rank, step)) for rank, length in enumerate(lengths) if step < length])
            loss = (rows - rows.mean((0, 1))).square().mean() + rows.mean()
            loss.backward()
            return loss.detach()

        values.append(float(optimizer.step(closure)))
        scheduler.step()
    expected = values, nn.utils.parameters_to_vector(net.parameters()).tolist()
    for found in workers.run(3, contrast, lengths):
        assert found[0] == pytest.approx(expected[0], abs=1e-10)
        assert found[1] == pytest.approx(expected[1], abs=1e-10)


def resume(rank: int, lengths: tuple[int, ...], at: int) -> list[float]:
    """Train two epochs; save at a step of the first, and go on from there with another model."""
    saved: Any = None
    for job in (0, 1):
        net = network()
        ddp, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), lr=0.1)
        with Join([ddp, optimizer], placeholder="rows", weighting="samples") as join:
            if job:
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                join.load_state_dict(saved[2])
            for _ in range(2):
                for x in join.batches([rows_of(rank, step) for step in range(lengths[rank])]):
                    optimizer.zero_grad()
                    ddp(x).square().mean().backward()
                    optimizer.step()
                    if saved is None and join.step == at:
                        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), join.state_dict()))
    return nn.utils.parameters_to_vector(net.parameters()).tolist()


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_loop_goes_on(workers: Workers, at: int) -> None:
    net, lengths = network(), (1, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for step in [*range(4)] * 2:
        optimizer.zero_grad()
        batches = [rows_of(rank, step) for rank, length in enumerate(lengths) if step < length]
        torch.stack([net(x).square().mean() / len(batches) for x in batches]).sum().backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(net.parameters()).tolist()
    for found in workers.run(2, resume, lengths, at):
        assert found == pytest.approx(expected, abs=1e-10)


def measure(rank: int) -> tuple[int, list[int]]:
    net, monitor = network(), JoinMonitor()
    ddp = DistributedDataParallel(net)
    with Join([ddp], placeholder="last", monitor=monitor) as join:
        with torch.no_grad():  # none of what was given runs, and nothing is weighted
            evaluated = sum(not join.joined for x in join.batches([rows_of(rank, step) for step in range(3 - rank)]))
        assert evaluated == 3 - rank
        before = inside.channel_of(join).barrier_number
        for x in join.batches([rows_of(rank, step) for step in range((2, 4)[rank])]):
            ddp(x).square().mean().backward()
        met = inside.channel_of(join).barrier_number - before
    return met, [each.batches for each in monitor.epochs[0].ranks]


def test_certain_lengths_need_no_exchange(workers: Workers) -> None:
    for met, batches in workers.run(2, measure):
        assert met == 0
        assert batches == [2, 4]


def count_none(rank: int) -> list[float]:
    """Train on batches weighted by their tokens, of which rank 0's first one has none, and a mean over them."""
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    tokens = [[0.0, 2.0], [1.0, 3.0, 2.0]][rank]
    batches = [(rows_of(rank, step), torch.tensor(count)) for step, count in enumerate(tokens)]
    with Join([ddp, optimizer], weighting=lambda batch: float(batch[1]), placeholder="last") as join:
        for x, count in join.batches(batches):
            optimizer.zero_grad()
            ((ddp(x)[:, 0] * count).sum() / count).square().backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).tolist()


def test_a_batch_that_counts_nothing_adds_nothing(workers: Workers) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, weights in enumerate(([(1, 1.0)], [(0, 2 / 5), (1, 3 / 5)], [(1, 1.0)])):
        optimizer.zero_grad()
        for rank, weight in weights:
            (net(rows_of(rank, step))[:, 0].sum().square() * weight).backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(net.parameters()).tolist()
    for found in workers.run(2, count_none):
        assert found == pytest.approx(expected, abs=1e-10)


def test_no_rows_are_of_what_is_known_to_have_some() -> None:
    batch = defaultdict(list, x=torch.ones(2, 3), pair=(torch.ones(2), 5), names=["a", "b"], none=None)
    emptied = without_rows(batch)
    assert type(emptied) is defaultdict
    assert [len(emptied["x"]), len(emptied["pair"][0]), emptied["pair"][1], emptied["names"]] == [0, 0, 5, []]
    with pytest.raises(JoinTypeError, match="found a ndarray in a batch"):
        without_rows({"x": np.ones(3)})


# ---------------------------------------------------------------- what is refused, on all ranks


def refused(rank: int, how: str) -> None:
    net = network()
    ddp, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    if how == "synced statistics":
        net[1].register_module("unused", nn.SyncBatchNorm(4))
    placeholder: Any = (lambda x: torch.full_like(x, torch.nan)) if how == "nan" else "last"
    given: list[Any] = [ddp, optimizer]
    if how == "metric":
        from torchmetrics import MeanMetric

        given.append(MeanMetric())
    if how == "joinable":
        given.append(Counter())
    data: Any = [rows_of(rank, step) for step in range((1, 4)[rank] if how == "over steps" else (2, 4)[rank])]
    throws = how == "throws"
    with Join(given, placeholder=placeholder, weighting="active", throw_on_early_termination=throws) as join:
        loop: Any = iter(join.batches(Stream(data) if how == "break" else data))
        if how == "ahead":
            loop = iter([*loop])
        outputs, held = [], torch.zeros(())
        for x in loop:
            out = ddp(x)
            loss = out.square().mean()
            if how == "masked":
                mask = torch.zeros(len(x)) if join.joined else torch.ones(len(x))
                loss = (out[:, 0] * mask).sum() / mask.sum()
            if how == "fetched":
                next(loop, None)
            if how == "over steps":
                held = held + loss
                if join.step % 2 == 0:
                    continue
                loss, held = held, torch.zeros(())
            optimizer.zero_grad()
            loss.backward()
            outputs.append(out)
            if how == "amid" and join.step == 2:
                join.state_dict()
            if how == "weighed":
                join.weigh(loss)
            optimizer.step()
            if how == "break" and rank == 1:
                break
        if how == "gather":
            join.gather_in_order(outputs)


REFUSED = {
    "nan": "has zero weight, but its gradients are NaN",
    "masked": "has zero weight, but its gradients are NaN",
    "synced statistics": "SyncBatchNorm normalizes with the statistics of all ranks' samples",
    "metric": "A metric was passed to Join with placeholder=",
    "ahead": "was requested before the backward of the previous step",
    "fetched": "was requested before the backward of the previous step",
    "amid": "within an accumulation window",
    "over steps": "was requested before the backward of the previous step",
    "joinable": "which is a Joinable, was passed to Join with placeholder=",
    "weighed": "a value that requires grad",
    "gather": "the rows include results of placeholders",
    "break": "left the loop with `break` while others continued|wait for each other",
    "throws": "exhausted",
}


@pytest.mark.parametrize(
    "how", others_long(REFUSED, *(how for how in REFUSED if how not in ("nan", "synced statistics")))
)
def test_what_is_refused(workers: Workers, how: str) -> None:
    with pytest.raises(WorkerError, match=REFUSED[how]):
        workers.run(2, refused, how, deadline=40)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"placeholder": "first"}, JoinValueError, "Use 'last' or 'rows', or a function that takes a batch"),
        ({"placeholder": 3}, JoinTypeError, "placeholder must be 'last' or 'rows'"),
        ({"placeholder": "last", "rebalance": True}, JoinValueError, "placeholder= cannot be combined"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Join([network()], **options)
