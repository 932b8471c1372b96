import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.knowledge.candidates import Candidates
from epp.core.knowledge.load_report import LoadReport
from epp.core.knowledge.pool import UNUSUAL_SPELLINGS_FREE, EndpointPool, canonical_address
from epp.core.types import AdapterReport, EndpointMetrics, KvTransfers, MetricsTarget
from tests.builders import endpoint


def pool_of(*endpoints, now=0.0):
    pool = EndpointPool()
    pool.replace(endpoints, now)
    return pool


def ready(pool, now=0.0, subset=None):
    return [pool.columns.endpoints[slot].name for slot in pool.ready(subset, now).tolist()]


def scraped(**fields):
    return EndpointMetrics(**({"waiting_requests": 1.0} | fields))


def test_an_endpoint_that_leaves_frees_its_slot_and_is_forgotten():
    """The slot of what left is returned, and the next newcomer gets it with clean columns."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.observe(0, scraped(waiting_requests=7.0), 1.0)
    assert pool.replace([endpoint(1)], 2.0) == [0]
    assert pool.replace([endpoint(1), endpoint(2)], 3.0) == []
    assert [slot for slot, _ in pool.endpoints()] == [0, 1]
    assert math.isnan(pool.columns.waiting_requests[0])


def test_a_new_incarnation_keeps_the_slot_and_forgets_the_rest():
    """A restarted container is the same endpoint with an empty cache."""
    pool = pool_of(endpoint(0, incarnation="a"))
    pool.observe(0, scraped(), 1.0)
    assert pool.replace([endpoint(0, incarnation="b")], 2.0) == [0]
    assert math.isnan(pool.columns.waiting_requests[0])
    assert pool.slot_of(endpoint(0, incarnation="a")) is None
    assert pool.slot_of(endpoint(0, incarnation="b")) == 0


def test_changed_labels_forget_nothing():
    """A label edit is no restart."""
    pool = pool_of(endpoint(0))
    pool.observe(0, scraped(), 1.0)
    assert pool.replace([endpoint(0, labels={"zone": "b"})], 2.0) == []
    assert pool.columns.waiting_requests[0] == 1.0
    assert pool.columns.endpoints[0].labels == {"zone": "b"}


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        ({"process_started_at_s": 10.0}, {"process_started_at_s": 10.0}, False),
        ({"process_started_at_s": 10.0}, {"process_started_at_s": 11.0}, True),
        ({"requests_total": 5.0}, {"requests_total": 5.0}, False),
        ({"requests_total": 5.0}, {"requests_total": 4.0}, True),
        ({"requests_total": 5.0}, {}, False),
    ],
)
def test_a_restart_shows_in_the_start_time_or_a_falling_counter(before, after, restarted):
    """Either is enough; an absent value proves nothing."""
    pool = pool_of(endpoint(0))
    assert not pool.observe(0, scraped(**before), 1.0)
    assert pool.observe(0, scraped(**after), 2.0) is restarted
    assert pool.columns.observed_at_s[0] == 2.0


def test_a_static_endpoint_is_ready_once_scraped_or_after_its_grace():
    """Five seconds without metrics do not keep an endpoint out for ever."""
    pool = pool_of(endpoint(0, ready_after_s=5.0), endpoint(1, ready_after_s=5.0))
    assert ready(pool, 1.0) == []
    pool.observe(1, scraped(), 2.0)
    assert ready(pool, 2.0) == ["pod-1"]
    assert ready(pool, 5.0) == ["pod-0", "pod-1"]


def test_two_failures_in_a_row_set_an_endpoint_aside_until_its_next_good_scrape():
    """One failure is an accident; a success or a scrape between two starts the count again."""
    pool = pool_of(*(endpoint(i, metrics=MetricsTarget(port=8000)) for i in range(4)))
    pool.responded(2, 503, 1.0)
    pool.responded(2, 200, 1.0)
    pool.responded(2, 503, 1.0)
    assert len(ready(pool, 1.0)) == 4
    pool.responded(2, 502, 1.0)
    assert ready(pool, 1.0) == ["pod-0", "pod-1", "pod-3"]
    pool.observe(2, scraped(), 2.0)
    assert len(ready(pool, 2.0)) == 4


def test_at_most_half_the_pool_is_set_aside():
    """When everything fails, sending nothing anywhere helps nobody."""
    pool = pool_of(*(endpoint(i, metrics=MetricsTarget(port=8000)) for i in range(4)))
    for slot in range(4):
        pool.responded(slot, 504, 1.0)
        pool.responded(slot, 504, 1.0)
    assert ready(pool, 1.0) == ["pod-2", "pod-3"]


def test_an_endpoint_without_metrics_comes_back_by_itself():
    """No scrape will ever clear it, so time does."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.responded(0, 502, 1.0)
    pool.responded(0, 502, 1.0)
    assert ready(pool, 10.9) == ["pod-1"]
    assert ready(pool, 11.0) == ["pod-0", "pod-1"]


