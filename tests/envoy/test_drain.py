"""A picker that goes away takes no response with it."""

import asyncio

import pytest

from epp.shell.bootstrap import BodyMode
from tests.envoy.rig import until
from tests.envoy.upstream import sse_event, sse_stream

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p","stream":true}'
STREAMS = 100
EVENTS = 40
HALF = 20


async def read_half(client):
    """Ask for a stream and read its first half; the pod waits before the second."""
    headers = {"x-test-events": str(EVENTS), "x-test-pause-after": str(HALF)}
    response = await client.post(PATH, data=BODY, headers=headers)
    half = b"".join(map(sse_event, range(HALF)))
    assert await response.content.readexactly(len(half)) == half
    return response


async def read_rest(response):
    rest = await response.content.read()
    response.release()
    return rest


async def half_read(wired):
    return await asyncio.gather(*(read_half(wired.client) for _ in range(STREAMS)))


async def assert_nothing_lost(wired, responses):
    wired.pod.resume.set()
    rest = sse_stream(EVENTS)[sum(len(sse_event(number)) for number in range(HALF)) :]
    assert [await read_rest(response) for response in responses] == [rest] * STREAMS


@pytest.mark.parametrize("drain", range(3))
async def test_bypassing_responses_outlive_the_picker(drain, wire):
    """NONE: all streams end with OK at once, the picker stops, 100 clients read on to the end."""
    wired = await wire()
    responses = await half_read(wired)
    wired.picker.server.end_bypassed()
    await until(lambda: not wired.picker.server.open_streams, "the streams to end")
    assert set(wired.picker.witness.stream_codes) == {"OK"}
    await wired.picker.stop()
    await assert_nothing_lost(wired, responses)


@pytest.mark.parametrize("drain", range(3))
async def test_full_duplex_responses_are_served_to_their_end(drain, wire):
    """Ending those early would lose data: they stay open until the last chunk has passed."""
    wired = await wire(response_body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    responses = await half_read(wired)
    wired.picker.server.end_bypassed()
    assert wired.picker.server.open_streams == STREAMS
    await assert_nothing_lost(wired, responses)
    await until(lambda: not wired.picker.server.open_streams, "the streams to end")
    await wired.picker.stop()
