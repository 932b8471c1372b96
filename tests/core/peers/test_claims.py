"""What a peer can have in flight, by what the engine's page and this picker say."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.pool import EndpointPool
from epp.core.peers.claims import (
    PROMPT_TOKENS,
    SENT_REQUESTS_MIN,
    SENT_REQUESTS_PER_S,
    UNSEEN_S,
    claims_max,
)
from epp.core.types import EndpointMetrics
from tests.builders import endpoint


def bounds(waiting, running, *, ours=0, unreported=0, tokens=0, age_s=0.0):
    """Of one endpoint whose page was read `age_s` ago."""
    pool = EndpointPool()
    pool.replace([endpoint(0)], 0.0)
    pool.observe(0, EndpointMetrics(waiting_requests=waiting, running_requests=running), 10.0)
    columns = pool.columns
    columns.inflight_requests[0] = ours
    columns.unreported_requests[0] = unreported
    columns.inflight_context_tokens[0] = tokens
    requests, tokens_max = claims_max(columns, np.array([0]), 10.0 + age_s)
    return int(requests[0]), float(tokens_max[0])


def test_a_page_shows_what_is_there_and_time_what_may_have_come_since():
    assert bounds(3, 5) == (8 + 4, (3 + 4) * PROMPT_TOKENS)
    assert bounds(3, 5, age_s=0.5)[0] == 8 + 4 + 10
    # Ours that the page knows are nobody else's; those since it was read it does not show.
    assert bounds(3, 5, ours=6, unreported=2)[0] == 4 + 4
    # As long as ours, twice over.
    assert bounds(0, 0, ours=2, tokens=20_000)[1] == 4 * 2 * 10_000


def test_without_a_page_the_bound_is_that_of_an_old_one():
    pool = EndpointPool()
    pool.replace([endpoint(0)], 0.0)
    requests, tokens = claims_max(pool.columns, np.array([0]), 1e6)
    assert requests[0] == SENT_REQUESTS_MIN + UNSEEN_S * SENT_REQUESTS_PER_S
    assert math.isfinite(tokens[0])


gauges = st.one_of(st.integers(0, 10_000).map(float), st.just(math.nan))


@given(
    gauges,
    gauges,
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 10**9),
    st.floats(-10.0, 1e6),
)
def test_nothing_is_believed_beyond_the_page_and_the_time_since(
    waiting, running, ours, unreported, tokens, age_s
):
    """Whatever is known: at least what may have been sent, at most that and what is shown."""
    # As two instants tell it: from 10 s to 11.2 s it is a little less than 1.2 s.
    age_s = (10.0 + age_s) - 10.0
    requests, tokens_max = bounds(
        waiting,
        running,
        ours=ours,
        unreported=min(ours, unreported),
        tokens=tokens if ours else 0,
        age_s=age_s,
    )
    sent = SENT_REQUESTS_MIN + SENT_REQUESTS_PER_S * min(max(age_s, 0.0), UNSEEN_S)
    shown = np.nan_to_num(waiting) + np.nan_to_num(running)
    assert math.floor(sent) <= requests <= shown + sent
    each = 2 * tokens / ours if ours else PROMPT_TOKENS
    assert tokens_max <= (np.nan_to_num(waiting) + sent) * each * (1 + 1e-9)
