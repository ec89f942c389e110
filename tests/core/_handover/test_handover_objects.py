"""The handover of what one case's script does not hold: many objects, sharded and custom ones, and misuse."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, StepLR

from tests.core._handover.states import Holder, freeze, mlp
from tests.emulator import place
from tests.needs import known
from tests.support.inside import checksum, transfer_sizes
from tests.support.workers import Workers
from torch_join._handover.handover import hand_over
from torch_join.integration import open_channel


class Average:
    """A custom object: tensors at all depths of its state, one of them twice, and one that appears in time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.history: list[Any] = []
        self.best = self.weights[0]

    def step(self) -> None:
        for mean, parameter in zip(self.weights, self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        self.history.append({"norm": self.weights[0].norm(), "names": ("a", {1: torch.tensor([True])})})

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "history": self.history, "best": self.best, "model": self.model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["model"] is self.model  # every rank keeps its own
        self.__dict__.update(state)


def step(model: nn.Module, *steppers: Any, seed: int = 0) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().mean().backward()
    for stepper in steppers:
        stepper.step()
    model.zero_grad()


def hand_several_over(rank: int) -> Any:
    torch.manual_seed(rank)  # nothing is alike at first
    encoder, head = mlp(), nn.Linear(3, 3)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(head, ["bias"])
    ddp = DistributedDataParallel(head, **known(DistributedDataParallel, init_sync=False))
    optimizers = [torch.optim.SGD(encoder.parameters(), 0.1, 0.9), torch.optim.Adam(ddp.parameters())]
    average = Average(encoder)
    if rank == 1:
        for seed in range(3):
            step(nn.Sequential(encoder, head), *optimizers, average, seed=seed)
    bias = head.bias.clone()
    objects = [average, optimizers[1], ddp, optimizers[0], encoder]
    hand_over(objects, 1, open_channel())
    assert torch.equal(head.bias, bias)
    assert average.best is average.weights[0]
    groups = [[o.state[p] for p in o.param_groups[0]["params"] if p is not head.bias] for o in optimizers]
    kept = freeze([dict(encoder.named_parameters()), head.weight, groups, average.weights, average.history])
    for tensor in average.weights:
        tensor.add_(1)  # nothing that was handed over is shared with a model
    return kept, len(average.history), freeze(dict(encoder.named_parameters())), checksum(objects)


def test_several_models_optimizers_and_a_custom_object(workers: Workers) -> None:
    first, second, third = workers.run(3, hand_several_over)
    assert first == second == third
    assert first[1] == 3


def shard_over(rank: int, tensor_lr: bool) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = mlp()
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=lr, foreach=False, parameters_as_bucket_view=True
    )
    scheduler = StepLR(zero, 1)
    step(model, zero)
    shard = freeze([zero.optim.state[p] for p in zero.optim.param_groups[0]["params"]])
    if rank == 1:
        scheduler.step()
        zero.param_groups[0]["betas"] = (0.5, 0.6)
        zero.param_groups[0]["mine"] = "new"
        zero.optim.param_groups[0]["weight_decay"] = 0.5
    zero.state[model[0].weight] = rank  # as after `zero.load_state_dict`: of no use to other ranks
    own = [zero.param_groups[0]["params"], zero.optim.param_groups[0]["params"], zero.optim.param_groups[0]]
    hand_over([scheduler, zero, model], 1, open_channel())
    assert own[0] is zero.param_groups[0]["params"]
    assert own[1] is zero.optim.param_groups[0]["params"]
    assert own[2] is zero.optim.param_groups[0]
    assert zero.state[model[0].weight] == rank
    assert shard == freeze([zero.optim.state[p] for p in zero.optim.param_groups[0]["params"]])
    groups = [{k: v for k, v in g[0].items() if k != "params"} for g in (zero.param_groups, zero.optim.param_groups)]
    groups_before = freeze(groups)
    step(model, zero, scheduler, seed=1)
    return groups_before, freeze(dict(model.named_parameters())), scheduler.get_last_lr(), shard


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_sharded_optimizer_keeps_its_shard_and_takes_the_hyperparameters(workers: Workers, tensor_lr: bool) -> None:
    first, second = workers.run(2, shard_over, tensor_lr)
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    groups, inner = first[0][1]
    assert (groups["mine"], groups["weight_decay"], inner["weight_decay"]) == ("'new'", "0", "0.5")


