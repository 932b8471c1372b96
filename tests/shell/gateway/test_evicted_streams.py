"""Streams whose requests are evicted before their response, on every transport."""

import grpc
import pytest
from msgspec import structs

from epp.core.decision.inputs import Reconfigured
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.core.protocol.session import SessionSettings
from epp.shell.gateway.queue_waker import open_queue
from tests import gateway as gw
from tests.shell.gateway.test_ext_proc import serving
from tests.transports import TRANSPORTS

BODY = gw.prompt("hello")
EVICTING = FlowSettings(
    detector=ConcurrencyDetector(max_concurrency=1), evicts=True, wait_s_max=0.2
)
"""A request may evict after 0.1 s."""


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


def asking(objective):
    return gw.request_headers(gw.COMPLETIONS | {"x-llm-d-inference-objective": objective})


def evict(rig):
    """Let the server evict: two endpoints with room for one request each."""
    settings = structs.replace(rig.scheduler.settings, flow=EVICTING)
    rig.scheduler.take(Reconfigured(settings), 0.0)
    rig.settings = SessionSettings(priorities={"batch": -1})
    rig.queue = open_queue(rig.scheduler)


async def test_an_evicted_request_is_refused_on_its_own_stream(transport):
    """It gets 429 and its stream ends with OK. The one that waited is placed."""
    async with serving(transport) as rig:
        await rig.served_response()
        evict(rig)
        batch = [rig.call() for _ in range(2)]
        for call in batch:
            await call.exchange(asking("batch"), gw.request_body(BODY), answers=2)
        urgent = rig.call()
        placed = await urgent.exchange(asking("none"), gw.request_body(BODY), answers=2)
        assert gw.kinds(placed) == ["request_headers", "request_body"]
        (answer,) = await batch[1].answers(1)
        assert gw.refusal(answer)[0] == 429
        assert gw.refusal(answer)[1]["code"] == "evicted"
        assert await batch[1].ended() is grpc.StatusCode.OK
        assert rig.leases == 2
        assert rig.told.events.count("completed evicted") == 1
        for call in (batch[0], urgent):
            await call.end()
        await rig.closed(4)


async def test_a_response_that_began_stays(transport):
    """The waiting request is refused at the end of its wait."""
    async with serving(transport) as rig:
        await rig.served_response()
        evict(rig)
        batch = [rig.call() for _ in range(2)]
        for call in batch:
            await call.exchange(asking("batch"), gw.request_body(BODY), answers=2)
            await call.exchange(gw.response_headers(200), answers=1)
        urgent = rig.call()
        (refused,) = await urgent.exchange(asking("none"), gw.request_body(BODY), answers=1)
        assert gw.refusal(refused)[1]["code"] == "rejected-ttl-expired"
        for call in batch:
            (answer,) = await call.exchange(gw.response_body(b"data"), answers=1)
            assert gw.streamed([answer]) == (b"data", [True])
            await call.end()
        await rig.closed(4)
