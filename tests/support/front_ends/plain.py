"""A `Run` in a plain loop, under our `Join` or torch's."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.support.collectives import averages
from tests.support.run import (
    TOLERANCE,
    Batch,
    Expected,
    Run,
    Training,
    add_gradients,
    difference,
    flatten,
    same_bits,
    whole_state,
)
from torch_join import Join, JoinableModel, JoinableOptimizer, JoinableState

PLAIN_EPOCHS, PLAIN_STEPS = 3, 2  # of DDP without any Join, afterwards
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# What a random loop's step may do with others.
COLLECTIVES = (None, *(kind for kind in REDUCTIONS if kind != "avg" or averages()), "all_gather", "objects", "barrier")


@dataclass(frozen=True)
class Loop(Run):
    """A run, and what a loop of one's own may do besides."""

    rest: str = "dropped"
    loop: str = "sized"  # or "iterable", "wrong length", "plain", "heartbeat"
    collective: str | None = None  # in each step: one of REDUCTIONS, "all_gather", "objects" or "barrier"
    asynchronous: bool = False
    grouped: bool = False  # the collective is on a process group of its own
    one_context: bool = False  # one `with` for all epochs
    leaves: bool = False  # by `break`, before the loader's end

    def __post_init__(self) -> None:
        object.__setattr__(self, "ragged", self.ragged or self.weighting in ("samples", "count"))
        object.__setattr__(self, "iterable", self.iterable or self.loop == "iterable")
        object.__setattr__(self, "may_break", self.may_break or self.loop == "heartbeat")

    def wrap(self, net: Any) -> tuple[list[nn.Module], Any]:
        """Return the models of DDP, and what is called."""
        if self.loss == "two models":
            encoder, head = models = [DistributedDataParallel(part, **self.ddp) for part in net.parts()]
            return [*models], lambda x: head(encoder(x))
        model = DistributedDataParallel(torch.compile(net, backend="eager") if self.compiled else net, **self.ddp)
        return [model], model

    def losses_with(self, join: Any, model: Any, batch: Batch, rank: int, epoch: int, step: int) -> Iterator[Tensor]:
        """Yield the losses of a step, with what knows which ranks are active."""
        return self.losses(model, batch, rank, epoch, step)

    def breaks(self, rank: int, epoch: int, step: int) -> bool:
        """Whether the loop is left after a step."""
        return step + 1 == (self.lengths_in(epoch)[rank] if self.leaves else self.stops)


def go_on(expected: Expected) -> list[Tensor]:
    """Have the reference do the epochs of plain DDP."""
    training, run = expected.training, expected.training.run
    everyone = range(run.world_size)
    for epoch in range(50, 50 + PLAIN_EPOCHS):
        for step in range(PLAIN_STEPS):
            training.net.zero_grad()
            batches = {rank: run.batch(rank, epoch, step) for rank in everyone}
            add_gradients(training, batches, dict.fromkeys(everyone, 1 / run.world_size), epoch, step)
            training.update(epoch, step)
            training.schedule("step", True, step)
    return expected.parameters


