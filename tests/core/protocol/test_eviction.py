"""A session whose request is evicted: before its response begins, and never after."""

import pytest
from msgspec import structs

from epp.core.decision.inputs import Reconfigured
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.flow_queue import FlowQueue
from epp.core.protocol.session import Gateway, SessionSettings
from epp.core.types import Refusal, RefusalReason
from tests import gateway as gw
from tests.core.protocol.test_queued_session import Waker
from tests.core.protocol.test_waiting import MODES
from tests.test_hermetic import pods

OBJECTIVES = SessionSettings(priorities={"batch": -1, "urgent": 1})
REFUSAL = Refusal(
    reason=RefusalReason.EVICTED, status=429, message="evicted in a test", retry_after_s=7
)


class Busy:
    """A picker with one endpoint that has room for one request."""

    def __init__(self, **flow):
        self.scheduler = pods((0, 0.1))
        settings = FlowSettings(
            **{"detector": ConcurrencyDetector(max_concurrency=1), "evicts": True} | flow
        )
        settings = structs.replace(self.scheduler.settings, flow=settings)
        self.scheduler.take(Reconfigured(settings), 0.0)
        self.queue = FlowQueue(self.scheduler, Waker(), 0.0)
        self.gateway = Gateway()
        self.gateway.sends_response_headers = True

    @property
    def leases(self):
        return self.scheduler.ledger.open_leases

    def begin(self, objective="batch", mode="full duplex", **fields):
        """A stream whose request is complete."""
        fields = {"gateway": self.gateway, "settings": OBJECTIVES} | fields
        stream = gw.Stream(self.scheduler, queue=self.queue, **fields)
        for message in asked(mode, objective):
            stream.send(message)
        return stream


def asked(mode, objective):
    """The messages of `MODES` with the objective in the request headers."""
    first, *rest = MODES[mode][0]
    named = {**gw.COMPLETIONS, "x-llm-d-inference-objective": objective}
    modes = {
        "full duplex": None,
        "buffered": gw.protocol(gw.BUFFERED, gw.NONE),
        "streamed": gw.protocol(gw.STREAMED, gw.NONE),
        "none": gw.protocol(gw.NONE, gw.NONE),
    }
    if mode not in modes:
        return [first, *rest]
    return [gw.request_headers(named, end=not rest and mode != "none", modes=modes[mode]), *rest]


@pytest.mark.parametrize("mode", ["full duplex", "buffered", "streamed", "none"])
def test_a_request_is_evicted_in_every_body_mode(mode):
    busy, budget = Busy(), BodyBudget(1_000_000)
    batch = busy.begin(mode=mode, budget=budget)
    assert busy.leases == 1
    urgent = busy.begin("urgent")
    assert urgent.session.waiting
    urgent.now = batch.now = 1.0
    busy.queue.pump(1.0)
    (answer,) = batch.resumed
    status, error = gw.refusal(answer)
    assert (status, error["code"]) == (429, "evicted")
    assert gw.set_headers(answer)["x-llm-d-request-dropped-reason"] == "evicted"
    assert int(gw.set_headers(answer)["retry-after"]) >= 1
    assert batch.session.finished
    assert batch.told.events == ["decided", "completed evicted"]
    assert gw.kinds(urgent.resumed) == ["request_headers", "request_body"]
    assert busy.leases == 1
    assert budget.held_bytes == 0
    batch.close()
    assert batch.told.events == ["decided", "completed evicted"]
    assert busy.leases == 1


def test_a_response_that_began_is_never_evicted():
    busy = Busy()
    batch = busy.begin()
    urgent = busy.begin("urgent")
    batch.send(gw.response_headers(200))
    busy.queue.pump(10.0)
    assert urgent.session.waiting
    assert batch.resumed == []
    assert batch.session.evicted(REFUSAL, 10.0) == []
    batch.send(gw.response_body(b"data"))
    assert batch.told.events[-1] == "completed complete"
    busy.queue.pump(11.0)
    assert not urgent.session.waiting


def test_what_an_evicted_stream_still_sends_is_ignored():
    """The response headers may have been on their way."""
    busy = Busy()
    batch = busy.begin()
    busy.begin("urgent")
    busy.queue.pump(1.0)
    assert batch.session.finished
    assert batch.send(gw.response_headers(200)) == []
    assert not batch.session.violated


@pytest.mark.parametrize("end", ["leaves", "fails"])
def test_a_request_that_ended_is_not_evicted(end):
    busy = Busy()
    batch = busy.begin()
    if end == "leaves":
        batch.close()
    else:
        batch.send(gw.response_headers(500, end=True))
    assert len(busy.queue.control.evictions) == 0


def test_without_response_headers_nothing_is_evicted():
    """The picker would not see that the response begins."""
    busy = Busy()
    batch = busy.begin(gateway=Gateway())
    urgent = busy.begin("urgent")
    busy.queue.pump(10.0)
    assert batch.resumed == []
    assert urgent.session.waiting


@pytest.mark.parametrize(("objective", "evicts"), [("batch", False), ("urgent", True)])
def test_only_requests_of_negative_priority_and_only_if_allowed(objective, evicts):
    busy = Busy(evicts=evicts)
    first = busy.begin(objective)
    busy.begin("urgent")
    busy.queue.pump(10.0)
    assert first.resumed == []


def test_evictions_are_counted_by_priority():
    busy = Busy()
    busy.begin()
    busy.begin("urgent")
    assert busy.queue.snapshot(0.0).evicted == {}
    busy.queue.pump(1.0)
    assert busy.queue.snapshot(1.0).evicted == {-1: 1}
