"""Programs that random combinations of features have found to be wrong, against one process in float64."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.plain import Loop, assert_exact, train
from tests.support.run import Batch, Place, Run, difference, reference
from tests.support.small import batch, batches_of, loss, network, steps_of
from tests.support.workers import Workers
from torch_join import Join


@dataclass(frozen=True)
class Turning(Loop):
    """A loop in which layers are frozen and trained, batches are masked in the first epoch, and that ranks leave."""

    optimizer: str = "plain"
    rest: str = "added"
    one_context: bool = True
    frozen: bool = False  # the first layer is, when the `with` begins
    layers: int = 1  # of which that, and what follows, is so
    thaws: Place | None = None  # the epoch and step at which it no longer is
    freezes: int | None = None  # the step at which it is
    first_stop: int | None = None  # how many steps the first epoch has

    def set_layers(self, net: nn.Module, trained: bool, layers: int) -> None:
        for layer in [*net.children()][:layers]:
            layer.requires_grad_(trained)

    def wrap(self, net: Any) -> Any:
        wrapped = super().wrap(net)  # DDP leaves out what is frozen before
        self.set_layers(net, not self.frozen, self.layers)
        return wrapped

    def before_step(self, net: Any, epoch: int, step: int) -> None:
        if (epoch, step) == (0, -1):
            self.set_layers(net, not self.frozen, self.layers)
        if self.thaws == (epoch, step):
            self.set_layers(net, True, self.layers)
        if self.freezes == step:
            self.set_layers(net, False, 1)

    def losses(self, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        counts = epoch > 0 or (self.model == "sparse" and step % 2 == 1)
        return super().losses(model, batch, -1 if counts and rank == self.masked else rank, epoch, step)

    def rows(self, epoch: int) -> list[dict[int, Place]]:
        return super().rows(epoch)[: None if epoch else self.first_stop]

    def breaks(self, rank: int, epoch: int, step: int) -> bool:
        return epoch == 0 and step + 1 == self.first_stop

    def make_optimizer(self, parameters: Any, kind: str = "", sharded: bool = False) -> torch.optim.Optimizer:
        if self.optimizer != "zero":
            return super().make_optimizer(parameters, kind, sharded)
        make, options = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
        if sharded:
            return ZeroRedundancyOptimizer(parameters, make, parameters_as_bucket_view=True, **options)
        return make(parameters, **options)


UNUSED = {"find_unused_parameters": True}
PROGRAMS = {
    "unfrozen in the tail": Turning([(1, 4)], weighting="active", frozen=True, thaws=(0, 2), ddp=UNUSED),
    "unfrozen in the first step": Turning([(1, 4)], frozen=True, thaws=(0, 0), ddp=UNUSED),
    "unfrozen, even": Turning([(2, 2)] * 2, weighting="samples", frozen=True, thaws=(1, -1), ddp=UNUSED),
    "all unfrozen in the first step": Turning([(1, 4)], weighting="samples", frozen=True, layers=3, thaws=(0, 0)),
    "all unfrozen, even": Turning([(2, 2)] * 2, weighting="samples", frozen=True, layers=3, thaws=(0, 0)),
    "two backwards, views": Turning(
        [(0, 2), (2, 2)], loss="two backwards", ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}
    ),
    "static graph": Turning([(1, 3), (2, 2)], ddp={"static_graph": True}),
    "a window over two contexts": Turning([(1, 1), (0, 2)], accumulate=2, clear="after", one_context=False),
    "a window over two loops": Turning([(1, 1), (0, 2)], accumulate=2, clear="after"),
    "windows over three contexts": Turning([(2, 2), (1, 1), (0, 2)], accumulate=2, clear="after", one_context=False),
    "break amid a window": Turning([(1, 3), (2, 2)], accumulate=2, clear="after", first_stop=1),
    "break amid a masked window": Turning([(1, 3, 3), (2, 2, 2)], accumulate=2, clear="after", first_stop=1, masked=1),
    "frozen, ZeRO": Turning([(1, 4)], freezes=2, optimizer="zero", ddp=UNUSED),
    "sparse, masked": Turning([(0, 2), (2, 2)], accumulate=2, masked=1, model="sparse"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_what_one_process_computes(workers: Workers, name: str) -> None:
    program = PROGRAMS[name].but(epochs=len(PROGRAMS[name].lengths))
    assert_exact(workers.run(program.world_size, train, program), reference(program))


def scale_sparse(rank: int, lengths: Sequence[int]) -> list[Tensor]:
    program = Run(lengths, model="sparse")
    model = program.build()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range(lengths[rank])):
            optimizer.zero_grad()
            ddp(program.batch(rank, 0, step)[0]).pow(2).mean().backward()
            for p in model.parameters():
                p.grad.mul_(0.5)  # type: ignore[union-attr]
            optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]  # type: ignore[misc]


def test_a_sparse_gradient_that_was_changed_is_handed_over(workers: Workers) -> None:
    first, second = workers.run(2, scale_sparse, (1, 3))
    assert difference(first, second) == 0


def leave_and_evaluate(rank: int, lengths: Sequence[int]) -> list[bool]:
    program = Run((3, 3))
    model = program.build()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with Join([ddp, optimizer], may_break=True) as join:
        for step in join.batches(range(3)):
            optimizer.zero_grad()
            ddp(program.batch(rank, 0, step)[0]).pow(2).mean().backward()
            optimizer.step()
            if step + 1 == lengths[rank]:
                break
        ddp.eval()
        with torch.no_grad():
            for step in join.batches(range(2)):
                ddp(program.batch(rank, 1, step)[0])
                seen.append(ddp.training or model.last.training)
    return seen


@pytest.mark.parametrize("lengths", [(2, 9), (9, 1)])  # the other comes to the end of its loop
def test_what_a_rank_sets_after_a_break_stays(workers: Workers, lengths: Sequence[int]) -> None:
    assert workers.run(2, leave_and_evaluate, lengths) == [[False, False]] * 2


def clip_in_hooks(net: nn.Module, optimizer: Any) -> None:
    """Have each step clip gradients by a hook."""
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(net.parameters(), 0.1) and None)


def decay_by_hand(rank: int, lengths: Sequence[int], views: bool) -> list[Tensor]:
    net = network()
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, parameters_as_bucket_view=views
    )
    clip_in_hooks(net, optimizer)
    with Join([model, optimizer]) as join:
        for x in join.batches(batches_of(rank, lengths)):
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.9)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(("lengths", "views"), [((1, 6), False), ((0, 5, 3), True)])
def test_shards_of_joined_ranks_have_what_the_loop_changes(
    workers: Workers, lengths: tuple[int, ...], views: bool
) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    clip_in_hooks(net, optimizer)
    for places in steps_of(lengths):
        optimizer.zero_grad()
        for place in places:
            (loss(net, batch(*place)) / len(lengths)).backward()
        optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
    for found in workers.run(len(lengths), decay_by_hand, lengths, views):
        for mine, expected in zip(found, net.parameters(), strict=True):
            assert torch.allclose(mine, expected, rtol=0.0, atol=1e-12)


def forget_state(rank: int, lengths: Sequence[int], at: int) -> list[Tensor]:
    """Clear the optimizer's state, of which each rank has a shard, after a step of each of two epochs."""
    net = network()
    model = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([model, optimizer]) as join:
        for _ in range(2):
            for x in join.batches(batches_of(rank, lengths)):
                optimizer.zero_grad()
                loss(model, x).backward()
                optimizer.step()
                if join.step == at:
                    optimizer.optim.state.clear()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("at", [1, 3])  # amid the tail, and at its end
def test_shards_of_joined_ranks_forget_what_the_loop_clears(workers: Workers, at: int) -> None:
    lengths = (1, 4)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for step, places in enumerate(steps_of(lengths)):
            optimizer.zero_grad()
            for place in places:
                (loss(net, batch(*place)) / len(lengths)).backward()
            optimizer.step()
            if step == at:
                optimizer.state.clear()
    for found in workers.run(len(lengths), forget_state, lengths, at):
        for mine, expected in zip(found, net.parameters(), strict=True):
            assert torch.allclose(mine, expected, rtol=0.0, atol=1e-12)
