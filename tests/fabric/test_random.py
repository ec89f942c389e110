"""A random search over scripts on Fabric: uneven ones end as one process does, whatever ranks do together on the way.

`-m long` runs 500 of them, or as many as TORCH_JOIN_CASES says, from the seed TORCH_JOIN_SEED on.
"""

import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_join.fabric import DDPJoinStrategy
from tests.fabric.recipe import TOLERANCE, Trained, check, to_the_end, train
from tests.support.accelerated import Script
from tests.support.workers import Workers

FEW = range(2)
FIRST = int(os.environ.get("TORCH_JOIN_SEED", FEW.stop))
CASES = int(os.environ.get("TORCH_JOIN_CASES", 500))


@dataclass(frozen=True)
class Drawn(Script):
    """A script, and what its ranks do together in each step."""

    does: tuple[str, ...] = ()
    only_each: int = 1  # in which steps
    folder: str = field(default_factory=tempfile.gettempdir)


def draw(seed: int) -> Drawn:
    r = random.Random(seed)
    size = r.choice((2, 2, 3))
    shards = r.random() < 0.75
    lengths = tuple(r.randint(0, 6) for _ in range(size)) if shards else ()
    if shards and not any(lengths):
        lengths = (0,) * (size - 1) + (2,)
    batch_size = r.randint(1, 3)
    rebalance = r.random() < 0.15
    accumulate = r.choice((1, 1, 2, 3))
    return Drawn(
        world_size=size,
        samples=0 if shards else r.randint(size, 20),
        lengths=lengths,
        batch_size=batch_size,
        epochs=r.choice((1, 2, 3)),
        optimizer=r.choice(("adamw", "sgd", "zero")),
        weighting=r.choice(("world", "active", "samples", "count")[: 4 if accumulate == 1 else 2]),
        accumulate=accumulate,
        clip=r.choice((None, None, 0.2)),
        scheduler=r.choice((None, "step", "epoch")),
        iterable=shards and r.random() < 0.4,
        rebalance=rebalance,
        may_break=not rebalance and r.random() < 0.2,
        does=tuple(name for name in ("reduce", "gather", "rows", "broadcast", "barrier", "save") if r.random() < 0.3),
        only_each=r.choice((1, 2)),
    )


def act(fabric: Any, model: Any, optimizer: Any, epoch: int, step: int, script: Drawn) -> None:
    """Do what ranks do together, and check what it gives."""
    active = fabric.strategy.active_ranks
    if script.lengths and not script.rebalance:
        counts = [length - (length > 1 and script.batch_size == 1) for length in script.lengths]
        assert active == tuple(rank for rank, count in enumerate(counts) if count > step)
        assert fabric.strategy.at_last_step == (step == max(counts) - 1)
    if step % script.only_each:
        return
    rank, values = fabric.global_rank, [float(10 * r + step) for r in active]
    mine = torch.tensor(10.0 * rank + step)
    for name in script.does:
        if name == "reduce":
            torch.testing.assert_close(fabric.all_reduce(mine.clone()), torch.tensor(sum(values) / len(values)))
            assert float(fabric.all_reduce(mine.clone(), reduce_op="sum")) == sum(values)
        elif name == "gather":
            assert fabric.all_gather(mine).tolist() == values
        elif name == "rows":
            rows = fabric.strategy.gather_rows(mine.expand(rank))
            assert rows.tolist() == [value for r, value in zip(active, values, strict=True) for _ in range(r)]
        elif name == "broadcast":
            assert fabric.broadcast((rank, step), src=1) == (1 if 1 in active else active[0], step)
        elif name == "barrier":
            fabric.barrier()
        else:
            path = Path(script.folder) / f"{epoch}-{step}.ckpt"
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": step, "first": rank == active[0]})
            saved = torch.load(path, weights_only=True)
            assert saved["step"] == step
            assert saved["first"]
            state = model.state_dict()
            assert all(torch.equal(value, state[key]) for key, value in saved["model"].items())
            fabric.barrier()


def run(rank: int, script: Drawn) -> Trained:
    strategy = DDPJoinStrategy(weighting=script.option, rebalance=script.rebalance, may_break=script.may_break)
    return train(rank, script, strategy, lambda *args: act(*args, script=script))


def compare(workers: Workers, seed: int, folder: Path) -> None:
    script = draw(seed)
    ranks = workers.run(script.world_size, to_the_end, run, Drawn(**{**vars(script), "folder": str(folder)}))
    if script.rebalance and script.accumulate > 1:
        for one in ranks[1:]:  # the same on all: which of the micro-batches come together is another trajectory's
            assert all(torch.equal(a, b) for a, b in zip(one.parameters, ranks[0].parameters, strict=True))
    assert check(script, ranks) < TOLERANCE


@pytest.mark.parametrize("seed", FEW)
def test_scripts_drawn_are_exact(workers: Workers, seed: int, tmp_path: Path) -> None:
    compare(workers, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_many_scripts_are_exact(workers: Workers, seed: int, tmp_path: Path) -> None:
    compare(workers, seed, tmp_path)
