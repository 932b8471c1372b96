"""Requests that wait in the picker's queue behind a real Envoy."""

import asyncio
import hashlib
import io
import time

import pytest

from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.flags.values import BodyMode
from tests.builders import request
from tests.envoy.h2_client import http2_client
from tests.envoy.picker import IN_TURN
from tests.envoy.rig import http_connections, until
from tests.envoy.test_upgrades import connect, no_filters_of_its_own

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p"}'
ONE = SchedulerSettings(
    stages=Stages(decode=IN_TURN),
    flow=FlowSettings(detector=ConcurrencyDetector(max_concurrency=1)),
)


async def status_of(client, *, method="POST", path=PATH, **headers):
    body = BODY if method == "POST" else None
    async with client.request(method, path, data=body, headers=headers) as response:
        await response.read()
        return response.status


async def full(wire, **options):
    """A pod with room for one request, which it holds."""
    wired = await wire(scheduling=ONE, **options)
    held = asyncio.create_task(status_of(wired.client, **{"x-test-hold": "1"}))
    await until(lambda: wired.pod.serving == 1, "the pod serves")
    return wired, held


def waiting(wired):
    return wired.picker.queue.control.requests


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_request_outlasts_the_message_timeout(mode, wire):
    """Full duplex has none. In BUFFERED the picker asks for a longer one."""
    wired, held = await full(wire, request_body_mode=mode, message_timeout_s=1.0)
    later = asyncio.create_task(status_of(wired.client))
    await until(lambda: waiting(wired) == 1, "a request waits")
    done, _ = await asyncio.wait({later}, timeout=3.0)
    assert not done, "it still waits after three times the timeout"
    wired.pod.resume.set()
    assert (await held, await later) == (200, 200)
    assert wired.picker.decisions_waited() == 1
    timeouts = [answer.override_message_timeout for answer in wired.last_stream.answered]
    # Envoy 1.40 ignores a second one.
    assert len(list(filter(None, timeouts))) == (mode is BodyMode.BUFFERED)


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_get_request_waits_as_well(mode, wire):
    wired, held = await full(wire, request_body_mode=mode)
    later = asyncio.create_task(status_of(wired.client, method="GET", path="/v1/models"))
    await until(lambda: waiting(wired) == 1, "a request waits")
    wired.pod.resume.set()
    assert (await held, await later) == (200, 200)


async def test_a_client_that_leaves_gives_up_its_place_at_once(wire):
    wired, held = await full(wire)
    later = asyncio.create_task(status_of(wired.client))
    await until(lambda: waiting(wired) == 1, "a request waits")
    later.cancel()
    await until(lambda: waiting(wired) == 0, "nothing waits")
    wired.pod.resume.set()
    assert await held == 200
    assert len(wired.pod.received) == 1


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_large_body_waits_and_arrives_unchanged(mode, wire):
    wired, held = await full(wire, request_body_mode=mode)
    body = b'{"model":"m","prompt":"%b"}' % (b"p" * 4_000_000)
    later = asyncio.create_task(wired.client.post(PATH, data=io.BytesIO(body)))
    await until(lambda: waiting(wired) == 1, "a request waits")
    wired.pod.resume.set()
    response = await later
    await response.read()
    assert (await held, response.status) == (200, 200)
    assert wired.pod.received[-1].body_sha256 == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("gateway", ["of the bootstrap", "with one ext_proc for all"])
async def test_a_websocket_waits_before_it_opens(gateway, wire):
    """The gateway of the bootstrap waits for an answer to the headers; in full duplex no time-out
    runs.
    """
    edit = None if gateway == "of the bootstrap" else no_filters_of_its_own
    wired, held = await full(wire, edit=edit, message_timeout_s=1.0)
    later = asyncio.create_task(echo(wired.client))
    await until(lambda: waiting(wired) == 1, "a request waits")
    done, _ = await asyncio.wait({later}, timeout=1.5)
    assert not done, "it still waits after the message timeout"
    wired.pod.resume.set()
    assert (await held, await later) == (200, "hello")
    assert wired.picker.decisions_waited() == 1


async def echo(client):
    async with client.ws_connect("/v1/realtime") as socket:
        await socket.send_str("hello")
        return (await socket.receive()).data


async def test_a_websocket_over_http2_waits_before_it_opens(wire):
    wired, held = await full(wire)
    async with http2_client(wired.envoy.port) as client:
        stream = await client.open(connect("/v1/realtime"))
        await until(lambda: waiting(wired) == 1, "a request waits")
        wired.pod.resume.set()
        await client.until(lambda: stream in client.statuses)
        assert client.statuses[stream] == "200"
        await client.send_text(stream, "hello")
        assert await client.received_text(stream) == "hello"
    assert await held == 200


async def test_a_short_stream_idle_timeout_ends_the_wait(wire):
    """`epp check-config` warns of a TTL above it. The bootstrap sets an hour."""
    wired = await wire(scheduling=ONE, edit=idle_for_a_second)
    wired.picker.scheduler.schedule(request(), time.monotonic())
    later = asyncio.create_task(status_of(wired.client))
    await until(lambda: waiting(wired) == 1, "a request waits")
    assert await later == 504
    await until(lambda: waiting(wired) == 0, "nothing waits")
    assert wired.pod.received == []


def idle_for_a_second(document):
    connections = http_connections(document)
    connections["stream_idle_timeout"] = "1s"
    for route in connections["route_config"]["virtual_hosts"][0]["routes"]:
        route["route"].pop("idle_timeout", None)


async def test_a_wait_that_ends_is_a_429(wire):
    short = FlowSettings(detector=ConcurrencyDetector(max_concurrency=1), wait_s_max=0.3)
    scheduling = SchedulerSettings(stages=Stages(decode=IN_TURN), flow=short)
    wired = await wire(scheduling=scheduling)
    held = asyncio.create_task(status_of(wired.client, **{"x-test-hold": "1"}))
    await until(lambda: wired.pod.serving == 1, "the pod serves")
    assert await status_of(wired.client) == 429
    wired.pod.resume.set()
    assert await held == 200


async def test_a_drain_answers_those_that_wait(wire):
    wired, held = await full(wire)
    later = asyncio.create_task(status_of(wired.client))
    await until(lambda: waiting(wired) == 1, "a request waits")
    wired.picker.queue.drain(time.monotonic())
    assert await later == 503
    wired.pod.resume.set()
    assert await held == 200
