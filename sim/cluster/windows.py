"""Instants and windows of a run, as a user writes them down."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from epp.core.types import Seconds

_INSTANT_S_MAX: Final = 1e9

Instant: TypeAlias = Annotated[float, Meta(ge=0.0, le=_INSTANT_S_MAX)]
Duration: TypeAlias = Annotated[float, Meta(ge=0.0, le=_INSTANT_S_MAX)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Numbers: TypeAlias = tuple[Annotated[int, Meta(ge=0, le=1_000_000)], ...]
"""Of pods or pickers, from 0; none: all that are there."""


def check_window(from_s: Seconds, to_s: Seconds) -> None:
    """`ValueError` unless it ends after its beginning."""
    if from_s >= to_s:
        raise ValueError(f"expected to_s after from_s, {from_s:g} s, got {to_s:g} s")
