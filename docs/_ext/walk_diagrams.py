"""The directive `walk-diagram`: a walk through the sources as a picture, made of the numbered list of its page.

A box for each station, below the one before it; those of one folder stand in one column.
"""

import re
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive

_STATION = re.compile(r"^\d+\. `([\w/]+)/([\w.]+)`: `([\w.]+)`", re.MULTILINE)
_WIDTH, _HEIGHT, _GAP, _COLUMNS = 262, 52, 20, 3


class Station(NamedTuple):
    """A function, with its file and folder."""

    folder: str
    file: str
    name: str


def stations(text: str, title: str) -> list[Station]:
    """Return those of the walk with this title, in a page's source."""
    walk = text.split(f"**{title}**", 1)[1].split("\n**", 1)[0].split("\n## ", 1)[0]
    return [Station(*found) for found in _STATION.findall(walk)]


def draw(walk: list[Station], title: str) -> str:
    """Return the picture, as SVG that takes its colours from the page."""
    folders = list(dict.fromkeys(station.folder for station in walk))
    columns = min(len(folders), _COLUMNS)
    width, height = columns * (_WIDTH + _GAP) - _GAP, len(walk) * (_HEIGHT + _GAP) - _GAP
    parts = [
        (
            f'<svg class="walk" viewBox="-1 -1 {width + 2} {height + 2}" role="img" aria-label="{escape(title)}"'
            f' style="max-width: {width}px" xmlns="http://www.w3.org/2000/svg">'
        )
    ]
    middles = [folders.index(station.folder) % columns * (_WIDTH + _GAP) + _WIDTH / 2 for station in walk]
    for number, (station, middle) in enumerate(zip(walk, middles, strict=True)):
        y = number * (_HEIGHT + _GAP)
        if number:
            path = f"M{middles[number - 1]} {y - _GAP} V{y - _GAP / 2} H{middle} V{y - 3}"
            parts.append(f'<path class="arrow" d="{path}"/>')
            parts.append(f'<path class="head" d="M{middle - 4} {y - 7} L{middle} {y} L{middle + 4} {y - 7} Z"/>')
        parts.append(
            f'<rect class="station" x="{middle - _WIDTH / 2}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4"/>'
        )
        lines = (("folder", f"{station.folder}/"), ("file", f"{number + 1}. {station.file}"), ("name", station.name))
        for line, (kind, text) in enumerate(lines):
            parts.append(f'<text class="{kind}" x="{middle}" y="{y + 14 + 15 * line}">{escape(text)}</text>')
    return "".join([*parts, "</svg>"])


class WalkDiagram(Directive):
    """Draws the walk that its argument names."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        title = " ".join(self.arguments[0].split())
        walk = stations(Path(self.state.document["source"]).read_text(), title)
        if not walk:
            raise self.error(f"no walk is called {title!r}")
        return [nodes.raw("", f'<figure class="walk">{draw(walk, title)}</figure>', format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("walk-diagram", WalkDiagram)
    return {"parallel_read_safe": True}