class Gradual(LRScheduler):
    """As many users write it: it holds the scheduler that follows, and more than a state should."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.after = StepLR(optimizer, 1)
        self.model = model
        self.counts = Counter([1])
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.after.last_epoch += 1
        self.counts[self.last_epoch] += 1
        return [0.1 * self.after.last_epoch for _ in self.base_lrs]


def hand_nested_scheduler_over(rank: int) -> Any:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = Gradual(optimizer, model)
    if rank == 0:
        for seed in range(3):
            step(model, optimizer, scheduler, seed=seed)
    after = scheduler.after
    hand_over([scheduler, optimizer, model], 0, open_channel())
    assert scheduler.optimizer is optimizer
    assert scheduler.after is after
    assert after.optimizer is optimizer
    assert scheduler.model is model
    step(model, optimizer, scheduler)
    return (
        optimizer.param_groups[0]["lr"],
        scheduler.last_epoch,
        after.last_epoch,
        scheduler.counts,
        type(scheduler.counts),
    )


def test_a_scheduler_keeps_its_own_objects(workers: Workers) -> None:
    first, second = workers.run(2, hand_nested_scheduler_over)
    assert first == second
    assert first[1] == 4


def epoch_schedule(rank: int) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler, scaler = StepLR(optimizer, 1), torch.amp.GradScaler(place().type)
    if rank == 1:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    hand_over([model, optimizer, scheduler, scaler], 1, open_channel())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    scaler._check_scale_growth_tracker("update")
    return str(scaler.state_dict())


def test_a_rank_without_a_batch_is_as_if_it_had_stepped(workers: Workers) -> None:
    # Else torch warns that the scheduler steps before the optimizer, and `scaler.update` raises.
    first, second = workers.run(2, epoch_schedule)
    assert first == second


class Lazy(nn.Module):
    """Buffers that come, go and grow, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("late", None)
        self.register_buffer("early", torch.ones(3))
        self.register_buffer("growing", torch.zeros(0))
        self.register_buffer("repeated", torch.zeros(4, 6))
        self.register_buffer("twin", torch.zeros(4))
        self.register_buffer("images", torch.zeros(2, 3, 3, 5))
        self.register_buffer("cache", torch.zeros(3))
        self.note = {"text": "", "tensor": torch.zeros(1)}

    def run(self) -> None:
        self.late, self.early = torch.full((2,), 5.0), None
        self.growing = self.twin = torch.ones(4)
        self.repeated = torch.arange(6.0).expand(4, 6)
        self.images = torch.arange(90.0).view(2, 3, 3, 5).to(memory_format=torch.channels_last)
        with torch.inference_mode():
            self.cache = torch.ones(3)
        self.register_buffer("made", torch.ones(1), persistent=False)
        self.note = {"text": "ran", "tensor": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@contextmanager
def broadcast_sizes() -> Iterator[list[int]]:
    sizes: list[int] = []
    broadcast = dist.broadcast

    def record(tensor: Tensor, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return broadcast(tensor, **kwargs)

    dist.broadcast = record
    try:
        yield sizes
    finally:
        dist.broadcast = broadcast


def hand_lazy_over(rank: int, source: int) -> Any:
    model = nn.Sequential(Lazy())
    if rank == 1:
        model[0].run()
    with broadcast_sizes() as sizes:
        hand_over([model], source, open_channel())
    assert len({str(found) for found in open_channel().gather(sizes)}) == 1  # gloo does not mind, NCCL does
    return (
        freeze([dict(model.named_buffers(remove_duplicate=False)), model[0].note]),
        sorted(model.state_dict()),
        checksum([model]),
    )


@pytest.mark.parametrize("large", [4 * 2**20, 8])
@pytest.mark.parametrize("source", [0, 1])
def test_buffers_come_go_grow_and_change_their_layout(workers: Workers, source: int, large: int) -> None:
    first, second, third = workers.run(3, with_large, large, hand_lazy_over, source)
    assert first == second == third
    assert ("0.late" in first[1], "0.made" in first[1], "0.early" in first[1]) == (source == 1, False, source == 0)


def with_large(rank: int, large: int, function: Callable[..., Any], *args: Any) -> Any:
    with transfer_sizes(large=large):
        return function(rank, *args)


def hand_sparse_over(rank: int) -> Any:
    holder = Holder([torch.eye(2 + rank).to_sparse(), torch.eye(2 + rank).to_sparse_csr()])
    hand_over([holder], 1, open_channel())
    return [(str(tensor.layout), tensor.to_dense().tolist()) for tensor in holder.value]


def test_sparse_tensors(workers: Workers) -> None:
    first, second = workers.run(2, hand_sparse_over)
    eye = torch.eye(3).tolist()
    assert first == second == [("torch.sparse_coo", eye), ("torch.sparse_csr", eye)]
