"""The checks in their order, and who runs them: the ranks of a job, or three that are started for it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import torch.distributed as dist

from torch_join import __version__
from torch_join._doctor import connections, names, training, versions
from torch_join._doctor.check import Check
from torch_join._doctor.job import Job, SetupError, within
from torch_join._doctor.launch import PARENT, SAID, UNUSED, end_without_parent, launch, watch_parent
from torch_join._doctor.report import Finding, document, verdict_of

CHECKS = [
    connections.STORE,
    versions.CHECK,
    connections.BACKEND,
    connections.LINKS,
    training.EPOCH,
    names.CHECK,  # here, since it has had time meanwhile
    training.COST,
]
_END_SECONDS = 5.0  # for the end of the process group


def examine(is_json: bool) -> int:
    """Run all checks as a rank of the job that there is, or of one that is started; return the exit code."""
    try:
        job = Job.of_environment(os.environ)
    except SetupError as error:
        setup = Finding("setup", "failed", str(error), error.remedy, is_broken=True)
        print(document([setup], {"torch_join": __version__}) if is_json else setup.line)
        return 1
    if job is None:
        return launch(is_json, sum(check.seconds for check in CHECKS))
    watch_parent()
    begin = time.monotonic()
    if job.local_rank == 0:
        job.importing = names.start()
    with _own_stdout() as out:
        findings = []
        for finding in _until_told(run(job, CHECKS), job):
            findings.append(finding)
            end_without_parent()
            if job.rank == 0 and not is_json:
                print(finding.line, file=out, flush=True)
            elif job.store is None and finding.verdict == "failed":  # nobody else hears of it
                print(f"rank {job.rank}: {finding.line}", file=sys.stderr, flush=True)
        if job.rank == 0 and is_json:
            seconds = round(time.monotonic() - begin, 1)
            about = {"torch_join": __version__, "world_size": job.world_size, "seconds": seconds}
            print(document(findings, about), file=out, flush=True)
        if job.store is not None:
            job.part(_END_SECONDS)
        is_well = not any(finding.is_broken for finding in findings)
        if is_well and dist.is_initialized():
            with contextlib.suppress(Exception):
                within(_END_SECONDS, lambda: dist.destroy_process_group())
        code = (SAID if PARENT in os.environ else 1) if verdict_of(findings) == "failed" else 0
        sys.stderr.flush()
        if not is_well:
            os._exit(code)  # a thread of a check, or of the backend, may never end
    return code


class _ToldToEndError(BaseException):
    """A launcher has told this rank to end, as where another one has died."""


def _until_told(findings: Iterator[Finding], job: Job) -> Iterator[Finding]:
    """Yield findings; on rank 0, where a launcher ends this process, also what was not done."""
    if unused := os.environ.get(UNUSED):
        text = f"this machine was checked, and not the job around it ({unused})"
        yield Finding(
            "job", "warning", text, "Start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    names_left = [check.name for check in CHECKS]

    def end(*_: object) -> None:
        raise _ToldToEndError

    before = signal.signal(signal.SIGTERM, end) if job.rank == 0 else None
    try:
        for finding in findings:
            names_left.remove(finding.name)
            yield finding
    except _ToldToEndError:
        text = "the launcher has ended this rank: another one has died, or it was told to stop"
        yield from (Finding(name, "not run", text, is_broken=True) for name in names_left)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def run(job: Job, checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield what each check finds; what needs one that did not come to its end is not run."""
    broken: set[str] = set()
    for check in checks:
        can_run = check.needs not in broken and (job.store is not None or not check.needs)
        finding = check.run(job) if can_run else check.not_run()
        if finding.is_broken:
            broken.add(check.name)
        yield finding


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Send what others print to stderr, gloo for one; what this gives goes to stdout."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            yield out
        finally:
            sys.stdout.flush()
            out.flush()
            os.dup2(out.fileno(), 1)
