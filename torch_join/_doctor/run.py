"""Runs the checks in order, on the ranks of a job, or on three ranks that torchrun starts for it."""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO

from torch_join import __version__
from torch_join._base.errors import name_ranks
from torch_join._doctor import connections, training, versions
from torch_join._doctor.check import Check, Finding, Job, document, verdict_of

CHECKS = [
    connections.STORE,
    versions.VERSIONS,
    connections.BACKEND,
    connections.LINKS,
    training.EPOCH,
    versions.NAMES,
    training.COST,
]
_RANKS = 3
_END_SECONDS = 5.0  # how long ranks wait for each other at the end
_AROUND = "TORCH_JOIN_DOCTOR_AROUND"  # set for ranks that `_launch` starts, to the job around it, which is not checked
# Variables that show a job of several ranks in which this process does not know its own rank.
_JOBS = "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MASTER_ADDR"
_REPORTED = 3  # exit code of these ranks if a check has failed and rank 0 has printed that; Python itself uses 1


def examine(is_json: bool) -> int:
    """Run all checks as a rank of the current job, or of a job started here; return the exit code."""
    try:
        job = Job.of_environment()
    except ValueError as error:
        text = f"the environment is wrong: {error}"
        remedy = "Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT to whole numbers, as torchrun does."
        setup = Finding("setup", "failed", text, remedy, is_broken=True)
        print(document([setup], torch_join=__version__) if is_json else setup.line)
        return 1
    return _launch(is_json) if job is None else _run_as_rank(job, is_json)


def run(job: Job, checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield each check's finding; a check is not run if one that it needs was not completed."""
    if around := os.environ.get(_AROUND):
        text = f"this machine was checked, not the job around it ({around})"
        remedy = "Start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        yield Finding("job", "warning", text, remedy)
    broken, missing = set[str](), list[int]()
    for check in checks:
        if missing:
            finding = Finding(check.name, "not run", f"since {name_ranks(missing)} did not answer", is_broken=True)
        elif check.needs in broken or (check.needs and job.store is None):
            finding = Finding(check.name, "not run", f"since {check.needs!r} did not come to its end", is_broken=True)
        else:
            finding = check.run(job)
            missing = finding.data.get("missing", [])
        if finding.is_broken:
            broken.add(check.name)
        yield finding


def _run_as_rank(job: Job, is_json: bool) -> NoReturn:
    """Run all checks, print the findings on rank 0, and end this process."""
    faulthandler.register(signal.SIGTERM, chain=True)  # prints the stack when torchrun ends a rank that hangs
    begin, findings = time.monotonic(), list[Finding]()
    with _own_stdout() as out:
        for finding in run(job, CHECKS):
            findings.append(finding)
            if job.rank == 0 and not is_json:
                print(finding.line, file=out, flush=True)
            elif job.store is None and finding.verdict == "failed":  # no other rank prints it
                print(f"rank {job.rank}: {finding.line}", file=sys.stderr, flush=True)
        if job.rank == 0 and is_json:
            seconds = round(time.monotonic() - begin, 1)
            print(document(findings, torch_join=__version__, world_size=job.world_size, seconds=seconds), file=out)
    is_reported = job.rank == 0 or job.store is not None
    with contextlib.suppress(Exception):  # no rank ends before rank 0 has printed, and all have the last finding
        job.collect("end", None, _END_SECONDS)
    sys.stderr.flush()
    failed = _REPORTED if is_reported and _AROUND in os.environ else 1
    os._exit(failed if verdict_of(findings) == "failed" else 0)  # a thread of the backend may never end


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Send other output, such as gloo's, to stderr; the file yielded writes to stdout."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            yield out
        finally:
            sys.stdout.flush()
            out.flush()
            os.dup2(out.fileno(), 1)


def _launch(is_json: bool) -> int:
    """Start three ranks on this machine with torchrun; return the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    around = {name: os.environ.get(name, "") for name in _JOBS}
    os.environ[_AROUND] = ", ".join(f"{name}={value}" for name, value in around.items() if value not in ("", "0", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={_RANKS}", "--local-addr=127.0.0.1"]
    try:
        torchrun.main([*options, "-m", "torch_join", "doctor", *(["--json"] if is_json else [])])
    except SignalException as received:
        return 128 + received.sigval
    except ChildFailedError as error:
        if all(failure.exitcode != _REPORTED for failure in error.failures.values()):
            rank, first = error.get_first_failure()
            ending = f"exit code {first.exitcode}" if first.exitcode >= 0 else f"signal {first.signal_name()}"
            remedy = "What it has written to stderr says more."
            ranks = Finding("ranks", "failed", f"rank {rank} ended with {ending}", remedy, is_broken=True)
            print(document([ranks], torch_join=__version__, world_size=_RANKS) if is_json else ranks.line)
        return 1
    return 0
