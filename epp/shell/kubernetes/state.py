"""The state of watches, Kubernetes Events and leadership at the API server, for metrics pages."""

from collections.abc import Mapping

from msgspec import Struct

from epp.core.types import Seconds


class Reflection(Struct, frozen=True, kw_only=True):
    """The state of the watch of one kind of object, for a metrics page."""

    objects: int
    synced: bool
    stale_s: Seconds
    """Seconds since the API server last sent a page, event or bookmark or started a watch; infinite
    if it never did.
    """
    lists: int
    watches: int
    repairs: int
    errors: Mapping[str, int]
    """Number of errors of lists and watches by kind; a missing CRD of an optional kind of object is
    no error.
    """


class ClusterSnapshot(Struct, frozen=True, kw_only=True):
    """The state of the connection with the API server, for a metrics page."""

    kinds: Mapping[str, Reflection]
    """State of the watch of each kind of object, by resource ("pods", ...)."""
    events: Mapping[str, int]
    """Number of Kubernetes Events by result ("written", "dropped")."""
    leading: bool | None
    """True if this replica leads, None without leader election."""
