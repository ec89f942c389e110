"""What makes ranks drift apart is named, whatever it is; what differs on purpose is not."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler

from tests.emulator import place
from tests.support.inside import PLACES_PLACE, SET_TRAINING_PLACE
from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join
from torch_join._handover import optimizers as _optimizers
from torch_join._handover.audit import Audit
from torch_join._handover.digest import checksums
from torch_join.integration import Channel

UNEVEN = ((2, 4), (3, 3), (4, 1))


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 1)
        self.unused = nn.Linear(1, 1) if options.get("unused") else None
        self.accuracy = torchmetrics.MeanMetric() if options.get("metric") else None
        self.calls = 0
        self.counts = options.get("counts")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += bool(self.counts)
        hidden = self.norm(self.first(x))
        if self.accuracy is not None:
            self.accuracy.update(hidden.detach().mean())
        result: Tensor = self.second(torch.dropout(hidden, 0.5, train=self.training))
        return result


class Counting(SGD):
    """Its rate falls by a counter that is in no state dict."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.param_groups[0]["momentum"] = 0.5 / self.count
        super().step(closure)


class Wrapper(SGD):
    """Its state is in an optimizer that it wraps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, 0.9)
        self.inner = SGD(self.param_groups, 0.1, 0.9)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


class Holder:
    """Something of the user's with a state."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave all as it is."""


def falling() -> Callable[[], float]:
    calls = 0

    def factor() -> float:
        nonlocal calls
        calls += 1
        return 1 / calls

    return factor


# What the handover has learnt, and forgets.
OLD_HANDOVER: dict[str, Any] = {
    "master weights": (*PLACES_PLACE, lambda _: iter(())),
    "a wrapped optimizer": (_optimizers, "with_wrapped", lambda optimizer: [optimizer]),
    "flags": (*SET_TRAINING_PLACE, lambda *_: None),
}


def drift(rank: int, kind: str, audit: Any, epochs: Any) -> list[str]:
    with mock.patch.object(*OLD_HANDOVER[kind]) if kind in OLD_HANDOVER else nullcontext():
        return run(rank, kind, audit, epochs)


def run(rank: int, kind: str, audit: Any, epochs: Any) -> list[str]:
    torch.manual_seed(0)
    model = Net(counts=kind == "an attribute of a module")
    ddp = DistributedDataParallel(model)
    factor = falling()
    torch.manual_seed(rank)
    optimizer: Any = Counting(ddp.parameters(), 0.1) if kind == "an attribute of an optimizer" else None
    optimizer = Wrapper(ddp.parameters()) if kind == "a wrapped optimizer" else optimizer or SGD(ddp.parameters(), 0.1)
    masters = [p.detach().clone() for p in ddp.parameters()]
    if kind == "master weights":
        optimizer = SGD(masters, 0.1)
    things: list[Any] = [ddp, optimizer]
    holder = Holder(temperature=1.0)
    if kind == "an object":
        things.append(holder)
    with warned("the ranks") as said, Join(things, audit=audit) as join:
        for lengths in epochs:
            for step in join.batches(range(lengths[rank])):
                if kind == "flags" and step == 3:
                    model.norm.eval()
                optimizer.zero_grad()
                ddp(torch.randn(3, 2)).square().mean().backward()
                if kind == "a closure in the loop":
                    for p in ddp.parameters():
                        p.grad.mul_(factor())  # type: ignore[union-attr]
                if kind == "master weights":
                    ddp.zero_grad()
                    ddp(torch.randn(3, 2)).square().mean().backward()
                    for master, p in zip(masters, ddp.parameters(), strict=True):
                        master.grad = p.grad
                optimizer.step()
                if kind == "master weights":
                    for master, p in zip(masters, ddp.parameters(), strict=True):
                        p.data.copy_(master)
                holder.temperature *= 0.5
    return said


DRIFTS = {
    "a closure in the loop": "When rank 1 ran out of inputs, the ranks already differed in .*: first.weight, ",
    "master weights": "When rank 1 ran out of inputs, the ranks already differed in .*: first.weight, ",
    "an attribute of an optimizer": r"differ in optimizer 0 \(Counting\): .count \(2 on rank 0, 4 on rank 1\)",
    "an attribute of a module": r"the ranks differ in model 0 .*: .calls \(2 on rank 0, 4 on rank 1\)",
    "an object": r"the ranks differ in other 0 \(Holder\): .temperature \(0.25 on rank 0, 0.0625 on rank 1\)",
    "a wrapped optimizer": r"the ranks differ in optimizer 0 \(Wrapper\): optimizer 1 in it \(SGD\): .state\[0\]",
    "flags": r"handover, the ranks still differ in model 0 .*: training\['module.norm'\] \(True on rank 0, False",
}


@pytest.mark.parametrize("kind", DRIFTS)
def test_what_makes_ranks_drift_is_named(workers: Workers, kind: str) -> None:
    epochs = UNEVEN if "first.weight" in DRIFTS[kind] else UNEVEN[:1]
    said, nothing = workers.run(2, drift, kind, "tail", epochs)
    assert nothing == []  # one rank speaks for all
    with pytest.warns(UserWarning, match=DRIFTS[kind]):
        warnings.warn("\n".join(said), stacklevel=1)
    assert len(said) == 1
    assert workers.run(2, drift, kind, False, epochs) == [[], []]


