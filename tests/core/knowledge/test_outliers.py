"""Who is slow or fails beside the others, and for how long it gets nothing."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.inflight import Ending, InflightLedger, Outcome
from epp.core.knowledge.outliers import EVALUATE_EVERY_S, FRESH_S, Cause, OutlierEjection, Outliers
from epp.core.types import EndpointMetrics
from tests.builders import candidates, endpoint, request

SAMPLES = 24
"""More than are needed."""
OK = Outcome(status=200)
BROKEN = Outcome(status=500)
EVERYTHING = OutlierEjection(max_ejection_percent=50)
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: outlier-ejection-filter
  parameters: {{{parameters}}}
- type: queue-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: outlier-ejection-filter
  - pluginRef: queue-scorer
"""


class Pool:
    """Endpoints that answer as they are told, one request after another."""

    def __init__(self, count, settings=None, *, speed=1_000.0):
        self.columns = Columns()
        for slot in range(count):
            assert self.columns.add_slot() == slot
            self.columns.endpoints[slot] = endpoint(slot)
            self.columns.prefill_tokens_per_s[slot] = speed
        self.ledger = InflightLedger(self.columns)
        self.outliers = Outliers(self.columns)
        self.outliers.configure(settings)
        self.now = 0.0

    def answer(self, slot, took_s, *, outcome=OK, first_output_s=None, tokens=100.0, **fields):
        """One request, which begins now; nothing else is in flight."""
        lease = self.ledger.open(
            request(**fields), slot, matched_blocks=0, prefill_tokens=tokens, now=self.now
        )
        if first_output_s is not None:
            self.ledger.first_output(lease, self.now + first_output_s)
        self.outliers.ended(lease, outcome, self.now + took_s)
        self.ledger.close(lease, self.now + took_s)

    def answers(self, slot, took_s, count=SAMPLES, **fields):
        for _ in range(count):
            self.answer(slot, took_s, **fields)

    def wait(self, for_s):
        """As the shell does: a tick a second."""
        until_s = self.now + for_s
        while self.now < until_s:
            self.now += 1.0
            self.outliers.tick(self.now)

    def found(self):
        return dict(self.outliers.found())

    def ejected(self):
        return self.columns.ejected[: len(self.columns)].nonzero()[0].tolist()


def test_who_takes_several_times_as_long_as_the_median_is_slow():
    """And nobody else: not the fastest, not who is a little slower."""
    pool = Pool(5)
    for _ in range(SAMPLES):
        for slot, took_s in enumerate((2.0, 1.0, 2.2, 13.0, 4.0)):
            pool.answer(slot, took_s)
    pool.wait(EVALUATE_EVERY_S)
    assert list(pool.found()) == [3]
    found = pool.found()[3]
    assert found.cause is Cause.SLOW
    assert found.slowness == pytest.approx(13.0 / 2.2, rel=0.1)
    assert not found.ejected
    assert pool.outliers.slowness()[1] == pytest.approx(1.0 / 2.2, rel=0.1)


def test_first_outputs_tell_where_they_are_seen():
    """The whole answers take alike: one waits long for its beginning."""
    pool = Pool(4)
    for slot, first_output_s in enumerate((0.2, 0.2, 0.2, 2.0)):
        pool.answers(slot, 6.0, first_output_s=first_output_s, stream=True)
    pool.wait(EVALUATE_EVERY_S)
    assert list(pool.found()) == [3]


def test_of_an_answer_that_is_not_streamed_the_first_chunk_is_the_whole():
    pool = Pool(4)
    for slot in range(4):
        # One answers in one piece at the end.
        pool.answers(slot, 6.0, first_output_s=6.0 if slot == 3 else 0.2, stream=slot != 3)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found() == {}


def test_more_work_is_not_slowness():
    """Prompts that are twenty times as long take twenty times as long."""
    pool = Pool(4)
    for slot in range(4):
        tokens = 2_000.0 if slot == 3 else 100.0
        took_s = tokens / 1_000.0 + 0.025
        pool.answers(slot, took_s, first_output_s=took_s, stream=True, tokens=tokens)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found() == {}
    assert pool.outliers.slowness()[3] == pytest.approx(1.0)


