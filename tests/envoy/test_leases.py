"""A lease ends exactly when its request does, as far as the gateway lets the picker see."""

import time

import aiohttp
import pytest

from epp.core.decision.inputs import Tick
from epp.core.knowledge.inflight import Ending
from epp.flags.values import BodyMode
from tests.envoy.rig import RawConnection, ext_proc, until

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p","stream":true}'
AT_ONCE_S = 5.0
"""Far below any estimate of how long a request takes, far above a loaded machine's delays."""


def no_response_phase(document):
    """As gateways that stop listening once they know the destination."""
    ext_proc(document)["processing_mode"] |= {
        "response_header_mode": "SKIP",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SKIP",
    }


async def open_request(wired, connection, **headers):
    """Send a request and wait until the pod works on it."""
    before = wired.pod.serving
    await connection.send_head("POST", PATH, content_length=len(BODY), **headers)
    await connection.send(BODY)
    await until(lambda: wired.pod.serving > before, "the pod to work on the request")


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
async def test_a_client_that_leaves_mid_stream_frees_its_lease_at_once(mode, wire):
    """Whatever the response mode; the pod is told too."""
    wired = await wire(response_body_mode=mode)
    async with RawConnection.open(wired.envoy.port) as connection:
        await open_request(wired, connection, x_test_events=100, x_test_pause_after=10)
        assert (await connection.read_head())[0] == 200
        await connection.read_until(b'"index": 9')
        assert wired.picker.open_leases == 1
        connection.leave()
        await until(lambda: not wired.picker.open_leases, "the lease", AT_ONCE_S)
    await until(lambda: not wired.pod.serving, "the pod to stop", AT_ONCE_S)
    assert [outcome.status for outcome in wired.picker.witness.outcomes] == [200]


async def test_a_client_that_leaves_before_the_response_frees_its_lease_at_once(wire):
    """This gateway is known to send response headers, so their absence means the client left."""
    wired = await wire()
    async with wired.client.post(PATH, data=BODY) as response:
        assert response.status == 200
    async with RawConnection.open(wired.envoy.port) as connection:
        await open_request(wired, connection, x_test_hold=1)
        assert wired.picker.open_leases == 1
        connection.leave()
        await until(lambda: not wired.picker.open_leases, "the lease", AT_ONCE_S)
    assert wired.picker.witness.outcomes[-1].ending is Ending.CLIENT_LEFT


async def test_a_client_that_leaves_while_it_sends_has_no_lease(wire):
    """Nothing was decided yet; the picker forgets the half body."""
    wired = await wire()
    async with RawConnection.open(wired.envoy.port) as connection:
        await connection.send_head("POST", PATH, content_length=1_000_000)
        await connection.send(b'{"model":"m","prompt":"' + b"p" * 200_000)
        await until(
            lambda: wired.recorder.streams and wired.last_stream.count("> request_body") > 2,
            "half of the body to reach the picker",
        )
        connection.leave()
        await until(lambda: not wired.picker.server.open_streams, "the stream to end", AT_ONCE_S)
    assert wired.picker.witness.decisions == []
    async with wired.client.post(PATH, data=BODY) as response:
        assert response.status == 200


async def test_a_gateway_without_a_response_phase_keeps_a_lease_for_its_estimate(wire):
    """The stream ends with the request phase; the work is believed to go on, but not for ever."""
    wired = await wire(edit=no_response_phase)
    started_s = time.monotonic()
    async with wired.client.post(PATH, data=BODY) as response:
        assert response.status == 200
    await until(lambda: wired.picker.witness.outcomes, "the end of the stream")
    assert wired.picker.server.open_streams == 0
    assert wired.picker.witness.outcomes[0].ending is Ending.UNSEEN
    scheduler = wired.picker.scheduler
    scheduler.take(Tick(), started_s)
    assert wired.picker.open_leases == 1
    scheduler.take(Tick(), time.monotonic() + scheduler.settings.lease_ttl_without_response_phase_s)
    assert wired.picker.open_leases == 0


async def test_the_lease_of_a_live_stream_never_expires(wire):
    """However long a generation takes, its endpoint is known to be at work."""
    wired = await wire()
    headers = {"x-test-events": "10", "x-test-pause-after": "5"}
    async with wired.client.post(PATH, data=BODY, headers=headers) as response:
        wired.picker.scheduler.take(Tick(), time.monotonic() + 86_400)
        assert wired.picker.open_leases == 1
        wired.pod.resume.set()
        await response.read()
    await until(lambda: not wired.picker.open_leases, "the lease", AT_ONCE_S)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
async def test_a_pod_that_dies_mid_stream_frees_its_lease_at_once(mode, wire):
    """The client sees a cut response, the picker the end of the request."""
    wired = await wire(response_body_mode=mode)
    headers = {"x-test-events": "100", "x-test-pause-after": "10"}
    async with wired.client.post(PATH, data=BODY, headers=headers) as response:
        await response.content.readuntil(b'"index": 9')
        assert wired.picker.open_leases == 1
        await wired.pod.stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await until(lambda: not wired.picker.open_leases, "the lease", AT_ONCE_S)
