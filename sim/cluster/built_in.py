"""Configurations that others publish, to compare one's own with: what `--config NAME` runs.

Texts are `EndpointPickerConfig`s as a user would write them, with every parameter that decides.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from epp.configuration.config import DEFAULT_CONFIG
from epp.strategies import STRATEGIES

DEFAULT_POLICY: Final = "default"
"""The configuration that `epp serve` has when it is given none."""

CONFIGURATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        DEFAULT_POLICY: DEFAULT_CONFIG,
        **{name: strategy.config for name, strategy in STRATEGIES.items()},
    }
)
"""Name -> text."""
