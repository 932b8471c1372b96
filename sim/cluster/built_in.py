"""Built-in configurations: the values of `--config NAME`.

`epp.plugins.strategies` has Homing's strategies and general ones. Other distributions, such as
homing-rivals, offer theirs through entry points.
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
"""Entry-point group in which distributions offer routing strategies. Each entry point is a tuple of
`Strategy`.
"""
RIVALS_MISSING: Final = (
    "strategies of other routers are in homing-rivals, which is not installed: "
    "pip install 'homing-epp[rivals]'"
)
_RIVALS: Final = "rivals"
DEFAULT_POLICY: Final = "default"
"""Name, for `--config`, of the configuration that `epp serve` uses if none is given."""


@cache
def strategies() -> Mapping[str, Strategy]:
    """Return all routing strategies by name: Homing's own first, then those of other distributions.

    Raises `ConfigError` if an entry point cannot be imported, if it is not a tuple of `Strategy`,
    or if a name is already in use.
    """
    found = dict(STRATEGIES)
    problems: list[str] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        where = f"entry point {entry.name} ({entry.value})"
        try:
            offered = entry.load()
        except Exception as error:  # noqa: BLE001  other distributions' code runs
            problems.append(f"{where} cannot be imported: {type(error).__name__}: {error}")
            continue
        if not isinstance(offered, Iterable):
            offered = (None,)
        for strategy in offered:
            if not isinstance(strategy, Strategy):
                problems.append(f"{where} is not a tuple of Strategy")
            elif strategy.name == DEFAULT_POLICY or strategy.name in found:
                problems.append(
                    f"{where} has strategy {strategy.name}, whose name is already in use"
                )
            else:
                found[strategy.name] = strategy
    if problems:
        raise ConfigError(problems)
    return MappingProxyType(found)


@cache
def configurations() -> Mapping[str, str]:
    """Return the text of the `EndpointPickerConfig` of the default and of each strategy, by name.
    Raises `ConfigError` for invalid entry points, as `strategies` does.
    """
    named = {name: strategy.config for name, strategy in strategies().items()}
    return MappingProxyType({DEFAULT_POLICY: DEFAULT_CONFIG, **named})


def rivals_installed() -> bool:
    """Return whether the distribution with the strategies of other routers, homing-rivals, is
    installed.
    """
    return bool(entry_points(group=ENTRY_POINTS, name=_RIVALS))
