"""What the tap sees, passes over, and what it leaves behind: nothing."""

import contextlib
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.collectives import (
    Case,
    averages,
    check,
    operations,
)
from tests.support.inside import see
from tests.support.party import listening
from tests.support.workers import Workers
from torch_join import UnsupportedError
from torch_join._base.errors import JoinError
from torch_join._collectives.call import OBJECT_OPERATIONS
from torch_join._collectives.neutral import ENTRIES, REDUCTIONS
from torch_join._collectives.tap import Call, CollectiveTap
from torch_join._compat import operators as _compat_c10d


class _Checkpointed(torch.nn.Sequential):
    def forward(self, tensor: Tensor) -> Tensor:
        return checkpoint(super().forward, tensor.requires_grad_(), use_reentrant=True)


def _ddp_backward(rank: int, hook: str) -> tuple[int, list[Any]]:
    torch.manual_seed(0)
    kind = _Checkpointed if hook == "reentrant" else torch.nn.Sequential
    module = kind(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    buckets = 25 if hook == "power" else 1e-5  # several would mispair on gloo without a tap too
    ddp = DistributedDataParallel(module, find_unused_parameters=hook == "unused", bucket_cap_mb=buckets)
    if hook == "compressed":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    observed: list[Call] = []
    tap = CollectiveTap(observed.append, lambda r: r == 0)
    for step in range(4):
        with listening(tap) if rank == 1 else contextlib.nullcontext():
            with tap.ignoring():  # the buckets are rebuilt
                loss = ddp(torch.full((2, 4), float(rank + step))).sum()
            loss.backward()
    return len(observed), [p.grad.tolist() for p in module.parameters()]


@pytest.mark.parametrize("hook", ["", "unused", "compressed", "power", "reentrant"])
def test_ddps_own_collectives_in_backward_are_passed_over(workers: Workers, hook: str) -> None:
    (_, gradients), (observed, same) = workers.run(2, _ddp_backward, hook, store="tcp")
    assert observed == 0
    assert same == gradients


def _leaves_nothing_behind(rank: int) -> tuple[list[str], list[Any]]:
    observed: list[Call] = []
    tap = CollectiveTap(observed.append, lambda r: r == 0)
    operators = _compat_c10d.operators()
    for _ in range(3):
        tap.install()
        tap.install()
        assert all(map(_compat_c10d.has_kernel, operators))
        with pytest.raises(JoinError, match="Another join context"):
            CollectiveTap(observed.append, lambda r: True).install()
        with tap.ignoring():
            with tap.ignoring():
                dist.barrier()
            dist.barrier()
        assert observed == []
        tap.remove()
        tap.remove()
        assert not any(map(_compat_c10d.has_kernel, operators))
    tap.install()
    dist.barrier()
    tap.remove()
    assert [call.operation for call in observed] == ["barrier"]
    everything = [run(Case(rank, [0, 1], [0, 1], None)) for run in operations().values()]
    assert len(observed) == 1
    return [*operations()], everything


def test_nothing_is_left_behind(workers: Workers) -> None:
    for names, everything in workers.run(2, _leaves_nothing_behind, store="tcp"):
        for name, results in zip(names, everything, strict=True):
            check(name, results)


def _observer_raises(rank: int) -> bool:
    def observe(call: Call) -> None:
        raise KeyError(call.operation)

    tap = CollectiveTap(observe, lambda r: r == 0)
    tensor = torch.ones(2)
    if rank == 1:
        for async_op in (False, True):
            with pytest.raises(KeyError, match="all_reduce"), listening(tap):
                dist.all_reduce(tensor, async_op=async_op)
    assert not any(map(_compat_c10d.has_kernel, _compat_c10d.operators()))
    dist.all_reduce(tensor)
    return tensor.tolist() == [2.0, 2.0]


def test_what_the_observer_raises_the_collective_raises_unissued(workers: Workers) -> None:
    assert workers.run(2, _observer_raises, store="tcp") == [True, True]


def _follows(rank: int) -> tuple[list[str], list[float]]:
    observed: list[Call] = []
    tensor = torch.full((2,), rank / 2)
    average = dist.ReduceOp.AVG if averages() else dist.ReduceOp.SUM
    with listening(CollectiveTap(observed.append, None)):
        dist.all_reduce(tensor, average)
        dist.broadcast(tensor, 0)
        dist.all_gather_object([None, None], rank)
        with pytest.raises(UnsupportedError, match="a process group in which some ranks have finished"):
            dist.send(tensor, 1 - rank)
    return [call.operation for call in observed], tensor.tolist()


def test_a_rank_that_follows_on_its_own_sees_everything_and_scales_nothing(workers: Workers) -> None:
    for seen, tensor in workers.run(2, _follows, store="tcp"):
        assert seen == ["all_reduce", "broadcast", "all_gather_object"]
        assert tensor == ([0.25, 0.25] if averages() else [0.5, 0.5])


def _other_threads(rank: int) -> tuple[int, int, list[float]]:
    observed: list[Call] = []
    group = dist.new_group([0, 1])
    tap = CollectiveTap(observed.append, lambda r: r == 0)
    tensor = torch.ones(2)
    ticks = 0
    if rank == 1:
        # One tap while a collective of another thread waits, another while one of this thread does.
        thread = threading.Thread(target=dist.monitored_barrier, args=(group,))
        with listening(tap):
            thread.start()
            time.sleep(0.2)
        dist.all_reduce(tensor)
        thread.join()
        done = threading.Event()

        def tick() -> None:
            nonlocal ticks
            while not done.wait(0.01):
                ticks += 1

        thread = threading.Thread(target=tick)
        thread.start()
        with listening(tap):
            dist.monitored_barrier()
        done.set()
        thread.join()
    else:
        dist.all_reduce(tensor)
        dist.monitored_barrier(group)
        time.sleep(0.5)
        dist.monitored_barrier()
    return len(observed), ticks, tensor.tolist()


def test_other_threads_are_not_listened_to_and_not_held_up(workers: Workers) -> None:
    _, (observed, ticks, tensor) = workers.run(2, _other_threads, store="tcp")
    assert observed == 1
    assert ticks > 10
    assert tensor == [2.0, 2.0]


def test_installing_takes_little_time() -> None:
    tap = CollectiveTap(lambda call: None, lambda r: True)
    tap.install()
    tap.remove()
    start = time.perf_counter()
    for _ in range(50):
        tap.install()
        tap.remove()
    assert (time.perf_counter() - start) / 50 < 0.01


def test_what_the_tap_does_not_know_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    tap = CollectiveTap(lambda call: None, lambda r: True)
    with pytest.raises(UnsupportedError, match="This version of torch_join does not support c10d::all_new_"):
        see(tap, "all_new_", {})
    monkeypatch.setattr(dist.ProcessGroup, "unbox", lambda boxed: boxed)
    monkeypatch.setattr(_compat_c10d, "group_ranks", lambda group: [])
    with pytest.raises(UnsupportedError, match=r"a process group that is not registered with torch\.distributed"):
        see(tap, "barrier", {"process_group": None})


def test_the_dispatcher_still_has_what_the_tap_relies_on() -> None:
    refused = {"gather_into_tensor_"}  # of torch 2.14; not of gloo, so that its mirror could not be tested
    assert set(_compat_c10d.operators()) - refused == set(_compat_c10d.OPERATORS)
    for name in _compat_c10d.operators():
        assert "process_group" in _compat_c10d.argument_names(name)
        assert not _compat_c10d.has_kernel(name)
    assert set(ENTRIES) == {*_compat_c10d.OPERATORS.values(), *OBJECT_OPERATIONS} - {"send", "recv"}
    assert not _compat_c10d.in_backward()
    for name in OBJECT_OPERATIONS:
        assert name in vars(distributed_c10d)
    assert "group_dst" in distributed_c10d.gather_object.__wrapped__.__code__.co_varnames
    members = {r.op for r in REDUCTIONS} | {"PREMUL_SUM"}
    assert set(dist.ReduceOp.RedOpType.__members__) == members


class _Seen(torch.autograd.Function):
    """Notes whether a collective here would be one whose backward may come."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients if len(gradients) == 1 else (*gradients, None)

    @staticmethod
    def note() -> None:
        seen.append(_compat_c10d.differentiates(sys._getframe()))


class _Usual(_Seen):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        tensor = tensor.T.contiguous()  # needs no gradient any more, the context knows
        _Seen.note()
        return tensor


class _Starred(_Seen):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        _Seen.note()
        return args[1].clone()


class _Decorated(_Seen):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _Usual.forward(ctx, tensor)


class _SetUpLater(_Seen):
    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        _Seen.note()
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


seen: list[bool] = []


@pytest.mark.parametrize("function", [_Usual, _Starred, _Decorated, _SetUpLater])
def test_a_collective_of_an_autograd_functions_forward_is_known(function: Any) -> None:
    seen.clear()
    function.apply(torch.ones(2, 3, requires_grad=True))
    with torch.no_grad():
        _Seen.note()
    assert seen == [True, False]
    if function is not _SetUpLater:  # else nobody can tell
        function.apply(torch.ones(2, 3))
        assert seen[2:] == [False]