def test_a_sleeping_engine_gets_no_work_until_it_wakes():
    """It answers /health while its weights are offloaded."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.observe(0, scraped(asleep=True), 1.0)
    assert ready(pool, 1.0) == ["pod-1"]
    pool.observe(0, scraped(), 2.0)
    assert ready(pool, 2.0) == ["pod-0", "pod-1"]


def test_a_503_marks_the_engine_as_full_until_it_is_scraped():
    """vLLM refuses with 503 when its queue limits are reached."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.responded(0, 503, 1.0)
    assert pool.columns.saturated[:2].tolist() == [True, False]
    pool.observe(0, scraped(), 2.0)
    assert not pool.columns.saturated[0]


@pytest.mark.parametrize(
    ("subset", "names"),
    [
        (None, ["pod-0", "pod-1", "v6"]),
        ((), []),
        (("192.168.1.2:8000",), ["pod-1"]),
        (("192.168.1.2",), ["pod-1"]),
        (("192.168.1.2:9999",), []),
        (("[fd00::1]:8000",), ["v6"]),
        (("[fd00:0:0::1]:8000",), ["v6"]),
        (("fd00::1",), ["v6"]),
        (("[fd00::1]",), ["v6"]),
        (("192.168.1.2:8000", "192.168.1.1"), ["pod-0", "pod-1"]),
        (("not an address",), []),
    ],
)
def test_a_subset_hint_names_ports_or_whole_hosts_and_never_means_all(subset, names):
    """ "ip:port" restricts the port, a bare ip does not, and what is unknown matches nobody."""
    v6 = endpoint(9, name="v6", address="[fd00::1]:8000")
    assert ready(pool_of(endpoint(0), endpoint(1), v6), subset=subset) == names


def test_a_long_subset_hint_is_not_read_address_by_address(monkeypatch):
    """Each reading takes 10 us: so many as the pool may need, and the rest names nobody."""
    read = []

    def counted(text):
        read.append(text)
        return canonical_address(text)

    monkeypatch.setattr("epp.core.knowledge.pool.canonical_address", counted)
    pool = pool_of(endpoint(0), endpoint(9, name="v6", address="[fd00::1]:8000"))
    read.clear()
    unknown = tuple(f"10.1.{number // 250}.{number % 250}:1" for number in range(10_000))
    assert ready(pool, subset=("[fd00:0::1]:8000", *unknown, "192.168.1.1:8000")) == ["pod-0", "v6"]
    assert len(read) == UNUSUAL_SPELLINGS_FREE + 4
    assert ready(pool, subset=(*unknown, "[fd00:0::1]:8000")) == []


def test_an_unchanged_adapter_report_is_not_counted_again():
    """Scrapes mostly repeat themselves; a changed report replaces the old one."""
    pool = pool_of(endpoint(0))
    pool.observe(0, scraped(adapters=AdapterReport(active=frozenset("ab"), slots_max=4)), 1.0)
    pool.observe(0, scraped(adapters=AdapterReport(active=frozenset("ab"), slots_max=4)), 2.0)
    assert pool.columns.adapters_active[0] == 2
    pool.observe(0, scraped(adapters=None), 3.0)
    assert pool.columns.adapter_generation[0] == 0


