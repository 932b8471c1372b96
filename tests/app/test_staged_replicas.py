"""Two pickers, each a process of its own: each counts the prefill and decode legs of the other."""

import json
from contextlib import AsyncExitStack

import aiohttp
import pytest

from tests import gateway as gw
from tests.envoy.process import EppProcess
from tests.envoy.rig import free_ports, until
from tests.envoy.upstream import running_pods
from tests.streams import Call, channel_to

RECEIVED = 'homing_peer_records_total{direction="received"'
STARTS_IN_S = 60.0
ROUNDS = 8
"""Two pickers that knew nothing of each other would choose other pods in all rounds once in 2^16."""
pytestmark = pytest.mark.timeout(180)
ROLES = ("prefill", "prefill", "decode", "decode")
CONFIG = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: always-disagg-pd-decider}
- type: always-disagg-pd-decider
- type: decode-filter
- type: prefill-filter
- type: active-request-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: active-request-scorer
  - pluginRef: prefix-cache-scorer
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: active-request-scorer
  - pluginRef: prefix-cache-scorer
"""


async def metric(picker, series):
    """Sum of the series that begin with this text; 0 if there are none."""
    async with aiohttp.ClientSession() as session, session.get(picker.metrics_url) as response:
        page = await response.text()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(series))


async def reached(picker, series, value):
    """Wait until the metric of a picker is at least `value`."""

    async def there():
        return await metric(picker, series) >= value

    await until(there, f"{series} to be {value}", STARTS_IN_S)


@pytest.fixture
async def pickers(tmp_path):
    """Start two pickers that share their counts."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    ports = free_ports(2)
    everybody = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with AsyncExitStack() as opened:
        pods = await opened.enter_async_context(running_pods(len(ROLES)))
        for pod in pods:
            # A picker believes no more requests of a peer than the page of the pod allows.
            pod.running_requests = 4 * ROUNDS
        endpoints = [
            {
                "name": pod.name,
                "address": pod.host,
                "port": pod.port,
                "labels": {"llm-d.ai/role": role},
            }
            for pod, role in zip(pods, ROLES, strict=True)
        ]
        (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": endpoints}))
        started = []
        for port in ports:
            process = EppProcess(
                tmp_path / f"epp-{port}.log",
                *("--endpoints-file", str(tmp_path / "endpoints.json")),
                *("--config-file", str(tmp_path / "config.yaml"), "--secure-serving=false"),
                *("--drain-grace=0s", "--drain-timeout=1s", "--replicas=2"),
                *("--peers", everybody, "--peer-port", str(port)),
                "--peer-bind-address=127.0.0.1",
            )
            opened.push_async_callback(ended, process)
            started.append(process)
        for process in started:
            await process.launch()
        for process in started:
            await until(process.is_ready, "epp serve to be ready", STARTS_IN_S)
            await reached(process, "homing_peers ", 1)
            await reached(process, "homing_ready_endpoints", len(ROLES))
        yield started


async def ended(picker):
    if picker.alive:
        await picker.kill()


async def chosen(call, number):
    """Return the prefill and the decode address of a chat whose stream stays open."""
    body = gw.request_body(gw.prompt(f"question {number} " + "word " * 1_000))
    head, *_ = await call.exchange(gw.request_headers(gw.COMPLETIONS), body, answers=2)
    return gw.set_headers(head)["x-prefiller-host-port"], gw.destination(head)


async def test_each_picker_counts_the_legs_of_the_other(pickers):
    """Both are asked in turn, and no request ends. Two of them are never at the same pod, because
    both pods of each role had equally many before.
    """
    async with AsyncExitStack() as opened:
        channels = [
            await opened.enter_async_context(channel_to(picker.address)) for picker in pickers
        ]
        heard = [await metric(picker, RECEIVED) for picker in pickers]
        calls = []
        for number in range(ROUNDS):
            found = []
            for at in (0, 1) if number % 2 else (1, 0):
                calls.append(Call(channels[at]))
                found.append(await chosen(calls[-1], len(calls)))
                heard[1 - at] += 2  # a record for each leg
                await reached(pickers[1 - at], RECEIVED, heard[1 - at])
            (prefill, decode), (other_prefill, other_decode) = found
            assert prefill != other_prefill
            assert decode != other_decode
        for call in calls:
            await call.exchange(gw.response_headers(end=True), answers=1)
            await call.grpc.done_writing()
