"""Run a function on several ranks, under a deadline.

Workers are started once and reused, since importing Lightning costs seconds. Every run gets a fresh
process group (gloo on the loopback interface, rendezvous through a file: no ports). A run that
outlasts its deadline is stopped: every rank's stack is printed, all workers are killed and replaced.
On a busy machine all times are longer, see `patience`.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import emulator
from tests.emulator.mode import OnDevice
from tests.needs import has, lend_events_to_the_cpu

_CONTEXT = multiprocessing.get_context("forkserver")
# What most tests import, of which some take workers with them. The scaler while there is no process group: it takes for
# its own the one that there is at its import.
_PRELOADED = ["torch", "lightning.pytorch", "tests.support.workers", "torch.distributed.fsdp.sharded_grad_scaler"]
_PRELOADED += [f"tests.support.front_ends.{name}" for name in ("lightning", "plain", "accelerate")]
_CONTEXT.set_forkserver_preload(_PRELOADED)

lend_events_to_the_cpu()

_MOST_THREADS = 64  # three for each group that is kept
_USUAL_LOAD = 3  # processes for each core, as `scripts/test` has them

_started = [0.0]  # when this worker's function began, or had its connections


def patience() -> float:
    """Return how much more time than usual a test has: the machine's load, or what `JOIN_TEST_PATIENCE` says."""
    if given := os.environ.get("JOIN_TEST_PATIENCE"):
        return float(given)
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / _USUAL_LOAD)


class WorkerError(AssertionError):
    """A function raised, or its process ended, on some rank; the message holds every traceback."""


class DeadlineError(AssertionError):
    """A run outlasted its deadline; the message holds every rank's stack."""


@dataclass(frozen=True)
class Outcome:
    """What a function returned or raised on one rank."""

    value: Any = None
    error: str = ""  # "Type: message", with the causes that it was raised from
    trace: str = ""
    seconds: float = 0.0  # until it raised, divided by `patience`
    ends: bool = False  # the process ends with it: torch cannot begin anew after half a process group


