"""The report: one HTML page of all epochs, which loads nothing, in a light and a dark style."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from torch_join._monitor.records import EpochRecord, RankRecord

_TITLE = "What uneven inputs cost"
# So that a page of a long job has less than a megabyte.
_MOST_ROWS = 128  # of ranks; with more, each row is the mean of as many neighbours as it takes
_MOST_EPOCHS = 200  # in the timeline, and to choose from: the newest ones
_MOST_CELLS = 6000  # of one row in one epoch there
_MOST_LISTED = 500  # epochs in the table: the newest ones
_UNITS = 1000  # of the drawing's width, for a mean epoch
_ROW = 10  # its height for a rank, of which 8 are the bar


def page(epochs: Sequence[EpochRecord], rebalances: bool = False) -> str:
    """Return the page of these epochs, of which there is one or more.

    Args:
        epochs: All of the job's, of the same ranks.
        rebalances: Whether batches are rebalanced, so that nobody need be told to.
    """
    per_row = -(-len(epochs[0].ranks) // _MOST_ROWS)
    rows = _row_names(len(epochs[0].ranks), per_row)
    shown = epochs[-min(_MOST_EPOCHS, max(1, _MOST_CELLS // len(rows))) :]
    listed = epochs[-_MOST_LISTED:]
    scale = _UNITS * len(shown) / (sum(epoch.seconds for epoch in shown) or 1.0)
    views = {"all": _view(epochs, rebalances, 0.0, sum(epoch.seconds for epoch in shown), scale)}
    ends, start, drawn = [], 0.0, []
    for place, epoch in enumerate(shown):
        views[str(place)] = _view([epoch], rebalances, start, epoch.seconds, scale)
        drawn.append(_drawn(epoch, per_row, start, scale, len(rows)))
        start += epoch.seconds
        ends.append(round(start * scale))
    columns = _Columns(epochs)
    cells = [[columns.cells(ranks) for ranks in _grouped(epoch.ranks, per_row)] for epoch in shown]
    whole = [columns.cells(ranks, of=len(epochs)) for ranks in _grouped_over(epochs, per_row)]
    data = {
        "views": views,
        "ends": ends,
        "names": [f"epoch {epoch.epoch}" for epoch in shown],
        "rows": rows,
        "cells": cells,
        "reads": columns.reads,
        "whole": whole,
    }
    height = _ROW * len(rows)
    pixels = len(rows) * (24 if len(rows) <= 16 else 14 if len(rows) <= 40 else 8)
    choices = [("all", "all epochs"), *((str(place), f"epoch {epoch.epoch}") for place, epoch in enumerate(shown))]
    template = Template(files("torch_join._monitor").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_TITLE,
        job=_job(epochs),
        choices="".join(f'<option value="{value}">{name}</option>' for value, name in choices),
        numbers=views["all"]["numbers"],
        names=_labels(rows, pixels // len(rows)),
        timeline=f'<svg id="drawing" role="img" aria-label="Timeline of {len(rows)} rows of ranks over'
        f' {_count(len(shown), "epoch")}" viewBox="0 0 {views["all"]["width"]} {height}" preserveAspectRatio="none"'
        f' style="height:{pixels}px">{"".join(drawn)}</svg>',
        axis=views["all"]["axis"],
        caption=_caption(epochs, shown, per_row),
        rank_head=columns.head,
        epoch_head="".join(f"<th scope=col>{name}</th>" for name in _EPOCH_HEAD),
        epochs="".join(_epoch_row(epoch, place) for place, epoch in enumerate(listed, len(shown) - len(listed))),
        epochs_note=_left_out(len(epochs) - len(listed), "table"),
        words="".join(f"<p class=quiet>{text}</p>" for text in _words(columns, rebalances)),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


# ------------------------------------------------------------ numbers


def _view(
    epochs: Sequence[EpochRecord], rebalances: bool, start: float, seconds: float, scale: float
) -> dict[str, int | str]:
    """Return what the page shows of one epoch, or of all."""
    first = round(start * scale)
    return {
        "from": first,
        "width": max(1, round((start + seconds) * scale) - first),
        "numbers": "".join(_tile(*each) for each in _tiles(epochs, rebalances)),
        "axis": "".join(f"<span>{_time(seconds * tick / 4)}</span>" for tick in range(5)),
    }


def _tile(name: str, number: str, note: str, costs: bool) -> str:
    return f"<div><dt>{name}</dt><dd><strong{' class=cost' if costs else ''}>{number}</strong>{note}</dd></div>"


def _tiles(epochs: Sequence[EpochRecord], rebalances: bool) -> Iterable[tuple[str, str, str, bool]]:
    """Yield, for epochs as a whole: a name, a number, what it is of, and whether it is a loss."""
    seconds, rank_seconds = _sum(epochs, "seconds"), _sum(epochs, "rank_seconds")
    idle, steps, batches = _sum(epochs, "idle_seconds"), round(_sum(epochs, "steps")), round(_sum(epochs, "batches"))
    share = idle / rank_seconds if rank_seconds else 0.0
    yield (
        "Idle time",
        f"{share:.0%}",
        f"{_time(idle)} of {_time(rank_seconds)}, added up over ranks",
        share >= 0.005,
    )
    longest = sum(max(rank.owned for rank in epoch.ranks) for epoch in epochs)
    mean = batches / len(epochs[0].ranks)
    per = " per epoch" if len(epochs) > 1 else ""
    yield (
        "Skew",
        f"{longest / mean if mean else 1.0:.2f} x",
        f"longest rank {_number(longest / len(epochs))} batches, mean {_number(mean / len(epochs))}{per}",
        False,
    )
    to_save, saves = round(_sum(epochs, "steps_to_save")), _sum(epochs, "seconds_to_save")
    yield (
        "Even shards would save" if rebalances else "Rebalancing would save",
        _count(to_save, "step"),
        f"of {steps:,}, or about {_time(saves)} of {_time(seconds)}",
        to_save > 0,
    )
    if donated := round(_sum(epochs, "donated")):
        size = _sum(epochs, "donated_bytes") / 1e6
        saved = round(_sum(epochs, "steps_saved"))
        yield "Rebalancing has saved", _count(saved, "step"), f"{donated:,} donated batches, {size:,.1f} MB", False
    reading = [rank.reading_seconds for epoch in epochs for rank in epoch.ranks]
    if None not in reading:
        read = sum(seconds or 0.0 for seconds in reading)
        active = rank_seconds - idle
        what = f"{_time(read)} of {_time(active)} with batches"
        yield "Waiting for batches", f"{read / active if active else 0.0:.0%}", what, False
    yield (
        "Duration",
        _time(seconds),
        f"{_count(steps, 'step')}, {batches:,} batches on {_count(len(epochs[0].ranks), 'rank')}",
        False,
    )


def _sum(epochs: Iterable[EpochRecord], name: str) -> float:
    return float(sum(getattr(epoch, name) for epoch in epochs))


def _job(epochs: Sequence[EpochRecord]) -> str:
    what = _count(len(epochs[0].ranks), "rank"), _count(len(epochs), "epoch")
    batches = f"{round(_sum(epochs, 'batches')):,} batches"
    return f"{', '.join(what)}, {batches}, {_time(_sum(epochs, 'seconds'))} in training loops"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _time(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    minutes = seconds / 60
    text = f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"
    return text.replace(".0 ", " ")


# ------------------------------------------------------------ the timeline


def _grouped(ranks: Sequence[RankRecord], per_row: int) -> list[list[RankRecord]]:
    return [list(ranks[first : first + per_row]) for first in range(0, len(ranks), per_row)]


def _grouped_over(epochs: Sequence[EpochRecord], per_row: int) -> list[list[RankRecord]]:
    """Return, by row, what its ranks did in all epochs."""
    by_epoch = [_grouped(epoch.ranks, per_row) for epoch in epochs]
    return [[rank for each in group for rank in each] for group in zip(*by_epoch, strict=True)]


def _row_names(ranks: int, per_row: int) -> list[str]:
    if per_row == 1:
        return [f"rank {rank}" for rank in range(ranks)]
    return [f"ranks {first}-{min(first + per_row, ranks) - 1}" for first in range(0, ranks, per_row)]


def _labels(rows: Sequence[str], pixels: int) -> str:
    """Return the rows' names, of as many as there is room for."""
    every = next(number for number in (1, 2, 4, 8) if number * pixels >= 14)
    return "".join(
        f'<span style="top:{(index + 0.5) * pixels:g}px">{escape(name)}</span>'
        for index, name in enumerate(rows)
        if index % every == 0
    )


