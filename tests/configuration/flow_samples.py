"""Configurations with the lines of llm-d's samples and guide for flow control, by name.

Sources: llm-d/llm-d-router, `deploy/config` and the README of `max-saturation-detector`, and
llm-d/llm-d, `guides/flow-control`; the comments are ours.
"""

from pathlib import Path
from typing import Final

from epp.configuration.compatibility import REFUSED

FOLDER: Final = Path(__file__).parent / "config_samples" / "flow"
NAMES: Final = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def supported() -> list[str]:
    """Return the names of the samples that are not named after a plugin that is not available."""
    return [name for name in NAMES if name not in REFUSED]


def text_of(name: str) -> str:
    """Return the text of a sample."""
    return (FOLDER / f"{name}.yaml").read_text()
