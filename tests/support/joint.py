"""Training in which a step's losses come from all active ranks together, or some have none."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Batch, Case, Module, Net, build_net, build_optimizer, build_scheduler, longest, weights

Losses = Callable[[Net, dict[int, Batch], int, int], dict[int, Tensor | None]]


@dataclass
class Joint:
    """What one process computes."""

    net: Net
    optimizer: Any
    lr: float
    steps: int
    updates: int = 0  # the steps of an optimizer in which some rank had a loss
    epochs: list[list[Tensor]] = field(default_factory=list)


def joint_reference(case: Case, losses: Losses) -> Joint:
    """Apply the formula to the losses of all active ranks; where all are `None`, skip as Lightning does."""
    net = build_net(case)
    optimizer = build_optimizer(case, net, sharded=False)
    scheduler = build_scheduler(case, optimizer, 0)
    steps = updates = 0
    for epoch in range(case.epochs):
        for step, row in enumerate(case.rows(epoch)):
            batches = {rank: case.batch(owner, epoch, index) for rank, (owner, index) in row.items()}
            weight = weights(case, {rank: len(batch[0]) for rank, batch in batches.items()})
            found = losses(net, batches, epoch, step)
            terms = [weight[rank] * loss / case.accumulate for rank, loss in found.items() if loss is not None]
            if step % case.accumulate == 0:
                optimizer.zero_grad()
            if terms:
                torch.stack(terms).sum().backward()
            if (step + 1) % case.accumulate == 0 or step + 1 == longest(case, epoch):
                if case.clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
                optimizer.step()
                steps += 1
                updates += bool(terms)
                if scheduler is not None:
                    scheduler.step()
    return Joint(net, optimizer.state_dict()["state"], optimizer.param_groups[0]["lr"], steps, updates)


def returns_none(case: Case, rank: int, epoch: int, step: int) -> bool:
    """A fixed pattern, in which sometimes one rank and sometimes all have no loss."""
    return (7 * rank + 5 * epoch + 3 * step + rank * step) % 5 < 2 or (epoch, step % 5) in ((0, 0), (1, 2), (1, 3))


class JointModule(Module):
    """Knows the step that it is in."""

    @property
    def place(self) -> tuple[int, int]:
        return self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
