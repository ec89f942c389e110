"""Buffers that a model keeps alike itself, where no wrapper does: exact where all ranks held the same, else named."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD

from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join

EPOCHS = ((1, 4), (2, 2), (3, 1))
EMPTY = ((0, 3), (2, 2), (3, 1))  # nobody has trained where the first rank joins


def inputs(epoch: int, rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * epoch + 100 * rank + step)).double()


class Codebook(nn.Module):
    """Averages over all ranks' outputs, kept alike by the model's own collective."""

    def __init__(self, wraps: bool = False) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4).double())
        self.register_buffer("size", torch.zeros(()).double())
        if wraps:
            self.register_buffer("seen", torch.zeros(4).double())  # each rank's own

    def forward(self, z: Tensor, ranks: list[Tensor] | None = None) -> Tensor:
        with torch.no_grad():
            before = self.centre.clone()
            total = z.detach().sum(0) if ranks is None else torch.stack([each.sum(0) for each in ranks]).sum(0)
            if ranks is None:
                dist.all_reduce(total)
            self.centre.mul_(0.9).add_(total, alpha=0.1)
            self.size += total.sum()
            if hasattr(self, "seen"):
                self.seen += z.detach().sum(0)
        return z - before


class Net(nn.Module):
    def __init__(self, wraps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4).double()
        self.codes = Codebook(wraps)
        self.norm = nn.BatchNorm1d(4, affine=False).double()

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)  # its statistics only: what one process would have of all ranks is another matter
        return self.codes(self.body(x)).square().mean()  # type: ignore[no-any-return]


def alone(epochs: Any) -> tuple[Tensor, Tensor]:
    """Train in one process."""
    net = Net()
    optimizer = SGD(net.body.parameters(), 0.1)
    for epoch, lengths in enumerate(epochs):
        for step in range(max(lengths)):
            there = [net.body(inputs(epoch, rank, step)) for rank, length in enumerate(lengths) if step < length]
            before = net.codes.centre.clone()
            optimizer.zero_grad()
            sum((z - before).square().mean() / len(lengths) for z in there).backward()  # type: ignore[union-attr]
            net.codes(there[0], [z.detach() for z in there])
            optimizer.step()
    return net.body.weight.detach(), net.codes.centre


def train(rank: int, kind: str, epochs: Any, options: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore", FutureWarning)
    net: Any = Net(wraps=kind == "mixed")
    model: Any = net
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # it takes long to import

        fully_shard(net)
    elif kind == "ignored":
        names = ["codes.centre", "codes.size"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        model = DistributedDataParallel(net)
    else:
        model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = SGD(model.parameters(), 0.1)
    statistics = []
    with warned("differ") as said:
        for epoch, lengths in enumerate(epochs):
            with Join([model, optimizer], **options) as join:
                batches = [inputs(epoch, rank, step) for step in range(lengths[rank])]
                for x in batches if kind == "plain" else join.batches(batches):
                    optimizer.zero_grad()
                    model(x).backward()
                    optimizer.step()
            statistics.append(net.norm.running_mean.tolist())
    weight = net.body.weight.full_tensor() if kind == "fsdp2" else net.body.weight
    return weight.detach(), net.codes.centre, statistics, said


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ddp", {}), ("ddp", {"may_break": True}), ("plain", {"audit": False}), ("ignored", {}), ("fsdp2", {})],
)
def test_what_the_model_keeps_alike_is_handed_over(workers: Workers, kind: str, options: dict[str, Any]) -> None:
    found = workers.run(2, train, kind, EPOCHS, options, deadline=180.0, timeout=60.0)
    expected = alone(EPOCHS)
    for weight, centre, _, said in found:
        assert (weight - expected[0]).abs().max() < 1e-10
        assert (centre - expected[1]).abs().max() < 1e-10
        assert said == []
    if kind != "ignored":  # whose norm DDP keeps alike
        assert found[0][2][0] != found[1][2][0]  # a norm's statistics stay each rank's own


def test_what_nobody_can_tell_is_named_once_it_differs(workers: Workers) -> None:
    for kind, epochs in (("ddp", EMPTY), ("mixed", EPOCHS)):
        (*_, said), (*_, nothing) = workers.run(2, train, kind, epochs, {})
        assert nothing == []
        assert len(said) == 1
        assert "model 0 (Net): codes.centre, " in said[0]
        assert "hand_over_buffers=True" in said[0]


@pytest.mark.parametrize("kind", ["ddp", "mixed"])
def test_the_user_can_tell(workers: Workers, kind: str) -> None:
    expected = alone(EMPTY)
    found = workers.run(2, train, kind, EMPTY, {"hand_over_buffers": True})
    for weight, centre, statistics, said in found:
        assert (weight - expected[0]).abs().max() < 1e-10
        assert (centre - expected[1]).abs().max() < 1e-10
        assert said == []
        assert statistics[-1] == found[0][2][-1]
    (own, _, _, said), (other, *_) = workers.run(2, train, kind, EPOCHS, {"hand_over_buffers": False})
    assert said == []
    assert own.equal(other)
    assert (own - alone(EPOCHS)[0]).abs().max() > 1e-4


def keep_alike(rank: int, loop: str, options: dict[str, Any], epochs: Any) -> tuple[Tensor, Tensor]:
    """Train with a buffer that each forward changes alike, without a collective."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(0)
    net = spectral_norm(nn.Linear(4, 3).double())
    ddp = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = SGD(net.parameters(), 0.3)
    with Join([ddp, optimizer], **options) as join:
        for epoch, lengths in enumerate(epochs):
            batches: Any = [inputs(epoch, rank, step) for step in range(9 if loop == "break" else lengths[rank])]
            for step, x in enumerate(join.batches(iter(batches) if loop == "stream" else batches)):
                if loop == "break" and step == lengths[rank]:
                    break
                optimizer.zero_grad()
                ddp(x).square().sum(1).mean().backward()
                optimizer.step()
    return net.parametrizations.weight.original.detach(), net.parametrizations.weight[0]._u  # type: ignore[union-attr,index]


