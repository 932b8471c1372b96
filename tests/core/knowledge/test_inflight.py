import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Candidates, Columns
from epp.core.knowledge.inflight import InflightLedger, Outcome
from epp.core.knowledge.load_report import LoadReport
from epp.core.knowledge.peer_load import PeerLoads
from epp.core.types import AdapterReport, EndpointMetrics, KvTransfers, Stage
from tests.builders import endpoint, request

RATE = 100.0
"""Prefill tokens a second in these tests."""


def ledger_of(slots=2):
    columns = Columns()
    ledger = InflightLedger(columns)
    for _ in range(slots):
        ledger.set_speed(columns.add_slot(), RATE, 0.0)
    return ledger, columns


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


@given(
    st.lists(st.floats(0.0, 6.0), min_size=1, max_size=20),
    st.lists(st.floats(0.0, 7.0), max_size=8).map(sorted),
)
def test_unseen_requests_are_closed_in_the_order_of_their_ends_and_never_early(ends_s, looks_s):
    """The endpoint needs 100 s for the prompts, so that the limit decides when each one ends."""
    closed = []
    ledger = InflightLedger(columns := Columns(), lambda one, _: closed.append(one))
    ledger.set_speed(columns.add_slot(), RATE, 0.0)
    leases = [lease(ledger, tokens=10_000.0) for _ in ends_s]
    for one, end_s in zip(leases, ends_s, strict=True):
        ledger.close_later(one, 0.0, at_most_s=end_s)
    expected = sorted(range(len(ends_s)), key=lambda number: ends_s[number])
    for look_s in [*looks_s, 8.0]:
        ledger.close_due(look_s)
        due = [leases[number] for number in expected if ends_s[number] <= look_s]
        assert len(closed) == len(due)
        assert all(one is other for one, other in zip(closed, due, strict=True))


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


class Counted:
    """One endpoint whose page counts first outputs, and a picker that sends it prompts of 100 tokens."""

    def __init__(self):
        self.ledger, self.columns = ledger_of()
        self.count = 40.0
        self.page(-0.1)
        self.page(0.0)

    def page(self, now, more=0, **told):
        """Until `now` so many `more` first outputs were counted."""
        self.count += more
        self.ledger.scraped(0, EndpointMetrics(**{"first_outputs_total": self.count, **told}), now)

    def send(self, now, tokens=100.0):
        return lease(self.ledger, tokens=tokens, now=now)

    def left(self, now):
        return float(
            Candidates(self.columns, np.arange(1), now, affinities={}).inflight_prefill_tokens[0]
        )


def test_what_no_page_has_counted_is_still_to_be_computed():
    """By belief two of three were done after 2.1 s; the oldest at most is, as none has a first output."""
    there = Counted()
    for _ in range(3):
        there.send(0.0)
    there.page(0.2)
    assert there.left(0.2) == 280.0
    assert there.left(0.7) == 230.0
    there.page(2.1)
    assert there.left(2.1) == 200.0
    there.page(2.3, more=2)
    assert there.left(2.3) == 100.0
    there.page(2.5, more=1)
    assert there.left(2.5) == 0.0


@pytest.mark.parametrize(
    ("shared", "streamed", "left"), [(True, True, 100.0), (True, False, 0.0), (False, True, 0.0)]
)
def test_first_outputs_of_peers_are_not_taken_for_ours_where_ours_are_seen(shared, streamed, left):
    """The engine counts one more first output, and the gateway has shown none of this picker's."""
    there = shared_endpoint() if shared else Counted()
    seen = lease(there.ledger, stream=True, now=0.0)
    there.ledger.first_output(seen, 0.1)
    there.page(0.15, more=1)
    lease(there.ledger, stream=streamed, now=0.2)
    there.page(0.2, more=1)
    assert there.left(0.2) == left


def shared_endpoint():
    """An endpoint that a peer of this picker uses too."""
    there = Counted()
    there.columns.peers = PeerLoads()
    nothing = np.zeros(0, dtype=np.int64)
    there.columns.peers.tell(b"a", nothing, nothing, np.zeros(0), 0.0, whole=True, size=2)
    return there


