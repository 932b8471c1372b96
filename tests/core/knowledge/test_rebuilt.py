"""What is kept of candidates is enough to ask a scorer again."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.candidates import NUMBERS
from epp.core.knowledge.peer_load import PeerLoads
from epp.core.knowledge.rebuilt import rebuilt_candidates
from tests.builders import candidates, lora, resident

SOME = st.floats(0, 1e9) | st.just(math.nan)
ROW = st.tuples(SOME, SOME, SOME, st.integers(0, 99), st.floats(0, 1e6), st.integers(0, 9))


@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_the_numbers_of_one_candidate_are_its_columns(rows):
    """One by one what the columns say of all, and again of candidates made of them."""
    waiting, running, usage, inflight, tokens, matched = map(list, zip(*rows, strict=True))
    pool = candidates(
        waiting_requests=waiting,
        running_requests=running,
        kv_cache_usage=usage,
        inflight_requests=inflight,
        inflight_prefill_tokens=tokens,
        matched_blocks=matched,
        metrics_age_s=[0.5 * at for at in range(len(rows))],
        total_blocks=9,
        prompt_tokens=700,
    )
    numbers = [pool.numbers_of(at) for at in range(len(rows))]
    again = rebuilt_candidates(
        pool.endpoints, numbers, total_blocks=9, block_tokens=64, prompt_tokens=700
    )
    assert again.endpoints == pool.endpoints
    for at, name in enumerate(NUMBERS):
        column = getattr(pool, name).astype(float)
        np.testing.assert_array_equal([row[at] for row in numbers], column)
        np.testing.assert_array_equal(getattr(again, name).astype(float), column)
    np.testing.assert_array_equal(again.total_blocks, pool.total_blocks)
    np.testing.assert_array_equal(again.uncached_tokens, pool.uncached_tokens)


def test_what_peers_have_in_flight_is_among_them():
    """As in the columns: a decision went by both."""
    pool = candidates(2, inflight_requests=[1, 2], inflight_prefill_tokens=[10.0, 20.0])
    pool._columns.peers = PeerLoads()
    pool._columns.peers.tell(
        b"peer", np.array([1]), np.array([5]), np.array([100.0]), 1_000.0, whole=True, size=2
    )
    told = dict(zip(NUMBERS, pool.numbers_of(1), strict=True))
    assert told["inflight_requests"] == pool.inflight_requests[1] == 7
    assert told["inflight_prefill_tokens"] == pool.inflight_prefill_tokens[1] == 120.0
    assert pool.numbers_of(0)[5:8] == (1, 0, 10.0)


def test_adapters_and_rendezvous_come_along():
    """A scorer that asks for either finds what it found then; of who told nothing there is nothing."""
    pool = candidates(
        3, adapters=[lora("sql", slots_max=2), None, resident(gpu=["chat"], slots_max=4)]
    )
    again = rebuilt_candidates(
        pool.endpoints,
        [pool.numbers_of(at) for at in range(3)],
        total_blocks=0,
        block_tokens=64,
        prompt_tokens=0,
        adapters=pool.adapter_state.reports,
    )
    assert again.adapters_reported
    assert again.adapter_state.generation.tolist() == [1, 0, 2]
    assert again.adapter_state.slots_max.tolist() == [2, 0, 4]
    assert again.adapter_state.active("sql").tolist() == [True, False, False]
    assert again.adapter_state.on_gpu("chat").tolist() == [False, False, True]
    np.testing.assert_array_equal(again.rendezvous(7), pool.rendezvous(7))