def test_an_endpoint_that_is_known_to_be_slower_is_not_slow():
    """Its speed is configured by label."""
    pool = Pool(4)
    pool.columns.prefill_tokens_per_s[3] = 100.0
    for slot in range(4):
        took_s = 2_000.0 / (100.0 if slot == 3 else 1_000.0) + 0.025
        pool.answers(slot, took_s, tokens=2_000.0, output_tokens_max=1)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found() == {}


def test_a_pool_of_two_kinds_has_no_outliers():
    """Nor while the slower ones become known one by one."""
    pool = Pool(8)
    for count in (10, 10, 4):
        for slot in range(8):
            pool.answers(slot, 8.0 if slot >= 4 else 2.0, count if slot < 5 else count // 2)
        pool.wait(EVALUATE_EVERY_S)
        assert pool.found() == {}
    assert pool.outliers.slowness()[4] > 1
    for slot in range(5, 8):
        pool.answers(slot, 8.0)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found() == {}
    assert pool.outliers.slowness()[7] > 1


def test_two_are_too_few_to_say_who_is_slow():
    pool = Pool(2)
    pool.answers(0, 1.0)
    pool.answers(1, 50.0)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found() == {}
    assert pool.outliers.slowness() == {}


def test_too_few_answers_say_nothing():
    pool = Pool(4, OutlierEjection(samples_min=20))
    for slot in range(3):
        pool.answers(slot, 2.0)
    pool.answers(3, 50.0, 19)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found() == {}
    pool.answer(3, 50.0)
    pool.wait(EVALUATE_EVERY_S)
    assert list(pool.found()) == [3]


def test_old_answers_say_nothing():
    """Who has got nothing for minutes may have been mended."""
    pool = Pool(4)
    for slot in range(4):
        pool.answers(slot, 50.0 if slot == 3 else 2.0)
    pool.wait(FRESH_S - 10.0)
    assert list(pool.found()) == [3]
    for slot in range(3):
        pool.answers(slot, 2.0)
    pool.wait(70.0)
    assert pool.found() == {}


def test_who_is_fast_again_is_not_slow_any_more():
    """And does not flicker around the threshold meanwhile."""
    pool = Pool(4)
    for slot in range(4):
        pool.answers(slot, 12.0 if slot == 3 else 2.0)
    pool.wait(EVALUATE_EVERY_S)
    told = []
    for _ in range(60):
        for slot in range(4):
            pool.answer(slot, 2.0)
        pool.wait(EVALUATE_EVERY_S)
        told.append(3 in pool.found())
    assert told[0]
    assert not told[-1]
    assert sorted(told, reverse=True) == told


def test_who_leaves_early_hides_nothing_and_says_nothing():
    """A client that gives up on the slow one shows that it takes at least so long."""
    left = Outcome(status=200, ending=Ending.CLIENT_LEFT)
    pool = Pool(4)
    for slot in range(3):
        pool.answers(slot, 2.0)
        pool.answers(slot, 0.01, outcome=left)
    for number in range(SAMPLES):
        pool.answer(3, 40.0 + number, outcome=left)
    pool.wait(EVALUATE_EVERY_S)
    assert list(pool.found()) == [3]
    assert pool.found()[3].slowness > 15.0


def test_errors_are_not_fast_answers():
    """Nor are refusals of the engine, nor what nobody saw."""
    pool = Pool(4)
    for outcome in (
        Outcome(status=503),
        Outcome(status=404),
        Outcome(ending=Ending.UNSEEN),
        Outcome(ending=Ending.CLIENT_LEFT),
    ):
        for slot in range(4):
            pool.answers(slot, 0.001, outcome=outcome)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.outliers.slowness() == {}
    assert pool.found() == {}


def test_errors_in_a_row_are_told_at_once_until_an_answer():
    pool = Pool(4)
    pool.answers(1, 1.0, 4, outcome=BROKEN)
    assert pool.found() == {}
    pool.answer(1, 1.0)
    pool.answers(1, 1.0, 5, outcome=BROKEN)
    found = pool.found()[1]
    assert (found.cause, found.failures, found.ejected) == (Cause.FAILING, 5, False)
    assert math.isnan(found.slowness)
    pool.answer(1, 1.0)
    assert pool.found() == {}


def test_an_engine_that_is_full_does_not_fail():
    """Its own 503 is no error; the gateway's is, for it did not get through."""
    pool = Pool(4)
    pool.answers(0, 0.1, 9, outcome=Outcome(status=503))
    pool.answers(1, 0.1, 9, outcome=Outcome(status=503, by_gateway=True))
    assert list(pool.found()) == [1]


def test_nobody_is_ejected_unless_it_is_asked_for():
    pool = Pool(4)
    for slot in range(4):
        pool.answers(slot, 50.0 if slot == 3 else 2.0)
    pool.answers(2, 1.0, 9, outcome=BROKEN)
    pool.wait(EVALUATE_EVERY_S)
    assert sorted(pool.found()) == [2, 3]
    assert pool.ejected() == []


def test_who_is_slow_gets_nothing_for_a_time_that_grows():
    """And is compared anew each time; in good standing the time shrinks again."""
    pool = Pool(4, OutlierEjection(base_ejection_time=30.0, max_ejection_time=70.0))
    away_s = []
    for _ in range(4):
        for slot in range(4):
            pool.answers(slot, 50.0 if slot == 3 else 2.0)
        pool.wait(EVALUATE_EVERY_S)
        assert pool.ejected() == [3]
        assert pool.found()[3].ejected
        left_at_s = pool.now
        while pool.ejected():
            pool.wait(1.0)
        away_s.append(pool.now - left_at_s)
        assert pool.found() == {}
    assert away_s == sorted(away_s)
    assert away_s[0] <= 30.0 < away_s[1] <= 60.0 < away_s[2]
    assert away_s[3] <= 70.0
    assert pool.outliers.ejections == {Cause.SLOW: 4, Cause.FAILING: 0}
    pool.wait(200.0)
    pool.answers(3, 1.0, 5, outcome=BROKEN)
    left_at_s = pool.now
    while pool.ejected():
        pool.wait(1.0)
    assert pool.now - left_at_s <= 31.0


def test_what_was_sent_before_says_nothing_of_who_is_back():
    pool = Pool(4, EVERYTHING)
    slow = [
        pool.ledger.open(request(), 3, matched_blocks=0, prefill_tokens=1.0, now=0.0)
        for _ in range(SAMPLES)
    ]
    pool.answers(3, 1.0, 5, outcome=BROKEN)
    assert pool.ejected() == [3]
    pool.wait(40.0)
    assert pool.ejected() == []
    for lease in slow:
        pool.outliers.ended(lease, BROKEN, pool.now)
    assert pool.found() == {}


def test_another_in_the_same_slot_starts_anew():
    """The endpoint left or restarted while it was ejected."""
    pool = Pool(4, EVERYTHING)
    pool.answers(3, 1.0, 5, outcome=BROKEN)
    pool.outliers.forget(3)
    assert pool.ejected() == []
    assert pool.found() == {}


@pytest.mark.parametrize(
    ("endpoints", "percent", "at_most"),
    [(1, 50, 0), (2, 10, 0), (2, 50, 1), (3, 10, 1), (20, 10, 2), (29, 10, 2), (10, 0, 0)],
)
def test_a_bounded_share_is_ejected(endpoints, percent, at_most):
    assert OutlierEjection(max_ejection_percent=percent).ejected_max(endpoints) == at_most


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.floats(0, 50),
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.floats(0.0, 100.0),
            st.sampled_from((OK, BROKEN, Outcome(ending=Ending.ERROR), Outcome(status=204))),
            st.integers(0, 40),
        ),
        max_size=60,
    ),
)
def test_never_more_are_away_than_may_be_and_all_come_back(count, percent, events):
    """Whatever endpoints do, in whatever order."""
    pool = Pool(count, OutlierEjection(max_ejection_percent=percent, samples_min=5))
    at_most = OutlierEjection(max_ejection_percent=percent).ejected_max(count)
    for slot, took_s, outcome, wait_s in events:
        pool.answers(slot % count, took_s, 6, outcome=outcome)
        pool.wait(wait_s)
        assert len(pool.ejected()) <= at_most
        assert pool.ejected() == [slot for slot, found in sorted(pool.found().items())
                                  if found.ejected]  # fmt: skip
        assert all(slowness > 0 for slowness in pool.outliers.slowness().values())
    pool.wait(401.0)
    assert pool.ejected() == []


