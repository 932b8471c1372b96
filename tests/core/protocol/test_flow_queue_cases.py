"""Cases of the queue with a real scheduler: restarts, missing pages, and headers of any content."""

import math

import pytest

from epp.core.decision.decision import Decision
from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.flow.detectors import BLIND_REQUESTS_MAX, Utilization
from epp.core.protocol.flow_queue import FLOW_CHARACTERS_MAX, Place
from epp.core.types import EndpointMetrics
from tests.builders import endpoint
from tests.core.protocol.test_flow_queue import Picker

FULL = EndpointMetrics(waiting_requests=100.0, running_requests=8.0, kv_cache_usage=1.0)


def judged_by_pages(**fields):
    """A picker with one endpoint, whose page shows a long queue."""
    picker = Picker(detector=Utilization(), **fields)
    picker.scheduler.take(PageScraped(0, FULL), 0.0)
    return picker


def test_a_restarted_pod_has_room_although_its_last_page_showed_a_queue():
    picker = judged_by_pages()
    assert isinstance(picker.enter("a"), Place)
    picker.scheduler.take(PoolReplaced([endpoint(0, incarnation="2")]), 1.0)
    assert picker.waker.asked
    picker.queue.pump(1.0)
    assert isinstance(picker.results["a"], Decision)


def test_requests_are_placed_by_count_while_no_pages_come():
    """A pool without pages is not a full pool."""
    picker = judged_by_pages(wait_s_max=0.0)
    assert isinstance(picker.enter("a"), Place)
    picker.queue.pump(3_600.0)
    assert isinstance(picker.results["a"], Decision)
    for number in range(1, BLIND_REQUESTS_MAX):
        assert isinstance(picker.enter(f"{number}", 3_600.0), Decision)
    assert isinstance(picker.enter("one more", 3_600.0), Place)


@pytest.mark.parametrize("value", ["9" * 400, "1e308", "inf", "nan", "-1", "0", "one", ""])
@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"])
def test_any_target_is_a_number_of_seconds_or_none(name, value):
    picker = Picker()
    picker.enter("a")
    ticket = picker.enter("b", headers={name: value}).ticket
    target_s = ticket.first_token_within_s
    assert target_s is None or 0.0 < target_s < math.inf


@pytest.mark.parametrize("value", ["9" * 400 + "h", "1ns", "-1s", "0s", "1e9", "nonsense", ""])
def test_any_wait_that_a_client_asks_for_is_within_that_of_the_settings(value):
    picker = Picker(wait_s_max=10.0)
    picker.enter("a")
    picker.enter("b", headers={"x-llm-d-inference-ttl": value})
    picker.queue.pump(10.0)
    assert picker.results["b"].status == 429


def test_a_long_name_of_a_tenant_is_cut():
    picker = Picker()
    picker.enter("a")
    place = picker.enter("b", tenant="t" * 100_000)
    assert len(place.ticket.flow) == FLOW_CHARACTERS_MAX


@pytest.mark.parametrize(("limit", "tokens"), [(None, 256), (10, 10), (10_000, 256)])
def test_an_answer_without_a_limit_is_charged_as_an_average_one(limit, tokens):
    picker = Picker()
    picker.enter("a")
    place = picker.enter("b", prompt_tokens=100, output_tokens_max=limit)
    picker.end("a", 1.0)
    assert place.ticket.charged_tokens == 100 + 2 * tokens
