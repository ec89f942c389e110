"""What a check has found, and how it is printed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warning", "failed", "not run"]


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        name: The check's.
        verdict: Of it.
        text: One sentence, or a few.
        remedy: What to do, where it is not ok.
        data: Numbers and names, for programs.
        is_broken: Whether some rank did not come to the check's end: what builds on it is not run.
    """

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False

    @property
    def line(self) -> str:
        """What a person reads."""
        text = f"{self.verdict:<8} {self.name:<9} {self.text}"
        return f"{text}\n{'':<18} what to do: {self.remedy}" if self.remedy else text


def document(findings: Sequence[Finding], **about: Any) -> str:
    """Return the JSON document of a run; `about` is what else it says of that."""
    checks = [asdict(finding) for finding in findings]
    return json.dumps({**about, "verdict": verdict_of(findings), "checks": checks}, indent=1)


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the worst of the verdicts."""
    found = {finding.verdict for finding in findings}
    return "failed" if found & {"failed", "not run"} else "warning" if "warning" in found else "ok"
