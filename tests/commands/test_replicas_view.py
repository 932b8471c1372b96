"""Several pickers as one."""

from itertools import pairwise

import msgspec
import pytest

from epp.commands.replicas_view import as_one, differences
from epp.core.protocol.flow_queue import WaitingFlow
from epp.journal.records import Applied
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.live.live_view import LiveBand, LivePrefills
from epp.shell.process.own_process import ProcessLately
from tests.commands.test_top_screen import live, live_decision, live_endpoint

EVENT_STATES = (
    *("later", "none", "stale", "silent"),
    *("connecting", "replaying", "live, incomplete", "live"),
)
"""From the worst to the best; the first is that of a later release."""


def test_sums_are_sums_and_shares_are_of_all():
    """Shares of tokens are weighted by the tokens that they are of."""
    first = live(
        decided=30,
        refused={"a": 1},
        shed_total=2,
        unparsed_total={"no-prompt": 1},
        endpoints=[
            live_endpoint(1, requests=30, failed=1, prompt_tokens=100, predicted_hits=0.5),
        ],
    )
    second = live(
        decided=10,
        refused={"a": 2, "b": 1},
        unparsed_total={"no-prompt": 2, "unknown-shape": 4},
        endpoints=[
            live_endpoint(1, requests=0, prompt_tokens=0, predicted_hits=None),
            live_endpoint(2, requests=10, prompt_tokens=300, predicted_hits=0.9),
        ],
    )
    seen = as_one([first, second])
    assert (seen.decided, seen.refused, seen.shed_total) == (40, {"a": 3, "b": 1}, 2)
    assert seen.unparsed_total == {"no-prompt": 3, "unknown-shape": 4}
    one, other = seen.endpoints
    assert (one.requests, one.failed, one.share) == (30, 1, 0.75)
    assert one.predicted_hits == pytest.approx(0.5)
    assert (other.share, other.predicted_hits) == (0.25, pytest.approx(0.9))
    assert sum(one.share for one in seen.endpoints) == 1.0


def test_who_says_that_an_endpoint_is_bad_is_heard():
    """Though another, with fresher metrics, says that it is ready; and how many say so is told."""
    bad = live_endpoint(1, state="unreachable", reason="no answer", metrics_age_s=None)
    well = live_endpoint(1, metrics_age_s=0.1, waiting=7.0, inflight_requests=9)
    (one,) = as_one([live(endpoints=[bad]), live(endpoints=[well])]).endpoints
    assert one.state == "unreachable"
    assert one.reason == "no answer; 1 of 2 pickers report this"
    assert (one.waiting, one.inflight_requests) == (7.0, 9)


def test_who_does_not_hear_an_engine_is_heard():
    """Whichever picker it is; where none is to hear it, there is nothing to say."""
    heard = live_endpoint(1, kv_events="live", metrics_age_s=0.1)
    not_heard = live_endpoint(
        1, kv_events="stale", kv_events_problem="it closed", metrics_age_s=3.0
    )
    for told in ((heard, not_heard), (not_heard, heard)):
        (one,) = as_one([live(endpoints=[each]) for each in told]).endpoints
        assert (one.kv_events, one.kv_events_problem) == ("stale", "it closed")
    (one,) = as_one([live(endpoints=[live_endpoint(1)])] * 2).endpoints
    assert one.kv_events is None


@pytest.mark.parametrize(
    ("worse", "better"),
    list(pairwise(EVENT_STATES)),
)
def test_the_worst_of_several_states_of_kv_events_counts(worse, better):
    states = [worse, better, better]
    for told in (states, states[::-1]):
        endpoints = [live_endpoint(1, kv_events=state, kv_events_problem=state) for state in told]
        (one,) = as_one([live(endpoints=[each]) for each in endpoints]).endpoints
        assert (one.kv_events, one.kv_events_problem) == (worse, worse)


