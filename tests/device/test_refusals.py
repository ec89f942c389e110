"""What cannot be followed on an accelerator raises, and leaves nothing open."""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_join import DDPJoinStrategy
from tests.core.backward.programs import Sum, train_reentrant
from tests.needs import needs
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.inside import late_records
from tests.support.joinables import step_too_often
from tests.support.workers import WorkerError, Workers
from torch_join import Join, PeerFailedError, UnsupportedError
from torch_join._compat import ddp as compat


def exchanging(rank: int) -> str:
    """Point-to-point operations, which torch coalesces, are refused; then all ranks go on."""
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    said = ""
    with Join([ddp]) as join:
        for step in join.batches(range([1, 3, 3][rank])):
            if step == 2:
                x, other = torch.ones(2), 3 - rank
                pairs = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.ones(2), other)]
                with pytest.raises(UnsupportedError) as raised:
                    dist.batch_isend_irecv(pairs)
                said = str(raised.value)
            ddp(torch.ones(1, 2)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3
    return said


def test_a_refused_exchange_leaves_no_coalesced_group_open(devices: Workers) -> None:
    joined, *active = devices.run(3, exchanging)
    assert joined == ""
    assert all("batch_isend_irecv" in said for said in active)


def catching(rank: int) -> str:
    """A coalesced group of the user's own, in which a refusal is caught: it goes on and is ended by who began it."""
    ddp, said = DistributedDataParallel(nn.Linear(2, 1)), ""
    with Join([ddp]) as join:
        for step in join.batches(range([1, 3][rank])):
            if step == 2:
                x = torch.ones(2)
                with dist._coalescing_manager():
                    with pytest.raises(UnsupportedError) as raised:
                        dist.send(torch.ones(2), 0)
                    dist.all_reduce(x)
                said = f"{raised.value} {x.tolist()}"
            ddp(torch.ones(1, 2)).sum().backward()
    return said


def test_a_refusal_that_is_caught_inside_leaves_the_users_group_open(devices: Workers) -> None:
    if devices.device == "cuda" and os.environ.get("TORCH_JOIN_TEST_BACKEND") == "gloo":
        pytest.skip("torch: gloo has no coalesced collectives of a GPU's tensors")
    joined, active = devices.run(2, catching)
    assert joined == ""
    assert active.startswith("send was called on a process group")
    assert active.endswith("[1.0, 1.0]")


class Coalesced(Sum):
    """Passes on, and sums gradients of all ranks in a coalescing manager."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with dist._coalescing_manager(device=gradient.device):
            return Sum.backward(ctx, gradient)


def coalescing_in_backward(rank: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    with Join([ddp], weighting="samples", backward_collectives=True) as join:
        for batch in join.batches([torch.ones(1 + rank, 2)] * 2):
            loss = Coalesced.apply(ddp(batch).sum())
            with pytest.raises(UnsupportedError, match="coalescing manager") as raised:
                loss.backward()
            raise raised.value
    return ""


def test_a_coalesced_sum_of_weighted_gradients_is_refused(emulated: Workers) -> None:
    for outcome in emulated.outcomes(2, coalescing_in_backward):
        assert "called in backward under weighting='samples', inside a coalescing manager" in outcome.error


def stepping(rank: int) -> None:
    with late_records(0.5) if rank == 1 else nullcontext():
        step_too_often(rank, 1, 2)


def test_who_refuses_a_step_waits_for_what_comes_before(devices: Workers) -> None:
    # Rank 2 gets there before rank 1, which leads, has told rank 0 of the first step.
    outcomes = devices.outcomes(3, stepping)
    assert all("JoinError: torch's Join cannot handle what" in outcome.error for outcome in outcomes), outcomes


@pytest.mark.parametrize("last", [False, True])
def test_a_backward_in_a_thread_of_the_engines_that_has_another_inside(devices: Workers, last: bool) -> None:
    joined, active = devices.outcomes(2, train_reentrant, last, timeout=3.0)
    assert active.error.startswith("UnsupportedError: A backward with collectives ran inside another backward")
    assert joined.error.startswith("PeerFailedError: Rank 1 failed")


def replaying(rank: int, weighting: Any, lengths: tuple[int, ...]) -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    graph: Any = torch.cuda.CUDAGraph
    with Join([ddp], weighting=weighting) as join:
        for _ in join.batches([torch.ones(2, 2)] * lengths[rank]):
            graph.replay(object())
            ddp(torch.ones(2, 2)).sum().backward()
    return "fine"


def _replays(_: object) -> None: ...


def replay(rank: int, weighting: str, lengths: tuple[int, ...]) -> str:
    """Torch's own replay, of which there is none without CUDA, does nothing here."""
    graph: Any = torch.cuda.CUDAGraph
    own, graph.replay = graph.replay, _replays
    try:
        return replaying(rank, weighting, lengths)
    finally:
        assert graph.replay is _replays
        graph.replay = own


@pytest.mark.parametrize(("weighting", "lengths"), [("world", (1, 3)), ("samples", (3, 3))])
def test_a_cuda_graph_raises_where_collectives_are_listened_to(
    workers: Workers, weighting: str, lengths: tuple[int, ...]
) -> None:
    outcomes = workers.outcomes(2, replay, weighting, lengths, timeout=2.0)
    assert outcomes[1].error.startswith(("UnsupportedError: A CUDA graph", "PeerFailedError"))
    assert any(outcome.error.startswith("UnsupportedError: A CUDA graph") for outcome in outcomes)
    assert all("CUDA graph" in outcome.error for outcome in outcomes)


def test_a_cuda_graph_is_left_alone_on_even_inputs(workers: Workers) -> None:
    assert workers.run(2, replay, "world", (3, 3)) == ["fine", "fine"]


def capturing(rank: int) -> str:
    """As if a graph were being captured: without CUDA torch cannot say."""
    said, on_cuda = "", SimpleNamespace(is_cuda=True)
    own = torch.cuda.is_current_stream_capturing, compat.check_not_captured
    torch.cuda.is_current_stream_capturing = lambda: True
    compat.check_not_captured = lambda _: own[1](on_cuda)  # type: ignore[arg-type]
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 1))
        # A rank that has not heard yet that the loop begins is told by the other's error.
        with pytest.raises((UnsupportedError, PeerFailedError)) as raised, Join([ddp]) as join:
            for x in join.batches([torch.ones(1, 2)]):
                ddp(x).sum().backward()
        said = str(raised.value)
    finally:
        torch.cuda.is_current_stream_capturing, compat.check_not_captured = own
    return said


