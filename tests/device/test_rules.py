"""What an accelerator asks for, and CPUs do not: the right device, no waiting for it, one order of collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from accelerate_join import Accelerator
from tests import emulator
from tests.device.jobs import BLOCKING, BOTH, SERIAL, Job, assert_one_order, skip_without_functional_gather
from tests.needs import has
from tests.support.front_ends import accelerate as accelerate_front_end
from tests.support.front_ends import plain
from tests.support.front_ends.lightning import Fit, build_trainer
from tests.support.front_ends.plain import Loop
from tests.support.run import difference, reference
from tests.support.workers import Workers
from torch_join import Join, JoinableModel, JoinableOptimizer
from torch_join._base.specs import TensorSpec
from torch_join._compat.operators import finished_work
from torch_join._handover import objects, transfer
from torch_join.integration import ModelShadow

UNSET = Job(sets_device=False)
BOUND = Job(binds_device=True)
JOBS = {"no set_device": UNSET, "bound": BOUND, "gloo too": BOTH, "serial": SERIAL, "blocking": BLOCKING}
PROGRAMS = {
    "gathers": Loop((1, 4, 2), collective="all_gather", optimizer="adamw", scheduler="step"),
    "sums in a group, a scaler": Loop((3, 0, 2), collective="sum", grouped=True, scaler=8.0),
    "ZeRO, streams": Loop((2, 4, 0), optimizer="zero", loop="iterable", model="norm"),
}


def train_and_count(rank: int, program: Loop) -> tuple[Any, list[int]]:
    emulator.installed().reset()
    outcome = plain.train(rank, program)
    return outcome, emulator.installed().contexts()


@pytest.mark.covering(1)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_rank_stays_on_its_device(emulated: Workers, job: str, name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    if "ZeRO" in name and not JOBS[job].sets_device:
        pytest.skip("torch's consolidation of ZeRO's shards uses the current device")
    if JOBS[job].binds_device and not has("a process group that can be bound to any device"):
        pytest.skip("needs a process group that can be bound to any device")
    expected = reference(program)
    results = JOBS[job].run(emulated, 3, tmp_path, train_and_count, program)
    for rank, ((outcome, contexts), _) in enumerate(results):
        assert difference(outcome.parameters, expected.parameters) < 1e-10
        assert contexts == [rank]
    assert_one_order([log for _, log in results])


def metric_of_the_cpu(rank: int) -> tuple[float, list[int]]:
    emulator.installed().reset()
    ddp, metric = DistributedDataParallel(nn.Linear(3, 2)), MeanMetric().to("cpu")
    optimizer = torch.optim.Adam(ddp.parameters(), 0.1)
    with Join([ddp, optimizer, metric]) as join:
        for step in join.batches(range([1, 4][rank])):
            optimizer.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            metric.update(torch.tensor(float(step), device="cpu"))
        found = float(metric.compute())
    return found, emulator.installed().contexts()


def test_a_metric_of_the_cpu_travels_over_the_own_device(emulated: Workers, tmp_path: Path) -> None:
    for rank, ((found, contexts), _) in enumerate(UNSET.run(emulated, 2, tmp_path, metric_of_the_cpu)):
        assert found == pytest.approx(6 / 5)
        assert contexts == [rank]


def in_torchs_join(rank: int) -> tuple[list[Tensor], list[int]]:
    emulator.installed().reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.Adam(ddp.parameters(), 0.1)
    with TorchJoin([JoinableModel(ddp), JoinableOptimizer(optimizer)]):
        for _ in range([1, 4][rank]):
            optimizer.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    return [p.detach() for p in ddp.parameters()], emulator.installed().contexts()


def test_torchs_own_join_stays_on_the_device_too(emulated: Workers, tmp_path: Path) -> None:
    results = [value for value, _ in UNSET.run(emulated, 2, tmp_path, in_torchs_join)]
    assert [contexts for _, contexts in results] == [[0], [1]]
    assert all(map(torch.equal, results[0][0], results[1][0]))


# ---------------------------------------------------------------- what has a state


def tensor_lr(rank: int, kind: str) -> tuple[list[Tensor], set[str], str]:
    device = emulator.place()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    lr = torch.tensor(0.1, device="cpu" if kind == "of the CPU" else device)
    optimizer: Any
    if kind == "of a shard":
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=lr, capturable=True, foreach=False)
    else:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=lr, foreach=False, capturable=kind != "of the CPU")
    with Join([ddp, optimizer]) as join:
        for step in join.batches(range([1, 4, 2][rank])):
            optimizer.zero_grad()
            ddp(torch.full((2, 3), step + rank + 1.0)).square().sum().backward()
            for group in optimizer.param_groups:
                group["lr"].mul_(0.9)
            optimizer.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    states = [value for state in getattr(optimizer, "optim", optimizer).state.values() for value in state.values()]
    places = {str(value.device) for value in (*rates, *states) if isinstance(value, Tensor)}
    return [*(p.detach() for p in ddp.parameters()), *rates], places, str(device)


@pytest.mark.parametrize("kind", ["of the device", "of the CPU", "of a shard"])
def test_a_learning_rate_in_a_tensor_comes_to_the_own_device(devices: Workers, kind: str) -> None:
    results = devices.run(3, tensor_lr, kind)
    for tensors, places, place in results:
        assert all(map(torch.equal, tensors, results[0][0]))
        assert places <= {place, "cpu"}
        assert kind == "of the CPU" or place in places


@pytest.mark.parametrize("may_break", [False, True])
def test_a_learning_rate_of_the_device_that_differs_is_named(devices: Workers, may_break: bool) -> None:
    """Also where its tensor has changed again before it is compared."""
    for outcome in devices.outcomes(2, differ, may_break):
        assert "lr of Adam is " in outcome.error
        assert outcome.seconds < 20


def differ(rank: int, may_break: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    rate = torch.tensor(0.1, device=emulator.place())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=rate, foreach=False, capturable=True)
    with Join([ddp, optimizer], may_break=may_break) as join:
        for _ in join.batches(range([2, 5][rank])):
            optimizer.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            rate.mul_(0.9 - 0.1 * rank)


def send_object(rank: int) -> tuple[bool, str, float]:
    device = emulator.place()
    sent = {"x": torch.full((2,), 1.0 + rank, device=device), "kept": torch.ones(1, device="cpu")}
    got = objects.broadcast(objects.pack(sent, "It") if rank == 1 else None, 1, None)
    return got["x"].device == device, str(got["kept"].device), got["x"][1].item()


def test_a_tensor_in_an_object_comes_to_the_readers_device(devices: Workers) -> None:
    assert devices.run(3, send_object) == [(True, "cpu", 2.0)] * 3


def send_cpu_tensors(rank: int) -> tuple[list[float], list[int]]:
    large, small = (torch.full((size,), float(rank), device="cpu") for size in (2**23 + 3, 5))  # more than a bucket
    specs = [TensorSpec.of(tensor) for tensor in (large, small)]
    transfer.broadcast(specs, [[large], [small]], 1, None)
    return [large.min().item(), large.max().item(), small.sum().item()], [large._version, small._version]


def test_cpu_tensors_travel_over_the_device_and_leave_the_source_alone(devices: Workers) -> None:
    results = devices.run(3, send_cpu_tensors)
    assert [found for found, _ in results] == [[1.0, 1.0, 5.0]] * 3
    assert results[1][1] == [0, 0]


# ---------------------------------------------------------------- waiting for the device

WAITS = ("items", "to_host", "to_device", "synchronisations")


@contextmanager
def waits(into: list[int]) -> Iterator[None]:
    before = emulator.installed().counts()
    yield
    after = emulator.installed().counts()
    into.append(sum(after[name] - before[name] for name in WAITS))


def wide(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def step_of(ddp: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
        optimizer.step()

    return step


def waits_of(rank: int, lengths: tuple[int, ...], layers: int, joins: bool) -> list[int]:
    """Return how often each step of this rank's waits; of one that has run out, all of its tail in one."""
    ddp = DistributedDataParallel(wide(layers))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    step, found = step_of(ddp, optimizer, torch.ones(2, 4)), []
    for _ in range(3):
        step()  # DDP has its buckets
    if not joins:
        for _ in range(lengths[rank]):
            with waits(found):
                step()
        return found
    with Join([ddp, optimizer]) as join:
        batches = iter(join.batches(range(lengths[rank])))
        while True:
            taken: list[int] = []
            with waits(taken):
                going_on = next(batches, None) is not None
                if going_on:
                    step()
            found += taken
            if not going_on:
                return found


