"""Requests that are evicted behind a real Envoy, before their response begins."""

import asyncio

import pytest

from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.core.protocol.session import SessionSettings
from epp.flags.values import BodyMode
from tests.envoy.picker import IN_TURN
from tests.envoy.rig import until

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p"}'
ONE = SchedulerSettings(
    stages=Stages(decode=IN_TURN),
    flow=FlowSettings(detector=ConcurrencyDetector(max_concurrency=1), evicts=True, wait_s_max=1.0),
)
BATCH = SessionSettings(priorities={"batch": -1})
OBJECTIVE = "x-llm-d-inference-objective"
MODES = [
    (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE),
    (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED),
    (BodyMode.BUFFERED, BodyMode.NONE),
    (BodyMode.BUFFERED, BodyMode.STREAMED),
]


async def answer_of(client, **headers):
    async with client.post(PATH, data=BODY, headers=headers) as response:
        return response.status, response.headers, await response.read()


async def begun(wire, request_mode, response_mode, **headers):
    """A pod with room for one request, which has a sheddable one, behind a gateway that is known to
    send response headers.
    """
    wired = await wire(
        scheduling=ONE,
        settings=BATCH,
        request_body_mode=request_mode,
        response_body_mode=response_mode,
    )
    assert (await answer_of(wired.client))[0] == 200
    batch = asyncio.create_task(answer_of(wired.client, **{OBJECTIVE: "batch"}, **headers))
    await until(lambda: wired.pod.serving == 1, "the pod serves")
    return wired, batch


@pytest.mark.parametrize(("request_mode", "response_mode"), MODES)
async def test_the_client_gets_a_429_and_the_engine_is_relieved(request_mode, response_mode, wire):
    wired, batch = await begun(wire, request_mode, response_mode, **{"x-test-hold": "1"})
    urgent = asyncio.create_task(answer_of(wired.client))
    status, headers, body = await batch
    assert status == 429
    assert headers["x-llm-d-request-dropped-reason"] == "evicted"
    assert int(headers["retry-after"]) >= 1
    assert b"evicted before its response began" in body
    assert (await urgent)[0] == 200
    await until(lambda: wired.pod.serving == 0, "the engine drops the evicted request")
    await until(lambda: wired.picker.open_leases == 0, "the leases end")
    endings = [outcome.ending.value for outcome in wired.picker.witness.outcomes]
    assert sorted(endings) == ["complete", "complete", "evicted"]


async def test_a_response_that_began_is_complete(wire):
    """The client loses no part of it. The waiting request is refused instead."""
    modes = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE
    events = {"x-test-events": "4", "x-test-pause-after": "1"}
    wired, batch = await begun(wire, *modes, **events)
    stream = wired.last_stream
    await until(lambda: stream.count("< response_headers") == 1, "the response begins")
    status, headers, _ = await answer_of(wired.client)
    assert (status, headers["x-llm-d-request-dropped-reason"]) == (429, "rejected-ttl-expired")
    wired.pod.resume.set()
    status, _, body = await batch
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
