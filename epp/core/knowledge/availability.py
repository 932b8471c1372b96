"""The ready endpoints that may serve a request now: those that are in service and have room."""

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Columns, Ints
from epp.core.knowledge.ejection import Ejection, OutlierEjection
from epp.core.knowledge.fullness import FULL, FullEndpoints
from epp.core.types import Seconds


class Available(Struct, frozen=True, gc=False):
    """The endpoints that may serve a request, by slot. Each field is a part of the one before it."""

    ready: Ints
    """Ready endpoints in the gateway's subset."""
    in_service: Ints
    """Endpoints that are not ejected, or all if every one is."""
    with_room: Ints
    """Endpoints that are not full, or all if every one is. It is `in_service` itself if none is
    left out.
    """

    def left_out(self, slots: Ints, columns: Columns) -> dict[str, Ints]:
        """Return the slots of ready endpoints that are not among `slots`, by cause.

        `slots` is `with_room` or `in_service`.
        """
        found: dict[str, Ints] = {}
        if len(self.in_service) < len(self.ready):
            found[OutlierEjection.type_name] = self.ready[columns.ejected[self.ready]]
        if slots is not self.in_service:
            found[FULL] = self.in_service[~np.isin(self.in_service, slots)]
        return found


def available(
    ready: Ints, columns: Columns, ejection: Ejection, full: FullEndpoints, now: Seconds
) -> Available:
    """Return which of the `ready` endpoints are in service and have room."""
    in_service = ready
    if ejection.masked:
        left = ready[~columns.ejected[ready]]
        in_service = left if len(left) else ready
    with_room = in_service
    if full.by_slot:
        closed = full.without_room(in_service, now)
        if 0 < len(closed) < len(in_service):
            with_room = in_service[~np.isin(in_service, closed)]
    return Available(ready, in_service, with_room)