def test_the_end_of_an_answer_does_not_show_that_first_outputs_are_seen():
    """Without chunks, the picker learns only at the end that a prompt was computed long before."""
    there = shared_endpoint()
    there.page(0.0)
    ended = lease(there.ledger, stream=True, now=0.0)
    lease(there.ledger, stream=True, now=0.2)
    there.ledger.close(ended, 0.25, answered=True)
    there.page(0.3, more=2)
    assert there.left(0.3) == 0.0


def test_answers_that_end_show_that_no_prompt_is_left():
    """The only first output was taken for that of a peer. Two pages later all requests have one."""
    there = shared_endpoint()
    there.page(0.0, running_requests=0.0, waiting_requests=0.0, answers_total=0.0)
    there.ledger.first_output(lease(there.ledger, stream=True, now=0.05), 0.1)
    lease(there.ledger, stream=True, now=0.2)
    for now, first_outputs, answers in ((0.3, 4, 0), (0.4, 0, 0), (0.5, 0, 1)):
        there.page(
            now,
            first_outputs,
            running_requests=4.0 - answers,
            waiting_requests=0.0,
            answers_total=answers,
        )
        assert there.left(now) > 0.0
    there.page(0.6, running_requests=2.0, waiting_requests=0.0, answers_total=2.0)
    assert there.left(0.6) == 0.0


class Receiving(Counted):
    """The endpoint of `Counted`, and another one that computes prompts for it."""

    def receive(self, now, tokens=100.0):
        """Send a request whose prompt the other endpoint computes."""
        prefill = self.ledger.open(
            request(), 1, matched_blocks=0, prefill_tokens=tokens, now=now, stage=Stage.PREFILL
        )
        decode = self.send(now, tokens=0.0)
        decode.earlier = (prefill,)
        self.ledger.receive(decode, tokens, (1, prefill.generation))
        return decode

    def told(self, now, more, received):
        """`received` is the number of tokens that the endpoint has received in all."""
        self.page(now, more=more, transfers=KvTransfers(received_tokens=received))

    @property
    def moving(self):
        columns = self.columns
        assert columns.receiving_tokens[0] == columns.sending_tokens[1]
        return columns.receiving_tokens.item(0)


def test_received_tokens_show_whose_first_output_a_page_counts():
    """The older request waits for its KV blocks while the newer one is computed."""
    there = Receiving()
    there.told(0.0, 0, 500.0)
    there.receive(0.0)
    there.send(0.0)
    assert (there.moving, there.left(0.0)) == (100.0, 100.0)
    there.told(0.2, 1, 500.0)
    assert (there.moving, there.left(0.2)) == (100.0, 0.0)
    there.told(0.4, 1, 600.0)
    assert there.moving == 0.0


@pytest.mark.parametrize("received", [(500.0, 610.0, 700.0), (500.0, 590.0, 700.0)])
def test_received_tokens_are_rounded_to_requests(received):
    there = Receiving()
    before, one, both = received
    there.told(0.0, 0, before)
    there.receive(0.0)
    there.receive(0.0)
    there.told(0.2, 1, one)
    assert there.moving == 100.0
    there.told(0.4, 1, both)
    assert there.moving == 0.0


def test_without_received_tokens_the_oldest_request_has_the_first_output():
    there = Receiving()
    there.receive(0.0)
    there.ledger.close_earlier(there.receive(0.0), 0.0)
    there.send(0.1)
    there.page(0.2, more=1)
    assert (there.moving, there.left(0.2)) == (100.0, 100.0), "the prefill of the older one goes on"
    there.page(0.4, more=2)
    assert (there.moving, there.left(0.4)) == (0.0, 0.0)


def test_a_transfer_is_halfway_once_the_prefill_has_ended():
    there = Receiving()
    decode = there.receive(0.0)
    there.ledger.close_earlier(decode, 0.1)
    there.ledger.close_earlier(decode, 0.2)
    assert there.moving == 50.0
    there.ledger.first_output(decode, 0.3)
    assert there.moving == 0.0
    there.ledger.close(decode, 0.4, answered=True)
    assert there.moving == 0.0


def test_a_transfer_that_no_page_will_show_ends_with_the_prefill():
    ledger, columns = ledger_of()
    there = Receiving()
    there.ledger, there.columns = ledger, columns
    decode = there.receive(0.0)
    assert there.moving == 100.0
    ledger.close_earlier(decode, 0.1)
    assert there.moving == 0.0


