"""More than a thousand requests that wait in the picker's queue, behind a real Envoy."""

import asyncio
import time
from collections import Counter

import pytest

from epp.core.decision.inputs import Reconfigured
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.flow.detectors import ConcurrencyDetector
from epp.core.flow.settings import FlowSettings
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.picker import IN_TURN, running_picker
from tests.envoy.rig import http_client, running_envoy, until
from tests.envoy.upstream import running_pods

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p"}'
ENVOY_MAX = 1_024
"""Default of Envoy's circuit breaker `max_requests`."""

PINGED_S = 6.0
"""Time in which Envoy sends more pings than gRPC allows by default."""


def settings(max_concurrency):
    return SchedulerSettings(
        stages=Stages(decode=IN_TURN),
        flow=FlowSettings(detector=ConcurrencyDetector(max_concurrency=max_concurrency)),
    )


@pytest.fixture
def behind_envoy(opened, tmp_path, transport):
    """A pod with room for one request, which it holds, the picker in this loop, and an Envoy."""

    async def start(edit=None):
        (pod,) = await opened.enter_async_context(running_pods(1))
        picker = await opened.enter_async_context(
            running_picker([pod], transport=transport, scheduling=settings(1))
        )
        options = BootstrapOptions(picker_address=picker.address, plaintext=True)
        envoy = await opened.enter_async_context(running_envoy(options, tmp_path, edit))
        client = await opened.enter_async_context(http_client(envoy))
        held = asyncio.create_task(ask(client, **{"x-test-hold": "1"}))
        await until(lambda: pod.serving == 1, "the pod serves")
        return pod, picker, client, held

    return start


async def ask(client, **headers):
    async with client.post(PATH, data=BODY, headers=headers) as response:
        await response.read()
        return response.status


async def waiting(client, picker, count):
    """Return the tasks of `count` requests, all of which wait."""
    before = picker.queue.control.requests
    tasks = [asyncio.create_task(ask(client)) for _ in range(count)]
    await until(lambda: picker.queue.control.requests == before + count, f"{count} waiting")
    return tasks


async def test_1025_waiting_requests_are_all_served_when_room_comes_at_once(behind_envoy):
    """The picker places them in portions, and no response is late for Envoy."""
    pod, picker, client, held = await behind_envoy(patient)
    tasks = await waiting(client, picker, ENVOY_MAX + 1)
    pod.resume.set()
    now = time.monotonic()
    picker.scheduler.take(Reconfigured(settings(2 * ENVOY_MAX)), now)
    picker.queue.configure(now)
    assert Counter(await asyncio.gather(held, *tasks)) == {200: ENVOY_MAX + 2}
    assert picker.decisions_waited() == ENVOY_MAX + 1
    await until(lambda: not picker.open_leases, "all leases to be released")


async def test_a_quiet_connection_outlives_envoys_pings(behind_envoy):
    """The bootstrap lets Envoy ping the picker each second. No other byte passes while all wait."""
    pod, picker, client, held = await behind_envoy()
    tasks = await waiting(client, picker, 2)
    done, _ = await asyncio.wait([held, *tasks], timeout=PINGED_S)
    assert not done
    assert picker.witness.stream_codes == []
    pod.resume.set()
    assert await asyncio.gather(held, *tasks) == [200] * 3


async def test_envoys_default_circuit_breaker_refuses_request_1025(behind_envoy):
    """The bootstrap raises this limit. The picker never sees the refused request."""
    _, picker, client, held = await behind_envoy(with_default_circuit_breakers)
    tasks = await waiting(client, picker, ENVOY_MAX - 1)
    assert await ask(client) == 500
    assert picker.witness.refusals == []
    (one, *others) = tasks
    one.cancel()
    await until(lambda: picker.queue.control.requests == len(others), "one leaves")
    others += await waiting(client, picker, 1)
    for task in (held, *others):
        task.cancel()
    await until(lambda: not picker.server.open_streams, "all streams to end")


def with_default_circuit_breakers(document):
    patient(document)
    for cluster in document["static_resources"]["clusters"]:
        cluster.pop("circuit_breakers", None)


def patient(document):
    """Let pings wait: one event loop has all clients, the picker and the pod, and may be busy for
    longer than the picker's own.
    """
    clusters = document["static_resources"]["clusters"]
    (pickers,) = (cluster for cluster in clusters if cluster["name"] == "ext_proc")
    (http,) = pickers["typed_extension_protocol_options"].values()
    http["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]["timeout"] = (
        "60s"
    )