def _drawn(epoch: EpochRecord, per_row: int, start: float, scale: float, rows: int) -> str:
    """Return an epoch's part of the drawing: a path of all bars of a kind, and a line where it ends."""
    bars: dict[str, list[str]] = {"trains": [], "idle": []}
    for row, ranks in enumerate(_grouped(epoch.ranks, per_row)):
        active = sum(rank.active_seconds for rank in ranks) / len(ranks)
        seconds = sum(rank.seconds for rank in ranks) / len(ranks)
        begin, middle, end = (round((start + at) * scale) for at in (0.0, active, seconds))
        for kind, left, width in (("trains", begin, middle - begin), ("idle", middle, end - middle)):
            if width > 0:
                bars[kind].append(f"M{left} {row * _ROW + 1}h{width}v{_ROW - 2}h-{width}z")
    x = round((start + epoch.seconds) * scale)
    paths = "".join(f'<path class={kind} d="{"".join(parts)}"/>' for kind, parts in bars.items() if parts)
    return f'{paths}<path class=edge d="M{x} 0v{rows * _ROW}"/>'


def _caption(epochs: Sequence[EpochRecord], shown: Sequence[EpochRecord], per_row: int) -> str:
    text = (
        "Seconds since the loop began, where all ranks met; each rank by its own clock."
        + (" Epochs follow one another, without what was between them." if len(epochs) > 1 else "")
        + (f" Each row is the mean of {per_row} ranks." if per_row > 1 else "")
    )
    return text + _left_out(len(epochs) - len(shown), "timeline", tag="span")


