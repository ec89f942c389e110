"""The directive `walk-diagram`: a walk through the sources as a picture, made of the numbered list of its page.

A column for each folder, a box for each station, and an arrow from each to the next.
"""

import re
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive

_STATION = re.compile(r"^\d+\. `([\w/]+)/([\w.]+)`: `([\w.]+)`", re.MULTILINE)
_WIDTH, _HEIGHT, _GAP, _TOP = 216, 40, 18, 34


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
    width, height = len(folders) * (_WIDTH + _GAP), _TOP + len(walk) * (_HEIGHT + _GAP)
    parts = [
        f'<svg class="walk" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
        f' style="max-width: {width}px" xmlns="http://www.w3.org/2000/svg">'
    ]
    for column, folder in enumerate(folders):
        x = column * (_WIDTH + _GAP)
        parts.append(f'<rect class="lane" x="{x}" y="0" width="{_WIDTH}" height="{height}" rx="6"/>')
        parts.append(f'<text class="folder" x="{x + _WIDTH / 2}" y="20">{escape(folder)}</text>')
    for number, station in enumerate(walk):
        x, y = folders.index(station.folder) * (_WIDTH + _GAP), _TOP + number * (_HEIGHT + _GAP)
        middle = x + _WIDTH / 2
        if number:
            before = folders.index(walk[number - 1].folder) * (_WIDTH + _GAP) + _WIDTH / 2
            line = y - _GAP / 2
            parts.append(f'<path class="arrow" d="M{before} {y - _GAP} V{line} H{middle} V{y - 3}"/>')
            parts.append(f'<path class="head" d="M{middle - 4} {y - 7} L{middle} {y} L{middle + 4} {y - 7} Z"/>')
        parts.append(f'<rect class="station" x="{x + 6}" y="{y}" width="{_WIDTH - 12}" height="{_HEIGHT}" rx="4"/>')
        parts.append(f'<text class="file" x="{middle}" y="{y + 16}">{number + 1}. {escape(station.file)}</text>')
        parts.append(f'<text class="name" x="{middle}" y="{y + 31}">{escape(station.name)}</text>')
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
