"""Draws programs that hang, and slow ones; judges how they end."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.soak.hangs.programs import FRONT_ENDS
from tests.soak.hangs.running import Record
from tests.soak.hangs.script import Case, expected
from tests.soak.hangs.slips import SLIPS
from tests.soak.hangs.slowness import EXTRAS, MIRRORED, OUTSIDE

WITHIN = 20.0  # seconds, in which a hang is told
TOLERANCE = 1e-10
_BEGINS = "Deadlock: these ranks wait for each other:"
_WAITED = "Some ranks have waited for others"
_PAIRS = [(front_end, name) for name, slip in SLIPS.items() for front_end in slip.front_ends]
random.Random(0).shuffle(_PAIRS)
_PLACES = ("outside", "before", "begin", "between", "hook", "optimizer", "loader", "end", "after", "ended")
_HOWS = ("sleep",) * 6 + ("python", "garbage", "compile", "matmul", "held")


def _world(pick: random.Random) -> tuple[int, ...]:
    ranks = pick.choice((2, 2, 3, 3, 4))
    if pick.random() < 0.4:
        return (pick.randint(2, 5),) * ranks
    return tuple(pick.randint(1, 6) for _ in range(ranks))


def draw_hang(seed: int) -> Case:
    pick = random.Random(seed)
    front_end, name = _PAIRS[seed % len(_PAIRS)]
    lengths = _world(pick)
    who = pick.randrange(len(lengths))
    at = pick.randrange(lengths[who])
    if name == "own forward" and pick.random() < 0.7:
        at = lengths[who] - 1
    stream = pick.random() < 0.5 and front_end != "transformers"
    buffers = SLIPS[name].buffers or (pick.random() < 0.4 and not front_end.startswith("fsdp"))
    return Case(seed, front_end, (name,), lengths, who, at, stream, buffers, context=pick.random() < 0.3)


def draw_slow(seed: int) -> Case:
    pick = random.Random(1_000_000 + seed)
    front_end = pick.choice(("plain", *FRONT_ENDS))
    lengths = _world(pick)
    who = pick.randrange(len(lengths))
    at = pick.randrange(lengths[who])
    stream = pick.random() < 0.5 and front_end != "transformers"
    buffers = pick.random() < 0.4 and not front_end.startswith("fsdp")
    where = pick.choice(_PLACES)
    what: tuple[str, ...] = ()
    if pick.random() < 0.6:
        name = pick.choice([*EXTRAS])
        what = (name,)
        if name not in MIRRORED or front_end not in ("plain", "fabric", "accelerate"):
            at = min(at, min(lengths) - 1)  # where all have a batch
        where = pick.choice(("before", "end", "after"))
        if where == "end" and name == "ends_sum":
            at, where = at - 1, where if at else "after"
    how = pick.choice(_HOWS)
    seconds = pick.uniform(15, 45) if how == "sleep" else pick.uniform(15, 22)
    if pick.random() < 0.06:
        seconds = pick.uniform(45, 60) if how == "sleep" else 40.0
    options: dict[str, Any] = {}
    if not front_end.startswith("fsdp") and not what and pick.random() < 0.2:
        options["rebalance"] = True
    elif front_end in ("plain", "accelerate") and pick.random() < 0.2:
        options["may_break"] = True
    return Case(
        *(seed, front_end, what, lengths, who, at, stream, buffers, options, where, how, round(seconds, 1)),
        context=pick.random() < 0.3,
    )


@dataclass
class Verdict:
    """How a program has ended.

    Of a hang: "told", "logged" (a rank raises in gloo's words, and has logged ours), "said to wait" (in the
    log), "late", "misplaced", "named", "gloo's abort", "no hang", "partly", "wrong", or "silent hang". Of a slow
    program: "right", "false alarm", "wrong", or "error".
    """

    kind: str
    said: str = ""
    seconds: float = 0.0


def is_proven(case: Case) -> bool:
    """Whether a hang can be proven."""
    return all(SLIPS[name].proven for name in case.what)


def told(text: str) -> dict[int, tuple[str, str, int]]:
    """Where a text says that ranks are, by rank: in what, in which file, at which line."""
    places = {}
    for ranks, what, file, line in re.findall(r"ranks? ([\d, ]+) (?:is|are) in (.+?) at (\S+?):(\d+),", text):
        places |= {int(rank): (what, file.rsplit("/", 1)[-1], int(line)) for rank in ranks.split(", ")}
    return places


def same_bits(records: Sequence[Record]) -> bool:
    return all(each.parameters == records[0].parameters for each in records)


def judge_hang(case: Case, records: Sequence[Record], errors: Sequence[str]) -> Verdict:
    """Say how a program has ended; `errors` are what the workers tell."""
    said = "\n".join([*map(_describe, range(len(records)), records), *(error[:2000] for error in errors if error)])
    aborts = any("the process ended" in error and not one.ended for error, one in zip(errors, records, strict=False))
    if aborts or any("EnforceNotMet" in one.text for one in records):
        return Verdict("gloo's abort", said)
    if not all(one.ended for one in records):
        if not is_proven(case) and any(_WAITED in text for one in records for text in one.said):
            return Verdict("said to wait", said)
        return Verdict("partly" if any(one.ended for one in records) else "silent hang", said)
    if not any(one.error for one in records):
        return Verdict("no hang" if same_bits(records) else "wrong", said)
    if not all(one.by_name for one in records):
        logged = all(one.by_name or any(_BEGINS in text for text in one.said) for one in records)
        return Verdict("logged" if logged and all(one.error for one in records) else "partly", said)
    if not all(_BEGINS in one.text for one in records):
        return Verdict("partly" if any(_BEGINS in one.text for one in records) else "named", said)
    seconds = max(one.ended for one in records) - max(one.stay[0].since for one in records if one.stay)
    if faults := misplaced(case, records):
        return Verdict("misplaced", "; ".join(faults) + "\n" + said, seconds)
    return Verdict("told" if seconds < WITHIN else "late", said, seconds)


def _describe(rank: int, record: Record) -> str:
    text = f"rank {rank}: {record.text or ('ended' if record.ended else 'stuck')}"
    if record.stay is None:
        return text
    place, seconds = record.stay
    return f"{text} [{seconds:.0f} s at {place.file}:{place.line} ({place.function})]"


def misplaced(case: Case, records: Sequence[Record]) -> list[str]:
    """What of the texts is not so."""
    faults = []
    for rank, one in enumerate(records):
        places = told(one.text)
        if len(places) < 2:
            faults.append(f"rank {rank} names {sorted(places)} alone")
        if "Usual causes:" not in one.text:
            faults.append(f"rank {rank} names no cause")
        for other, (what, file, line) in places.items():
            stay = records[other].stay
            if stay is None or (file, line) != (stay[0].file, stay[0].line):
                faults.append(f"rank {rank} says of {other} that it is in {what} at {file}:{line}")
    inside = SLIPS[case.what[0]].inside
    stay = records[case.who].stay
    if case.what[0] not in ("epoch less", "stop") and case.who not in told(records[0].text):
        faults.append(f"rank {case.who}, whose mistake it is, is not named")
    if inside and stay is not None and stay[0].function != inside:
        faults.append(f"rank {case.who} was in {stay[0].function}, not in {inside}")
    if SLIPS[case.what[0]].place in ("begin", "between", "end") and inside:
        steps = re.findall(
            rf"(?:rank|ranks [\d, ]*){case.who} (?:is|are) in [^;]+?:\d+, in step (\d+)", records[0].text
        )
        if any(int(step) != case.at for step in steps):
            faults.append(f"rank {case.who} is said to be in step {steps}, not in {case.at}")
    return faults


def judge_slow(case: Case, records: Sequence[Record], errors: Sequence[str]) -> Verdict:
    said = "\n".join([*map(_describe, range(len(records)), records), *(error[:2000] for error in errors if error)])
    words = [text for one in records for text in (one.text, *one.said) if _BEGINS in text or "deadlock" in text.lower()]
    if words:
        return Verdict("false alarm", "\n".join([said, *words]))
    if any(one.error or not one.ended for one in records) or any(errors):
        return Verdict("error", said)
    if not same_bits(records):
        return Verdict("wrong", "the ranks differ")
    if not case.options.get("rebalance"):
        pairs = zip(records[0].parameters, expected(case), strict=True)
        off = max(
            float((torch.tensor(ours, dtype=torch.float64) - theirs.flatten()).abs().max()) for ours, theirs in pairs
        )
        if not off < TOLERANCE:
            return Verdict("wrong", f"{off} off")
    return Verdict("right", "; ".join(sorted({text for one in records for text in one.said})))


assert {*OUTSIDE} < {*_PLACES}
