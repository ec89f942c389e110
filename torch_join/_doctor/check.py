"""One check: each rank acts within a deadline, and rank 0 judges. The ranks exchange JSON in the job's store.

The judgement is a finding, which is printed.
"""

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from torch_join._base.errors import name_ranks

_GRACE = 3.0  # seconds that rank 0 waits beyond a rank's deadline


Verdict = Literal["ok", "warning", "failed", "not run"]


@dataclass(frozen=True)
class Finding:
    """The finding of a check.

    Attributes:
        name: The name of the check.
        verdict: Its verdict.
        text: One or a few sentences.
        remedy: What to do, unless the verdict is ok.
        data: Numbers and names, for programs.
        is_broken: Whether some rank did not complete the check. Checks that need it are then not run.
    """

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False

    @property
    def line(self) -> str:
        """The line printed for people."""
        text = f"{self.verdict:<8} {self.name:<9} {self.text}"
        return f"{text}\n{'':<18} what to do: {self.remedy}" if self.remedy else text


def document(findings: Sequence[Finding], **about: Any) -> str:
    """Return the JSON document of a run, with `about` added to it."""
    checks = [asdict(finding) for finding in findings]
    return json.dumps({**about, "verdict": verdict_of(findings), "checks": checks}, indent=1)


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict."""
    found = {finding.verdict for finding in findings}
    return "failed" if found & {"failed", "not run"} else "warning" if "warning" in found else "ok"


@dataclass
class Job:
    """This process, as one rank of a job.

    Attributes:
        rank: Its number.
        world_size: The number of ranks.
        local_rank: Its number on this host.
        local_world_size: The number of ranks on this host.
        store: The job's store, once it is reached.
        device: The device that it trains on.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store: dist.Store | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009  it cannot be changed

    @classmethod
    def of_environment(cls) -> "Job | None":
        """Return the job that torchrun's variables describe, if they are set.

        Raises:
            ValueError: They are not numbers, or the rank is not one of that world size.
        """
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        rank, world_size, _ = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank}, and WORLD_SIZE {world_size}")
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(rank, world_size, *local)

    def collect(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        """Send a value to all ranks; return, by rank, the values of this name that arrive in time."""
        store, keys = self.store, [f"{name}/{rank}" for rank in range(self.world_size)]
        assert store is not None
        store.set(keys[self.rank], json.dumps(value))
        with suppress(RuntimeError):  # some do not arrive
            store.wait(keys, timedelta(seconds=seconds))
        return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Its name.
        act: Called on each rank; the value that it returns goes to rank 0 as JSON.
        judge: Called on rank 0 with the values of all ranks, by rank.
        seconds: The deadline of `act`.
        needs: An earlier check that must have been completed.
        remedy: What to do if a rank does not complete the check.
    """

    name: str
    act: Callable[[Job], Any]
    judge: Callable[[Sequence[Any]], Finding]
    seconds: float
    needs: str = ""
    remedy: str = "Read the ranks' stderr, and the stacks that --json prints."

    def run(self, job: Job) -> Finding:
        """Return the finding of all ranks; all of them call this.

        A rank that is not done some seconds after the deadline prints its stack and exits; rank 0 has then reported it.
        """
        deadline = time.monotonic() + self.seconds
        faulthandler.dump_traceback_later(self.seconds + (5 if job.rank else 2) * _GRACE, exit=True)
        try:
            return self._share(job, self._attempt(job), deadline)
        except Exception as error:  # the store is gone: this rank continues alone
            job.store = None
            text = (
                f"rank {job.rank} lost the job's store, or the rank that collects the answers: {type(error).__name__}:"
                f" {error}"
            )
            return Finding(self.name, "failed", text, "The log of rank 0 says more.", is_broken=True)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _attempt(self, job: Job) -> dict[str, Any]:
        try:
            return {"value": self.act(job)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "stack": traceback.format_exception(error)}

    def _share(self, job: Job, outcome: dict[str, Any], deadline: float) -> Finding:
        if job.store is None:  # then this rank is on its own
            return self._conclude({job.rank: outcome}, [])
        store, key, left = job.store, f"{self.name}/finding", max(deadline - time.monotonic(), _GRACE)
        if job.rank > 0:
            store.set(f"{self.name}/{job.rank}", json.dumps(outcome))
            store.wait([key], timedelta(seconds=left + 4 * _GRACE))
            return Finding(**json.loads(store.get(key)))
        outcomes = job.collect(self.name, outcome, left)
        finding = self._conclude(outcomes, sorted({*range(job.world_size)} - outcomes.keys()))
        store.set(key, json.dumps(vars(finding)))
        return finding

    def _conclude(self, outcomes: Mapping[int, dict[str, Any]], missing: Sequence[int]) -> Finding:
        if not missing and all("value" in outcome for outcome in outcomes.values()):
            return self.judge([outcome["value"] for outcome in outcomes.values()])
        errors: dict[str, list[int]] = {}
        for rank, outcome in outcomes.items():
            errors.setdefault(outcome.get("error", ""), []).append(rank)
        own = {error: ranks for error, ranks in errors.items() if error and not error.startswith("PeerFailedError")}
        remedy = self.remedy
        texts = [f"{name_ranks(ranks)}: {error}" for error, ranks in (own or errors).items() if error]
        if missing:
            texts.insert(0, f"{name_ranks(missing)} did not answer in time: slow, ended, stopped, or never started")
            remedy = f"Read what {name_ranks(missing)} has written to stderr." if self.needs else remedy
        stacks = {str(rank): outcome["stack"] for rank, outcome in outcomes.items() if "stack" in outcome}
        data = {"missing": [*missing], "stacks": stacks}
        return Finding(self.name, "failed", "; ".join(texts), remedy, data, is_broken=True)
