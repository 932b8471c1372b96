"""Requests that wait in the picker's queue behind a real Envoy."""

import asyncio
import time

import pytest

from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.flags.values import BodyMode
from tests.envoy.picker import IN_TURN
from tests.envoy.rig import until

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


async def test_a_get_request_waits_as_well(wire):
    wired, held = await full(wire)
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
