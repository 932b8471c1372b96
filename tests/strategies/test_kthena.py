"""kthena's default: its two scorers by hand, its filter, and its index."""

import math
from collections import Counter

from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.knowledge.inflight import Outcome
from epp.core.types import EndpointMetrics, Refusal
from epp.strategies.kthena import (
    FewWaiting,
    KthenaIndexSettings,
    KthenaLeastRequest,
    KthenaPrefix,
)
from tests.builders import affinity, candidates, endpoint, request
from tests.sim.made import arrivals
from tests.strategies.driven import scheduler_of
from tests.strategies.simulated import hit_rate, simulated

INDEX = "kthena-prefix-producer"


def test_ten_waiting_are_too_many():
    """Nine are not, and neither is what nobody knows."""
    pool = candidates(waiting_requests=[9, 10, math.nan])
    assert FewWaiting().keep(request(), pool).tolist() == [True, False, True]


def test_what_is_sent_and_does_not_run_weighs_a_hundred_times():
    """b = 5, 4 + 100 x 2, 3: whole percent of the most, cut off."""
    pool = candidates(inflight_requests=[5, 4, 3], running_requests=[9, 2, math.nan])
    scores = KthenaLeastRequest().score(request(), pool)
    assert scores.tolist() == [0.97, 0.0, 0.98]
    assert KthenaLeastRequest().score(request(), candidates(2)).tolist() == [1, 1]


def test_a_prefix_counts_in_whole_percent_for_the_best_five():
    """Of equals in the last place the first one."""

    def scores(matched, total):
        pool = candidates(len(matched), affinities={INDEX: affinity(matched, total)})
        return KthenaPrefix().score(request(), pool).tolist()

    assert scores([2, 1, 0], 3) == [0.66, 0.33, 0]
    assert scores([1, 2, 3, 4, 5, 6, 2], 10) == [0, 0.2, 0.3, 0.4, 0.5, 0.6, 0]
    assert scores([0], 0) == [0]


def test_the_index_has_blocks_of_64_bytes_and_128_of_them_at_most():
    """And per endpoint no more than its capacity, tails gone before heads."""
    index = KthenaIndexSettings().open()
    asked = request(prompts=(bytes(range(256)) * 64,))
    index.record(asked, 0, 0.0)
    known = index.match(asked, 1, 0.0)
    assert (known.matched.tolist(), known.total) == ([128], 128)
    small = KthenaIndexSettings(lru_capacity_per_server=10).open()
    small.record(asked, 0, 0.0)
    assert small.match(asked, 1, 0.0).matched.tolist() == [10]


def pool_of(loads, now=0.0):
    scheduler = scheduler_of("kthena-default")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(len(loads))]), now)
    scrape(scheduler, loads, now)
    return scheduler


def scrape(scheduler, waiting, now, running=0.0):
    for slot, requests in enumerate(waiting):
        metrics = EndpointMetrics(
            waiting_requests=requests, running_requests=running, kv_cache_usage=0.1
        )
        scheduler.take(PageScraped(slot, metrics), now)


def test_a_pool_with_ten_waiting_everywhere_refuses():
    """As it does: nobody is left, and the client may come back."""
    refused = pool_of([10, 12]).schedule(request(), 0.0)
    assert isinstance(refused, Refusal)
    assert refused.status == 429


def test_a_burst_between_two_scrapes_is_spread():
    """A cold endpoint that joins gets its share and no stampede, before any scrape tells."""
    scheduler = pool_of([0, 0, 0, 0])
    went = Counter(
        scheduler.schedule(request(request_id=f"{number}"), 0.0).lease.slot for number in range(40)
    )
    assert set(went.values()) == {10}
    scrape(scheduler, [0] * 4, 1.0, running=10.0)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(5)]), 1.0)
    scrape(scheduler, [0], 1.0, running=10.0)
    metrics = EndpointMetrics(waiting_requests=0.0, running_requests=0.0, kv_cache_usage=0.0)
    scheduler.take(PageScraped(4, metrics), 1.0)
    joined = [
        scheduler.schedule(request(request_id=f"late {number}"), 1.0).lease.slot
        for number in range(10)
    ]
    assert joined[0] == 4
    assert Counter(joined) == dict.fromkeys(range(5), 2)


def test_a_conversation_stays_where_it_is_warm():
    """Prefix and load weigh the same, so it stays while loads are near."""
    scheduler = pool_of([0, 0, 0])
    text = b""
    homes = set()
    for turn in range(12):
        text += b"turn %d " % turn * 40
        decision = scheduler.schedule(request(request_id=f"{turn}", prompts=(text,)), 0.0)
        homes.add(decision.endpoint.name)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 0.0)
    assert len(homes) == 1


def test_it_finds_more_in_caches_than_load_alone():
    """In the simulator, whose prompts have blocks of 16 tokens for it."""

    def hits(policy):
        return hit_rate(simulated(arrivals(150, rate=10.0, groups=12), policy))

    assert hits("kthena-default") > 1.1 * hits("least-requests-live")
