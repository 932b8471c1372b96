"""Selection of the ready endpoints that may serve a request now: those that are neither ejected nor
excluded as full. If a reason holds for all, it excludes none. A full endpoint is excluded during its
pause; after it, the endpoint may receive a few requests (`FullEndpoints`).
"""

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Columns, Ints
from epp.core.knowledge.ejection import Ejection, OutlierEjection
from epp.core.knowledge.fullness import FULL, FullEndpoints
from epp.core.types import Seconds


class Available(Struct, frozen=True, gc=False):
    """The slots of the endpoints that may serve a request. Each field is a subset of the field
    before it.
    """

    ready: Ints
    """Slots of ready endpoints that the gateway's subset hint allows."""
    in_service: Ints
    """Slots of `ready` whose endpoints are not ejected, or all of `ready` if every one is ejected;
    without those that the filters before all stages of a staged scheduler dropped.
    """
    with_room: Ints
    """Slots of `in_service` whose endpoints are not excluded as full, or all of `in_service` if every
    one is. With flow control, endpoints above the ceiling of the request may be missing too
    (`Admission.below_ceiling`). It is the same array as `in_service` if no endpoint was excluded as full before these
    filters dropped any.
    """

    def left_out(self, slots: Ints, columns: Columns) -> dict[str, Ints]:
        """Return the slots of the ready endpoints that are not in `slots` because they are ejected
        or full, by that reason. Those above the ceiling of the request count as full. `slots` is
        `with_room` or `in_service` of this object.
        """
        found: dict[str, Ints] = {}
        if len(self.in_service) < len(self.ready):
            ejected = self.ready[columns.ejected[self.ready]]
            # A filter before all stages may have dropped the others.
            if len(ejected):
                found[OutlierEjection.type_name] = ejected
        # Filters before all stages may have dropped the full ones too.
        if len(slots) < len(self.in_service):
            found[FULL] = self.in_service[~np.isin(self.in_service, slots)]
        return found


def available(
    ready: Ints, columns: Columns, ejection: Ejection, full: FullEndpoints, now: Seconds
) -> Available:
    """Return the slots of the `ready` endpoints that are not ejected, and of these the ones that
    are not full or may receive a request although they are. A reason that holds for all of them
    excludes none.
    """
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
