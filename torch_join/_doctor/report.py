"""The finding of a check, and how it is printed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