def test_addresses_have_one_spelling():
    """IPv6 is compressed and bracketed when a port follows; nonsense stays as it is."""
    assert canonical_address(" [2001:DB8:0:0::1]:80 ") == "[2001:db8::1]:80"
    assert canonical_address("2001:db8::1") == "2001:db8::1"
    assert canonical_address("10.0.0.1:80") == "10.0.0.1:80"
    assert canonical_address("host:80") == "host:80"


def test_each_endpoint_is_told_to_be_ready_or_why_not():
    """In the order of slots, as of now."""
    scraped_at = MetricsTarget(port=9)
    fields = {"metrics": scraped_at, "ready_after_s": math.inf}
    pool = pool_of(*(endpoint(number, **fields) for number in range(4)))
    for slot in (0, 1, 2):
        pool.observe(slot, scraped(asleep=slot == 1), 1.0)
    pool.responded(2, 503, 1.0)
    pool.responded(2, 503, 1.0)
    assert pool.standings(2.0, 2.0) == {
        0: "ready",
        1: "asleep",
        2: "set aside",
        3: "never scraped",
    }


def test_who_does_not_answer_twice_is_unreachable_until_it_answers():
    """One scrape may be lost; an answer that is no page is an answer."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.observe(0, scraped(), 1.0)
    pool.observe(1, scraped(), 1.0)
    pool.observe_failure(0, answered=False)
    assert standing(pool, 0, 1.4) == "ready"
    assert pool.all_observed_since(1.0)
    pool.observe_failure(0, answered=False)
    assert standing(pool, 0, 1.4) == "unreachable"
    assert pool.columns.unreachable[:2].tolist() == [True, False]
    assert not pool.all_observed_since(1.0)
    pool.observe_failure(0, answered=True)
    assert standing(pool, 0, 1.4) == "ready"
    assert pool.all_observed_since(1.0)
    for _ in range(2):
        pool.observe_failure(0, answered=False)
    pool.observe(0, scraped(), 2.0)
    assert standing(pool, 0, 2.0) == "ready"
    assert not pool.columns.unreachable[0]


def test_one_that_became_silent_is_unreachable_when_its_metrics_are_stale():
    """A silent one makes each scrape take long, so that there may be only one of them by then."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.observe(0, scraped(), 1.0)
    pool.observe(1, scraped(), 1.0)
    pool.observe_failure(0, answered=False)
    assert standing(pool, 0, 3.0) == "ready"
    assert standing(pool, 0, 3.1) == "unreachable"
    assert standing(pool, 1, 3.1) == "stale"


def test_the_unreachable_and_the_stale_may_still_be_given_work():
    """There may be nobody else."""
    pool = pool_of(endpoint(0), endpoint(1))
    for slot in (0, 1):
        pool.observe(slot, scraped(), 1.0)
        pool.observe_failure(slot, answered=False)
        pool.observe_failure(slot, answered=slot == 1)
    assert ready(pool, 9.0) == ["pod-0", "pod-1"]
    assert list(pool.standings(9.0, 2.0).values()) == ["unreachable", "stale"]


def test_one_that_was_never_scraped_is_ready_only_where_nobody_is_scraped():
    """Where nobody serves metrics all get work; beside endpoints with metrics it would get none."""
    pool = pool_of(endpoint(0), endpoint(1))
    assert list(pool.standings(9.0, 2.0).values()) == ["ready", "ready"]
    pool.observe(0, scraped(), 9.0)
    assert list(pool.standings(9.0, 2.0).values()) == ["ready", "never scraped"]
    pool.observe_failure(1, answered=False)
    assert list(pool.standings(9.0, 2.0).values()) == ["ready", "unreachable"]


