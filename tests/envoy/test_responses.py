"""Responses reach the client byte for byte, whether or not they pass through the picker."""

import pytest

from epp.core.knowledge.inflight import Ending
from epp.core.protocol.session import SessionSettings
from epp.flags.values import BodyMode
from tests.envoy.rig import ext_proc, until
from tests.envoy.upstream import large_body, sse_event, sse_stream

pytestmark = pytest.mark.envoy

EVENTS = 1_000
PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p","stream":true}'
RESPONSE_MODES = (BodyMode.NONE, BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


@pytest.mark.parametrize("mode", RESPONSE_MODES)
async def test_an_event_stream_arrives_byte_for_byte(mode, wire):
    """1,000 events are the same bytes to the client, in each response mode."""
    wired = await wire(response_body_mode=mode)
    async with wired.client.post(
        PATH, data=BODY, headers={"x-test-events": str(EVENTS)}
    ) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert await response.read() == sse_stream(EVENTS)
    await until(lambda: wired.picker.witness.outcomes, "the outcome")
    (outcome,) = wired.picker.witness.outcomes
    assert (outcome.ending, outcome.status) == (Ending.COMPLETE, 200)
    assert wired.picker.open_leases == 0
    stream = wired.last_stream
    if mode is BodyMode.FULL_DUPLEX_STREAMED:
        echoed = [
            answer.response_body.response.body_mutation.streamed_response
            for answer in stream.answered
            if answer.response_body is not None
        ]
        assert b"".join(piece.body for piece in echoed) == sse_stream(EVENTS)
        assert echoed[-1].end_of_stream


@pytest.mark.parametrize("mode", RESPONSE_MODES)
@pytest.mark.parametrize("size_bytes", [1, 100_000, 3_000_000])
async def test_a_whole_response_arrives_byte_for_byte(mode, size_bytes, wire):
    """So is a response that is not a stream of events, small or large."""
    wired = await wire(response_body_mode=mode)
    headers = {"x-test-response-bytes": str(size_bytes)}
    async with wired.client.post(PATH, data=BODY, headers=headers) as response:
        assert await response.read() == large_body(size_bytes)
    await until(lambda: not wired.picker.open_leases, "the lease to be released")


@pytest.mark.parametrize("mode", RESPONSE_MODES)
async def test_the_client_gets_the_name_of_its_request_and_the_choice(mode, wire):
    """Whatever is shown of the body; the same that the pod got."""
    wired = await wire(response_body_mode=mode, settings=SessionSettings(explain_headers=True))
    async with wired.client.post(PATH, data=BODY, headers={"x-request-id": "mine"}) as response:
        assert response.status == 200
        assert response.headers.getall("x-request-id") == ["mine"]
        assert response.headers["x-homing-reason"].startswith("score ")
        assert response.headers["x-homing-endpoint"]
    async with wired.client.post(PATH, data=BODY) as response:
        named = response.headers["x-request-id"]
    assert named == wired.pod.received[-1].headers["x-request-id"]
    wired.picker.serve([])
    async with wired.client.post(PATH, data=BODY, headers={"x-request-id": "mine"}) as response:
        assert response.status == 503
        assert response.headers.getall("x-request-id") == ["mine"]


@pytest.mark.parametrize("allows", [True, False])
@pytest.mark.parametrize("asked", [BodyMode.BUFFERED, BodyMode.NONE])
async def test_a_gateway_that_allows_it_is_told_not_to_show_the_body(allows, asked, wire):
    """By an answer to the response headers; the end of the response is seen all the same."""

    def allow(document):
        ext_proc(document)["allow_mode_override"] = allows

    settings = SessionSettings(decline_response_bodies=True)
    modes = {"request_body_mode": asked, "response_body_mode": BodyMode.STREAMED}
    wired = await wire(**modes, settings=settings, edit=allow)
    headers = {"x-test-events": str(EVENTS)}
    async with wired.client.post(PATH, data=BODY, headers=headers) as response:
        assert await response.read() == sse_stream(EVENTS)
    await until(lambda: wired.picker.witness.outcomes, "the outcome")
    (outcome,) = wired.picker.witness.outcomes
    assert (outcome.ending, outcome.status) == (Ending.COMPLETE, 200)
    assert wired.picker.witness.declined == 1
    pieces = [answer for answer in wired.last_stream.answered if answer.response_body is not None]
    assert (pieces == []) is allows


async def test_a_bypassing_response_costs_no_message_and_its_end_is_seen_at_the_end(wire):
    """NONE with trailers SEND: no message a chunk; the stream ends when the response does."""
    wired = await wire()
    headers = {"x-test-events": "100", "x-test-pause-after": "50"}
    async with wired.client.post(PATH, data=BODY, headers=headers) as response:
        half = b"".join(map(sse_event, range(50)))
        assert await response.content.readexactly(len(half)) == half
        stream = wired.last_stream
        assert not stream.over
        assert wired.picker.open_leases == 1
        assert wired.picker.witness.outcomes == []
        wired.pod.resume.set()
        assert half + await response.content.read() == sse_stream(100)
    await until(lambda: stream.over, "the end of the ext_proc stream")
    await until(lambda: wired.picker.witness.outcomes, "the outcome")
    assert stream.count("> response_headers") == stream.count("< response_headers") == 1
    assert stream.count("> response_body") == 0
    assert wired.picker.open_leases == 0


async def test_every_chunk_of_a_full_duplex_response_is_passed_on_at_once(wire):
    """The client holds the first half while the pod has not sent the second."""
    wired = await wire(response_body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    headers = {"x-test-events": "100", "x-test-pause-after": "50"}
    async with wired.client.post(PATH, data=BODY, headers=headers) as response:
        half = b"".join(map(sse_event, range(50)))
        assert await response.content.readexactly(len(half)) == half
        assert wired.picker.open_leases == 1
        wired.pod.resume.set()
        assert half + await response.content.read() == sse_stream(100)
    await until(lambda: not wired.picker.open_leases, "the lease to be released")


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_what_the_pod_answers_is_what_the_client_gets(status, wire):
    """An engine's own error passes unchanged and is noted with its status."""
    wired = await wire()
    async with wired.client.post(PATH, data=BODY, headers={"x-test-status": str(status)}) as got:
        assert got.status == status
        assert (await got.json())["pod"] == wired.pod.name
    await until(lambda: wired.picker.witness.outcomes, "the outcome")
    assert wired.picker.witness.outcomes[0].status == status
