"""Collectives of all kinds in `training_step`, with gradients through some of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.front_ends.lightning import Fit, Result, assert_same_bits, fit
from tests.support.joint import JointModule, joint_reference, returns_none
from tests.support.run import Batch, Net, difference, loss_of
from tests.support.workers import Workers
from torch_join._compat.operators import groups_of_this_rank


def contrast(own: Tensor, gathered: Tensor) -> Tensor:
    """A contrastive loss of this rank's embeddings against those of all ranks."""
    others = gathered.flatten(0, 1)
    return (own @ others.T).logsumexp(1).mean() - (own * own.roll(1, 0)).sum(1).mean()


def embed(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(net.first(x))
    return hidden, net.last(hidden)


class Contrastive(JointModule):
    """Gathers twice with gradients that are used, once with gradients that are not, and without gradients."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        hidden, out = embed(self.net, x)
        all_hidden = self.all_gather(hidden, sync_grads=True)
        if self.net.kind == "unused":
            self.all_gather(self.net.extra(x), sync_grads=True)
        all_out = self.all_gather({"out": out}, sync_grads=True)["out"]
        targets = self.all_gather(y, sync_grads=True)
        assert not targets.requires_grad
        assert torch.equal(all_out.detach(), self.all_gather(out))
        loss = contrast(hidden, all_hidden) + contrast(out, all_out) + (all_out - targets).pow(2).mean()
        return {"loss": loss} if batch_idx % 2 else loss


def losses(net: Net, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor | None]:
    embedded = {rank: embed(net, batch[0]) for rank, batch in batches.items()}
    hidden, out = (torch.stack([pair[i] for pair in embedded.values()]) for i in range(2))
    errors = (out - torch.stack([batch[1] for batch in batches.values()])).pow(2).mean()
    return {rank: contrast(mine[0], hidden) + contrast(mine[1], out) + errors for rank, mine in embedded.items()}


def fit_contrastive(rank: int, case: Fit) -> Result:
    result = fit(rank, case, Contrastive)
    assert len(groups_of_this_rank()) == 1, "a group has been left behind"
    return result


TINY: dict[str, Any] = {"bucket_cap_mb": 1e-5}
CONTRASTS = [
    Fit((4, 4), optimizer="sgd"),
    Fit((2, 5), optimizer="sgd", accumulate=2, ddp=TINY),
    Fit((4, 0, 2), model="unused", optimizer="adamw", ddp={**TINY, "find_unused_parameters": True}),
    Fit((1, 4), weighting="samples", ddp={**TINY, "static_graph": True}),
    Fit((2, 6), optimizer="adamw", ddp=TINY),
    Fit((5, 3, 0), optimizer="sgd", weighting="active", accumulate=2, ddp=TINY),
    Fit((7, 0, 1), optimizer="adamw", ddp=TINY, rebalance=True),
    Fit((2, 7), weighting="samples", accumulate=2, iterable=True, rebalance=True),
]


@pytest.mark.parametrize("case", CONTRASTS, ids=str)
def test_a_contrastive_loss(workers: Workers, case: Fit) -> None:
    expected = joint_reference(case, losses)
    results = workers.run(case.world_size, fit_contrastive, case)
    assert_same_bits(results)
    for result in results:
        assert difference(result.parameters, expected.parameters) < 1e-10
        assert result.global_step == expected.steps


def test_even_inputs_train_as_under_ddp(workers: Workers) -> None:
    ours, stock = (
        workers.run(2, fit, Fit((3, 3)), Contrastive, {}, {"strategy": name})[0] for name in ("ddp_join", "ddp")
    )
    assert difference(ours.parameters, stock.parameters) < 1e-12


class SilentContrastive(Contrastive):
    """Returns `None` after a gather through which the others' gradients come."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (self.trainer.global_rank, batch_idx) == (1, 1) else loss


@pytest.mark.parametrize("lengths", [(3, 3), (1, 3, 3)])
def test_no_loss_after_a_gather_with_gradients_raises(workers: Workers, lengths: tuple[int, ...]) -> None:
    outcomes = workers.outcomes(len(lengths), fit, Fit(lengths), SilentContrastive, timeout=3.0)
    assert outcomes[1].error.startswith("UnsupportedError: training_step returned None")
    assert "0.0 * loss" in outcomes[1].error
    assert all(outcome.error.startswith(("UnsupportedError", "PeerFailedError")) for outcome in outcomes)


# ---------------------------------------------------------------- without gradients


class Everything(JointModule):
    """Compares each collective with its value over the ranks that have a batch."""

    def active(self) -> list[int]:
        lengths = self.case.lengths_in(0)
        return [rank for rank in range(self.case.world_size) if lengths[rank] > self.moment[1]]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        active, rank, strategy = self.active(), self.trainer.global_rank, self.trainer.strategy
        mine = torch.tensor([rank + 1.0, 10.0 * batch_idx])
        stacked = torch.tensor([[r + 1.0, 10.0 * batch_idx] for r in active])
        assert torch.equal(self.all_gather(mine), stacked)
        assert torch.equal(self.all_gather({"a": mine, "b": [mine]})["b"][0], stacked)
        assert torch.equal(strategy.all_gather(mine), stacked)
        whole = torch.tensor(rank + 1)
        mean = sum(r + 1 for r in active) / len(active)
        assert float(strategy.reduce(whole.clone(), reduce_op="mean")) == mean
        assert float(strategy.reduce(whole.double(), group=dist.group.WORLD, reduce_op="mean")) == mean
        assert int(strategy.reduce(whole.clone(), reduce_op="sum")) == sum(r + 1 for r in active)
        assert int(strategy.reduce(-whole, reduce_op="max")) == -(active[0] + 1)
        assert strategy.broadcast(("from", rank, batch_idx)) == ("from", active[0], batch_idx)
        assert strategy.broadcast(rank, active[-1]) == active[-1]
        strategy.barrier()
        assert strategy.reduce_boolean_decision(True)
        assert strategy.reduce_boolean_decision(rank == active[0]) == (len(active) == 1)
        assert strategy.reduce_boolean_decision(rank == active[0], all=False)
        assert not strategy.reduce_boolean_decision(False, all=False)
        dist.all_reduce(mine)
        assert torch.equal(mine, stacked.sum(0))
        work = dist.all_reduce(whole, op=dist.ReduceOp.MIN, async_op=True)
        work.wait()
        assert int(whole) == active[0] + 1
        objects: list[Any] = [None] * self.case.world_size
        dist.all_gather_object(objects, {rank: batch_idx})
        assert [o for o in objects if o is not None] == [{r: batch_idx} for r in active]
        if returns_none(self.case, 0, *self.moment):
            return None  # type: ignore[return-value]
        return super().training_step(batch, batch_idx)


def everything(case: Fit) -> Any:
    def of(net: Net, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor | None]:
        none = returns_none(case, 0, epoch, step)
        return {rank: None if none else loss_of(net, batch) for rank, batch in batches.items()}

    return of


@pytest.mark.parametrize(
    "case", [Fit((1, 4), epochs=2, accumulate=2), Fit((4, 0, 2), epochs=2, model="mlp"), Fit((3,))], ids=str
)
def test_collectives_are_over_the_ranks_that_have_a_batch(workers: Workers, case: Fit) -> None:
    expected = joint_reference(case, everything(case))
    for result in workers.run(case.world_size, fit, case, Everything):
        assert difference(result.parameters, expected.parameters) < 1e-10


class Sloped(JointModule):
    """Differentiates in the step, through a gather; another one is in a checkpoint."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden, out = embed(self.net, batch[0])
        gathered: Any = self.all_gather(hidden, sync_grads=True)
        out = torch.utils.checkpoint.checkpoint(self.gather, out, use_reentrant=False)
        (slope,) = torch.autograd.grad(gathered.sum(), [hidden], retain_graph=True)
        loss: Tensor = (gathered.mean() + out.mean()) ** 2 * slope.mean()
        return loss

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor + self.all_gather(tensor.sin(), sync_grads=True).sin().mean()  # type: ignore[union-attr]


def sloped(net: Net, batches: dict[int, Batch], epoch: int, step: int) -> dict[int, Tensor | None]:
    embedded = {rank: embed(net, batch[0]) for rank, batch in batches.items()}
    gathered = torch.stack([hidden for hidden, _ in embedded.values()])
    common = torch.stack([out.sin() for _, out in embedded.values()]).sin().mean()
    return {rank: (gathered.mean() + (out + common).mean()) ** 2 * len(batches) for rank, (_, out) in embedded.items()}


@pytest.mark.parametrize("case", [Fit((1, 4), optimizer="sgd"), Fit((4, 0, 2), optimizer="sgd")], ids=str)
def test_gathers_in_a_gradient_of_the_step_and_in_a_checkpoint(workers: Workers, case: Fit) -> None:
    expected = joint_reference(case, sloped)
    for result in workers.run(case.world_size, fit, case, Sloped):
        assert difference(result.parameters, expected.parameters) < 1e-10


# ---------------------------------------------------------------- what raises


class GathersInAPair(JointModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden, out = embed(self.net, batch[0])
        gathered: Any = self.all_gather(hidden, group=self.pair, sync_grads=True)
        return (gathered.mean() + out.mean()) ** 2  # type: ignore[no-any-return]

    def on_fit_start(self) -> None:
        self.pair = dist.new_group([0, 1])


def test_what_cannot_be_followed_raises_on_all_ranks(workers: Workers) -> None:
    joined, active = workers.outcomes(2, fit, Fit((1, 3)), GathersInAPair)
    assert "UnsupportedError: " in active.error, active.trace
    assert "was called in another group. While some rank has finished, it needs automatic" in active.error
    assert "PeerFailedError" in joined.error
