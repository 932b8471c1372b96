import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.inflight import InflightLedger, Outcome
from epp.core.knowledge.load_report import LoadReport
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request

RATE = 100.0
"""Prefill tokens a second in these tests."""


def ledger_of(slots=2):
    columns = Columns()
    for _ in range(slots):
        slot = columns.add_slot()
        columns.prefill_tokens_per_s[slot] = RATE
    return InflightLedger(columns), columns


def lease(ledger, slot=0, tokens=100.0, now=0.0, **fields):
    return ledger.open(request(**fields), slot, matched_blocks=0, prefill_tokens=tokens, now=now)


def test_a_lease_counts_until_it_is_closed_and_only_once():
    """The second close does nothing and says so."""
    ledger, columns = ledger_of()
    one, two = lease(ledger), lease(ledger)
    assert columns.inflight_requests[0] == 2
    assert ledger.close(one, 0.0)
    assert not ledger.close(one, 0.0)
    assert columns.inflight_requests[0] == 1
    assert ledger.close(two, 0.0)
    assert (columns.inflight_requests[0], columns.prefill_backlog_tokens[0]) == (0, 0.0)
    assert ledger.open_leases == 0


def test_what_was_sent_since_the_last_report_is_counted_until_the_next():
    """Also what has ended meanwhile: no page could tell of it."""
    scheduler = Scheduler(build_settings(default_config(plugin_tables())), seed=1)
    pool = scheduler.pool
    scheduler.take(PoolReplaced([endpoint(), endpoint(1)]), 0.0)
    loaded = EndpointMetrics(waiting_requests=1.0, running_requests=1.0, kv_cache_usage=0.5)
    pool.observe(0, loaded, 0.0)
    pool.observe(1, loaded, 0.0)
    for step in range(4):
        decision = scheduler.schedule(request(request_id=f"{step}"), 0.1)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 0.1)
    unreported = pool.columns.unreported_requests
    assert unreported[:2].tolist() == [2, 2]
    pool.observe(0, loaded, 0.2)
    assert unreported[:2].tolist() == [0, 2]
    assert pool.report(1, LoadReport(kv_cache_usage=0.1))
    assert unreported[1] == 2, "it said nothing of requests"
    assert pool.report(1, LoadReport(waiting_requests=3.0))
    assert unreported[1] == 0
    scheduler.schedule(request(request_id="last"), 0.2)
    scheduler.take(PoolReplaced([]), 0.3)
    assert not unreported[:2].any()


def test_prefill_tokens_drain_oldest_first_at_the_endpoints_speed():
    """After 1.5 s at 100 tokens/s the first 100 of 300 are gone and the second is half done."""
    ledger, columns = ledger_of()
    leases = [lease(ledger) for _ in range(3)]
    ledger.first_output(leases[2], 1.5)
    assert [held.prefill_tokens for held in leases] == pytest.approx([0.0, 50.0, 0.0])
    assert columns.prefill_backlog_tokens[0] == pytest.approx(50.0)


def test_the_first_output_releases_the_rest_of_the_prompt_but_not_the_request():
    """A first chunk proves that the prompt is prefilled."""
    ledger, columns = ledger_of()
    one = lease(ledger, tokens=1_000.0)
    ledger.first_output(one, 1.0)
    assert columns.prefill_backlog_tokens[0] == pytest.approx(0.0)
    assert columns.inflight_requests[0] == 1


def test_the_context_stays_until_the_request_ends():
    """All of its prompt, cached or not: it lies in the KV cache while the answer is made."""
    ledger, columns = ledger_of()
    one, two = (lease(ledger, tokens=10.0, prompt_tokens=tokens) for tokens in (1_000, 500))
    ledger.first_output(one, 0.0)
    assert columns.inflight_context_tokens[0] == 1_500
    ledger.move(one, 1, 0.0, 0.0)
    assert columns.inflight_context_tokens[:2].tolist() == [500, 1_000]
    assert ledger.close(two, 1.0)
    assert not ledger.close(two, 1.0)
    assert columns.inflight_context_tokens[:2].tolist() == [0, 1_000]


