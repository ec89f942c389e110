"""What Fabric's own operations do in a step that some rank does not have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.accelerate import Script
from tests.support.front_ends.fabric import fabric_of, raising, to_the_end, train
from tests.support.workers import Workers
from torch_join import JoinError, UnsupportedError

LENGTHS = (1, 4, 3)


def loop(rank: int, body: Any, lengths: tuple[int, ...] = LENGTHS, stream: bool = False, **options: Any) -> list[Any]:
    """Return what `body` does in each step of a small training, after the step's forward."""
    fabric = fabric_of(len(lengths), DDPJoinStrategy(**options))
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data: Any = [torch.full((2,), float(rank + 1), dtype=torch.float64)] * (2 * lengths[rank])
    if stream:
        data = Stream(data)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2), use_distributed_sampler=False)
    found = []
    for step, batch in enumerate(loader):
        output = model(batch)
        found.append(body(fabric, step, output))
        fabric.backward(output.mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.barrier()
    return found


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def reduce_and_gather(fabric: Any, step: int, output: Any) -> Any:
    mine = torch.tensor(float(10 * fabric.global_rank + step))
    return [
        float(fabric.all_reduce(mine.clone())),
        float(fabric.all_reduce(mine.clone(), reduce_op="sum")),
        int(fabric.all_reduce(torch.tensor(fabric.global_rank))),
        fabric.all_gather(mine).tolist(),
        fabric.broadcast([fabric.global_rank, step]),
        fabric.broadcast({"of": fabric.global_rank}, src=2),
        fabric.strategy.gather_rows(torch.full((fabric.global_rank, 1), step)).flatten().tolist(),
        list(fabric.strategy.active_ranks),
        fabric.strategy.joined,
        fabric.strategy.at_last_step,
        fabric.strategy.reduce_boolean_decision(fabric.global_rank > 0),
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["sized", "stream"])
def test_operations_are_over_the_active_ranks(workers: Workers, stream: bool) -> None:
    everyone = workers.run(3, loop, reduce_and_gather, LENGTHS, stream)
    for rank, found in enumerate(everyone):
        assert len(found) == LENGTHS[rank]
        for step, values in enumerate(found):
            active = [r for r, length in enumerate(LENGTHS) if length > step]
            mine = [float(10 * r + step) for r in active]
            rows = [step] * sum(active)
            assert values == [
                sum(mine) / len(mine),
                sum(mine),
                int(sum(active) / len(active)),
                mine,
                [active[0], step],
                {"of": 2 if 2 in active else active[0]},
                rows,
                active,
                False,
                step == 3,
                0 not in active,
            ]


def save(fabric: Any, model: Any, optimizer: Any, epoch: int, step: int, folder: str, filters: bool) -> None:
    only = {"model": lambda name, _: "last" not in name} if filters else None
    path = Path(folder) / f"{epoch}-{step}.ckpt"
    state = {"model": model, "optimizer": optimizer, "place": (epoch, step), "by": fabric.strategy.active_ranks[0]}
    fabric.save(path, state, filter=only)
    assert path.exists()
    torch.save(model.state_dict(), path.with_suffix(f".{fabric.global_rank}"))


def train_and_save(rank: int, script: Script, folder: str, filters: bool) -> None:
    train(rank, script, each=lambda *args: save(*args, folder=folder, filters=filters))


@pytest.mark.parametrize(
    ("script", "filters"),
    [
        (Script(lengths=(2, 4), epochs=2), False),
        (Script(lengths=(0, 3, 1), epochs=2, iterable=True, optimizer="zero"), False),
        (Script(lengths=(1, 3, 3), epochs=1), True),
    ],
)
def test_a_checkpoint_holds_the_active_ranks_state(
    workers: Workers, script: Script, filters: bool, tmp_path: Path
) -> None:
    workers.run(script.world_size, train_and_save, script, str(tmp_path), filters)
    for epoch in range(script.epochs):
        for step in range(max(script.lengths)):
            checkpoint = torch.load(tmp_path / f"{epoch}-{step}.ckpt", weights_only=False)
            by = next(rank for rank, length in enumerate(script.lengths) if length > step)
            weights = torch.load(tmp_path / f"{epoch}-{step}.{by}", weights_only=False)
            assert checkpoint["place"] == (epoch, step)
            assert checkpoint["by"] == by
            assert checkpoint["optimizer"]["state"]
            assert checkpoint["model"].keys() == {n for n in weights if not filters or "last" not in n}
            assert all(torch.equal(value, weights[name]) for name, value in checkpoint["model"].items())


class Writer:
    """A callback that writes on rank 0 only."""

    def __init__(self) -> None:
        self.written: list[int] = []

    @rank_zero_only
    def note(self, step: int) -> None:
        self.written.append(step)


def tell(rank: int, folder: str) -> tuple[list[int], list[str]]:
    writer, printed = Writer(), []
    fabric = fabric_of(2, loggers=CSVLogger(folder, flush_logs_every_n_steps=1), callbacks=[writer])
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data: Any = DataLoader(torch.ones(2 * (1, 3)[rank], 2), batch_size=2)  # type: ignore[arg-type]
    for step, batch in enumerate(fabric.setup_dataloaders(data, use_distributed_sampler=False)):
        loss = model(batch).mean()
        fabric.backward(loss)
        optimizer.step()
        fabric.log("loss", loss * 0 + 10 * rank + step, step=step)
        fabric.call("note", step)
        fabric.print("step", step, file=Lines(printed))
        if step > 0:
            with raising(UnsupportedError) as said, fabric.rank_zero_first():
                pass
            assert "process group" in said[0]
    fabric.barrier()
    return writer.written, printed


class Lines:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def write(self, text: str) -> None:
        self.lines.append(text)


def test_what_rank_0_tells_is_told_in_the_tail(workers: Workers, tmp_path: Path) -> None:
    (first, printed), (second, printed_too) = workers.run(2, tell, str(tmp_path))
    assert (first, second) == ([0], [1, 2])
    assert "".join(printed) == "step 0\n"
    assert "".join(printed_too) == "step 1\nstep 2\n"
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert sorted(metrics.read_text().split()) == sorted(["loss,step", "0.0,0", "11.0,1", "12.0,2"])


def differ_in_shape(fabric: Any, step: int, output: Any) -> Any:
    with raising(UnsupportedError) as said:
        fabric.all_gather(torch.zeros(fabric.global_rank, 2))
    return said[0]


def test_a_gather_of_different_shapes_raises(workers: Workers) -> None:
    for found in workers.run(2, loop, differ_in_shape, (2, 2)):
        assert all("(0, 2) on rank 0, (1, 2) on rank 1" in text and "gather_rows" in text for text in found)


def gather_with_gradients(rank: int, lengths: tuple[int, ...], one_process: bool) -> Any:
    """Train on the squared mean of all active ranks' outputs."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1).double()
    seeds = [torch.Generator().manual_seed(r) for r in range(len(lengths))]
    data = [torch.randn(n, 1, 2, generator=seed, dtype=torch.float64) for n, seed in zip(lengths, seeds, strict=True)]
    if one_process:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(max(lengths)):
            outputs = torch.stack([net(mine[step]) for mine in data if len(mine) > step])
            outputs.mean().square().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]
    fabric = fabric_of(len(lengths), DDPJoinStrategy(weighting="active"))
    model, sgd = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader: Any = DataLoader(data[rank], batch_size=None)  # type: ignore[arg-type]
    for batch in fabric.setup_dataloaders(loader, use_distributed_sampler=False):
        outputs = fabric.all_gather(model(batch), sync_grads=True)
        fabric.backward(outputs.mean().square())
        sgd.step()
        sgd.zero_grad()
    fabric.barrier()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("lengths", [(1, 4), (0, 2, 3)])
def test_gradients_flow_through_a_gather(workers: Workers, lengths: tuple[int, ...]) -> None:
    expected = gather_with_gradients(0, lengths, one_process=True)
    for found in workers.run(len(lengths), gather_with_gradients, lengths, False):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def load(rank: int) -> None:
    loop(rank, lambda fabric, step, _: step > 0 and fabric.load("nothing"), (1, 3))


def test_a_load_in_the_tail_raises(workers: Workers) -> None:
    for outcome in workers.outcomes(2, to_the_end, load):
        assert UnsupportedError.__name__ in outcome.error or JoinError.__name__ in outcome.error
        assert "fabric.load was called in a step in which some ranks have no batch" in outcome.error
