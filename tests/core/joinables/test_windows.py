"""Windows of accumulation around which gradients are kept, cleared or changed, where ranks join amid one."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.cases import difference
from tests.support.workers import Workers
from torch_join import Join

# In which steps gradients are cleared, where the last one of each `window` syncs.
CLEARS: dict[str, Callable[[int, int], bool]] = {
    "an average kept, and cleared amid the next window": lambda step, window: step % (2 * window) in (0, window + 1),
    "cleared before a late meeting": lambda step, window: step % window in (0, 1),
    "an average kept that nobody uses": lambda step, window: step % (2 * window) == 0,
    "cleared, and used by nobody but ranks that join": lambda step, window: step % window in (0, 1),
}
LENGTHS = [((3, 5, 8), 4), ((0, 7, 8), 4), ((8, 5, 3), 2), ((3, 8, 5), 3)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.extra = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, with_extra: bool = True) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out + self.extra(x) if with_extra else out


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(1 + (rank + step) % 3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: Callable[..., Tensor], x: Tensor, kind: str, step: int, window: int, joins: bool) -> Tensor:
    """Return a loss; `joins`: the batch is the rank's last one, and others go on."""
    with_extra = joins if "ranks that join" in kind else step % (2 * window) < window or "nobody" not in kind
    return (model(x, with_extra) - 1).pow(2).mean()


def train(rank: int, kind: str, lengths: tuple[int, ...], window: int, loop: str) -> list[Tensor]:
    ddp = DistributedDataParallel(Net(), find_unused_parameters="nobody" in kind)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    options: dict[str, Any] = {"weighting": "samples"} if loop == "samples" else {"may_break": loop == "heartbeat"}
    loader = [batch(rank, step) for step in range(lengths[rank])]
    with Join([ddp, optimizer], **options) as join:
        for step, x in enumerate(loader if loop == "plain" else join.batches(loader)):
            syncs = (step + 1) % window == 0
            if CLEARS.get(kind, CLEARS["cleared before a late meeting"])(step, window):
                optimizer.zero_grad()
            with nullcontext() if syncs else ddp.no_sync():
                loss_of(ddp, x, kind, step, window, step + 1 == lengths[rank] < max(lengths)).backward()
            if syncs:
                optimizer.step()
            elif kind == "clipped":
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.covering(2)
@pytest.mark.parametrize("loop", ["sized", "heartbeat", "plain", "samples"])
@pytest.mark.parametrize(("lengths", "window"), LENGTHS)
@pytest.mark.parametrize("kind", CLEARS)
def test_it_is_what_one_process_computes(
    workers: Workers, kind: str, lengths: tuple[int, ...], window: int, loop: str
) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(max(lengths)):
        if CLEARS[kind](step, window):
            optimizer.zero_grad()
        here = {rank: batch(rank, step) for rank, length in enumerate(lengths) if step < length}
        for rank, x in here.items():
            share = len(x) / sum(map(len, here.values())) if loop == "samples" else 1 / len(lengths)
            joins = step + 1 == lengths[rank] < max(lengths)
            (loss_of(model, x, kind, step, window, joins) * share).backward()
        if (step + 1) % window == 0:
            optimizer.step()
    for parameters in workers.run(len(lengths), train, kind, lengths, window, loop):
        assert difference(parameters, [p.detach() for p in model.parameters()]) < 1e-10


@pytest.mark.parametrize("loop", ["sized", "heartbeat"])
def test_what_is_changed_amid_a_window_raises_on_all_ranks(workers: Workers, loop: str) -> None:
    for outcome in workers.outcomes(3, train, "clipped", *LENGTHS[0], loop, timeout=20.0):
        assert "A gradient was changed by hand since the last backward" in outcome.error
