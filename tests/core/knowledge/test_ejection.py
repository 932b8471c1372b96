"""For how long an outlier gets nothing, how many may be away, and how one comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.core.decision.inputs import PageScraped, PoolReplaced, Reconfigured, RequestEnded, Tick
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.ejection import PROBES, Cause, OutlierEjection
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.outliers import EVALUATE_EVERY_S, PATIENCE_S
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request
from tests.core.knowledge.test_outliers import BROKEN, CONFIG, FULL, OK, SAMPLES, Pool

LEFT = Outcome(ending=Ending.CLIENT_LEFT)


def failing(pool, slot):
    """Send away `slot` and wait until it may be probed."""
    pool.answers(slot, 0.02, 5, outcome=BROKEN)
    assert slot in pool.away()
    while pool.gets_nothing(slot):
        pool.wait(1.0)


def away_for(pool, slot):
    """How long it gets nothing."""
    left_at_s = pool.now
    while pool.gets_nothing(slot):
        pool.wait(1.0)
    return pool.now - left_at_s


def slow(pool, slot):
    for other in range(4):
        pool.answers(other, 50.0 if other == slot else 2.0)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.away() == [slot]


def test_who_fails_gets_nothing_then_one_request_then_two():
    pool = Pool(4, OutlierEjection())
    failing(pool, 3)
    probe = pool.open(3)
    assert pool.gets_nothing(3)
    pool.end(probe, OK)
    second, third = pool.open(3), pool.open(3)
    assert pool.gets_nothing(3)
    pool.end(second, OK)
    assert pool.away() == [3]
    pool.end(third, OK)
    assert pool.away() == []
    assert pool.found() == {}


def test_who_fails_its_probe_is_away_for_longer():
    pool = Pool(4, OutlierEjection(base_ejection_time=30.0, max_ejection_time=70.0))
    failing(pool, 3)
    away_s = []
    for _ in range(3):
        pool.answer(3, 0.0, outcome=BROKEN)
        away_s.append(away_for(pool, 3))
    assert away_s == [60.0, 70.0, 70.0]
    found = pool.found()[3]
    assert (found.cause, found.probed) == (Cause.FAILING, True)
    assert pool.outliers.ejection.total == {Cause.SLOW: 0, Cause.FAILING: 4}


@pytest.mark.parametrize("outcome", [LEFT, FULL, Outcome(ending=Ending.UNSEEN)])
def test_a_probe_that_shows_nothing_is_repeated(outcome):
    """The client left, the engine was full, or the gateway showed no response."""
    pool = Pool(4, OutlierEjection())
    failing(pool, 3)
    for _ in range(9):
        pool.page(3, waiting_requests=4.0)
        pool.answer(3, 0.02, outcome=outcome)
        assert pool.away() == [3]
        assert not pool.gets_nothing(3)
    pool.answers(3, 1.0, PROBES)
    assert pool.away() == []


def test_a_probe_that_another_endpoint_served_is_repeated():
    pool = Pool(4, OutlierEjection())
    failing(pool, 3)
    lease = pool.open(3)
    pool.outliers.left(lease)
    assert not pool.gets_nothing(3)
    assert not lease.probe


def test_a_probe_without_an_answer_holds_nobody_up():
    """It hangs: nothing more is sent there."""
    pool = Pool(4, OutlierEjection())
    failing(pool, 3)
    probe = pool.open(3)
    pool.wait(1_000.0)
    assert pool.gets_nothing(3)
    pool.end(probe, BROKEN)
    assert pool.found()[3].ejected
    assert not pool.found()[3].probed


def test_a_probe_that_hangs_has_failed_when_its_client_leaves():
    """One that leaves at once says nothing."""
    pool = Pool(4, OutlierEjection())
    failing(pool, 3)
    pool.answer(3, PATIENCE_S - 1.0, outcome=LEFT)
    assert not pool.gets_nothing(3)
    pool.answer(3, PATIENCE_S, outcome=LEFT)
    assert pool.gets_nothing(3)
    assert not pool.found()[3].probed


def test_who_was_slow_and_is_slow_in_its_probes_is_away_again():
    pool = Pool(4, OutlierEjection())
    slow(pool, 3)
    assert away_for(pool, 3) == pytest.approx(30.0, abs=EVALUATE_EVERY_S)
    pool.answers(3, 50.0, PROBES)
    assert pool.gets_nothing(3)
    away_for(pool, 3)
    pool.answers(3, 2.0, PROBES)
    assert pool.away() == []


def test_clients_that_leave_a_slow_probe_end_it():
    pool = Pool(4, OutlierEjection())
    slow(pool, 3)
    away_for(pool, 3)
    pool.answer(3, 60.0, outcome=Outcome(status=200, ending=Ending.CLIENT_LEFT))
    assert pool.gets_nothing(3)
    assert pool.found()[3].cause is Cause.SLOW


def test_in_good_standing_the_time_shrinks_again():
    pool = Pool(4, OutlierEjection(base_ejection_time=30.0))
    failing(pool, 3)
    pool.answer(3, 0.0, outcome=BROKEN)
    assert away_for(pool, 3) == 60.0
    pool.answers(3, 1.0, PROBES)
    pool.wait(200.0)
    pool.answers(3, 0.0, 5, outcome=BROKEN)
    assert away_for(pool, 3) == 30.0


def test_what_was_sent_before_says_nothing_of_who_is_probed():
    pool = Pool(4, OutlierEjection())
    sent = [pool.open(3) for _ in range(SAMPLES)]
    failing(pool, 3)
    for lease in sent[::2]:
        pool.end(lease, BROKEN)
    for lease in sent[1::2]:
        pool.end(lease, OK)
    assert pool.away() == [3]
    assert not pool.gets_nothing(3)
    assert pool.found()[3].failures == 0


def test_another_in_the_same_slot_starts_anew():
    """The endpoint left or restarted while it was ejected."""
    pool = Pool(4, OutlierEjection())
    pool.answers(3, 1.0, 5, outcome=BROKEN)
    pool.columns.clear(3)
    pool.outliers.forget(3)
    assert pool.away() == []
    assert not pool.outliers.ejection.masked
    assert pool.found() == {}


@pytest.mark.parametrize(
    ("endpoints", "percent", "at_most"),
    [(1, 50, 0), (2, 10, 0), (2, 50, 1), (3, 10, 1), (20, 10, 2), (29, 10, 2), (10, 0, 0)],
)
def test_a_bounded_share_may_be_away_that_serves_some(endpoints, percent, at_most):
    settings = OutlierEjection(max_ejection_percent=percent)
    assert settings.away_max(endpoints, serving_some=True) == at_most


@pytest.mark.parametrize(
    ("endpoints", "percent", "at_most"),
    [(1, 75, 0), (2, 75, 1), (3, 75, 2), (4, 75, 3), (10, 75, 7), (1, 90, 0), (10, 0, 0)],
)
def test_never_all_may_be_away(endpoints, percent, at_most):
    settings = OutlierEjection(max_failing_percent=percent)
    assert settings.away_max(endpoints, serving_some=False) == at_most


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0, 50),
    st.floats(0, 90),
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.floats(0.0, 100.0),
            st.sampled_from((OK, BROKEN, Outcome(ending=Ending.ERROR), FULL, LEFT)),
            st.integers(0, 40),
        ),
        max_size=60,
    ),
)
def test_never_more_are_away_than_may_be_and_all_come_back(count, percent, most, events):
    """Whatever endpoints do, in whatever order."""
    limits = OutlierEjection(max_ejection_percent=percent, max_failing_percent=most, samples_min=5)
    pool = Pool(count, limits)
    few = limits.away_max(count, serving_some=True)
    many = limits.away_max(count, serving_some=False)
    for slot, took_s, outcome, wait_s in events:
        pool.answers(slot % count, took_s, 6, outcome=outcome)
        pool.wait(wait_s)
        assert len(pool.away()) <= max(few, many) < max(count, 1)
        ejected = {slot for slot, found in pool.found().items() if found.ejected}
        assert ejected == set(pool.away())
        marked = pool.columns.ejected[:count].nonzero()[0].tolist()
        assert set(marked) == pool.outliers.ejection.masked <= ejected
        assert all(slowness > 0 for slowness in pool.outliers.slowness().values())
    pool.wait(401.0)
    for slot in range(count):
        pool.answers(slot, 2.0, PROBES + 6)
    assert pool.away() == []


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("baseEjectionTime: 0s", "baseEjectionTime is 0.0s; it must be finite and above 0s"),
        ("window: 0s", "window is 0.0s; it must be finite and above 0s"),
        (
            "maxEjectionTime: 10s",
            "maxEjectionTime is 10s; it must be at least baseEjectionTime, 30s",
        ),
        ("maxEjectionPercent: 80", "expected a number of at most 50"),
        ("maxFailingPercent: 100", "expected a number of at most 90"),
        ("slownessFactor: 1.1", "expected a number of at least 2"),
        ("consecutive5xx: 3", "has unknown field `consecutive5xx`"),
    ],
)
def test_what_cannot_be_is_refused(parameters, said):
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG.format(parameters=parameters), "test", plugin_tables())
    assert said in str(refused.value)


# Through the scheduler's own verbs.


class Traffic:
    """A scheduler, requests ten a second, and scrapes that show one idle pod."""

    def __init__(self, pods=5, config=None):
        settings = build_settings(config or default_config(plugin_tables()))
        self.scheduler = Scheduler(settings, seed=1)
        self.pods = pods
        self.scheduler.take(PoolReplaced([endpoint(number) for number in range(pods)]), 0.0)
        self.now = 0.0

    def served(self, outcome_of, count=40, prompt=b""):
        """The slots that `count` requests went to."""
        slots = []
        for number in range(count):
            self.now += 0.1
            for slot in range(self.pods):
                page = EndpointMetrics(
                    waiting_requests=1.0 if slot else 0.0,
                    running_requests=3.0 if slot else 0.0,
                    kv_cache_usage=0.5 if slot else 0.0,
                )
                self.scheduler.take(PageScraped(slot, page), self.now)
            given = request(
                prompts=(prompt or b"%d " % number * 400,),
                prompt_tokens=400,
                request_id=f"{number}",
            )
            decision = self.scheduler.schedule(given, self.now)
            slots.append(decision.lease.slot)
            outcome = outcome_of(slots[-1])
            self.scheduler.take(RequestEnded(decision.lease, outcome), self.now + 0.05)
            self.scheduler.take(Tick(), self.now)
        return slots


def zero_is_broken(slot):
    return BROKEN if slot == 0 else OK


def test_an_idle_pod_that_fails_every_request_gets_a_handful():
    """By the default configuration, which names no filter."""
    traffic = Traffic()
    served = traffic.served(zero_is_broken, 400)
    # Three, and a probe at 30 s: forty seconds of requests.
    assert served.count(0) == 4
    assert served[:3] == [0] * 3
    decision = traffic.scheduler.schedule(request(), traffic.now)
    assert decision.leg.eliminated == {"outlier-ejection": 1}
    assert decision.leg.ready == 5


def test_one_switch_turns_it_off_and_lets_everybody_back():
    traffic = Traffic()
    traffic.served(zero_is_broken)
    text = CONFIG.format(parameters="enabled: false")
    config = load_config(text, "test", plugin_tables())
    traffic.scheduler.take(Reconfigured(build_settings(config)), traffic.now)
    assert traffic.served(zero_is_broken).count(0) == 40


def test_where_nobody_else_is_allowed_who_is_away_is_asked():
    """The gateway's subset names the one that fails."""
    traffic = Traffic()
    traffic.served(zero_is_broken)
    only = request(subset=(endpoint(0).address,))
    assert traffic.scheduler.schedule(only, traffic.now).lease.slot == 0


def test_who_restarts_is_not_ejected_any_more():
    traffic = Traffic()
    traffic.served(zero_is_broken)
    again = [endpoint(number, incarnation="2") for number in range(5)]
    traffic.scheduler.take(PoolReplaced(again), traffic.now)
    assert not traffic.scheduler.pool.columns.ejected[:5].any()
    assert traffic.served(lambda _: OK).count(0) > 5


@pytest.mark.parametrize("status", [500, 503, 404, 429])
def test_a_request_that_was_not_served_teaches_the_index_nothing(status):
    """What was there before stays."""
    prompt = b"a long prompt " * 400
    traffic = Traffic()
    traffic.served(lambda _: Outcome(status=status), 1, prompt)
    index = traffic.scheduler.indexes["approx-prefix-cache-producer"]
    assert [index.blocks_held(slot) for slot in range(5)] == [0] * 5
    (slot,) = traffic.served(lambda _: OK, 1, prompt[:2_000])
    held = index.blocks_held(slot)
    assert held
    assert traffic.served(lambda _: Outcome(status=status), 1, prompt) == [slot]
    assert index.blocks_held(slot) == held