def kept_alone(weighs: bool, epochs: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    net = spectral_norm(nn.Linear(4, 3).double())
    optimizer = SGD(net.parameters(), 0.3)
    for epoch, lengths in enumerate(epochs):
        for step in range(max(lengths)):
            x = torch.cat([inputs(epoch, rank, step) for rank, length in enumerate(lengths) if step < length])
            optimizer.zero_grad()
            (net(x).square().sum(1).sum() / (len(x) if weighs else 3 * len(lengths))).backward()
            optimizer.step()
    return net.parametrizations.weight.original.detach(), net.parametrizations.weight[0]._u  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("list", {"weighting": "samples"}),
        ("list", {"weighting": len}),
        ("stream", {"weighting": "samples"}),
        ("list", {"may_break": True}),
        ("break", {"may_break": True}),
    ],
    ids=str,
)
def test_what_a_forward_keeps_alike_is_handed_over(workers: Workers, loop: str, options: dict[str, Any]) -> None:
    epochs = ((2, 4, 4), (0, 3, 1))
    expected = kept_alone("weighting" in options, epochs)
    for weight, u in workers.run(3, keep_alike, loop, options, epochs):
        assert (weight - expected[0]).abs().max() < 1e-10
        assert (u - expected[1]).abs().max() < 1e-10


class Counting(nn.Module):
    """Counts its forwards in a buffer, which decides what they do; its weight is computed in each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.spectral_norm(nn.Linear(4, 3).double())
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        return self.body(x).square().sum(1).mean() / self.turn  # type: ignore[no-any-return]


def count_forwards(rank: int, lengths: tuple[int, ...]) -> tuple[int, list[str]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Counting(), broadcast_buffers=False)
    with warned("the ranks differ in") as said, Join([ddp]) as join:
        for x in join.batches([inputs(0, rank, step) for step in range(lengths[rank])]):
            ddp(x).backward()
    return int(ddp.module.turn), said


@pytest.mark.parametrize("lengths", [(0, 3), (1, 0, 4)], ids=str)
def test_a_counter_is_named_where_nobody_can_tell(workers: Workers, lengths: tuple[int, ...]) -> None:
    (_, said), *others = workers.run(len(lengths), count_forwards, lengths)
    assert not any(nothing for _, nothing in others)
    assert len(said) == 1
    assert "model 0 (Counting): turn, " in said[0]


def test_what_a_forward_computes_from_its_buffers_is_not_named(workers: Workers) -> None:
    assert workers.run(2, count_forwards, (2, 4)) == [(4, []), (4, [])]


def anneal(rank: int, loop: str, options: dict[str, Any]) -> tuple[int, list[str]]:
    """Change a buffer before each forward, where the ranks meet; a forward changes one of each rank's own."""
    net = Net()
    net.register_buffer("tau", torch.zeros(()))
    net.own = nn.Module()
    net.own.register_buffer("mine", torch.zeros(2))
    net.register_forward_hook(lambda net, *_: net.own.register_buffer("mine", net.own.mine + rank + 1))
    ddp = DistributedDataParallel(net, broadcast_buffers=False)
    with warned("hand_over_buffers") as said, Join([ddp], **options) as join:
        for lengths in ((2, 4), (0, 2)) if loop == "zip" else ((4, 4) if loop == "break" else (2, 4),):
            batches: Any = [inputs(0, rank, step) for step in range(lengths[rank])]
            walk = batches if loop == "plain" else join.batches(batches)
            for step, x in zip(range(len(batches)), walk, strict=False) if loop == "zip" else enumerate(walk):
                net.tau += 1
                ddp(x).backward()
                if loop == "break" and step == (1, 3)[rank]:
                    break
    return int(net.tau), said


@pytest.mark.parametrize(("loop", "options"), [("plain", {}), ("break", {"may_break": True})])
def test_what_a_step_changes_where_the_ranks_meet_is_named(
    workers: Workers, loop: str, options: dict[str, Any]
) -> None:
    (own, said), (last, nothing) = workers.run(2, anneal, loop, options)
    assert (own, last, nothing) == (2, 4, [])
    assert len(said) == 1
    assert "its own model 0 (Net): tau. Code changed" in said[0]
    assert "mine" not in said[0]
    assert workers.run(2, anneal, loop, {**options, "hand_over_buffers": True}) == [(4, []), (4, [])]


def test_what_it_changes_where_all_look_at_its_top_is_handed_over(workers: Workers) -> None:
    assert workers.run(2, anneal, "zip", {}) == [(6, []), (6, [])]