class Ticks(Holder):
    """Something with a state, in a module."""

    ticks = 0

    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self.ticks}


class Attributes(nn.Linear):
    """Its forward changes attributes of all kinds alike on all ranks, and some that are each rank's own."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.calls, self.array, self.names = 0, numpy.zeros(2), {"0"}
        self.data, self.ticks, self.losses, self.own = b"", Ticks(), [0.0], numpy.zeros(2)
        self.listed = [nn.Linear(1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.array, self.data = self.array + 1, self.data + b"x"
        self.names.add(str(self.calls))
        self.ticks.ticks += 1
        self.losses[0], self.own = float(x.sum()), self.own + float(x.sum())
        with torch.no_grad():
            self.listed[0].weight += 1
        if self.calls == 4:
            self.scale = 0.5
        self.seen = x.detach()
        return super().forward(x)


def count_in_attributes(rank: int, options: dict[str, Any], loop: str, lengths: Any) -> list[str]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Attributes())
    temperature = nn.Parameter(torch.ones(1))
    optimizer = SGD([*ddp.parameters(), temperature], 0.1)
    torch.manual_seed(rank)
    batches: Any = [torch.randn(3, 6) for _ in range(lengths[rank])]
    if loop == "break":  # where others have run out
        batches = [*batches, *batches[:1], *batches[:1]]
    with warned("the ranks") as said, Join([ddp, optimizer], **options) as join:
        for step, x in enumerate(batches if loop == "for" else join.batches(iter(batches) if loop else batches)):
            if loop == "break" and step == lengths[rank]:
                break
            if loop not in ("break", "for"):  # there the ranks meet after this
                temperature.data.mul_(0.9)
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    return said


KINDS_OF_LOOPS = [
    ({}, ""),
    ({"weighting": "samples"}, ""),
    ({"weighting": len}, ""),
    ({"weighting": "samples"}, "stream"),
    ({"may_break": True}, ""),
    ({"may_break": True}, "break"),
    ({}, "for"),
]


@pytest.mark.parametrize(("options", "loop"), KINDS_OF_LOOPS, ids=str)
def test_an_attribute_is_named_in_each_kind_of_loop(workers: Workers, options: dict[str, Any], loop: str) -> None:
    said, *nothing = workers.run(3, count_in_attributes, options, loop, (2, 5, 5))
    assert nothing == [[], []]
    assert len(said) == 1
    for name in ("array", "data", "listed[0].weight", "calls", "ticks.state_dict()['ticks']", "names"):
        assert f".{name}" in said[0], name
    assert ".scale (missing on rank 0, 0.5 on rank 1, 0.5 on rank 2)" in said[0]
    assert not any(word in said[0] for word in (".losses", ".own", ".seen", "already differed"))


@pytest.mark.parametrize("loop", ["", "stream"])
def test_what_a_step_changes_before_the_ranks_meet_is_no_difference(workers: Workers, loop: str) -> None:
    said, _ = workers.run(2, count_in_attributes, {"weighting": "samples"}, loop, (0, 2))
    assert not any("already differed" in text for text in said)


def test_even_loops_are_looked_at_if_asked(workers: Workers) -> None:
    epochs = (*UNEVEN[:1], (3, 3), (2, 2))
    said, _ = workers.run(2, drift, "a closure in the loop", True, epochs)
    assert len(said) == 2
    assert said[0].startswith("After an even loop, the ranks already differed in model 0")
    assert workers.run(2, drift, "a closure in the loop", "tail", epochs) == [[], []]


class Loader:
    """Where it is differs by rank."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        for self.position in range(5):
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Progress:
    """Its counts begin as its class has them."""

    steps = epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps, self.epochs = state["steps"], state["epochs"]


LEGITIMATE = [
    "nothing",
    "each rank's own buffers",
    "random numbers",
    "a rank that never trains",
    "a metric",
    "a metric inside the model",
    "a sharded optimizer",
    "ignored parameters",
    "signs of zero",
    "kinds of NaN",
    "an attribute with the rank",
    "a counter that differed before",
    "clocks",
    "a default of a class",
    "accumulation that is not over",
    "an evaluation after accumulation",
    "gradients cleared first",
    "gradients kept",
    "parameters without a gradient",
    "a frozen layer",
    "the order of attributes",
    "a loader",
    "a sampler",
    "generators",
    "a communication hook's state",
    "a scheduler stepped first",
    "a heartbeat",
    "weighting by samples",
    "a plain for",
    "an evaluation on one rank",
    "a scaler",
]