def test_the_filter_drops_who_is_ejected_unless_nobody_is_left():
    keep = OutlierEjection().keep
    assert keep(request(), candidates(3, ejected=[False, True, False])).tolist() == [
        True,
        False,
        True,
    ]
    assert keep(request(), candidates(2, ejected=[True, True])).all()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("baseEjectionTime: 0s", "baseEjectionTime must be a duration above 0s"),
        ("maxEjectionTime: 10s", "maxEjectionTime must be at least baseEjectionTime, 30s, is 10s"),
        ("maxEjectionPercent: 80", "expected `float` <= 50"),
        ("slownessFactor: 1.1", "expected `float` >= 2"),
        ("consecutive5xx: 3", "has unknown field `consecutive5xx`"),
    ],
)
def test_what_cannot_be_is_refused(parameters, said):
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG.format(parameters=parameters), "test", plugin_tables())
    assert said in str(refused.value)


def scheduler_with(parameters):
    config = load_config(CONFIG.format(parameters=parameters), "test", plugin_tables())
    return Scheduler(build_settings(config), seed=1)


def test_by_configuration_requests_go_elsewhere_until_it_is_taken_out():
    """Through the scheduler's own verbs, with scrapes all the while."""
    scheduler = scheduler_with("consecutiveFailures: 3")
    scheduler.replace([endpoint(number) for number in range(3)], 0.0)
    now = 0.0

    def went(outcome_of):
        nonlocal now
        served = []
        for number in range(30):
            now += 0.1
            for slot in range(3):
                page = EndpointMetrics(waiting_requests=1.0 if slot else 0.0)
                scheduler.observe(slot, page, now)
            decision = scheduler.schedule(request(request_id=f"{number}"), now)
            served.append(decision.lease.slot)
            scheduler.complete(decision.lease, outcome_of(decision.lease.slot), now + 0.05)
            scheduler.tick(now)
        return served

    served = went(lambda slot: BROKEN if slot == 0 else OK)
    assert served.count(0) == 3
    assert scheduler.pool.columns.ejected[:3].tolist() == [True, False, False]
    plain = CONFIG.replace("  - pluginRef: outlier-ejection-filter\n", "")
    config = load_config(plain.format(parameters=""), "test", plugin_tables())
    scheduler.configure(build_settings(config), now)
    assert not scheduler.pool.columns.ejected[:3].any()
    assert went(lambda slot: OK).count(0) == 30


