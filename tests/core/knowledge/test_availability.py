"""The ready endpoints that may serve: nobody is lost, and somebody is always left."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.availability import Available, available
from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.ejection import Ejection, OutlierEjection
from epp.core.knowledge.fullness import FULL, FullEndpoints

N = 6
slots = st.sets(st.integers(0, N - 1))


def among(ready, ejected, refused):
    columns = Columns()
    for _ in range(N):
        columns.add_slot()
    ejection, full = Ejection(columns), FullEndpoints()
    for slot in ejected:
        columns.ejected[slot] = True
        ejection.masked.add(slot)
    for slot in refused:
        full.refused(slot, 0.0, 10.0, 1.0)
    return available(np.array(sorted(ready), dtype=np.int64), columns, ejection, full, 2.0), columns


@given(ready=slots, ejected=slots, refused=slots)
def test_each_ready_endpoint_is_offered_or_left_out_for_a_reason(ready, ejected, refused):
    offered, columns = among(ready, ejected, refused)
    in_service = ready - ejected or ready
    with_room = in_service - refused or in_service
    assert offered.ready.tolist() == sorted(ready)
    assert offered.in_service.tolist() == sorted(in_service)
    assert offered.with_room.tolist() == sorted(with_room)
    assert (offered.with_room is offered.in_service) == (with_room == in_service)
    for tried in (offered.with_room, offered.in_service):
        left_out = offered.left_out(tried, columns)
        assert set(left_out) <= {OutlierEjection.type_name, FULL}
        found = [slot for gone in left_out.values() for slot in gone.tolist()]
        assert sorted([*found, *tried.tolist()]) == sorted(ready)


def test_no_reason_is_given_for_no_endpoint():
    """Filters before all stages may leave all endpoints with room, in an array of their own."""
    offered, columns = among({0, 1, 2}, (), ())
    left = offered.ready[1:]
    screened = Available(offered.ready, left, left.copy())
    assert screened.left_out(screened.with_room, columns) == {}


def test_without_ejected_and_full_endpoints_nothing_is_copied():
    offered, _ = among({0, 1}, (), ())
    assert offered.with_room is offered.in_service is offered.ready
