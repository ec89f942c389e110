"""One check: what each rank does, under a deadline, and what comes of it on rank 0."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_join._base.errors import name_ranks
from torch_join._doctor.job import Job, LateError, within
from torch_join._doctor.report import Finding

_GRACE = 3.0  # seconds, for which rank 0 waits longer than a rank is given
_MOST_LINES = 3  # of a stack, in a finding's text
_MOST_ERRORS = 3


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: What it is called.
        act: What each rank does; what it returns goes to rank 0 as JSON.
        judge: What rank 0 makes of that: a value of each rank, by rank; `None` of one that an earlier check has missed.
        seconds: The deadline of `act`.
        needs: An earlier check, without whose end this one cannot run.
        remedy: What to do where a rank does not come to its end.
    """

    name: str
    act: Callable[[Job], Any]
    judge: Callable[[Sequence[Any]], Finding]
    seconds: float
    needs: str = ""
    remedy: str = ""

    def run(self, job: Job) -> Finding:
        """Return what all ranks have found; all of them call this."""
        outcome = self._attempt(job)
        try:
            return self._share(job, outcome)
        except Exception as error:  # the store is gone: this rank goes on alone
            job.store = None
            text = f"rank {job.rank} lost the job's store, or the rank that judges: {type(error).__name__}: {error}"
            return Finding(self.name, "failed", text, "The log of rank 0 says more.", is_broken=True)

    def _share(self, job: Job, outcome: dict[str, Any]) -> Finding:
        if job.store is None:  # then this rank is alone with it
            return self._conclude({job.rank: outcome}, [job.rank], {})
        job.put(f"{self.name}/{job.rank}", outcome)
        if job.rank > 0:
            return Finding(**job.get(f"{self.name}/finding", 2 * self.seconds + 2 * _GRACE))
        asked = [rank for rank in range(job.world_size) if rank not in job.missing]
        outcomes = job.collect(self.name, asked, self.seconds + _GRACE)
        missing = {rank: job.why_gone(rank) for rank in asked if rank not in outcomes}
        finding = self._conclude(outcomes, asked, missing)
        job.missing |= missing.keys()
        job.put(f"{self.name}/finding", vars(finding))
        return finding

    def not_run(self) -> Finding:
        """Return the finding where what this check needs has not come to its end."""
        return Finding(self.name, "not run", f"since {self.needs!r} did not come to its end", is_broken=True)

    def _attempt(self, job: Job) -> dict[str, Any]:
        try:
            return {"value": within(self.seconds, lambda: self._act_on_device(job))}
        except LateError as error:
            return {"late": str(error), "stack": error.stack}
        except Exception as error:
            return {
                "error": f"{type(error).__name__}: {error}",
                "is_others": type(error).__name__ == "PeerFailedError",
                "stack": traceback.format_exception(error),
                "remedy": getattr(error, "remedy", ""),
            }

    def _act_on_device(self, job: Job) -> Any:
        """Act on the job's device: each check has a thread of its own, and each thread a current device."""
        if job.device.type != "cpu":
            torch.get_device_module(job.device).set_device(job.device)
        return self.act(job)

    def _conclude(
        self, outcomes: Mapping[int, dict[str, Any]], ranks: Sequence[int], missing: Mapping[int, str]
    ) -> Finding:
        if all("value" in outcomes.get(rank, {}) for rank in ranks):
            return self.judge([outcomes[rank]["value"] if rank in ranks else None for rank in range(max(ranks) + 1)])
        texts = [f"rank {rank} does not answer: {why}" for rank, why in missing.items()]
        errors: dict[str, list[int]] = {}
        own = [rank for rank, outcome in outcomes.items() if "error" in outcome and not outcome["is_others"]]
        for rank, outcome in outcomes.items():
            if "late" in outcome:
                texts.append(f"rank {rank} was {outcome['late']}, in {_innermost(outcome['stack'])}")
            elif "error" in outcome and (rank in own or not (own or missing)):
                errors.setdefault(outcome["error"], []).append(rank)
        texts += [f"{name_ranks(who)}: {error}" for error, who in [*errors.items()][:_MOST_ERRORS]]
        stacks = {str(rank): outcome["stack"] for rank, outcome in outcomes.items() if "stack" in outcome}
        remedy = f"Find out why {name_ranks(missing)} ended or stopped." if missing and self.needs else self.remedy
        remedy = next((told for outcome in outcomes.values() if (told := outcome.get("remedy"))), remedy)
        return Finding(self.name, "failed", "; ".join(texts), remedy, {"stacks": stacks}, is_broken=True)


def _innermost(stack: Sequence[str]) -> str:
    lines = [" ".join(line.split()) for entry in stack[-_MOST_LINES:] for line in entry.splitlines()[:2]]
    return " / ".join(lines) or "a call that shows no lines"
