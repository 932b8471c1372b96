"""The requests at candidates are the same whether they are computed or recounted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.candidates import Candidates, Columns
from epp.core.knowledge.inflight import InflightLedger
from epp.core.knowledge.peer_load import PeerLoads
from epp.core.knowledge.request_load import RequestLoad
from epp.core.prompt.request import InferenceRequest
from epp.testing.builders import candidates

ARRAYS = (
    *("context_tokens", "held_up", "requests", "unseen", "unseen_waiting"),
    *("waiting_kv_tokens", "waiting_share"),
)
FACTOR, OFFSET = np.array(0.3), np.array(3.1)
COUNTS = st.integers(0, 9)


def reported(waiting, running):
    n = len(waiting)
    return candidates(
        waiting_requests=[float(one) for one in waiting],
        running_requests=[float(one) for one in running],
        kv_cache_usage=[0.5] * n,
    )


def columns_of(made: Candidates) -> Columns:
    columns = made._columns
    columns.kv_capacity_tokens[:] = 1_000.0
    columns.first_slots = made._slot
    return columns


def computed(made: Candidates) -> RequestLoad:
    load = made.engine_load()
    return RequestLoad(
        load.requests,
        load.waiting_requests,
        made.inflight_requests.astype(np.float64),
        made.inflight_context_tokens.astype(np.float64),
        load.kv_used_tokens,
        waits=load.waits,
    )


def same(left: RequestLoad, right: RequestLoad) -> bool:
    scaled = [one.scaled(FACTOR, OFFSET) for one in (left, right)]
    return np.array_equal(*scaled) and all(
        np.array_equal(getattr(left, name), getattr(right, name))
        if getattr(left, name) is not None
        else getattr(right, name) is None
        for name in ARRAYS
    )


@given(
    st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20),
)
def test_recounted_requests_equal_computed_ones(loads, events):
    made = reported(*zip(*loads, strict=True))
    ledger = InflightLedger(columns_of(made))
    leases = []
    for number, (slot, begins) in enumerate(events):
        if begins or not leases:
            request = InferenceRequest(request_id="r", prompt_tokens=100 + number)
            lease = ledger.open(
                request, slot % len(loads), matched_blocks=0, prefill_tokens=10.0, now=number
            )
            leases.append(lease)
        else:
            ledger.close(leases.pop(slot % len(leases)), number)
        assert same(made.request_load(made.engine_load()), computed(made))


def test_the_arrays_are_gathered_once_between_two_changes_of_the_load():
    made = reported([1, 0], [2, 3])
    columns = columns_of(made)
    before = made.request_load(made.engine_load())
    assert made.request_load(made.engine_load()) is before
    columns.set_load(1, 4.0, 4.0, 0.5)
    assert made.request_load(made.engine_load()) is not before
    assert same(made.request_load(made.engine_load()), computed(made))


def test_some_of_the_slots_are_gathered_for_themselves():
    made = reported([1, 0, 2], [2, 3, 4])
    columns_of(made)
    made.request_load(made.engine_load())
    some = made.take(np.array([0, 2]))
    assert some.request_load(some.engine_load()).requests.tolist() == [3.0, 6.0]
    assert same(some.request_load(some.engine_load()), computed(some))


def test_requests_of_peers_count():
    made = reported([0, 0], [1, 1])
    columns = columns_of(made)
    made.request_load(made.engine_load())
    columns.peers = PeerLoads()
    columns.inflight_requests[0] = 5
    assert made.request_load(made.engine_load()).requests.tolist() == [5.0, 1.0]


def test_no_share_waits_if_no_request_waits():
    made = reported([0, 0], [1, 1])
    columns_of(made)
    found = made.request_load(made.engine_load())
    assert found.waiting_share is None
    assert found.unseen_waiting is None
