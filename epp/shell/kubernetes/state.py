"""How it is with the API server: what operators are shown of it."""

from collections.abc import Mapping

from msgspec import Struct

from epp.core.types import Seconds


class Reflection(Struct, frozen=True, kw_only=True):
    """How it is with one kind of object, for a page of metrics."""

    objects: int
    synced: bool
    stale_s: Seconds
    """Since the last page, event, bookmark or beginning of a watch; infinite before the first."""
    lists: int
    watches: int
    repairs: int
    errors: Mapping[str, int]
    """By kind."""


class ClusterSnapshot(Struct, frozen=True, kw_only=True):
    """What the API server told, and how it is with it."""

    kinds: Mapping[str, Reflection]
    """By resource ("pods", ...)."""
    events: Mapping[str, int]
    """Result ("written", "dropped") -> Kubernetes Events."""
    leading: bool | None
    """None: there is no election."""
