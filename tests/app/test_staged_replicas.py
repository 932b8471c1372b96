"""Pickers that are processes of their own: each counts the prefill and decode legs of the others."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from tests import gateway as gw
from tests.envoy.process import EppProcess
from tests.envoy.rig import free_ports, until
from tests.envoy.upstream import running_pods
from tests.streams import Call, channel_to

RECEIVED = 'homing_peer_records_total{direction="received"'
STARTS_IN_S = 150.0
ROUNDS = 8
"""Two pickers that knew nothing of each other would choose other pods in all rounds once in 2^16."""
pytestmark = pytest.mark.timeout(600)
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

BY_TOKENS = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: always-disagg-pd-decider}
- type: always-disagg-pd-decider
- type: inflight-load-producer
  parameters: {peakPrefillThroughput: 1}
- type: decode-filter
- type: prefill-filter
- type: active-request-scorer
- type: token-load-scorer
schedulingProfiles:
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: active-request-scorer
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: token-load-scorer
"""
"""Configuration in which the promised tokens choose the prefill pod. They do not drain meanwhile."""
WORDS = (3_000, 500, 1_200, 2_100, 350, 800, 1_700, 250)
"""Lengths of prompts in words, of which no two sums that the test compares are nearly equal."""


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


@asynccontextmanager
async def sharing(tmp_path, number, config):
    """Yield so many pickers that share their counts."""
    (tmp_path / "config.yaml").write_text(config)
    ports = free_ports(number)
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
                *("--drain-grace=0s", "--drain-timeout=1s", f"--replicas={number}"),
                *("--peers", everybody, "--peer-port", str(port)),
                "--peer-bind-address=127.0.0.1",
            )
            opened.push_async_callback(ended, process)
            started.append(process)
        for process in started:
            await process.launch()
        for process in started:
            await until(process.is_ready, "epp serve to be ready", STARTS_IN_S)
            await reached(process, "homing_peers ", number - 1)
            await reached(process, "homing_ready_endpoints", len(ROLES))
        yield started


async def ended(picker):
    if picker.alive:
        await picker.kill()


async def chosen(call, number, words=1_000):
    """Return the prefill and the decode address of a chat whose stream stays open."""
    body = gw.request_body(gw.prompt(f"question {number} " + "word " * words))
    head, *_ = await call.exchange(gw.request_headers(gw.COMPLETIONS), body, answers=2)
    return gw.set_headers(head)["x-prefiller-host-port"], gw.destination(head)


async def test_each_picker_counts_the_legs_of_the_other(tmp_path):
    """Both are asked in turn, and no request ends. Two of them are never at the same pod, because
    both pods of each role had equally many before.
    """
    async with AsyncExitStack() as opened:
        pickers = await opened.enter_async_context(sharing(tmp_path, 2, CONFIG))
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


@pytest.mark.parametrize("number", [1, 2, 4])
async def test_several_pickers_place_prefills_by_their_tokens_as_one_does(number, tmp_path):
    """Each prompt goes to the prefill pod with fewer promised tokens, whichever picker promised
    them. The pickers are asked in turn, and no prefill ends.
    """
    async with AsyncExitStack() as opened:
        pickers = await opened.enter_async_context(sharing(tmp_path, number, BY_TOKENS))
        channels = [
            await opened.enter_async_context(channel_to(picker.address)) for picker in pickers
        ]
        heard = [await metric(picker, RECEIVED) for picker in pickers]
        calls, promised = [], {}
        for place, words in enumerate(WORDS):
            asked = place % number
            calls.append(Call(channels[asked]))
            prefill, _ = await chosen(calls[-1], place, words)
            least = min(promised.values()) if len(promised) == 2 else 0
            assert promised.get(prefill, 0) == least
            promised[prefill] = promised.get(prefill, 0) + words
            for other in range(number):
                if other != asked:
                    heard[other] += 2  # a record for each leg
                    await reached(pickers[other], RECEIVED, heard[other])
        assert len(promised) == 2
        for call in calls:
            await call.exchange(gw.response_headers(end=True), answers=1)
            await call.grpc.done_writing()
