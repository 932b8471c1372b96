"""What plugins read is seen, by whatever way they come to it."""

import numpy as np
import pytest

from epp.testing import candidates, request
from epp.testing.reads import ReadsObserved


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda request, pool: pool.slot + len(pool) + pool.block_tokens, set()),
        (lambda request, pool: pool.waiting_requests, {"waiting_requests"}),
        (lambda request, pool: pool.all_observed_within(2.0), {"metrics_age_s"}),
        (lambda request, pool: pool.prefix_match(0), {"matched_blocks"}),
        (lambda request, pool: pool.affinity(""), {"matched_blocks"}),
        (lambda request, pool: pool.affinity("another"), set()),
        (lambda request, pool: pool.take(np.arange(1)).uncached_tokens, {"uncached_tokens"}),
        (lambda request, pool: request.headers, {"headers"}),
        (lambda request, pool: request.chains_of(256, 9), {"prompts"}),
        (lambda request, pool: request.moment.cold, {"cold"}),
        (lambda request, pool: (request.model, pool.labels), {"model", "labels"}),
    ],
)
def test_what_is_read_is_named_as_it_is_declared(read, names):
    """And is what it would be unobserved."""
    reads, asked, pool = ReadsObserved(), request(), candidates(3)
    found = read(reads.request(asked), reads.candidates(pool))
    assert reads.names == names
    assert repr(found) == repr(read(asked, pool)) or not isinstance(found, (np.ndarray, str))