def test_even_steps_do_not_wait_for_the_device(emulated: Workers) -> None:
    alone = emulated.run(2, waits_of, (5, 5), 6, False)
    joined = emulated.run(2, waits_of, (5, 5), 6, True)
    for without, within in zip(alone, joined, strict=True):
        assert within[: len(without)] == without


@pytest.mark.parametrize("layers", [3, 30])
def test_a_step_in_the_tail_waits_twice_at_most_however_many_parameters(emulated: Workers, layers: int) -> None:
    plain = emulated.run(2, waits_of, (9, 9), layers, False)[0]
    active = emulated.run(2, waits_of, (2, 9), layers, True)[1]
    assert max(active[3:8]) <= max(plain) + 2
    short, long = (emulated.run(2, waits_of, (2, 2 + steps), layers, True)[0][-1] for steps in (3, 13))
    assert long == short  # a joined rank's own, which has nothing to read


def joined_waits(rank: int, steps: int, what: str) -> int:
    """Return how often a rank that has run out waits in the tail of a loop, in which the other one has more steps."""
    model: Any = wide(4)
    if what == "fsdp2":
        for layer in model:
            fully_shard(layer)
    if what in ("fsdp1", "fsdp2"):
        # By its limit, torch's own class waits in each forward, on all ranks.
        model = fully_shard(model) if what == "fsdp2" else FullyShardedDataParallel(model, limit_all_gathers=False)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step, found = step_of(model, optimizer, torch.ones(2, 4)), []
    with Join([model, optimizer]) as join:
        batches = iter(join.batches(range(2 if rank == 0 else 2 + steps)))
        while next(batches, None) is not None:
            step()
            if what == "a collective":
                dist.all_reduce(torch.ones(3))
            before = emulator.installed().counts()
        found = [emulator.installed().counts()[name] - before[name] for name in WAITS]
    return sum(found)


