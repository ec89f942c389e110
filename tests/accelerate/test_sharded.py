"""Accelerate's FSDP under the context: the weights and moments are those that one process would have computed.

Torch's own `clip_grad_norm_` of `FullyShardedDataParallel` raises on CPUs in float64, so there it is tested in float32.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.covering import others_long
from tests.support.front_ends.accelerate import plain
from tests.support.front_ends.accelerate_sharded import (
    Session,
    Sharded,
    Trained,
    check,
    possible,
    sharding_accelerator,
    train,
)
from tests.support.many import seeds
from tests.support.run import FEATURES, TOLERANCE
from tests.support.workers import Workers

SCRIPTS: dict[str, Sharded] = {
    # Accelerate shards: the last process has no batch, or one less, or the last batch is short.
    "3 samples": Sharded(samples=3, batch_size=1, scheduler="epoch", evaluates=True),
    "3 ranks, one batch": Sharded(processes=3, samples=3, optimizer="sgd", scheduler="step"),
    "3 ranks, samples": Sharded(processes=3, samples=25, weighting="samples", accumulate=2, evaluates=True),
    "then even": Sharded(samples=20, even=1, accumulate=3, scheduler="step", own_function=True),
    "heartbeat": Sharded(samples=20, may_break=True, accumulate=2),
    # The user has: any lengths, so that the main process joins first or has no batch.
    "main first": Sharded(lengths=(2, 7), accumulate=2, scheduler="step", even=1),
    "main has none": Sharded(lengths=(0, 5), optimizer="sgd", accumulate=3),
    "main first, samples": Sharded(lengths=(2, 6), weighting="samples", scheduler="epoch"),
    "main first, active": Sharded(lengths=(1, 6, 4), weighting="active", accumulate=3),
    "none in the middle": Sharded(lengths=(4, 0, 7), accumulate=2, even=1, evaluates=True),
    "each batch": Sharded(lengths=(2, 7), accumulate=3, sync_each_batch=True, scheduler="step"),
    "iterable": Sharded(lengths=(2, 7), iterable=True, accumulate=2),
    "scheduler on its own": Sharded(samples=20, scheduler="step", step_scheduler_with_optimizer=False, accumulate=2),
}
OF_VERSION: dict[int, dict[str, Sharded]] = {
    1: {
        "flat": Sharded(lengths=(2, 6), plugin={"use_orig_params": False}, optimizer="sgd", accumulate=2),
        "grads": Sharded(lengths=(2, 6), plugin={"sharding_strategy": "SHARD_GRAD_OP"}, evaluates=True),
        "checkpointed": Sharded(lengths=(2, 6), plugin={"activation_checkpointing": True}, accumulate=2),
        "scaler": Sharded(lengths=(2, 6), scaler=8.0, optimizer="sgd", scheduler="step"),
        "clip": Sharded(lengths=(2, 6), clip=0.05, accumulate=2, dtype=torch.float32, scheduler="step"),
    },
    2: {
        "whole": Sharded(lengths=(2, 6), plugin={"reshard_after_forward": False}, evaluates=True),
        "checkpointed": Sharded(lengths=(2, 6), plugin={"activation_checkpointing": True}, accumulate=2),
        "clip": Sharded(lengths=(2, 6), clip=0.05, scheduler="step", accumulate=2),
        "clip, 3 ranks": Sharded(processes=3, samples=25, clip=0.05, optimizer="sgd"),
        "offload": Sharded(lengths=(2, 6), plugin={"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, accumulate=2),
        "mesh": Sharded(samples=20, mesh={"dp_shard_size": 2}, accumulate=2),
        "hybrid": Sharded(lengths=(2, 0, 5, 3), mesh={"dp_replicate_size": 2, "dp_shard_size": 2}, accumulate=2),
        "scaler": Sharded(lengths=(2, 6), scaler=8.0, optimizer="sgd", scheduler="step"),
    },
}
CASES: dict[str, Sharded] = {
    f"{name}, version {version}": replace(script, version=version)
    for version in (1, 2)
    for name, script in {**SCRIPTS, **OF_VERSION[version]}.items()
}


def draw(seed: int) -> Sharded:
    """Return any combination of what a script may do."""
    random = Random(seed)
    world_size = random.choice([2, 2, 3])
    version = random.choice([1, 2])
    own = random.random() < 0.6  # shards
    plugins: dict[int, list[dict[str, Any]]] = {
        1: [{}, {"use_orig_params": False}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"activation_checkpointing": True}],
        2: [{}, {"reshard_after_forward": False}, {"activation_checkpointing": True}],
    }
    return Sharded(
        processes=world_size,
        samples=0 if own else random.randrange(1, 45),
        lengths=[random.randrange(9) for _ in range(world_size - 1)] + [random.randrange(1, 9)] if own else (),
        batch_size=random.choice([1, 2, 3]),
        optimizer=random.choice(["sgd", "adamw"]),
        weighting=random.choice(["world", "active", "samples"]),
        accumulate=random.choice([1, 2, 3]),
        clip=random.choice([None, 0.05]) if version == 2 else None,
        scheduler=random.choice([None, "step", "epoch"]),
        step_scheduler_with_optimizer=random.random() < 0.6,
        scaler=8.0 if version == 2 and random.random() < 0.2 else 0.0,
        iterable=own and random.random() < 0.3,
        even=random.choice([0, 1]),
        own_function=random.random() < 0.3,
        may_break=random.random() < 0.2,
        version=version,
        plugin=random.choice(plugins[version]),
        sync_each_batch=random.random() < 0.2,
        evaluates=random.random() < 0.3,
    )


# Every second one, with the versions in turns, and what there is of one alone.
SOME = [f"{name}, version {1 + place % 2}" for place, name in enumerate([*SCRIPTS][::2])]
SOME += [f"{name}, version {version}" for version in (1, 2) for name in OF_VERSION[version]]


@pytest.mark.parametrize("name", others_long(CASES, *SOME))
def test_as_one_process(workers: Workers, name: str) -> None:
    check_one_process(workers, CASES[name])


def check_one_process(workers: Workers, script: Sharded) -> None:
    found: list[Trained] = workers.run(script.world_size, train, possible(script))
    check(script, found, TOLERANCE if script.dtype == torch.float64 else 2e-5)
    everything = sorted(n for n in script.all_samples() if n < 9000)
    for epoch in range(script.epochs):
        assert sorted(n for trained in found for numbers in trained.seen[epoch] for n in numbers) == everything
    for gathered in max((trained.gathered for trained in found), key=lambda epochs: sum(map(len, epochs))):
        assert sorted(gathered) == everything


@seeds(range(2), 8)
def test_any_script_is_as_one_process(workers: Workers, seed: int) -> None:
    check_one_process(workers, draw(seed))


def enter(rank: int, script: Sharded, kind: str) -> None:
    with sharding_accelerator(rank, script) as accelerator:
        if kind == "tensor parallelism":
            accelerator.parallelism_config.tp_size = 2  # Accelerate wants transformers for one of its own
        elif kind == "a mesh without FSDP":
            accelerator.state.distributed_type = DistributedType.MULTI_CPU
        with accelerator.join_uneven_inputs():
            pass


@pytest.mark.parametrize(
    ("kind", "mesh", "text"),
    [
        (
            "tensor parallelism",
            {"dp_shard_size": 2},
            r"this parallelism_config \(tp_size > 1\), with which several ranks compute",
        ),
        ("context parallelism", {"cp_size": 2}, r"\(cp_size > 1\), with which several ranks compute"),
        ("a mesh without FSDP", {"dp_shard_size": 2}, "a parallelism_config without FSDP"),
    ],
)
def test_what_is_not_supported_says_why(workers: Workers, kind: str, mesh: dict[str, int], text: str) -> None:
    for outcome in workers.outcomes(2, enter, possible(Sharded(samples=2, mesh=mesh)), kind):
        assert re.search(f"UnsupportedError: join_uneven_inputs does not support .*{text}", outcome.error), (
            outcome.error
        )


def mixed(rank: int, script: Sharded, joins: bool) -> list[Any]:
    """Train in mixed precision; without joining, by batches that count nothing in place of those that there are not."""
    generator = torch.Generator().manual_seed(rank)
    steps = script.lengths[rank] if joins else max(script.lengths)
    data = [torch.randn(3, FEATURES, generator=generator) for _ in range(steps)]
    with sharding_accelerator(rank, script, mixed_precision="bf16") as accelerator:
        session = Session(accelerator, script, rank)
        loader: Any = DataLoaderShard(data, batch_size=None)
        with accelerator.join_uneven_inputs() if joins else nullcontext():
            for step, x in enumerate(loader):
                with accelerator.accumulate(session.model):
                    loss = session.model(x).float().pow(2).mean() * (step < script.lengths[rank])
                    accelerator.backward(loss)
                    session.optimizer.step()
                    session.optimizer.zero_grad()
        return [plain(part) for part in (session.state().weights, session.state().moments)]


@pytest.mark.parametrize("lengths", [(2, 5), (4, 0, 5)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision(workers: Workers, version: int, lengths: tuple[int, ...]) -> None:
    script = Sharded(lengths=lengths, accumulate=2, version=version, dtype=torch.float32)
    found = workers.run(len(lengths), mixed, possible(script), True)
    assert all(mine == found[0] for mine in found)
    assert found == workers.run(len(lengths), mixed, script, False)
