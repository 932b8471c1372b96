"""Who is slow or fails beside the others."""

import math

import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PoolReplaced, RequestEnded, ServedBy, Tick
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.ejection import Cause, OutlierEjection
from epp.core.knowledge.inflight import Ending, InflightLedger, Outcome
from epp.core.knowledge.outliers import EVALUATE_EVERY_S, FRESH_S, PAGE_S, REFUSALS_MAX, Outliers
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request

SAMPLES = 24
"""More than are needed."""
OK = Outcome(status=200)
BROKEN = Outcome(status=500)
TELLING = OutlierEjection(enabled=False)
EVERYTHING = OutlierEjection(max_ejection_percent=50)
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: outlier-ejection
  parameters: {{{parameters}}}
- type: queue-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
"""


class Pool:
    """Endpoints that answer as they are told, one request after another."""

    def __init__(self, count, settings=TELLING, *, speed=1_000.0):
        self.columns = Columns()
        for slot in range(count):
            assert self.columns.add_slot() == slot
            self.columns.endpoints[slot] = endpoint(slot)
            self.columns.prefill_tokens_per_s[slot] = speed
            self.columns.prefill_drain_tokens_per_s[slot] = speed
            self.columns.observed_at_s[slot] = 0.0
        self.ledger = InflightLedger(self.columns)
        self.outliers = Outliers(self.columns)
        self.outliers.configure(settings)
        self.now = 0.0

    def open(self, slot, tokens=100.0, **fields):
        """Send one request there, which begins now."""
        lease = self.ledger.open(
            request(**fields), slot, matched_blocks=0, prefill_tokens=tokens, now=self.now
        )
        self.outliers.ejection.sent(lease)
        return lease

    def end(self, lease, outcome):
        self.outliers.ended(lease, outcome, self.now)
        self.ledger.close(lease, self.now)

    def gets_nothing(self, slot):
        return bool(self.columns.ejected[slot])

    def answer(self, slot, took_s, *, outcome=OK, first_output_s=None, tokens=100.0, **fields):
        """One request, which begins now; nothing else is in flight."""
        lease = self.open(slot, tokens, **fields)
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
        return dict(self.outliers.detected(self.now))

    def page(self, slot, **told):
        """The engine in `slot` serves a page."""
        self.now += 0.2
        self.columns.observed_at_s[slot] = self.now
        self.outliers.observed(slot, EndpointMetrics(**{"waiting_requests": 0.0, **told}), self.now)

    def away(self):
        return sorted(self.outliers.ejection.away)


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
    pool.ledger.set_speed(3, 100.0, 0.0)
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
    pool = Pool(4, OutlierEjection(samples_min=20, enabled=False))
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
    pool.answers(1, 1.0, 2, outcome=BROKEN)
    assert pool.found() == {}
    pool.answer(1, 1.0)
    pool.answers(1, 1.0, 5, outcome=BROKEN)
    found = pool.found()[1]
    assert (found.cause, found.failures, found.ejected) == (Cause.FAILING, 5, False)
    assert math.isnan(found.slowness)
    pool.answer(1, 1.0)
    assert pool.found() == {}


FULL = Outcome(status=503)


def test_a_gateway_that_did_not_get_through_is_a_failure():
    pool = Pool(4)
    pool.answers(1, 0.1, 9, outcome=Outcome(status=503, by_gateway=True))
    assert list(pool.found()) == [1]


def test_an_engine_that_counts_its_refusals_is_full_and_does_not_fail():
    """Though nobody waits: one huge prompt can be more than its limit."""
    pool = Pool(4)
    pool.page(0, rejections_total=3.0)
    for rejections in (12.0, 21.0):
        pool.answers(0, 0.1, 9, outcome=FULL)
        pool.page(0, rejections_total=3.0)  # it was on its way
        pool.page(0, rejections_total=rejections)
    pool.page(0, rejections_total=21.0)
    assert pool.found() == {}


def test_a_counter_of_refusals_that_stands_still_contradicts_them():
    pool = Pool(4)
    pool.page(0, rejections_total=3.0)
    pool.answers(0, 0.1, 5, outcome=FULL)
    assert pool.found() == {}
    pool.page(0, waiting_requests=4.0, rejections_total=3.0)
    assert pool.found() == {}
    pool.page(0, waiting_requests=4.0, rejections_total=3.0)
    assert pool.found()[0].failures == 5


@pytest.mark.parametrize(("waiting", "fails"), [(0.0, True), (7.0, False), (math.nan, False)])
def test_where_refusals_are_not_counted_an_empty_queue_contradicts_them(waiting, fails):
    pool = Pool(4)
    pool.answers(0, 0.1, 5, outcome=FULL)
    pool.page(0, waiting_requests=waiting)
    pool.page(0, waiting_requests=waiting)
    assert bool(pool.found()) is fails


def test_where_no_page_will_tell_a_refusal_is_a_failure():
    """It serves no metrics, or has ceased to."""
    pool = Pool(4)
    pool.columns.observed_at_s[0] = -math.inf
    pool.answers(0, 0.1, 5, outcome=FULL)
    assert list(pool.found()) == [0]
    pool.now = PAGE_S
    pool.answers(1, 0.1, 5, outcome=FULL)
    assert list(pool.found()) == [0, 1]


def test_who_refuses_everybody_is_not_full_whatever_it_counts():
    pool = Pool(4)
    refused = 0
    while not pool.found():
        refused += 1
        pool.answer(0, 0.1, outcome=FULL)
        pool.page(0, rejections_total=float(refused))
    assert refused == REFUSALS_MAX + 3
    for rejections in range(REFUSALS_MAX + 5):
        pool.answer(1, 0.1, outcome=FULL)
        pool.page(1, rejections_total=float(rejections))
        pool.answer(1, 0.1)
    assert list(pool.found()) == [0]


def test_who_fails_half_of_its_requests_fails_if_the_others_do_not():
    pool = Pool(4, OutlierEjection())
    for _ in range(6):
        pool.answers(3, 1.0, 2, outcome=BROKEN)
        pool.answers(3, 1.0, 2)
    found = pool.found()[3]
    assert (found.cause, found.ejected, found.failure_share) == (Cause.FAILING, True, 0.5)
    assert found.failures < 3


def test_who_fails_as_the_others_do_stays():
    """It is what they are asked."""
    pool = Pool(4, OutlierEjection())
    for _ in range(9):
        for slot in range(4):
            pool.answers(slot, 1.0, 2, outcome=BROKEN)
            pool.answers(slot, 1.0, 2)
    assert list(pool.found()) == [0, 1, 2, 3]
    assert pool.away() == []


def test_a_row_that_chance_gives_the_others_too_is_no_sign():
    """Of a pool that loses a third of its requests, one that loses three in a row."""
    pool = Pool(5, OutlierEjection())
    for _ in range(20):
        for slot in range(5):
            pool.answers(slot, 1.0, 2)
            pool.answer(slot, 1.0, outcome=BROKEN)
    told = []
    for _ in range(12):
        pool.answer(3, 1.0, outcome=BROKEN)
        told.append(pool.away())
        pool.wait(1.0)
    assert told[:5] == [[]] * 5
    assert told[-1] == [3]


def test_several_that_break_at_once_do_not_excuse_each_other():
    pool = Pool(10, OutlierEjection())
    for _ in range(3):
        for slot in range(7):
            pool.answer(slot, 0.02, outcome=BROKEN)
        pool.wait(1.0)
    pool.answers(7, 1.0)
    for slot in range(7):
        pool.answer(slot, 0.02, outcome=BROKEN)
        pool.wait(1.0)
    assert pool.away() == [0, 1, 2, 3, 4, 5, 6]


def test_old_failures_do_not_count():
    pool = Pool(4, OutlierEjection())
    for _ in range(9):
        pool.answer(3, 1.0, outcome=BROKEN)
        pool.wait(10.0)
        pool.answer(3, 1.0)
        pool.wait(10.0)
    assert pool.found() == {}
    assert pool.away() == []


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_a_pool_that_fails_as_a_whole_is_left_alone(count):
    """At first some are sent away, because nothing is known of the others."""
    pool = Pool(count, OutlierEjection())
    for slot in range(count):
        pool.answers(slot, 0.02, 5, outcome=BROKEN)
        pool.wait(1.0)
    pool.answer(count - 1, 0.02, outcome=BROKEN)
    assert pool.away() == []
    assert len(pool.found()) == count
    for slot in range(count):
        pool.answers(slot, 0.02, outcome=BROKEN)
    assert pool.away() == []


@pytest.mark.parametrize(("count", "broken"), [(2, 1), (3, 2), (5, 3), (10, 7)])
def test_those_that_answer_nothing_but_errors_go_while_others_answer(count, broken):
    """More than half of them too: what stays is better than an idle pod that fails at once."""
    pool = Pool(count, OutlierEjection())
    for slot in range(broken):
        pool.answers(slot, 0.02, 5, outcome=BROKEN)
        pool.answers(count - 1, 1.0, 2)
        pool.wait(1.0)
    assert pool.away() == list(range(broken))


def test_who_is_mended_after_all_failed_is_not_held_back():
    """Then the other, which still fails, is the one to send away."""
    pool = Pool(2, OutlierEjection())
    for slot in (0, 1, 0, 1):
        pool.answers(slot, 0.02, 6, outcome=BROKEN)
        pool.wait(1.0)
    assert pool.away() == []
    pool.answer(0, 1.0)
    pool.answer(1, 0.02, outcome=BROKEN)
    assert pool.away() == [1]


def test_nobody_is_ejected_if_it_is_turned_off():
    pool = Pool(4, OutlierEjection(enabled=False))
    for slot in range(4):
        pool.answers(slot, 50.0 if slot == 3 else 2.0)
    pool.answers(2, 1.0, 9, outcome=BROKEN)
    pool.wait(EVALUATE_EVERY_S)
    assert sorted(pool.found()) == [2, 3]
    assert pool.away() == []


def test_clients_that_leave_a_pod_that_hangs_show_it():
    """They never saw a status."""
    left = Outcome(ending=Ending.CLIENT_LEFT)
    pool = Pool(4, OutlierEjection())
    for slot in range(3):
        pool.answers(slot, 2.0)
    pool.answers(3, 30.0, outcome=left)
    pool.wait(EVALUATE_EVERY_S)
    assert pool.found()[3].cause is Cause.SLOW
    assert pool.away() == [3]


def scheduler_with(parameters):
    config = load_config(CONFIG.format(parameters=parameters), "test", plugin_tables())
    return Scheduler(build_settings(config), seed=1)


def test_a_request_that_moved_is_timed_where_it_is():
    """The gateway tried the first endpoint for a minute, the second answered at once."""
    scheduler = scheduler_with("samplesMin: 5")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(3)]), 0.0)
    for number in range(18):
        lease = scheduler.schedule(request(request_id=f"{number}"), 0.0).lease
        if lease.slot == 2:
            scheduler.take(ServedBy(lease, endpoint(0).address), 60.0)
            scheduler.take(RequestEnded(lease, OK), 61.0)
        else:
            scheduler.take(RequestEnded(lease, OK), 1.0)
    scheduler.take(Tick(), EVALUATE_EVERY_S)
    assert dict(scheduler.outliers.detected(EVALUATE_EVERY_S)) == {}
