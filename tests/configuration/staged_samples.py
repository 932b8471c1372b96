"""Configurations with the lines of llm-d's samples and guides for several stages, by name.

Sources: llm-d/llm-d-router, `deploy/config`, and llm-d/llm-d, `guides`; the comments are ours.
"""

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "config_samples" / "stages"
NAMES: Final = sorted(path.stem for path in _FOLDER.glob("*.yaml"))
NOT_YET: Final = frozenset(
    {"guide-context-length", "guide-wide-expert-parallel", "prefill-decode-topology"}
)
"""Samples whose plug-ins are not available."""


def path_of(name: str) -> Path:
    """Return the file of a sample."""
    return _FOLDER / f"{name}.yaml"
