"""Docstrings are written as Markdown, which editors show as it is: here fences and names become RST's."""

import re
from typing import Any


def convert(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn fences into code blocks, in place."""
    inside, converted = False, []
    for line in lines:
        if line.strip().startswith("```"):
            inside = not inside
            margin = line[: len(line) - len(line.lstrip())]
            converted += ["", f"{margin}.. code-block:: python", ""] if inside else [""]
        else:
            # A name may have an ending: `Joinable`s.
            names = re.sub(r"(?<![`:])`([^`]+)`(?!`)", r"``\1``\ ", line)
            converted.append(f"    {line}" if inside and line.strip() else names)
    lines[:] = converted


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of it; napoleon comes later."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", convert, priority=100)
    return {"parallel_read_safe": True}