def legitimate(rank: int, kind: str, lengths: Any) -> list[str]:
    torch.manual_seed(0)
    model = Net(metric=kind == "a metric inside the model", unused=kind == "parameters without a gradient")
    if kind == "ignored parameters":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["second.weight", "second.bias"])
        nn.init.constant_(model.second.weight, 0.1 + rank)
    if kind in ("signs of zero", "kinds of NaN"):
        model.first.requires_grad_(False)
    if kind == "a frozen layer":
        model.second.requires_grad_(False)
    options = {"broadcast_buffers": False} if kind == "each rank's own buffers" else {}
    ddp = DistributedDataParallel(model, find_unused_parameters=kind == "parameters without a gradient", **options)
    torch.manual_seed(rank)
    with torch.no_grad():
        if kind in ("signs of zero", "kinds of NaN"):
            odd = [0.0, -0.0] if kind == "signs of zero" else [float("nan"), -float("nan")]
            model.first.weight[0, 0] = odd[rank]
    sharded = kind == "a sharded optimizer"
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    optimizer: Any = ZeroRedundancyOptimizer(parameters, Adam, lr=0.1) if sharded else Adam(parameters, 0.1)
    scaler = torch.amp.GradScaler(place().type, enabled=kind == "a scaler", growth_interval=2)
    scheduler = StepLR(optimizer, 2)
    things: list[Any] = [ddp, optimizer, scheduler, scaler]
    metric = torchmetrics.MeanMetric()
    loader = Loader()
    things += {"a metric": [metric], "a loader": [loader]}.get(kind, [])
    if kind == "a sampler":
        things.append(Holder(sampler=DistributedSampler(list(range(9))), rank=rank))
    if kind == "generators":
        things.append(Holder(generator=torch.Generator().manual_seed(rank)))
    if kind == "an attribute with the rank":
        model.rank, optimizer.rank = rank, rank
    if kind == "a communication hook's state":
        ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1), powerSGD_hook)
    if kind == "the order of attributes":
        things.append(Holder(**{"ab"[rank]: 1, "ba"[rank]: 1}))
    holder = Holder(seen=rank, started=time.time() + rank)  # as on two hosts
    progress = Progress()
    things += [progress] if kind == "a default of a class" else []
    things += [holder] if kind in ("a counter that differed before", "clocks") else []
    lengths = (0, 3) if kind == "a rank that never trains" else lengths
    may_break = kind in ("a heartbeat", "gradients cleared first", "a scheduler stepped first")
    weighting: Any = "samples" if kind == "weighting by samples" else "world"
    with warned("the ranks") as said:
        for _ in range(2):
            with Join(things, audit=True, may_break=may_break, weighting=weighting) as join:
                batches = range(lengths[rank])
                for step in batches if kind == "a plain for" else join.batches([torch.randn(3, 2) for _ in batches]):
                    del step
                    holder.seen, holder.started = holder.seen + 1, time.time() + rank
                    progress.steps += 1
                    if kind == "a scheduler stepped first":
                        scheduler.step()
                    if kind == "a loader":
                        next(iter(loader))
                    if kind != "gradients kept":
                        optimizer.zero_grad()
                    syncs = "accumulation" not in kind or join.step % 2 == 0
                    with nullcontext() if syncs else ddp.no_sync():
                        scaler.scale(ddp(torch.randn(3, 2)).square().mean()).backward()
                    if syncs:
                        scaler.step(optimizer)
                        scaler.update()
                    if kind == "gradients kept":
                        optimizer.zero_grad()
                    metric.update(torch.tensor(float(rank)))
                    if kind == "an evaluation on one rank" and rank == join.active_ranks[0]:
                        model.eval()
                        model(torch.randn(3, 2))
                        model.train()
                    if kind != "a scheduler stepped first":
                        scheduler.step()
                with torch.no_grad():
                    for _ in join.batches(range(3 - rank)) if kind == "an evaluation after accumulation" else ():
                        ddp(torch.randn(3, 2))
    return said


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_what_differs_on_purpose_is_not_named(workers: Workers, kind: str) -> None:
    assert workers.run(2, legitimate, kind, (2, 5)) == [[], []]
    assert workers.run(2, legitimate, kind, (4, 1)) == [[], []]


class Counter(Channel):
    """Counts messages."""

    gathered = 0

    def gather(self, value: Any, of: Any = Any) -> list[Any]:
        self.gathered += 1
        return [value]


def test_it_is_one_message_where_nothing_differs_and_none_where_it_is_off() -> None:
    model = Net()
    for often, messages in (("tail", 1), (True, 1), (False, 0)):
        channel, audit = Counter(), Audit([model], often, None)  # type: ignore[arg-type]
        audit.begin([1], settled=True)
        audit.end(channel, audit.local(channel), has_gradients=True)
        assert channel.gathered == messages
        audit.even(channel, has_gradients=True)
        assert channel.gathered == messages + (often is True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_a_digest_weighs_every_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(50, 8192) * 9).to(dtype)
    first = checksums([x])
    order = torch.randperm(50)
    swapped = x.clone()
    swapped[:, [0, 4096]] = swapped[:, [4096, 0]]
    changes = [x[order], x.flip(1), -x, swapped, torch.cat([x[1:], x[:1]])]
    assert len({*(checksums([change])[0] for change in changes), *first}) == 6
    assert checksums([x.t().contiguous().t()]) == first
    eye = torch.eye(50, dtype=dtype)
    assert checksums([eye]) != checksums([eye[order]])