def _left_out(number: int, where: str, tag: str = "p") -> str:
    if number <= 0:
        return ""
    return f" <{tag} class=quiet>The {where} leaves out the first {_count(number, 'epoch')}.</{tag}>"


# ------------------------------------------------------------ tables

_EPOCH_HEAD = ("Epoch", "Duration", "Steps", "Batches", "Skew", "Idle", "Could save", "About", "Donated")


def _epoch_row(epoch: EpochRecord, place: int) -> str:
    values = (
        _time(epoch.seconds),
        f"{epoch.steps:,}",
        f"{epoch.batches:,}",
        f"{epoch.skew:.2f} x",
        f"{epoch.idle_share:.0%}",
        _count(epoch.steps_to_save, "step"),
        _time(epoch.seconds_to_save),
        f"{epoch.donated:,}",
    )
    cells = "".join(f"<td>{value}</td>" for value in values)
    return f'<tr data-view="{place}"><th scope=row>{epoch.epoch}</th>{cells}</tr>'


class _Columns:
    """The columns of the table of ranks, of which some are left out where there is nothing in any of them."""

    def __init__(self, epochs: Sequence[EpochRecord]) -> None:
        ranks = [rank for epoch in epochs for rank in epoch.ranks]
        self.reads = all(rank.reading_seconds is not None for rank in ranks)
        self.donates = any(rank.given for rank in ranks)
        names = ["Rank", "Batches", "", "With batches", "Idle", "Idle share"]
        names += ["Waiting for batches"] if self.reads else []
        names += ["Given", "Received"] if self.donates else []
        self.head = "".join(f"<th scope=col>{name}</th>" if name else "<td></td>" for name in names)

    def cells(self, ranks: Sequence[RankRecord], of: int = 1) -> list[float]:
        """Return a row's numbers: the mean of ranks, over so many epochs."""
        size = len(ranks) / of

        def mean(values: Iterable[float | None]) -> float:
            value = sum(value or 0 for value in values) / size
            # Three digits are enough to divide by one another.
            value = round(value, 2) if value >= 1 else float(f"{value:.3g}")
            return int(value) if value == int(value) else value

        found = [mean(rank.batches for rank in ranks), mean(rank.active_seconds for rank in ranks)]
        found.append(mean(rank.idle_seconds for rank in ranks))
        found += [mean(rank.reading_seconds for rank in ranks)] if self.reads else []
        if self.donates:
            found += [mean(rank.given for rank in ranks), mean(rank.received for rank in ranks)]
        return found


def _words(columns: _Columns, rebalances: bool) -> Iterable[str]:
    yield (
        "<b>Idle</b> is a rank's time from where it has asked for a batch and got none, or has left the loop, until the"
        " loop ends on all ranks. That a rank waits for a slower one inside of a step is not idle time."
    )
    yield "<b>Skew</b> is the number of batches of the longest rank, over the mean of all ranks."
    yield (
        f"<b>{'Even shards' if rebalances else 'Rebalancing'} would save</b> the steps beyond all batches divided by"
        " the number of ranks. Its seconds are an estimate: each step counts as the mean of the epoch's."
    )
    if columns.reads:
        yield (
            "<b>Waiting for batches</b> is the time from asking for a batch to getting it: the loader's work, and where"
            " lengths are not known, the wait for other ranks."
        )
    if columns.donates:
        yield "<b>Donated</b> batches were read by one rank, and trained on by another one that had none left."
    yield "Seconds are those of the host. Work that a GPU has yet to do is not waited for."
