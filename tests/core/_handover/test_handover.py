"""The handover: one rank's state replaces everybody's, bit for bit, and in place."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from tests.core._handover.states import freeze, mlp
from tests.emulator import place
from tests.support.inside import checksum, transfer_sizes
from tests.support.workers import Workers
from torch_join._compat import optimizer_state as _compat_state
from torch_join._handover.handover import hand_over
from torch_join.integration import open_channel


class Odd(nn.Module):
    """Parameters and buffers of every form: 0-dim, empty, transposed, tied, not in the state dict, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.head = nn.Linear(4, 6, bias=False)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64).conj())
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("sliced", torch.zeros(5, 8)[:, ::2])

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.mean(0)[:3].detach().float()
        self.phase = (self.phase + 1j * self.scale.detach()).resolve_conj()
        self.flag = torch.tensor(True)
        self.sliced += self.seen[0]
        hidden = inputs @ (self.transposed * self.mask) * self.scale
        return self.tied(self.head(hidden[:, :4]) @ self.head.weight) + self.empty.sum()


class Rows(nn.Module):
    """A table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs.abs().sum(1).long() % 11)


class Warmup:
    """A multiplier with a state of its own, for `LambdaLR`."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def convolutions() -> nn.Module:
    layers = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 2)
    )
    return layers.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[list[Any]], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=0.1)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    dtype: torch.dtype = torch.float32
    scaler: bool = False


def two_groups(parameters: list[Any]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}]
    return torch.optim.Adam(groups, lr=torch.tensor(0.1), foreach=False)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.LambdaLR(optimizer, Warmup()), schedulers.MultiStepLR(optimizer, [1, 2])]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.StepLR(optimizer, 1), schedulers.CyclicLR(optimizer, 1e-3, 0.1, 2, cycle_momentum=False)]
    return schedulers.ChainedScheduler(parts, optimizer)


CASES = {
    "sgd": Case(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "adam": Case(),
    "adamw": Case(optimizer=lambda p: torch.optim.AdamW(p, lr=0.1)),
    "amsgrad": Case(optimizer=lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, capturable=False)),
    "adagrad": Case(optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "rmsprop": Case(optimizer=lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5)),
    "sparse adam": Case(Rows, lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    "tensor lr, two groups": Case(optimizer=two_groups, scheduler=lambda o: schedulers.StepLR(o, 1)),
    "bfloat16": Case(dtype=torch.bfloat16),
    "lbfgs": Case(optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1)),
    "float64": Case(dtype=torch.float64),
    "batch norm, channels last": Case(convolutions),
    "odd tensors": Case(Odd),
    "StepLR": Case(scheduler=lambda o: schedulers.StepLR(o, 2)),
    "OneCycleLR": Case(scheduler=lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=20)),
    "CosineAnnealingLR": Case(scheduler=lambda o: schedulers.CosineAnnealingLR(o, 10)),
    "LambdaLR": Case(scheduler=lambda o: schedulers.LambdaLR(o, Warmup())),
    "LambdaLR of a function": Case(scheduler=lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (epoch + 1))),
    "SequentialLR": Case(scheduler=sequential),
    "ChainedScheduler": Case(scheduler=chained),
    "ReduceLROnPlateau": Case(scheduler=lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=10.0)),
    "GradScaler": Case(scaler=True),
}


