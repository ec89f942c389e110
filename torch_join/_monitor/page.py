"""The report: one HTML page of all epochs, which loads nothing else, and draws itself from the numbers in it."""

import json
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch_join._monitor.records import EpochRecord, RankRecord

# Limits, so that a page of a long job has less than a megabyte.
_MOST_ROWS = 128  # one per rank; with more ranks, each row is the mean of several neighbours
_MOST_EPOCHS = 200  # in the timeline, and in the list to choose from: the newest ones
_MOST_CELLS = 6000  # of the timeline; one row in one epoch is a cell
_MOST_LISTED = 500  # epochs in the table: the newest ones
# The numbers of an epoch; those of all epochs are added up.
_NUMBERS = (
    *("seconds", "rank_seconds", "idle_seconds", "steps", "batches", "longest", "steps_to_save", "seconds_to_save"),
    *("donated", "donated_bytes", "steps_saved"),
)


def page(epochs: Sequence[EpochRecord], rebalances: bool = False, weighting: str = "world") -> str:
    """Return the page of one or more epochs, with this process's script, command and host, and the time.

    Args:
        epochs: The epochs of the job, all with the same number of ranks.
        rebalances: Whether batches are rebalanced, so that the page need not suggest it.
        weighting: The weighting, in words.
    """
    world_size = len(epochs[0].ranks)
    per_row = -(-world_size // _MOST_ROWS)
    firsts = range(0, world_size, per_row)
    shown = epochs[-min(_MOST_EPOCHS, max(1, _MOST_CELLS // len(firsts))) :]
    ranks = [rank for epoch in epochs for rank in epoch.ranks]
    reads, donates = all(rank.reading_seconds is not None for rank in ranks), any(rank.given for rank in ranks)
    columns = ["batches", "active_seconds", "idle_seconds"]
    counts = all(rank.counted is not None for rank in ranks)
    columns += ["reading_seconds"] * reads + ["counted"] * counts + ["given", "received"] * donates

    def rows(some: Sequence[EpochRecord]) -> list[list[float]]:
        """Return, by row, the numbers of its columns: the mean of its ranks, over these epochs."""
        groups = [[rank for epoch in some for rank in epoch.ranks[first : first + per_row]] for first in firsts]
        sizes = [len(group) / len(some) for group in groups]
        return [[_sum(group, name) / size for name in columns] for group, size in zip(groups, sizes, strict=True)]

    data = {
        "script": Path(sys.argv[0]).name or "python",
        "command": shlex.join(sys.orig_argv),
        "host": socket.gethostname(),
        "written": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "weighting": weighting,
        "ranks": world_size,
        "rows": [_name(first, min(first + per_row, world_size) - 1) for first in firsts],
        "perRow": per_row,
        "rebalances": rebalances,
        "reads": reads,
        "counts": counts,
        "donates": donates,
        "epochs": len(epochs),
        "all": _numbers(epochs, reads),
        "listed": [{"epoch": epoch.epoch, **_numbers([epoch], reads)} for epoch in epochs[-_MOST_LISTED:]],
        "whole": rows(epochs),
        "cells": [rows([epoch]) for epoch in shown],
    }
    template = files("torch_join._monitor").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("$DATA", json.dumps(_short(data), separators=(",", ":")).replace("<", "\\u003c"))


def _numbers(epochs: Sequence[EpochRecord], reads: bool) -> dict[str, float]:
    numbers = {name: _sum(epochs, name) for name in _NUMBERS}
    if reads:
        numbers["reading_seconds"] = _sum((rank for epoch in epochs for rank in epoch.ranks), "reading_seconds")
    return numbers


def _sum(records: Iterable[EpochRecord | RankRecord], name: str) -> float:
    return float(sum(getattr(record, name) for record in records))


def _name(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _short(value: Any) -> Any:
    """Return a value with its numbers rounded to two decimals, or below 1 to three digits, as precise as the page."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_short, value)]
    if isinstance(value, float):
        value = round(value, 2) if value >= 1 else float(f"{value:.3g}")
        return int(value) if value == int(value) else value
    return value