def test_what_is_unreachable_is_forgotten_with_its_process():
    """The same slot may be another's."""
    pool = pool_of(endpoint(0, incarnation="1"), endpoint(1))
    for slot in (0, 1, 0, 1):
        pool.observe_failure(slot, answered=False)
    pool.replace([endpoint(0, incarnation="2")], 2.0)
    pool.replace([endpoint(0, incarnation="2"), endpoint(2)], 3.0)
    assert not pool.columns.unreachable.any()
    assert list(pool.standings(3.0, 2.0).values()) == ["ready", "ready"]
    assert pool.all_observed_since(-math.inf)


def test_a_refused_connection_is_not_load():
    """Neither what the gateway says in its place, nor a 503 of one that nobody reaches."""
    pool = pool_of(endpoint(0), endpoint(1), endpoint(2))
    pool.responded(0, 503, 1.0, by_gateway=True)
    pool.responded(1, 503, 1.0)
    pool.observe_failure(1, answered=False)
    pool.observe_failure(2, answered=False)
    pool.responded(2, 503, 1.0)
    assert not pool.columns.saturated.any()
    pool.observe_failure(2, answered=True)
    pool.responded(2, 503, 1.0)
    assert pool.columns.saturated.tolist()[:3] == [False, False, True]


def standing(pool, slot, now):
    return pool.standings(now, 2.0)[slot]


def test_the_generation_tells_whether_the_endpoints_may_be_others():
    """Scrapes do not change it."""
    pool = pool_of(endpoint(0))
    before = pool.generation
    pool.observe(0, scraped(), 1.0)
    assert pool.generation == before
    pool.replace([endpoint(1)], 2.0)
    assert pool.generation > before


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["observe", "restart", "replace", "ask"]),
        st.integers(0, 3),
        st.floats(0.0, 3.0),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_all_are_observed_since_when_the_longest_unobserved_is(steps):
    """Whatever joins, leaves and restarts between two questions."""
    pool, now, starts = pool_of(endpoint(0), endpoint(1)), 0.0, 1.0
    for verb, which, wait_s in steps:
        now += wait_s
        members = dict(pool.endpoints())
        if verb == "replace":
            pool.replace([endpoint(number, ready_after_s=1.0) for number in range(which)], now)
        elif verb != "ask" and which in members:
            starts += verb == "restart"
            pool.observe(which, scraped(process_started_at_s=starts), now)
        else:
            slots = pool.ready(None, now)
            oldest_s = min(pool.columns.observed_at_s[slots].tolist(), default=math.inf)
            assert pool.all_observed_since(now - 2.0) == (oldest_s >= now - 2.0)
            if len(slots):
                seen = Candidates(pool.columns, slots, now, affinities={})
                assert seen.all_observed_within(2.0) == (now - oldest_s <= 2.0)


def test_a_load_report_changes_only_what_it_tells():
    """Age, marks and all else stay those of the last good scrape: one answer proves no health."""
    pool = pool_of(endpoint(0), endpoint(1))
    pool.observe(0, scraped(running_requests=5.0, kv_cache_usage=0.5), 1.0)
    pool.observe(1, scraped(), 1.0)
    pool.responded(0, 503, 2.0)
    pool.responded(0, 503, 2.0)
    assert pool.set_aside_count() == 1
    assert pool.report(0, LoadReport(waiting_requests=9.0, kv_cache_usage=0.75))
    columns = pool.columns
    assert (columns.waiting_requests[0], columns.running_requests[0]) == (9.0, 5.0)
    assert columns.kv_cache_usage[0] == 0.75
    assert columns.observed_at_s[0] == 1.0
    assert columns.saturated[0]
    assert pool.set_aside_count() == 1
    pool.observe(0, scraped(waiting_requests=2.0), 3.0)
    assert columns.waiting_requests[0] == 2.0


