"""The numbers that a report's page draws itself from."""

import json
from pathlib import Path
from typing import Any


def numbers_of(path: Path) -> dict[str, Any]:
    """Return all of them."""
    found: dict[str, Any] = json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])
    return found


def summary_of(path: Path) -> str:
    """Say how many ranks, epochs and batches a page is of."""
    numbers = numbers_of(path)
    return f"{numbers['ranks']} ranks, {numbers['epochs']} epochs, {numbers['all']['batches']} batches"