def test_a_move_takes_everything_along():
    """Served by another endpoint, the request counts there and nowhere else."""
    ledger, columns = ledger_of()
    one = lease(ledger, tokens=500.0)
    ledger.move(one, 1, 300.0, 0.0)
    assert columns.inflight_requests[:2].tolist() == [0, 1]
    assert columns.prefill_backlog_tokens[:2].tolist() == [0.0, 300.0]
    lease(ledger, slot=0, tokens=10.0, now=1.0)
    assert columns.prefill_backlog_tokens[0] == 10.0


def test_leases_of_a_forgotten_endpoint_never_make_its_successor_negative():
    """A pod that flaps starts from nothing, and stays there when old streams end."""
    ledger, columns = ledger_of()
    old = lease(ledger)
    ledger.forget(0)
    columns.clear(0)
    assert not ledger.is_live(old)
    assert ledger.close(old, 1.0)
    assert (columns.inflight_requests[0], columns.prefill_backlog_tokens[0]) == (0, 0.0)


@pytest.mark.parametrize(
    ("output_tokens_max", "ends_at_s"), [(40, 2.0), (4_000, 10.0), (None, 7.4)]
)
def test_an_unseen_request_is_closed_at_its_estimated_end_or_at_the_limit(
    output_tokens_max, ends_at_s
):
    """100 tokens at 100/s, then 25 ms an output token; at most 10 s."""
    ledger, _ = ledger_of()
    one = lease(ledger, output_tokens_max=output_tokens_max)
    ledger.close_later(one, 0.0, at_most_s=10.0)
    ledger.close_due(ends_at_s - 0.001)
    assert ledger.open_leases == 1
    ledger.close_due(ends_at_s + 0.001)
    assert ledger.open_leases == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "first", "close", "move", "forget"]),
            st.integers(0, 9),
            st.floats(0, 1_000),
            st.floats(0, 2),
        ),
        max_size=40,
    )
)
def test_whatever_happens_the_sums_are_those_of_the_open_leases(steps):
    """Columns equal what the live leases hold, and all is zero when every lease is closed."""
    ledger, columns = ledger_of(3)
    leases, now = [], 0.0
    for verb, number, tokens, elapsed in steps:
        now += elapsed
        picked = leases[number % len(leases)] if leases else None
        if verb == "open":
            context = 2 * int(tokens)
            leases.append(lease(ledger, number % 3, tokens, now, prompt_tokens=context))
        elif verb == "forget":
            ledger.forget(number % 3)
            columns.clear(number % 3)
        elif picked is not None and picked.slot >= 0:
            if verb == "first":
                ledger.first_output(picked, now)
            elif verb == "close":
                ledger.close(picked, now)
            else:
                ledger.move(picked, number % 3, tokens, now)
        for slot in range(3):
            live = [held for held in leases if held.slot == slot and ledger.is_live(held)]
            assert columns.inflight_requests[slot] == len(live)
            context_tokens = sum(held.request.prompt_tokens for held in live)
            assert columns.inflight_context_tokens[slot] == context_tokens
            held_tokens = sum(held.prefill_tokens for held in live)
            assert columns.prefill_backlog_tokens[slot] == pytest.approx(held_tokens, abs=1e-6)
    for held in leases:
        ledger.close(held, now)
    assert columns.inflight_requests[:3].tolist() == [0, 0, 0]
    assert columns.inflight_context_tokens[:3].tolist() == [0, 0, 0]
    assert columns.prefill_backlog_tokens[:3].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert ledger.open_leases == 0


def test_each_endpoint_drains_at_its_own_speed():
    """After 1 s the one at 100 tokens/s has 400 of 500 left, the one at 300 has 200."""
    ledger, columns = ledger_of()
    ledger.set_speed(1, 3 * RATE, 0.0)
    for slot in (0, 1):
        ledger.first_output(lease(ledger, slot, tokens=500.0), 0.0)
        lease(ledger, slot, tokens=500.0)
        ledger.first_output(lease(ledger, slot, tokens=0.0), 1.0)
    assert columns.prefill_backlog_tokens[:2].tolist() == [400.0, 200.0]


def test_what_was_prefilled_before_the_speed_changed_stays_prefilled():
    """A second at the old speed, a second at the new one."""
    ledger, columns = ledger_of()
    lease(ledger, tokens=500.0)
    ledger.set_speed(0, 3 * RATE, 1.0)
    assert columns.prefill_backlog_tokens[0] == 400.0
    ledger.first_output(lease(ledger, tokens=0.0), 2.0)
    assert columns.prefill_backlog_tokens[0] == 100.0
