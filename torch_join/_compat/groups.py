"""Queries a process group's backends and sends over them, by private names of torch (seen in torch 2.13.0).

`tests/core/_control/test_survivors.py` and `tests/core/_control/test_faults.py` fail when one of them is gone.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_join._base.errors import JoinError
from torch_join._base.names import TORCH, check_names

_PROBE_TAG, _MEET_TAG = 0x7001, 0x7002
_ANSWERS_WITHIN = timedelta(seconds=4)  # after all ranks have called `meet`
# Keeps tensors of abandoned gathers alive. If only gloo held one, its thread would need Python's lock to release it;
# older torch (2.6) holds that lock while it destroys the group and waits for that thread.
_unfinished: list[list[Tensor]] = []


def is_gone(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the process of `rank` in `group` has ended, as far as gloo knows (`detects_gone_ranks`).

    Gloo refuses to send to a peer whose connection has been closed. A living peer never receives the message, and its
    own tag makes it harmless. The message bypasses the dispatcher, where the collective tap refuses point-to-point
    messages in a tail.
    """
    if not detects_gone_ranks(group):
        return False
    try:
        _backend(group, "cpu").send([torch.zeros(1)], rank, _PROBE_TAG)
    except RuntimeError as error:
        return "Connection closed" in str(error) or "Connection reset" in str(error)
    return False


def detects_gone_ranks(group: dist.ProcessGroup) -> bool:
    """Whether `is_gone` can tell at once: gloo can, unless it connects only when it first sends."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0") and is_of_gloo(group)


def is_of_gloo(group: dist.ProcessGroup) -> bool:
    """Whether `group` sends CPU tensors by gloo."""
    gloo = getattr(dist, "ProcessGroupGloo", ())
    return can_send(group, "cpu") and isinstance(_backend(group, "cpu"), gloo)


def can_send(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether `group` can send tensors on a kind of device."""
    try:
        group._get_backend(torch.device(kind))
    except RuntimeError:
        return False
    return True


def meet(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Wait over gloo until every rank has called this: each rank sends to rank 0, which then answers all of them.

    It blocks this thread.

    Raises:
        NotHereError: A rank is missing at the timeout: rank 0 reports another rank, and other ranks report rank 0.
        RuntimeError: Another rank has disconnected.
    """
    backend, token = _backend(group, "cpu"), torch.zeros(1)
    others = range(1, dist.get_world_size(group))
    if dist.get_rank(group) > 0:
        # Rank 0 receives the message once it has called this, so its own timeout ends before the next wait does.
        _wait(backend.send([token], 0, _MEET_TAG), 0, timeout)
        backend.recv([token], 0, _MEET_TAG + 1).wait(timeout + _ANSWERS_WITHIN)
        return
    deadline = time.monotonic() + timeout.total_seconds()
    receives = {other: backend.recv([torch.zeros(1)], other, _MEET_TAG) for other in others}
    for other, work in receives.items():
        _wait(work, other, timedelta(seconds=max(0.01, deadline - time.monotonic())))
    for answer in [backend.send([token], other, _MEET_TAG + 1) for other in others]:
        answer.wait()


class NotHereError(Exception):
    """A rank is missing at the timeout."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def _wait(work: Any, rank: int, timeout: timedelta) -> None:
    start = time.monotonic()
    try:
        work.wait(timeout)
    except RuntimeError as error:
        if time.monotonic() - start < timeout.total_seconds():
            raise
        raise NotHereError(rank) from error


def _backend(group: dist.ProcessGroup, kind: str) -> Any:
    """Return the backend for a kind of device, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = group._get_backend(torch.device(kind))
    return getattr(backend, "wrapped_pg", backend)


def gather_directly(
    group: dist.ProcessGroup, tensor: Tensor, check: Callable[[], None], timeout: timedelta
) -> list[Tensor]:
    """Return each rank's tensor, all of one shape, bypassing the dispatcher.

    Meanwhile this calls `check` repeatedly, which may raise. Gloo then still waits until its timeout, and so does the
    destruction of the group.
    """
    backend = _backend(group, tensor.device.type)
    options = distributed_c10d.AllgatherOptions()
    kinds = [getattr(dist, name, ()) for name in ("ProcessGroupGloo", "ProcessGroupNCCL")]
    if isinstance(backend, kinds[0]):
        options.timeout = timeout
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    work, pause = backend.allgather([found], [tensor], options), 1e-4
    try:
        while any(isinstance(backend, kind) for kind in kinds) and not work.is_completed():  # others may not report it
            try:
                check()
            except JoinError:
                with suppress(RuntimeError):
                    if work.is_completed():  # it was, before the failure that `check` has seen
                        work.wait()
                        return found
                raise
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        work.wait()
    except BaseException:
        _unfinished.append([tensor, *found])
        raise
    return found


def abort(group: dist.ProcessGroup, kind: str) -> None:
    """Make a group abandon its work on a kind of device.

    If another rank has failed, the device would wait for it forever, and so would any read from the device.
    """
    backend: Any = group._get_backend(torch.device(kind))
    with suppress(RuntimeError, AttributeError):  # not every backend can
        backend.abort()


check_names("torch", TORCH, {dist.ProcessGroup: "_get_backend"})
