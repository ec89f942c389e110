"""Collectives inside backward in plain loops, against one process on the union of the ranks' batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.core.backward.programs import KINDS, Program, assert_exact, loses_hooks, train, train_reentrant
from tests.support.run import difference, reference
from tests.support.workers import Workers
from torch_join import Join

LENGTHS = ((2, 5), (0, 4, 2), (3, 3, 3))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighting", ["world", "active", "samples"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_parameters_are_those_of_one_process(
    workers: Workers, kind: str, weighting: str, lengths: tuple[int, ...]
) -> None:
    options, wrapper = KINDS[kind]
    program = Program(lengths, weighting=weighting, options=frozenset(options), ddp=dict(wrapper))
    if loses_hooks(program) and (weighting == "samples" or len({*lengths}) > 1):
        for outcome in workers.outcomes(program.world_size, train, program, timeout=3.0):
            assert "lost the hooks with which Join weights" in outcome.error, outcome
    else:
        assert_exact(program, workers.run(program.world_size, train, program))


def test_a_hook_that_compresses(workers: Workers) -> None:
    program = Program((2, 5, 3), options=frozenset({"fp16 hook"}))
    results = workers.run(3, train, program)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
    parameters = reference(program).parameters
    assert difference(results[0][: len(parameters)], parameters) < 2e-2


@pytest.mark.parametrize(
    "options", [(), ("checkpoint", "adam"), ("contrast", "no norm"), ("contrast", "mean")], ids=str
)
@pytest.mark.covering(1)
@pytest.mark.parametrize("weighting", ["world", "active"])
@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_sharded_models(workers: Workers, api: str, weighting: str, options: tuple[str, ...]) -> None:
    for lengths in LENGTHS:
        program = Program(lengths, weighting=weighting, options=frozenset({api, *options}))
        if loses_hooks(program) and api == "fsdp2" and weighting == "active" and len({*lengths}) > 1:
            assert all("lost the hooks" in each.error for each in workers.outcomes(len(lengths), train, program))
            continue
        assert_exact(program, workers.run(program.world_size, train, program))


def test_norms_of_some_of_the_ranks(workers: Workers) -> None:
    for lengths in ((2, 5, 3, 4), (4, 1, 0, 3)):
        program = Program(lengths, options=frozenset({"subgroup"}))
        assert_exact(program, workers.run(4, train, program), buffers=False)


# ---------------------------------------------------------------- what forward does not show


class OnlyBackward(torch.autograd.Function):
    """Adds up gradients over the ranks, of which nothing in forward tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Layers(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = place
        self.layers = nn.ModuleList([nn.Linear(2, 2).double() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == self.place:
                x = OnlyBackward.apply(x)  # type: ignore[no-untyped-call]
        return x


def train_layers(rank: int, place: int, always: bool) -> list[Tensor]:
    """Rank 0 joins after a step; in the tail the sum over the active ranks is rank 1's own gradient."""
    net = Layers(-1)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Join([model, optimizer]) as join:
        join.backward_collectives = always
        for step in join.batches(range(1 + 3 * rank)):
            net.place = place if len(join.active_ranks) == 1 else -1
            optimizer.zero_grad()
            model(torch.ones(3, 2, dtype=torch.float64) + step).square().sum().backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("place", [0, 1])
def test_a_collective_after_the_first_gradient_raises_and_names_the_switch(workers: Workers, place: int) -> None:
    joined, active = workers.outcomes(2, train_layers, place, False, timeout=2.0)
    assert active.error.startswith("UnsupportedError: A collective was called in backward")
    assert "backward_collectives=True" in active.error
    assert joined.error.startswith("PeerFailedError: Rank 1 failed")


def test_it_is_right_before_the_first_gradient_and_with_the_switch(workers: Workers) -> None:
    expected = workers.run(2, train_layers, -1, False)[0]
    for place, always in [(2, False), (0, True), (1, True), (2, True), (-1, True)]:
        for ours in workers.run(2, train_layers, place, always):
            assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, expected, strict=True)), place


# ---------------------------------------------------------------- what raises


@pytest.mark.parametrize("last", [False, True])
def test_reentrant_checkpointing_raises(workers: Workers, last: bool) -> None:
    joined, active = workers.outcomes(2, train_reentrant, last, timeout=2.0)
    assert active.error.startswith(("UnsupportedError", "JoinError"))
    assert "use_reentrant" in active.error
    assert joined.error.startswith("PeerFailedError: Rank 1 failed")


def torchs_join(rank: int) -> str:
    from torch.distributed.algorithms.join import Join as TorchJoin

    from torch_join import JoinableModel

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model.module[1] = nn.SyncBatchNorm(2)  # DDP itself takes it on accelerators only
    with pytest.raises(Exception, match=r"torch_join\.Join, or BatchNorm") as error, TorchJoin([JoinableModel(model)]):
        model(torch.ones(2, 2))
    return type(error.value).__name__


def test_torchs_own_join_refuses_synced_norms(workers: Workers) -> None:
    assert workers.run(2, torchs_join) == ["UnsupportedError"] * 2


def test_the_reference_tells_synced_norms_from_plain_ones() -> None:
    program = Program((2, 5))
    with_norms, without = reference(program), reference(program.but(options=frozenset({"no norm"})))
    assert (with_norms.parameters[0] - without.parameters[0]).abs().max() > 1e-3