class Stream(IterableDataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Claims:
    """A sized loader that does not hold what its length says, and takes `seconds` for a batch."""

    def __init__(self, batches: list[Batch], claimed: int, seconds: float = 0.0) -> None:
        self.batches, self.claimed, self.seconds = batches, claimed, seconds

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


@dataclass
class Outcome:
    """What one rank holds after training."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    optimizer: Any
    scheduler: Any
    lr: Any
    flags: list[bool]  # which parameters are trained
    scaler: dict[str, Any] = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)  # by epoch
    exchanged: list[list[tuple[float, Any]]] = field(default_factory=list)  # by epoch and loss: given, got
    plain: "Outcome | None" = None  # after the epochs of plain DDP


def train(rank: int, run: Loop, joins: str = "ours", plain: bool = False) -> Outcome:
    """Train under our `Join`, or torch's, and then perhaps for some epochs of even inputs under none.

    `joins` is "ours", "torch", or one of these with our joinables: "our joinables", "torch's with joinables".
    """
    net = run.build()
    wrapped, model = run.wrap(net)
    training = Training(run, net, sharded=True)
    group = dist.new_group() if run.grouped else None
    evaluated: list[float] = []
    exchanged: list[list[tuple[float, Any]]] = []

    def train_epoch(join: Any, epoch: int) -> None:
        batches = run.batches(rank, epoch)
        exchanged.append([])
        for step, batch in enumerate(loop(run, join, [*batches, *batches[: 1 + rank]] if run.leaves else batches)):
            training.begin_step(epoch, step)
            with ExitStack() as unsynced:
                for ddp in () if run.ends_window(epoch, step) else wrapped:
                    unsynced.enter_context(ddp.no_sync())  # type: ignore[operator]
                for loss in run.losses_with(join, model, batch, rank, epoch, step):
                    exchanged[-1].append((loss.item(), exchange(run, loss, group)))
                    training.backward(loss)
            training.end_step(epoch, step)
            if run.breaks(rank, epoch, step):
                break
        if run.evaluation:
            with torch.inference_mode() if run.evaluation == "inference" else nullcontext():
                evaluated.append(training.evaluate(model, loop(run, join, run.evaluated(rank, epoch))))

    with context(run, joins, wrapped, training) if run.one_context else nullcontext() as outer:
        for epoch in range(run.epochs):
            training.begin_epoch(epoch)
            with nullcontext(outer) if run.one_context else context(run, joins, wrapped, training) as join:
                train_epoch(join, epoch)
            training.end_epoch()
    outcome = outcome_of(rank, training, wrapped)
    outcome.evaluated, outcome.exchanged = evaluated, exchanged
    if plain:
        for epoch in range(50, 50 + PLAIN_EPOCHS):
            for step in range(PLAIN_STEPS):
                training.net.zero_grad()
                for loss in run.losses(model, run.batch(rank, epoch, step), rank, epoch, step):
                    training.backward(loss)
                training.update(epoch, step)
                training.schedule("step", True, step)
        outcome.plain = outcome_of(rank, training)
    return outcome


def outcome_of(rank: int, training: Training, wrapped: Sequence[nn.Module] = ()) -> Outcome:
    """Gather what there is; all ranks call this."""
    net = training.net
    with ExitStack() as stack:
        for model in wrapped:
            if isinstance(model, FullyShardedDataParallel):
                stack.enter_context(FullyShardedDataParallel.summon_full_params(model))
        parameters = [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in net.parameters()]
    schedulers = [{k: v for k, v in each.state_dict().items() if not callable(v)} for each in training.schedulers]
    return Outcome(
        parameters,
        [b.clone() for b in net.buffers()],
        {index: whole_state(rank, optimizer) for index, optimizer in enumerate(training.optimizers)},
        schedulers,
        training.rates,
        [p.requires_grad for p in net.parameters()],
        {} if training.scaler is None else training.scaler.state_dict(),
    )


def context(run: Loop, joins: str, wrapped: list[nn.Module], training: Training) -> AbstractContextManager[Any]:
    others = [*training.schedulers, *([] if training.scaler is None else [training.scaler])]
    if joins.endswith("joinables"):
        given: list[Any] = [*map(JoinableModel, wrapped), *map(JoinableOptimizer, training.optimizers)]
        given += map(JoinableState, others)
        if joins == "our joinables":
            return Join(given, weighting=run.weighting)  # type: ignore[arg-type]
        options: dict[str, Any] = {"divide_by_initial_world_size": run.weighting == "world"}
        return TorchJoin(given, **({"weighting": "samples"} if run.weighting == "samples" else options))  # type: ignore[return-value]
    if joins == "torch":
        sharded = [optimizer for optimizer in training.optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]
        return TorchJoin([*wrapped, *sharded], divide_by_initial_world_size=run.weighting == "world")  # type: ignore[list-item]
    options = {"may_break": run.may_break, "rebalance": run.rebalance, "placeholder": run.placeholder, **run.extra}
    return Join([*wrapped, *training.given], weighting=run.option, **options)


def loop(run: Loop, join: Any, batches: list[Batch]) -> Iterable[Batch]:
    if run.loop == "plain" or not isinstance(join, Join):
        return batches
    if run.iterable:
        return join.batches(DataLoader(Stream(batches), batch_size=None))
    if run.loop == "wrong length":
        claimed = len(batches) + (-1 if len(batches) % 3 == 1 else 2)
        return join.batches(Claims(batches, claimed, seconds=0.02 * (len(batches) % 2)))
    return join.batches(batches)


def exchange(run: Loop, value: Tensor, group: Any) -> Any:
    """The collective of a step, as a user would write it."""
    value, world_size = value.detach(), dist.get_world_size()
    kind, asynchronous = run.collective, run.asynchronous
    work: Any = None
    result: Any = None
    if kind in REDUCTIONS:
        result = value.clone()
        work = dist.all_reduce(result, REDUCTIONS[kind], group=group, async_op=asynchronous)
    elif kind == "all_gather":
        result = [torch.zeros_like(value) for _ in range(world_size)]
        work = dist.all_gather(result, value, group=group, async_op=asynchronous)
    elif kind == "objects":
        result = [None] * world_size
        dist.all_gather_object(result, {"loss": value.item()}, group=group)
    elif kind == "barrier":
        work = dist.barrier(group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
    if kind == "all_gather":
        return [tensor.item() for tensor in result]
    return result.item() if kind in REDUCTIONS else result


def tensors_of(outcome: Outcome) -> list[Tensor]:
    """All tensors that must be the same on all ranks."""
    return [*outcome.parameters, *flatten(outcome.optimizer)]


def assert_same_bits(outcomes: Sequence[Outcome], buffers: bool = True) -> None:
    first = outcomes[0]
    for other in outcomes[1:]:
        assert same_bits(tensors_of(first), tensors_of(other))
        assert not buffers or same_bits(first.buffers, other.buffers)
        assert (first.lr, first.scheduler, first.scaler) == (other.lr, other.scheduler, other.scaler)


def assert_exact(outcomes: Sequence[Outcome], expected: Expected) -> None:
    run = expected.training.run
    # After a last step of all ranks each has its own buffers until the next forward, as in plain DDP.
    assert_same_bits(outcomes, buffers=not run.rebalance)
    assert difference(outcomes[0].parameters, expected.parameters) < TOLERANCE
    assert outcomes[0].lr == expected.training.rates
    assert outcomes[0].scaler == expected.scaler
    if run.model == "norm":
        assert difference(outcomes[0].buffers, expected.buffers) < TOLERANCE
    for outcome, losses in zip(outcomes, expected.losses, strict=True):
        assert outcome.evaluated == pytest.approx(losses, rel=1e-10)


def parameters(rank: int, run: Run) -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    return train(rank, Loop(**vars(run))).parameters