def test_a_first_output_that_was_seen_is_not_taken_for_another():
    """The page counts the transfer whose first output the picker saw, and a computed prompt."""
    there = Receiving()
    there.told(0.0, 0, 500.0)
    seen = there.receive(0.0)
    there.receive(0.0)
    there.send(0.0)
    there.ledger.first_output(seen, 0.1)
    assert there.moving == 100.0
    there.told(0.2, 2, 600.0)
    assert (there.moving, there.left(0.2)) == (100.0, 0.0)


@pytest.mark.parametrize("slot", [0, 1])
def test_an_endpoint_that_left_neither_receives_nor_sends(slot):
    there = Receiving()
    decode = there.receive(0.0)
    there.ledger.forget(slot)
    assert there.columns.sending_tokens[1] == 0.0
    there.ledger.close(decode, 0.1)
    assert there.columns.receiving_tokens.tolist() == there.columns.sending_tokens.tolist()
    assert not there.columns.receiving_tokens.any()


def test_a_moved_request_receives_at_its_new_endpoint():
    ledger, columns = ledger_of(slots=3)
    there = Receiving()
    there.ledger, there.columns = ledger, columns
    decode = there.receive(0.0)
    ledger.move(decode, 2, 0.0, 0.1)
    assert not columns.receiving_tokens.any()
    ledger.receive(decode, 80.0, decode.sender)
    assert columns.receiving_tokens[:3].tolist() == [0.0, 0.0, 80.0]
    assert columns.sending_tokens[:3].tolist() == [0.0, 80.0, 0.0]
    ledger.close(decode, 0.2)
    assert not columns.receiving_tokens.any()
    assert not columns.sending_tokens.any()


def test_a_long_prompt_becomes_shorter_from_page_to_page():
    """No page counts its first output for 12 s, and the engine works all the time."""
    there = Counted()
    there.send(0.0, tokens=1000.0)
    there.send(0.0)
    before = 1100.0
    for page in range(1, 61):
        there.page(page / 5)
        assert 100.0 <= there.left(page / 5) <= before, "who waits behind it has all tokens still"
        before = there.left(page / 5)
    assert before < 900.0
    there.page(12.2, more=1)
    assert 80.0 < there.left(12.2) <= 100.0


def test_what_was_computed_before_a_first_output_is_not_computed_again():
    """Two of four prompts ended within a page: the rest of what was worked off is of the third."""
    there = Counted()
    for _ in range(4):
        there.send(0.0)
    there.page(2.0)
    assert there.left(2.0) == pytest.approx(300.0), "the first has no first output yet"
    there.page(2.6, more=1)
    assert there.left(2.6) == pytest.approx(240.0)


def test_a_prompt_that_leaves_takes_along_what_was_computed_of_it():
    there = Counted()
    first = there.send(0.0)
    there.send(0.0)
    there.page(0.8)
    assert there.left(0.8) == pytest.approx(120.0)
    there.ledger.move(first, 1, 100.0, 0.8)
    there.page(0.9)
    assert there.left(0.9) == pytest.approx(100.0)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("faster", [0.5, 1.0, 4.0])
def test_the_speed_is_learnt_of_prompts_that_come_one_by_one(faster, seen):
    """Each prompt takes 1.1 s, and the endpoint is idle between two prompts. The page before the end shows no
    first output. The learned speed is the same whether the picker saw the answer begin before the page or not.
    """
    there = Counted()
    now = 0.0
    for prompt in range(60):
        begun_s = now + 0.013 * (prompt % 16)
        ends_s = begun_s + 1.1
        sent = there.send(begun_s, tokens=1.1 * faster * RATE)
        while now < ends_s + 0.5:
            now += 0.2
            ended = now - 0.2 < ends_s <= now
            if ended and seen:
                there.ledger.first_output(sent, ends_s)
            there.page(now, more=ended)
    learnt = there.columns.prefill_drain_tokens_per_s[0]
    assert learnt == pytest.approx(faster * RATE, rel=0.15)


