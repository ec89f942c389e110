"""The package's description is the README, whose relative links lead to the repository there."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)(\[[^]]*\]\()(?!https?:|#|mailto:)")


class CustomMetadataHook(MetadataHookInterface):
    """What pyproject.toml calls the custom hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        base = metadata["urls"]["Source"]
        text = RELATIVE.sub(lambda link: f"{link[1]}{link[2]}{base}/{'raw' if link[1] else 'blob'}/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
