"""The checks in their order, and who runs them: the ranks of a job, or three that are started for it."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import torch.distributed as dist

from torch_join import __version__
from torch_join._doctor import connections, names, training, versions
from torch_join._doctor.check import Check
from torch_join._doctor.job import Job, within
from torch_join._doctor.launch import launch
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
    job = Job.of_environment(os.environ)
    if job is None:
        return launch(is_json, sum(check.seconds for check in CHECKS))
    begin = time.monotonic()
    if job.local_rank == 0:
        job.importing = names.start()
    with _own_stdout() as out:
        findings = []
        for finding in run(job, CHECKS):
            findings.append(finding)
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
        code = int(verdict_of(findings) == "failed")
        sys.stderr.flush()
        if not is_well:
            os._exit(code)  # a thread of a check, or of the backend, may never end
    return code


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
