"""A session whose request waits in the queue: every body mode, and all that can end the wait."""

import pytest
from msgspec import structs

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import Reconfigured
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.flow_queue import FlowQueue
from epp.core.protocol.session import CUTS_ALIKE, PATIENCE_KEPT_S, Gateway
from tests import gateway as gw
from tests.core.journal.traffic import document
from tests.core.protocol.test_waiting import BODY, MODES, Later
from tests.test_hermetic import pods

ONE_EACH = FlowSettings(
    detector=ConcurrencyDetector(max_concurrency=1), wait_s_max=30.0, empty_pool_wait_s_max=20.0
)


class Waker:
    def soon(self):
        pass

    def at(self, time_s):
        pass


class Full:
    """A picker with two endpoints, each of which has one request and room for no other."""

    def __init__(self, **flow):
        self.scheduler = pods((0, 0.1), (0, 0.1))
        settings = structs.replace(self.scheduler.settings, flow=structs.replace(ONE_EACH, **flow))
        self.scheduler.take(Reconfigured(settings), 0.0)
        self.queue = FlowQueue(self.scheduler, Waker(), 0.0)
        # A client leaves for sure only where the gateway is known to send responses.
        known = Gateway()
        known.sends_response_headers = True
        self.first = [self.stream(gateway=known) for _ in range(2)]
        for stream in self.first:
            stream.send(*MODES["full duplex"][0])
            assert not stream.session.waiting

    def stream(self, **fields):
        return gw.Stream(self.scheduler, queue=self.queue, **fields)

    def make_room(self, now=1.0):
        self.first.pop().close()
        self.queue.pump(now)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_waits_in_every_body_mode(mode):
    """It is answered as if it had not waited. Where the gateway's timeout runs, it is asked once for
    as long as the request may wait.
    """
    full = Full()
    stream = full.stream()
    messages, kinds = MODES[mode]
    before = stream.send(*messages)
    assert stream.session.waiting
    timed = mode in {"buffered", "streamed", "none"}
    timeouts = [answer.override_message_timeout for answer in before]
    assert [one.total_seconds() for one in timeouts if one] == [30.0] * timed
    full.make_room()
    assert gw.kinds(stream.resumed) == kinds
    assert stream.told.exchange.decision.account.queued.waited_s == 1.0
    assert full.scheduler.ledger.open_leases == 2


def test_a_request_that_has_room_is_answered_as_without_a_queue():
    full = Full()
    full.make_room()
    stream = full.stream()
    messages, kinds = MODES["full duplex"]
    assert gw.kinds(stream.send(*messages)) == kinds
    assert stream.told.exchange.decision.account.queued is None


def test_a_web_socket_waits_with_its_first_data():
    full = Full()
    stream = full.stream()
    headers = gw.request_headers(
        {":method": "GET", ":path": "/v1/realtime", "upgrade": "WebSocket"}
    )
    assert stream.send(headers, gw.request_body(b"data", end=False)) == []
    full.make_room()
    assert gw.kinds(stream.resumed) == ["request_headers", "request_body"]


def test_a_client_that_leaves_gives_up_its_place():
    full = Full()
    budget = BodyBudget(1_000_000)
    stream = full.stream(budget=budget)
    stream.send(*MODES["full duplex"][0])
    assert full.queue.control.requests == 1
    assert full.queue.control.bytes == len(BODY)
    stream.close()
    assert full.queue.control.requests == full.queue.control.bytes == budget.held_bytes == 0
    full.make_room()
    assert stream.resumed == []
    assert full.scheduler.ledger.open_leases == 1


def test_the_wait_may_end_with_a_refusal():
    full = Full()
    stream = full.stream()
    stream.send(*MODES["buffered"][0])
    stream.now = 30.0
    full.queue.pump(30.0)
    (answer,) = stream.resumed
    assert answer.immediate_response.status.code == 429
    headers = {
        option.header.key: option.header.raw_value
        for option in answer.immediate_response.headers.set_headers
    }
    assert headers["x-llm-d-request-dropped-reason"] == b"rejected-ttl-expired"
    assert headers["retry-after"] == b"30", "nothing was placed for 30 s"
    assert stream.session.finished
    queued = stream.told.refused_exchange.queued
    assert (queued.waited_s, queued.charged_tokens) == (30.0, 0.0)
    assert queued.why.startswith("2 of 2 endpoints are full")


def test_a_wait_in_the_queue_is_no_incomplete_request():
    """The queue limits the wait, not the time limit of requests."""
    stream = Full().stream()
    stream.send(*MODES["full duplex"][0])
    assert not stream.session.incomplete


def test_a_drain_refuses_what_waits():
    full = Full()
    stream = full.stream()
    stream.send(*MODES["full duplex"][0])
    assert not stream.session.may_end_for_drain()
    full.queue.drain(1.0)
    (answer,) = stream.resumed
    assert answer.immediate_response.status.code == 503


def test_a_request_may_wait_for_its_tokens_and_then_for_room():
    full = Full()
    later = Later()
    stream = full.stream(resolver=later)
    stream.send(*MODES["full duplex"][0])
    later.resolve(prompt_tokens=4_321)
    assert stream.session.waiting
    assert stream.resumed == []
    full.make_room()
    assert stream.told.exchange.request.prompt_tokens == 4_321


def test_a_gateway_that_ends_waits_is_answered_before_it_does():
    """Several waits in a row end after the same time; a later request is refused before that, until
    this is forgotten.
    """
    full = Full()
    gateway = Gateway()
    for _ in range(CUTS_ALIKE):
        cut = full.stream(gateway=gateway)
        cut.send(*MODES["buffered"][0])
        cut.now = 5.0
        cut.close()
    stream = full.stream(gateway=gateway, now=10.0)
    stream.send(*MODES["buffered"][0])
    full.queue.pump(14.4)
    assert stream.resumed == []
    full.queue.pump(14.5)
    assert gw.kinds(stream.resumed) == ["immediate_response"]
    assert gateway.patience_s(20.0 + PATIENCE_KEPT_S) is None


def test_clients_that_leave_are_no_sign_of_a_timeout():
    full = Full()
    gateway = Gateway()
    for waited_s in (1.0, 2.0, 0.1, 7.0, 3.0):
        left = full.stream(gateway=gateway)
        left.send(*MODES["buffered"][0])
        left.now = waited_s
        left.close()
    assert gateway.patience_s(10.0) is None


def test_a_queue_of_a_document_is_the_same():
    """The settings come from a configuration document as in production."""
    text = document().replace("plugins:", "featureGates: [flowControl]\nplugins:", 1)
    settings = build_settings(load_config(text, "c", plugin_tables()))
    assert settings.flow is not None
