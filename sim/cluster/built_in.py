"""Configurations that have a name, to compare one's own with: what `--config NAME` runs.

Ours and the field's are `epp.plugins.strategies`; those of other distributions, such as
homing-rivals, are found by their entry points.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final

from epp.configuration.config import DEFAULT_CONFIG, ConfigError
from epp.plugins.contract import Strategy
from epp.plugins.strategies import STRATEGIES

ENTRY_POINTS: Final = "homing.strategies"
"""Group in which distributions offer strategies: each entry point a tuple of `Strategy`."""
RIVALS_MISSING: Final = (
    "those of other routers are in homing-rivals, which is not installed: "
    "pip install 'homing-epp[rivals]'"
)
_RIVALS: Final = "rivals"
DEFAULT_POLICY: Final = "default"
"""The configuration that `epp serve` has when it is given none."""


@cache
def strategies() -> Mapping[str, Strategy]:
    """By name, ours first.

    Raises `ConfigError` when an installed distribution's cannot be imported or are no strategies,
    or take a name that is in use.
    """
    found = dict(STRATEGIES)
    problems: list[str] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        where = f"entry point {entry.name} ({entry.value})"
        try:
            offered = entry.load()
        except Exception as error:  # noqa: BLE001  the code of others runs
            problems.append(f"{where} cannot be imported: {type(error).__name__}: {error}")
            continue
        if not isinstance(offered, Iterable):
            offered = (None,)
        for strategy in offered:
            if not isinstance(strategy, Strategy):
                problems.append(f"{where} is no tuple of Strategy")
            elif strategy.name == DEFAULT_POLICY or strategy.name in found:
                problems.append(f"{where} has strategy {strategy.name}, which is taken")
            else:
                found[strategy.name] = strategy
    if problems:
        raise ConfigError(problems)
    return MappingProxyType(found)


@cache
def configurations() -> Mapping[str, str]:
    """Name -> text, an `EndpointPickerConfig`. Raises as `strategies`."""
    named = {name: strategy.config for name, strategy in strategies().items()}
    return MappingProxyType({DEFAULT_POLICY: DEFAULT_CONFIG, **named})


def rivals_installed() -> bool:
    """Whether strategies of other routers have names here."""
    return bool(entry_points(group=ENTRY_POINTS, name=_RIVALS))