def test_a_capture_of_a_forward_raises(workers: Workers) -> None:
    assert all("captured a forward" in said for said in workers.run(2, capturing))


class Heads(pl.LightningModule):
    """In the first step rank 1 leaves a head out, whose gradient the others wait for; it stays until they have left."""

    def __init__(self, left: Path) -> None:
        super().__init__()
        self.left = left
        self.net, self.heads = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 1) for _ in range(2))

    def training_step(self, x: Tensor) -> Tensor:
        heads = self.heads if self.global_rank == 0 else self.heads[:1]
        return sum((head(self.net(x)).sum() for head in heads), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def cpu(self) -> "Heads":  # at the end, also of a failure
        start = time.monotonic()
        while self.global_rank == 1 and not self.left.exists() and time.monotonic() < start + 20:
            time.sleep(0.01)
        self.left.touch()
        return super().cpu()


def fit_heads(rank: int, left: Path) -> None:
    strategy = DDPJoinStrategy(gradient_as_bucket_view=True)  # else the emulator's host waits in backward
    trainer = build_trainer(Fit((2, 2), epochs=1), strategy=strategy, gradient_clip_val=None)
    start = time.monotonic()
    try:
        trainer.fit(Heads(left), DataLoader([torch.ones(1, 2)] * 2, batch_size=None))
    except RuntimeError:
        assert time.monotonic() - start < 15, "the backend's own timeout is 25 s"
        raise


@needs("a backend of one's own that can be aborted")
def test_a_rank_that_waits_for_its_device_hears_of_a_failure(emulated: Workers, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as raised:
        emulated.run(2, fit_heads, tmp_path / "left")
    assert "rank 0: PeerFailedError: " in str(raised.value)
    assert "rank 1: RuntimeError: It looks like your LightningModule has parameters that were not used" in str(
        raised.value
    )
