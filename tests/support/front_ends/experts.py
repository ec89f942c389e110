"""Experts over several ranks, on each front end: what a rank returns is checked by `check` of the same module."""

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_join.fabric import DDPJoinStrategy
from tests.support import experts
from tests.support.experts import Batch, Case, Part, Spread
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.front_ends.fabric import fabric_of, to_the_end
from torch_join import Join

Found = tuple[int, list[Tensor]]  # a rank's place among those that share the experts, and its parameters


class Stream(IterableDataset[Batch]):
    """Batches without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def batches_of(case: Case, rank: int, streams: bool) -> Any:
    return Stream(case.batches(rank)) if streams else case.batches(rank)


def plain(rank: int, case: Case, streams: bool) -> Found:
    spread = Spread(case)
    seen: list[tuple[bool, tuple[int, ...]]] = []
    with Join([spread.model, spread.optimizer], weighting=case.weighting, placeholder=case.placeholder) as join:  # type: ignore[arg-type]
        batches = join.batches(batches_of(case, rank, streams))
        spread.run(batches, lambda: seen.append((join.joined, join.active_ranks)))
    active = [tuple(r for r, n in enumerate(case.lengths) if step < n) for step in range(max(case.lengths))]
    assert seen == [(rank not in ranks, ranks) for ranks in active]
    return spread.place, spread.parameters


def fabric(rank: int, case: Case, streams: bool) -> Found:
    return to_the_end(rank, _fabric, case, streams)  # type: ignore[no-any-return]


def _fabric(rank: int, case: Case, streams: bool) -> Found:
    strategy = DDPJoinStrategy(weighting=case.weighting, placeholder=case.placeholder)  # type: ignore[arg-type]
    fabric = fabric_of(len(case.lengths), strategy)
    part = Part(case)
    part.hide(part.net)
    model, optimizer = fabric.setup(part.net, experts.make_optimizer(part.net.parameters()))
    loader: Any = DataLoader(batches_of(case, rank, streams), batch_size=None)
    for step, (x, y) in enumerate(fabric.setup_dataloaders(loader, use_distributed_sampler=False)):
        syncs = (step + 1) % case.window == 0 or strategy.at_last_step
        with fabric.no_backward_sync(model, enabled=not syncs):
            fabric.backward(experts.loss_of(case, model(x), y, part.net) / case.window)
        if syncs:
            part.before_step()
            optimizer.step()
            optimizer.zero_grad()
    return part.place, part.parameters


def accelerate(rank: int, case: Case, streams: bool) -> Found:
    with accelerator_of(rank, gradient_accumulation_steps=case.window) as accelerator:
        part = Part(case)
        part.hide(part.net)
        model, optimizer = accelerator.prepare(part.net, experts.make_optimizer(part.net.parameters()))
        loader: Any = DataLoaderShard(batches_of(case, rank, streams), batch_size=None)
        for x, y in accelerator.join_batches(loader, placeholder=case.placeholder, weighting=case.weighting):
            with accelerator.accumulate(model):
                accelerator.backward(experts.loss_of(case, model(x), y, part.net))
                if accelerator.sync_gradients:
                    part.before_step()
                optimizer.step()
                optimizer.zero_grad()
        return part.place, part.parameters


def check(case: Case, ranks: Any) -> None:
    experts.check(case, ranks)
