"""Types of times, periods and pod numbers, as users write them in scenario files."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from epp.core.types import Seconds

_INSTANT_S_MAX: Final = 1e9

Instant: TypeAlias = Annotated[float, Meta(ge=0.0, le=_INSTANT_S_MAX)]
Duration: TypeAlias = Annotated[float, Meta(ge=0.0, le=_INSTANT_S_MAX)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Numbers: TypeAlias = tuple[Annotated[int, Meta(ge=0, le=1_000_000)], ...]
"""Numbers of pods or pickers, counted from 0. An empty tuple means all; for an incident, all pods
that exist when it begins.
"""


def check_window(from_s: Seconds, to_s: Seconds) -> None:
    """Raise `ValueError` unless `to_s` is after `from_s`."""
    if from_s >= to_s:
        raise ValueError(f"expected to_s after from_s, {from_s:g} s, got {to_s:g} s")