def test_a_load_report_of_an_endpoint_that_was_never_scraped_is_not_taken():
    """It would never grow old."""
    pool = pool_of(endpoint(0))
    assert not pool.report(0, LoadReport(waiting_requests=9.0))
    assert math.isnan(pool.columns.waiting_requests[0])


@pytest.mark.parametrize(
    ("blocks_total", "block_size_tokens", "tokens"),
    [
        (2_048, 16, 32_768.0),
        (None, 16, math.nan),
        (2_048, None, math.nan),
        (0, 16, math.nan),
        (-5, 16, math.nan),
        (10**300, 10**300, math.nan),
    ],
)
def test_the_kv_cache_is_as_large_as_the_last_page_tells(blocks_total, block_size_tokens, tokens):
    """Unknown where it does not tell, or tells what no engine has; after a restart too."""
    pool = pool_of(endpoint(0))
    capacity = pool.columns.kv_capacity_tokens
    assert math.isnan(capacity[0])
    pool.observe(0, scraped(blocks_total=8, block_size_tokens=16), 1.0)
    assert capacity[0] == 128.0
    told = scraped(blocks_total=blocks_total, block_size_tokens=block_size_tokens)
    pool.observe(0, told, 2.0)
    assert capacity[0] == pytest.approx(tokens, nan_ok=True)
    pool.replace([endpoint(0, incarnation="restarted")], 3.0)
    assert math.isnan(capacity[0])


def ranks(*ports, pod="pod", host="10.0.0.1"):
    """Return an endpoint for each of `ports` of one pod."""
    return [
        endpoint(
            endpoint_id=f"{pod}:{port}",
            name=f"{pod}-{port}",
            address=f"{host}:{port}",
            metrics=MetricsTarget(port=port),
            ready_after_s=5.0,
        )
        for port in ports
    ]


def test_a_port_without_a_server_is_never_ready_while_others_answer():
    """Decode pods listen on two ports, the prefill pod only on the first."""
    pool = pool_of(*ranks(1, 2, pod="d"), *ranks(1, 2, pod="p", host="10.0.0.2"))
    for slot in (0, 1, 2):
        pool.observe(slot, scraped(), 0.1)
    for _ in range(3):
        pool.observe_failure(3, answered=False)
    for now in (0.2, 5.0, 1_000.0):
        assert ready(pool, now) == ["d-1", "d-2", "p-1"]
    pool.observe(3, scraped(), 1_001.0)
    assert ready(pool, 1_001.0) == ["d-1", "d-2", "p-1", "p-2"]
    pool.observe_failure(3, answered=False)
    assert ready(pool, 1_002.0) == ["d-1", "d-2", "p-1", "p-2"]


def test_a_port_without_metrics_but_with_a_server_is_ready_after_its_time():
    """An answer such as 404 shows that something listens."""
    pool = pool_of(*ranks(1, 2))
    pool.observe(0, scraped(), 0.1)
    assert ready(pool, 6.0) == ["pod-1"]
    pool.observe_failure(1, answered=True)
    assert ready(pool, 6.0) == ["pod-1", "pod-2"]


def test_ports_are_ready_after_their_time_if_the_picker_reaches_no_endpoint():
    """A network policy may keep it from all of them."""
    pool = pool_of(*ranks(1, 2))
    for slot in (0, 1):
        pool.observe_failure(slot, answered=False)
    assert ready(pool, 1.0) == []
    assert ready(pool, 5.0) == ["pod-1", "pod-2"]


def test_a_pod_with_one_port_is_ready_after_its_time_without_an_answer():
    pool = pool_of(*ranks(1), *ranks(1, pod="other", host="10.0.0.2"))
    pool.observe(0, scraped(), 0.1)
    assert ready(pool, 5.0) == ["pod-1", "other-1"]


def test_the_last_transfers_of_an_engine_are_known():
    pool = pool_of(endpoint(0))
    assert pool.transfers(0) is None
    told = KvTransfers(received_tokens=5.0)
    pool.observe(0, scraped(transfers=told), 0.1)
    assert pool.transfers(0) == told