class Workers:
    """Up to `most` processes that run functions as the ranks of a process group.

    What they make is on their rank's device of this kind, if it says nothing else, and their process groups are of its
    backend; see `tests.emulator`.
    """

    def __init__(self, most: int, device: str = os.environ.get("TORCH_JOIN_TEST_DEVICE", "cpu")) -> None:
        self.device = device
        if device == emulator.DEVICE:
            emulator.build()  # not in a worker, whose time is limited
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self._most = most
        self._runs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(rank, *args)` on every rank and return the results by rank.

        Raises:
            WorkerError: The function raised on some rank.
            DeadlineError: Some rank did not come back in time.
        """
        outcomes = self.outcomes(world_size, function, *args, **kwargs)
        if any(outcome.error for outcome in outcomes):
            raise WorkerError(
                "\n".join(f"--- rank {rank}: {o.error or 'fine'}\n{o.trace}" for rank, o in enumerate(outcomes))
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        deadline: float = 60.0,
        store: str = "file",
        timeout: float = 30.0,
    ) -> list[Outcome]:
        """Run `function(rank, *args)` on every rank; errors are outcomes too.

        Args:
            world_size: Number of ranks.
            function: A function of a module, so that it can be pickled.
            *args: Its arguments after the rank.
            deadline: Seconds after which the ranks are killed, times `patience`.
            store: What the process group is built from: `"file"`, `"tcp"` (a port of the system's choice),
                or `""` for no process group.
            timeout: The process group's timeout in seconds.

        Raises:
            DeadlineError: Some rank did not come back in time.
        """
        if world_size > self._most:
            raise ValueError(f"These are {self._most} workers, not {world_size}.")
        self._runs += 1
        slower = patience()
        deadline *= slower
        rendezvous = Path(self._folder.name) / f"store-{self._runs}"
        for rank in range(world_size):
            self._ensure(rank)
            self._connections[rank].send((function, args, world_size, str(rendezvous), store, timeout))
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + deadline
        while missing := [rank for rank in range(world_size) if rank not in outcomes]:
            by_connection = {self._connections[rank]: rank for rank in missing}
            ready = wait(list(by_connection), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                ended = [f"rank {rank} ended: {one.error or 'well'}" for rank, one in sorted(outcomes.items())]
                raise DeadlineError("\n".join([self._stacks(missing, deadline), *ended]))
            for connection in ready:
                rank = by_connection[connection]  # type: ignore[index]
                try:
                    outcomes[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = Outcome(error="the process ended", trace=self._how_it_ended(rank), ends=True)
                if outcomes[rank].ends:
                    process = self._processes.pop(rank)
                    process.kill()
                    process.join()
        if any(outcome.ends and outcome.error for outcome in outcomes.values()):
            self._kill()  # what is left of a process group whose peers have gone may take all of a core
        return [replace(outcomes[rank], seconds=outcomes[rank].seconds / slower) for rank in range(world_size)]

    def pid(self, rank: int) -> int:
        """Return the process of `rank`."""
        self._ensure(rank)
        return int(self._processes[rank].pid)

    def close(self) -> None:
        """End all workers."""
        self._kill()
        self._folder.cleanup()

    def _ensure(self, rank: int) -> None:
        if rank in self._processes:
            if self._processes[rank].is_alive():
                return
            how = self._how_it_ended(rank)
            self._kill()
            raise WorkerError(f"The process of rank {rank} ended after its last run: {how}")
        ours, theirs = _CONTEXT.Pipe()
        Path(self._stack_file(rank)).write_text("")
        process = _CONTEXT.Process(target=_serve, args=(theirs, rank, self._stack_file(rank), self.device), daemon=True)
        process.start()
        theirs.close()
        self._processes[rank], self._connections[rank] = process, ours

    def _how_it_ended(self, rank: int) -> str:
        self._processes[rank].join(1.0)
        return f"exit code {self._processes[rank].exitcode}\n{Path(self._stack_file(rank)).read_text()}"

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"stacks-{rank}")

    def _stacks(self, missing: list[int], deadline: float) -> str:
        for rank, process in self._processes.items():
            Path(self._stack_file(rank)).write_text("")
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        stacks = [f"--- rank {rank}\n{Path(self._stack_file(rank)).read_text()}" for rank in self._processes]
        self._kill()
        return "\n".join([f"Ranks {missing} did not come back within {deadline} s.", *stacks])

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()
        self._connections.clear()


def _serve(connection: Connection, rank: int, stack_file: str, device: str) -> None:
    stacks = open(stack_file, "a")  # noqa: SIM115  faulthandler needs it open for good
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    if os.environ.get("TORCH_JOIN_TEST_HOSTS"):  # an old NCCL takes ranks that share a GPU for ranks of several hosts
        os.environ["NCCL_HOSTID"] = f"host{rank}"
    torch.set_num_threads(1)
    backend, place = emulator.use(device, rank), emulator.place()
    # What was imported stays. Whoever collects garbage, as Trainer does after each training, or looks for something
    # among all objects, as Accelerate's context does, would go through a million of its objects each time.
    gc.freeze()
    modules = len(sys.modules)
    while True:
        try:
            function, args, world_size, rendezvous, store, timeout = connection.recv()
        except EOFError:
            return
        if len(sys.modules) > modules:
            gc.collect()  # what the last run has left
            gc.freeze()
            modules = len(sys.modules)
        # Anew each time: Lightning puts back the signal handlers that Python knows of, and not this one.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks)  # a process that crashes says where
        _started[0] = time.monotonic()
        connected = None
        try:
            if store:
                connected = _join_group(rank, world_size, rendezvous, store, timeout, backend)
        except BaseException as error:
            connection.send(Outcome(error=_describe(error), trace=traceback.format_exc(), ends=True))
            return
        try:
            with OnDevice(place) if place.type != "cpu" else contextlib.nullcontext():
                value = function(rank, *args)
            if device == emulator.DEVICE and (races := emulator.installed().take_races()):
                raise AssertionError("; ".join(races))
            if dist.is_initialized():
                dist.barrier()  # nobody hangs up on a rank that is still reading
            outcome = Outcome(value)
        except BaseException as error:
            outcome = Outcome(
                error=_describe(error), trace=traceback.format_exc(), seconds=time.monotonic() - _started[0]
            )
            with contextlib.suppress(Exception):  # nobody hangs up on a rank that is still connecting
                if connected is not None:
                    connected.wait([f"connected/{each}" for each in range(world_size)], timedelta(seconds=10))
        finally:
            # Older torch (2.6) holds Python's lock while it destroys a group, and waits for gloo, of which a
            # thread may wait for that lock to drop a tensor: here it has it.
            time.sleep(0.01)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            _forget_meshes()
            if device == emulator.DEVICE:
                emulator.installed().abandon()
                emulator.installed().take_races()
            torch.set_default_dtype(torch.float32)
            sys.stdout.flush()
            sys.stderr.flush()
        connection.send(replace(outcome, ends=_is_worn_out()))


def _forget_meshes() -> None:
    """Clear what torch keeps of the last run's meshes: a mesh of the same shape gets the groups of the kept one."""
    if (tensors := sys.modules.get("torch.distributed.tensor")) is None:
        return
    tensors.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    if clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None):  # newer than 2.6
        clear()


def _is_worn_out() -> bool:
    """Whether this process has many threads, of groups that something in torch has kept."""
    tasks = Path("/proc/self/task")
    return tasks.exists() and len([*tasks.iterdir()]) > _MOST_THREADS


def _join_group(rank: int, world_size: int, rendezvous: str, store: str, timeout: float, backend: str) -> dist.Store:
    """Begin a process group; return a store in which each rank notes that it is connected."""
    limit = timedelta(seconds=60)  # to begin: a worker may have to start first
    file: dist.Store = dist.FileStore(rendezvous, world_size)
    meeting = file
    meeting.set_timeout(limit)
    if store == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        if server is not None:
            meeting.set("port", str(server.port))
        port = int(meeting.get("port"))
        meeting = server or dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if not has("gloo's timeout that can be set later"):  # then all have started before it counts
        file.set(f"started/{rank}", "")
        file.wait([f"started/{each}" for each in range(world_size)], limit)
        limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world_size, timeout=limit)
    if backend == emulator.BACKEND:
        emulator.set_timeout(dist.group.WORLD, timedelta(seconds=timeout))
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)
    file.set(f"connected/{rank}", "")
    return file


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return f"{text} <- {_describe(error.__cause__)}" if error.__cause__ is not None else text


def connect() -> None:
    """Make this group's connections to the store, before a test with short timeouts begins.

    Where names resolve slowly, torch takes five seconds for one now and then, which an outcome's `seconds` leave out.
    """
    from tests.support.inside import open_channel

    channel = open_channel()
    while len(channel.health().answers) < dist.get_world_size():
        pass
    dist.barrier()
    channel.close()
    _started[0] = time.monotonic()


def sum_and_read() -> None:
    """Sum in the group, and wait for it, which on a device no collective does."""
    one = torch.ones(1)
    dist.all_reduce(one)
    one.item()
