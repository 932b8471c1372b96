"""Work that peers have in flight."""

import numpy as np

from epp.core.knowledge.peer_load import PeerLoads


def tell(loads, origin, requests, *, tokens=0.0, now=0.0, whole=False, size=4):
    """`requests` by slot."""
    loads.tell(
        origin,
        np.array(list(requests), dtype=np.int64),
        np.array(list(requests.values()), dtype=np.int64),
        np.full(len(requests), tokens),
        now,
        whole=whole,
        size=size,
    )


def requests(loads, size=4):
    return loads.requests(np.arange(size), size).tolist()


def test_absolute_numbers_add_up_over_origins_and_replace_what_each_said_before():
    loads = PeerLoads()
    tell(loads, b"a", {0: 3, 2: 1})
    tell(loads, b"b", {0: 2})
    tell(loads, b"a", {0: 1})
    assert requests(loads) == [3, 0, 1, 0]
    tell(loads, b"a", {1: 4}, whole=True)
    assert requests(loads) == [2, 4, 0, 0]
    loads.forget(b"b")
    assert requests(loads) == [0, 4, 0, 0]
    assert len(loads) == 1
    loads.forget(b"never heard")


def test_an_endpoint_that_left_takes_its_load_with_it_and_a_new_slot_starts_empty():
    loads = PeerLoads()
    tell(loads, b"a", {3: 5}, tokens=100.0)
    loads.forget_slot(3)
    loads.forget_slot(70)
    assert requests(loads, size=9) == [0] * 9
    tell(loads, b"a", {8: 1}, size=9)
    assert requests(loads, size=12) == [0] * 8 + [1, 0, 0, 0]
    assert loads.prefill_tokens(np.arange(12), 0.0, np.full(12, 10.0)).tolist() == [0.0] * 12


def test_what_peers_prefill_drains_until_they_say_more():
    """Each by itself, never below nothing."""
    loads = PeerLoads()
    tell(loads, b"a", {0: 1, 1: 1}, tokens=100.0)
    tell(loads, b"b", {1: 1}, tokens=30.0, now=1.0)
    slots, speeds = np.array([0, 1, 2]), np.full(3, 10.0)
    assert loads.prefill_tokens(slots, 1.0, speeds).tolist() == [90.0, 120.0, 0.0]
    assert loads.prefill_tokens(slots, 9.0, speeds).tolist() == [10.0, 10.0, 0.0]
    assert loads.prefill_tokens(slots, 99.0, speeds).tolist() == [0.0] * 3
    speeds[1] = 20.0
    assert loads.prefill_tokens(slots, 2.0, speeds).tolist() == [80.0, 70.0, 0.0]