@pytest.mark.parametrize("what", ["a model", "a collective", "fsdp1", "fsdp2"])
def test_a_joined_rank_waits_for_nothing_that_it_follows(emulated: Workers, what: str) -> None:
    if what == "fsdp2":
        skip_without_functional_gather(emulated)
    short, long = (emulated.run(2, joined_waits, steps, what)[0] for steps in (5, 25))
    assert long == short


class Wide(pl.LightningModule):
    """Counts how often this rank waits in each step."""

    def __init__(self, layers: int, manual: bool) -> None:
        super().__init__()
        self.net = wide(layers)
        self.automatic_optimization = not manual
        self.before: dict[str, int] = {}
        self.found: list[int] = []

    def training_step(self, x: Tensor) -> Tensor | None:
        loss = self.net(x).square().mean()
        if self.automatic_optimization:
            return loss  # type: ignore[no-any-return]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        after = emulator.installed().counts()
        if self.before:
            self.found.append(sum(after[name] - self.before[name] for name in WAITS))
        self.before = after


def fit_counting(rank: int, lengths: tuple[int, ...], layers: int, manual: bool, strategy: str) -> list[int]:
    module = Wide(layers, manual)
    trainer = build_trainer(Fit(lengths, epochs=1), strategy=strategy, gradient_clip_val=None)
    trainer.fit(module, DataLoader([torch.ones(4)] * lengths[rank], batch_size=None))
    if strategy == "ddp":
        emulator.installed().take_races()  # it does not wait for the parameters that DDP sends in a stream of its own
    return module.found


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_waits_no_more_than_without(emulated: Workers, manual: bool) -> None:
    ours, stock = (emulated.run(2, fit_counting, (6, 6), 4, manual, strategy) for strategy in ("ddp_join", "ddp"))
    for mine, its in zip(ours, stock, strict=True):
        assert mine == [0] * len(its)
        assert min(its) > 0  # the count sees Lightning's own waits
    few, many = (emulated.run(2, fit_counting, (2, 8), layers, manual, "ddp_join") for layers in (3, 30))
    for tail in (*few, *many):
        assert max(tail[2:]) <= 2