def test_the_newest_decisions_of_all_are_shown():
    """By the clock of the day, whoever made them."""
    told = [
        live(decisions=[live_decision(at=f"2026-01-02T12:00:0{at}", request_id=str(at))])
        for at in (1, 3, 2)
    ]
    assert [one.request_id for one in as_one(told).decisions] == ["3", "2", "1"]


def test_the_latest_loop_of_all_is_shown_and_whose_it_is():
    """One picker of two that stands still must not hide behind the other."""
    well = ProcessLately(lag_mean_s=0.001, lag_most_s=0.01, cpu_cores=0.1, resident_bytes=100)
    late = ProcessLately(lag_mean_s=0.09, lag_most_s=0.27, cpu_cores=0.1, resident_bytes=100)
    first, second = (
        live(process=late, process_at="http://a"),
        live(process=well, process_at="http://b"),
    )
    for lives in ([first, second], [second, first], [live(), first]):
        seen = as_one(lives)
        assert (seen.process, seen.process_at) == (late, "http://a")
    assert as_one([live(), live()]).process is None


def test_what_all_captures_lost_is_lost():
    """Whichever of them has the newest configuration."""

    def capture(size_bytes, **dropped):
        return JournalSnapshot(
            requests=1, events=2, dropped=dropped, write_errors=1, bytes=size_bytes
        )

    seen = as_one(
        [live(), live(capture=capture(5, queue=1)), live(capture=capture(7, queue=2, disk=1))]
    )
    assert seen.capture == JournalSnapshot(
        requests=2, events=4, dropped={"queue": 3, "disk": 1}, write_errors=2, bytes=12
    )


def test_one_alone_is_itself():
    """Nothing is rounded or lost."""
    assert as_one([live()]) == live()


def test_differences_are_told():
    """A rollout that has not ended, or a ConfigMap that one replica did not take."""
    other = msgspec.structs.replace(
        live(), version="0.0.9", configuration=Applied(hash="other", at_s=2.0)
    )
    assert differences([live(), live()]) == ""
    assert differences([live(), other]) == "they have 2 versions and 2 configurations"


def test_waiting_requests_of_all_are_added_up():
    """The room of an endpoint is that of the picker that sees the highest load."""
    first = live(
        queue=[
            LiveBand(
                priority=0,
                requests=3,
                flows=2,
                oldest_wait_s=1.0,
                most=[WaitingFlow("a", 2, 1.0), WaitingFlow("b", 1, 0.5)],
            )
        ],
        evicted_total=2,
        endpoints=[live_endpoint(1, room_load=0.5, room_requests=9)],
    )
    second = live(
        queue=[
            LiveBand(
                priority=5,
                requests=1,
                flows=1,
                oldest_wait_s=0.1,
                most=[WaitingFlow("", 1, 0.1)],
            ),
            LiveBand(
                priority=0,
                requests=2,
                flows=1,
                oldest_wait_s=4.0,
                most=[WaitingFlow("b", 2, 4.0)],
            ),
        ],
        evicted_total=1,
        endpoints=[live_endpoint(1, room_load=0.9, room_requests=2)],
    )
    seen = as_one([first, second, live(endpoints=[])])
    high, low = seen.queue
    assert (high.priority, high.requests) == (5, 1)
    assert (low.requests, low.flows, low.oldest_wait_s) == (5, 2, 4.0)
    assert low.most == [WaitingFlow("b", 3, 4.0), WaitingFlow("a", 2, 1.0)]
    assert seen.evicted_total == 3
    (one,) = seen.endpoints
    assert (one.room_load, one.room_requests) == (0.9, 2)
    assert as_one([live(), live()]).queue is None


def test_prefills_in_flight_are_sums_by_pair():
    """A picker counts only its own."""

    def pair(decode, requests):
        return LivePrefills(prefill="p", decode=decode, requests=requests)

    both = as_one([live(prefills=[pair("a", 1), pair("b", 2)]), live(prefills=[pair("a", 4)])])
    assert both.prefills == [pair("a", 5), pair("b", 2)]