@pytest.mark.parametrize("seen", [False, True])
def test_the_speed_is_learnt_of_prompts_that_wait_for_each_other(seen):
    """The endpoint is never idle: three prompts are pending, and each takes 0.25 s, four times the believed
    speed.
    """
    there = Counted()
    pending = [there.send(0.0) for _ in range(3)]
    for step in range(1, 400):
        now = step * 0.05
        if step % 5 == 0:
            if seen:
                there.ledger.first_output(pending[0], now)
            del pending[0]
            pending.append(there.send(now))
        if step % 4 == 0:
            there.page(now + 0.001, more=step // 5 - (step - 4) // 5)
    learnt = there.columns.prefill_drain_tokens_per_s[0]
    assert learnt == pytest.approx(4 * RATE, rel=0.1)


@pytest.mark.parametrize("faster", [0.5, 1.0, 2.0])
def test_a_prompt_is_expected_to_wait_for_no_more_than_is_pending(faster):
    """The endpoint is always busy with one or two prompts. The wait at the configured speed is expected for
    them, and it does not grow if the endpoint serves more than its configured speed allows.
    """
    there = Counted()
    interval_s = 1.0 / faster
    sent = [there.send(0.0)]
    for step in range(1, 200):
        sent.append(there.send(step * interval_s - 0.01))
        there.page(step * interval_s, more=1)
    assert sent[-1].ahead_tokens <= 200.0
    assert sent[-1].ahead_tokens >= 100.0


def test_an_endpoint_that_is_faster_than_believed_is_done_when_its_page_says_so():
    there = Counted()
    sent = [there.send(0.0, tokens=10_000.0) for _ in range(3)]
    there.page(0.2, more=3)
    assert there.left(0.2) == 0.0
    assert [held.prefill_tokens for held in sent] == [0.0] * 3
    assert there.columns.inflight_requests[0] == 3


def test_between_pages_tokens_drain_as_fast_as_was_seen_there():
    """Busy all the time, it took 0.4 s for each prompt of 20 tokens, and is believed to do 100/s."""
    there = Counted()
    for _ in range(60):
        there.send(0.0, tokens=20.0)
    for page in range(1, 51):
        there.page(0.4 * page, more=1)
    drained = there.left(20.0) - there.left(20.5)
    assert 24.0 < drained < 30.0
    assert there.columns.prefill_tokens_per_s[0] == RATE
    there.ledger.forget(0)
    assert there.columns.prefill_drain_tokens_per_s[0] == RATE


def test_what_was_seen_by_chunks_or_ends_is_not_released_twice():
    """The page counts those too: it says nothing of the third."""
    there = Counted()
    first, second, _ = (there.send(0.0) for _ in range(3))
    there.ledger.first_output(first, 0.1)
    there.ledger.close(second, 0.1, answered=True)
    there.page(0.2, more=2)
    assert there.left(0.2) == 100.0


@pytest.mark.parametrize("counts", [40.0, math.nan], ids=["counted", "not counted"])
def test_a_page_that_is_heard_of_late_leaves_no_ghost_of_what_is_computed(counts):
    """It was read before the first output was seen, and is told after it: the prompt stays computed."""
    ledger, columns = ledger_of()
    for read_at_s in (-0.1, 0.0):
        ledger.scraped(0, EndpointMetrics(first_outputs_total=counts), read_at_s)
    held = lease(ledger)
    ledger.first_output(held, 0.6)
    ledger.scraped(0, EndpointMetrics(first_outputs_total=counts), 0.2)
    assert (held.prefill_tokens, columns.prefill_backlog_tokens[0]) == (0.0, 0.0)


def test_what_has_drained_before_a_page_that_came_late_stays_drained():
    """Where chunks were shown before: the next one restores nothing of it."""
    ledger, columns = ledger_of()
    ledger.first_output(lease(ledger, stream=True), 0.5)
    for read_at_s in (1.0, 1.2):
        ledger.scraped(0, EndpointMetrics(first_outputs_total=40.0), read_at_s)
    lease(ledger, now=1.2, stream=True)
    ledger.scraped(0, EndpointMetrics(first_outputs_total=40.0), 5.0)
    ledger.first_output(lease(ledger, now=5.0, stream=True), 5.1)
    assert columns.prefill_backlog_tokens[0] == 0.0


def test_the_end_of_a_request_from_before_the_first_page_hides_no_first_output():
    """It drained by belief, and its first output came before the first page that counts.

    When it ends, no later page counts it: the next rise is another request's.
    """
    ledger, columns = ledger_of()
    early = lease(ledger, tokens=10.0, now=0.0)
    ledger.scraped(0, EndpointMetrics(first_outputs_total=50.0), 0.5)
    ledger.scraped(0, EndpointMetrics(first_outputs_total=50.0), 0.7)
    late = lease(ledger, tokens=1_000.0, now=0.8)
    ledger.close(early, 0.85, answered=True)
    ledger.scraped(0, EndpointMetrics(first_outputs_total=51.0), 0.9)
    assert late.prefilled
    assert columns.prefill_backlog_tokens[0] == 0.0


def test_a_request_that_failed_at_once_releases_itself_alone():
    """No output will be counted for it, and it does not make the endpoint fast."""
    there = Counted()
    kept = there.send(0.0)
    for step in range(1, 100):
        now = step / 100
        there.ledger.close(there.send(now, tokens=1e6), now, answered=False)
        there.page(now)
    assert kept.prefill_tokens == 100.0
    assert there.columns.prefill_drain_tokens_per_s[0] <= RATE


def test_where_no_page_comes_tokens_drain_for_good_and_nothing_piles_up():
    """What is kept for the next page is what drained within two seconds after the last."""
    there = Counted()
    for step in range(1, 1_000):
        held = there.send(0.1 * step, tokens=1.0)
        there.ledger.close(held, 0.1 * step + 0.05, answered=True)
    open_ones = [there.send(100.0, tokens=1.0) for _ in range(50)]
    there.send(200.0)
    backlog = there.ledger._backlogs[0]
    assert len(backlog.drained) + len(backlog.queue) < 40
    assert there.left(200.0) == pytest.approx(100.0)
    there.page(200.1, more=999 + len(open_ones))
    assert there.left(200.1) == pytest.approx(90.0), "of so late a page nothing is learnt"


def test_where_adapters_are_reported_tokens_drain_as_believed():
    """Requests pass by who waits for a slot, so that a count does not say whose outputs they were."""
    there = Counted()
    for _ in range(3):
        there.send(0.0)
    there.page(1.5, adapters=AdapterReport(slots_max=2))
    assert there.left(1.5) == 150.0
    there.page(1.6, more=3, adapters=AdapterReport(slots_max=2))
    assert there.left(1.6) == pytest.approx(140.0)


def test_of_pages_that_are_far_apart_no_speed_is_learnt():
    """It had something to compute at each of them, and may have been idle between any two."""
    there = Counted()
    for page in range(1, 20):
        there.send(5.0 * page - 0.1)
        there.page(5.0 * page, more=page > 1)
    assert there.columns.prefill_drain_tokens_per_s[0] == RATE


def test_first_outputs_that_no_page_told_of_are_made_up_for():
    """Pages failed for 3 s, in which three prompts were computed; the endpoint is never idle afterwards."""
    there = Counted()
    there.page(0.1, answers_total=40.0, running_requests=0.0, waiting_requests=0.0)
    open_ones = [there.send(0.2, tokens=1000.0) for _ in range(3)]
    there.page(3.2, more=3, answers_total=40.0, running_requests=3.0, waiting_requests=0.0)
    now, ended = 3.2, 0
    for _ in range(40):
        open_ones.append(there.send(now))
        now += 0.2
        if len(open_ones) > 6:
            there.ledger.close(open_ones.pop(0), now, answered=True)
            ended += 1
        there.page(
            now,
            more=1,
            answers_total=40.0 + ended,
            running_requests=float(len(open_ones)),
            waiting_requests=0.0,
        )
    assert there.left(now) == pytest.approx(100.0), "one was sent after the page before"


@pytest.mark.parametrize("pickers", [1, 2, 4])
def test_requests_of_others_are_in_the_same_counter(pickers):
    """An engine computes a prompt of 100 tokens a second for blind pickers, answers take 5 s more.

    Each knows within two prompts how many of its own wait, though it took one for another's now and then.
    """
    dice = Random(1)
    ledgers = [ledger_of() for _ in range(pickers)]
    waiting, answering, ended, count, wrong = [], [], 0, 0.0, []
    for ledger, _ in ledgers:
        ledger.scraped(0, EndpointMetrics(first_outputs_total=0.0), 0.0)
    for step in range(1, 2_001):
        now = step / 10
        # A little more than it computes, then a little less.
        if dice.random() < (0.12 if step % 400 < 200 else 0.08):
            picker = dice.randrange(pickers)
            waiting.append((picker, lease(ledgers[picker][0], now=now)))
        if step % 10 == 0 and waiting:
            answering.append((now, *waiting.pop(0)))
            count += 1
        while answering and answering[0][0] <= now - 5.0:
            _, picker, held = answering.pop(0)
            ledgers[picker][0].close(held, now, answered=True)
            ended += 1
        page = EndpointMetrics(
            first_outputs_total=count,
            running_requests=float(len(answering)),
            waiting_requests=float(len(waiting)),
        )
        for number, (ledger, columns) in enumerate(ledgers):
            ledger.scraped(0, page, now)
            true = 100.0 * sum(picker == number for picker, _ in waiting)
            wrong.append(abs(columns.prefill_backlog_tokens[0] - true))
    assert ended > 100
    assert sum(wrong) / len(wrong) < 200.0
    if pickers == 1:
        assert max(wrong) < 1e-6


def test_where_chunks_are_shown_and_no_page_counts_the_others_are_still_to_be_computed():
    """By belief two of three were done after 2.5 s; the first was just then."""
    ledger, columns = ledger_of()
    ledger.first_output(lease(ledger, tokens=0.0, stream=True), 0.0)
    first, second, _ = (lease(ledger, stream=True) for _ in range(3))
    ledger.first_output(first, 2.5)
    assert columns.prefill_backlog_tokens[0] == 200.0
    ledger.first_output(second, 5.0)
    assert columns.prefill_backlog_tokens[0] == 100.0


def test_of_an_answer_that_is_not_streamed_a_chunk_says_little():
    """It comes with the last token: prompts of others drain as believed."""
    ledger, columns = ledger_of()
    first, *_ = (lease(ledger) for _ in range(3))
    ledger.first_output(first, 2.5)
    assert columns.prefill_backlog_tokens[0] == pytest.approx(50.0)


def test_where_chunks_are_shown_no_more_tokens_drain_and_nothing_piles_up():
    """The gateway has another configuration."""
    ledger, columns = ledger_of()
    ledger.first_output(lease(ledger, stream=True), 0.5)
    for step in range(1, 1_000):
        ledger.close(lease(ledger, tokens=10.0, now=0.2 * step, stream=True), 0.2 * step + 0.15)
    lease(ledger, now=300.0, stream=True)
    backlog = ledger._backlogs[0]
    assert len(backlog.drained) + len(backlog.queue) < 100
    assert columns.prefill_backlog_tokens[0] == pytest.approx(100.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "first", "answered", "failed", "page", "move", "forget"]),
            st.integers(0, 9),
            st.one_of(st.floats(0, 1e4), st.just(math.nan), st.just(1e15)),
            st.floats(0, 3),
        ),
        max_size=60,
    )
)
def test_whatever_pages_count_the_sums_are_those_of_the_open_leases(steps):
    """Counters that leap, fall, stand still or are missing: never below 0, never more than was sent."""
    ledger, columns = ledger_of(2)
    leases, now = [], 0.0
    for verb, number, told, elapsed in steps:
        now += elapsed
        picked = leases[number % len(leases)] if leases else None
        if verb == "send":
            leases.append(lease(ledger, number % 2, 100.0 * number, now, stream=number > 4))
        elif verb == "page":
            gauges = {"running_requests": float(number), "waiting_requests": 0.0}
            ledger.scraped(number % 2, EndpointMetrics(first_outputs_total=told, **gauges), now)
        elif verb == "forget":
            ledger.forget(number % 2)
            columns.clear(number % 2)
        elif picked is not None and picked.slot >= 0:
            if verb == "first":
                ledger.first_output(picked, now)
            elif verb == "move":
                ledger.move(picked, number % 2, 50.0, now)
            else:
                ledger.close(picked, now, answered=verb == "answered")
        for slot in range(2):
            live = [held for held in leases if held.slot == slot and ledger.is_live(held)]
            left = sum(held.prefill_tokens for held in live)
            assert columns.prefill_backlog_tokens[slot] == pytest.approx(left, abs=1e-6)
            assert all(0.0 <= held.prefill_tokens <= held.uncached_tokens for held in live)
            assert RATE / 8 <= columns.prefill_drain_tokens_per_s[slot] <= 8 * RATE
    for held in leases:
        ledger.close(held, now)
    assert columns.prefill_backlog_tokens[:2].tolist() == pytest.approx([0, 0], abs=1e-6)
