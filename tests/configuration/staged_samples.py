"""Configurations with the lines of llm-d's samples and guides for several stages, by name.

Sources: llm-d/llm-d-router, `deploy/config`, and llm-d/llm-d, `guides`; the comments are ours.
"""

from pathlib import Path
from typing import Final

import yaml

from epp.configuration.compatibility import REFUSED

_FOLDER: Final = Path(__file__).parent / "config_samples" / "stages"
NAMES: Final = sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def path_of(name: str) -> Path:
    """Return the file of a sample."""
    return _FOLDER / f"{name}.yaml"


def supported() -> list[str]:
    """Return the names of the samples whose plugins are all available."""
    return [name for name in NAMES if types_in(name).isdisjoint(REFUSED)]


def types_in(name: str) -> set[str]:
    """Return the types of the plugins of a sample."""
    document = yaml.safe_load(path_of(name).read_text())
    return {plugin["type"] for plugin in document["plugins"]}