def gather_counting(rank: int, ours: bool) -> list[int]:
    found: list[int] = []
    with accelerate_front_end.accelerator_of(rank, Accelerator if ours else accelerate.Accelerator) as accelerator:
        model = accelerator.prepare(wide(2))
        context = accelerator.join_uneven_inputs(even_batches=False) if ours else nullcontext()
        with context as join:
            for _ in join.batches(range(4)) if ours and join is not None else range(4):
                x = torch.ones(3, 4)
                model(x).sum().backward()
                with waits(found):
                    accelerator.gather_for_metrics((x, x[:, 0]))
    return found


def test_accelerates_gather_does_not_wait_for_the_device(emulated: Workers) -> None:
    assert emulated.run(2, gather_counting, True) == emulated.run(2, gather_counting, False)


def write_and_read(rank: int, waits: bool) -> list[str]:
    """Write on one stream and read on another one."""
    side, x = torch.Stream(), torch.ones(3)
    side.wait_stream(torch.accelerator.current_stream())
    with emulator.on_stream(side):
        x.zero_()
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    x.add_(1)
    races: list[str] = emulator.installed().take_races()
    return races


def test_a_stream_that_does_not_wait_for_another_one_is_found(emulated: Workers) -> None:
    assert emulated.run(1, write_and_read, True) == [[]]
    [(race,)] = emulated.run(1, write_and_read, False)
    assert race.startswith("aten::add on stream 0 does not wait for aten::zero_ on stream ")


def shadow_in_a_stream(rank: int) -> list[str]:
    """Do steps of nothing, one after another, of a model that was wrapped in another stream; return the races."""
    with emulator.on_stream(torch.Stream()):
        ddp = DistributedDataParallel(nn.Linear(3, 2))
    torch.accelerator.synchronize()
    shadow = ModelShadow(ddp)
    for _ in range(3):
        zero = shadow.forward()
        shadow.backward(zero.backward)
    return emulator.installed().take_races()  # type: ignore[no-any-return]


def test_a_step_of_nothing_waits_for_the_last_one_in_the_stream_of_its_gradients(emulated: Workers) -> None:
    assert emulated.run(2, shadow_in_a_stream) == [[], []]


def wait_for_a_work_that_is_done(rank: int) -> list[str]:
    """Write on one stream, and wait on another one for a work that is done by then; return the races."""
    side, x = torch.Stream(), torch.ones(3)
    torch.accelerator.synchronize()
    with emulator.on_stream(side):
        x.zero_()
        work = dist.Work.unbox(finished_work([x]))
    assert work is not None
    work.wait()
    x.add_(1)
    return emulator.installed().take_races()  # type: ignore[no-any-return]


def test_a_stream_waits_for_a_work_that_is_done(emulated: Workers) -> None:
    assert emulated.run(1, wait_for_a_work_that_is_done) == [[]]