def test_who_restarts_is_not_ejected_any_more():
    scheduler = scheduler_with("consecutiveFailures: 1")
    scheduler.replace([endpoint(number, ready_after_s=0.0) for number in range(3)], 0.0)
    lease = scheduler.schedule(request(), 0.0).lease
    slot = lease.slot
    scheduler.complete(lease, BROKEN, 1.0)
    assert scheduler.pool.columns.ejected[slot]
    again = [endpoint(number, incarnation="2") for number in range(3)]
    scheduler.replace(again, 2.0)
    assert not scheduler.pool.columns.ejected[:3].any()


def test_a_request_that_moved_is_timed_where_it_is():
    """The gateway tried the first endpoint for a minute, the second answered at once."""
    scheduler = scheduler_with("samplesMin: 5")
    scheduler.replace([endpoint(number) for number in range(3)], 0.0)
    for number in range(18):
        lease = scheduler.schedule(request(request_id=f"{number}"), 0.0).lease
        if lease.slot == 2:
            scheduler.reschedule(lease, endpoint(0).address, 60.0)
            scheduler.complete(lease, OK, 61.0)
        else:
            scheduler.complete(lease, OK, 1.0)
    scheduler.tick(EVALUATE_EVERY_S)
    assert dict(scheduler.outliers.found()) == {}