class Run:
    """What a case's script has made on one rank."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = case.model()
        if case.dtype != torch.float32:
            self.model.to(case.dtype)
        self.optimizer = case.optimizer(list(self.model.parameters()))
        self.scheduler = case.scheduler(self.optimizer) if case.scheduler else None
        self.scaler = torch.amp.GradScaler(place().type, enabled=case.scaler, growth_interval=2)
        self.dtype = case.dtype

    @property
    def objects(self) -> list[Any]:
        # Not in the order in which they have to be handed over.
        return [self.scaler, *([self.scheduler] if self.scheduler else []), self.optimizer, self.model]

    def train(self, steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            inputs = torch.randn(5, 4, generator=generator).to(self.dtype)
            loss = self.model(inputs).square().mean()
            self.scaler.scale(loss).backward()
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler:
                self.scheduler.step()

    def tensors(self) -> dict[Any, Tensor]:
        named: dict[Any, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for index, entries in enumerate(self.optimizer.state.values()):
            named |= {(index, name): value for name, value in entries.items() if isinstance(value, Tensor)}
        groups = self.optimizer.param_groups
        return named | {("lr", i): g["lr"] for i, g in enumerate(groups) if isinstance(g["lr"], Tensor)}

    def frozen(self) -> Any:
        states = [self.optimizer.state.get(p) for p in self.model.parameters()]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scheduler = self.scheduler.state_dict() if self.scheduler else None
        named = [dict(self.model.named_parameters()), dict(self.model.named_buffers())]
        strides = [tensor.stride() for tensor in self.tensors().values()]  # a new tensor is laid out as the source's
        return freeze([*named, strides, states, groups, scheduler, self.scaler.state_dict()])


def hand_case_over(rank: int, name: str, source: int, steps_elsewhere: int, tiny: bool) -> Any:
    with transfer_sizes(200, 64) if tiny else nullcontext():
        run = Run(CASES[name])
        run.train(4 if rank == source else steps_elsewhere, seed=rank)
        before, tensors = run.frozen(), run.tensors()
        hand_over(run.objects, source, open_channel())
        after, kept = run.frozen(), run.tensors()
        moved = [key for key, tensor in tensors.items() if kept.get(key) is not tensor]
        digest = checksum(run.objects)
        run.train(3, seed=7)
        return before, after, run.frozen(), moved, digest, checksum(run.objects)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("world_size", "source", "steps_elsewhere", "tiny"), [(2, 1, 0, False), (3, 2, 2, True), (2, 0, 6, False)]
)
def test_every_rank_goes_on_as_the_source(
    workers: Workers, name: str, world_size: int, source: int, steps_elsewhere: int, tiny: bool
) -> None:
    found = workers.run(world_size, hand_case_over, name, source, steps_elsewhere, tiny)
    expected = found[source]
    assert expected[0] == expected[1], "the source's own state must not change"
    for rank, (before, after, later, moved, digest, later_digest) in enumerate(found):
        assert rank == source or before != after  # else this test could not fail
        assert after == expected[1]
        assert later == expected[2]
        assert later != after
        assert moved == []
        assert (digest, later_digest) == expected[4:]
        assert digest != later_digest


def drop_what_the_source_lacks(rank: int, name: str) -> Any:
    run = Run(CASES[name])
    if rank != 1:
        run.train(3, seed=rank)
    stateful = len(run.optimizer.state) > 0
    hand_over(run.objects, 1, open_channel())
    frozen, entries = run.frozen(), len(run.optimizer.state)
    run.train(2, seed=7)
    return stateful, entries, frozen, run.frozen(), checksum(run.objects)


@pytest.mark.parametrize("name", ["adam", "sgd", "lbfgs", "GradScaler", "batch norm, channels last"])
def test_a_source_that_never_stepped_takes_the_others_back(workers: Workers, name: str) -> None:
    found = workers.run(3, drop_what_the_source_lacks, name)
    assert [stateful for stateful, *_ in found] == [True, False, True]
    assert all(result[1:] == found[1][1:] for result in found)
    assert found[0][1] == 0


def test_the_private_names_of_torch_are_there() -> None:
    model = nn.BatchNorm1d(2)
    assert "_non_persistent_buffers_set" in vars(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = schedulers.StepLR(optimizer, 1)
    assert not _compat_state.was_stepped(optimizer)
    optimizer.step()
    assert _compat_state.was_stepped(optimizer)
    assert scheduler.optimizer is optimizer
    scaler = torch.amp.GradScaler(place().type)
    assert vars(scaler)["_scale"] is None
    scaler.scale(torch.ones(()))
    assert _compat_state.scale_device(scaler) == "cpu"
    assert not _compat_state.has_own_state(optimizer)
    hooks = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    assert all(isinstance(getattr(optimizer, f"_optimizer_{hook}_hooks"), dict) for hook in hooks)
    optimizer.register_state_dict_post_hook(lambda _, state: state)
    assert _compat_state.has_own_state(optimizer)
    assert not _compat_state.is_sharded(optimizer)
