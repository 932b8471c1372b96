"""Prefill and decode on different pods: real Envoy, picker, sidecars and HTTP."""

import aiohttp
import pytest
from msgspec import Struct

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.picker import Picker, running_picker
from tests.envoy.recorder import RecordedStream, Recorder, recording
from tests.envoy.rig import http_client, running_envoy, until
from tests.sim.pods.role_pods import MODEL, RolePods, running_roles

pytestmark = pytest.mark.envoy

CONFIG = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: prefix-based-pd-decider}%s
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 64}
- type: decode-filter
- type: prefill-filter
- type: prefix-cache-scorer
- type: active-request-scorer
schedulingProfiles:
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: prefix-cache-scorer
  - pluginRef: active-request-scorer
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: active-request-scorer
"""
FALLBACK = "\n    profiles: {fallback: decode}"
PROMPT = "What is on page %d? " + "word " * 300
COPIES = {
    "x-prefiller-host-port": "10.9.9.9:80",
    "x-encoder-hosts-ports": "10.9.9.9:80",
    "x-kv-cache-source-host-port": "10.9.9.9:80",
    "x-data-parallel-host-port": "10.9.9.9:80",
}


class Wired(Struct):
    """Client, Envoy, recorder, picker and pods with roles in one line."""

    pods: RolePods
    picker: Picker
    recorder: Recorder
    client: aiohttp.ClientSession

    async def chat(self, number: int = 0, **options):
        """Status and answer of a chat with a prompt of its own."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT % number}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        async with self.client.post("/v1/chat/completions", json=body, **options) as response:
            return response.status, await response.json()


@pytest.fixture
def wire(opened, tmp_path):
    """Start pods with these roles, the picker, a recorder before it and an Envoy."""

    async def start(*roles, fallback="", **options):
        pods = await opened.enter_async_context(running_roles(*roles, **options))
        config = load_config(CONFIG % fallback, "config.yaml", plugin_tables())
        picker = await opened.enter_async_context(
            running_picker(pods.pods, scheduling=build_settings(config))
        )
        recorder = await opened.enter_async_context(recording(picker.address))
        chosen = BootstrapOptions(picker_address=recorder.address, plaintext=True)
        envoy = await opened.enter_async_context(running_envoy(chosen, tmp_path))
        client = await opened.enter_async_context(http_client(envoy))
        return Wired(pods, picker, recorder, client)

    return start


def set_headers(stream: RecordedStream) -> dict[str, str]:
    """The headers that the picker set."""
    found = {}
    for answer in stream.answered:
        phase = answer.request_headers or answer.request_body
        mutation = phase and phase.response and phase.response.header_mutation
        for option in mutation.set_headers if mutation else ():
            found[option.header.key] = option.header.raw_value.decode()
    return found


async def test_the_header_arrives_and_prefill_is_asked_first(wire):
    wired = await wire("prefill", "decode")
    status, answer = await wired.chat()
    assert status == 200
    pods = wired.pods
    prefill = pods["prefill-0"]
    sidecar, first, second = pods.generations()
    assert sidecar.headers["x-prefiller-host-port"] == prefill.address
    assert [sidecar.port, first.port, second.port] == [
        "decode-0 sidecar", "prefill-0 engine", "decode-0 engine",
    ]  # fmt: skip
    stream = wired.recorder.streams[-1]
    assert set_headers(stream)["x-prefiller-host-port"] == prefill.address
    assert stream.destination() == pods["decode-0"].address
    decode = pods["decode-0"]
    fetched = await decode.metric("prompt_tokens_by_source_total", source="external_kv_transfer")
    assert fetched == answer["usage"]["prompt_tokens"]
    await until(lambda: not wired.picker.open_leases, "the end of the stream")


async def test_the_next_turn_is_prefilled_where_it_is_decoded(wire):
    """Only what the decode pod does not have counts."""
    wired = await wire("prefill", "decode", "decode")
    assert (await wired.chat())[0] == 200
    wired.pods.seen.clear()
    assert (await wired.chat())[0] == 200
    sidecar, engine = wired.pods.generations()
    assert "x-prefiller-host-port" not in sidecar.headers
    assert engine.port.endswith("engine")
    assert not engine.port.startswith("prefill")


async def test_client_copies_of_the_headers_never_arrive(wire):
    wired = await wire("prefill", "decode")
    assert (await wired.chat(1, headers=COPIES))[0] == 200
    assert (await wired.chat(1, headers=COPIES))[0] == 200
    async with wired.client.get("/v1/models", headers=COPIES) as response:
        assert response.status == 200
    told = [seen.headers for seen in wired.pods.seen if seen.port == "decode-0 sidecar"]
    assert [headers.get("x-prefiller-host-port") for headers in told] == [
        wired.pods["prefill-0"].address, None, None,
    ]  # fmt: skip
    for headers in told:
        assert "10.9.9.9:80" not in headers.values()


async def test_a_prefill_pod_that_answers_503_is_not_blamed_on_its_only_partner(wire):
    """The decode pod goes on to serve what it can serve alone."""
    wired = await wire("prefill", "decode")
    wired.pods["prefill-0"].status = 503
    for number in range(6):
        assert (await wired.chat(number))[0] == 503
    assert wired.picker.witness.excluded == []
    assert wired.picker.scheduler.state.outlying == {}
    wired.pods["prefill-0"].status = 0
    assert (await wired.chat(9))[0] == 200


async def test_a_prefill_pod_that_fails_with_two_partners_is_excluded_alone(wire):
    """Then the fallback serves, and no decode pod is excluded."""
    wired = await wire("prefill", "decode", "decode", fallback=FALLBACK)
    wired.pods["prefill-0"].status = 503
    statuses = [(await wired.chat(number))[0] for number in range(12)]
    assert set(wired.picker.witness.excluded) == {"prefill-0"}
    failed = statuses.count(503)
    assert statuses == [503] * failed + [200] * (12 - failed)
    assert 2 <= failed <= 4


async def test_requests_go_to_the_other_prefill_pod_after_one_failed(wire):
    wired = await wire("prefill", "prefill", "decode", "decode")
    await wired.pods["prefill-0"].stop()
    statuses = [(await wired.chat(number))[0] for number in range(20)]
    assert set(wired.picker.witness.excluded) == {"prefill-0"}
    assert statuses.count(502) <= 4
    assert statuses[-8:] == [200] * 8
    prefilled = [port for port in wired.pods.ports() if port.startswith("prefill")]
    assert set(prefilled) == {"prefill-1 engine"}


async def test_engines_without_a_connector_answer_and_prefill_twice(wire):
    wired = await wire("prefill", "decode", without_connector=("prefill-0",))
    status, answer = await wired.chat()
    assert status == 200
    tokens = answer["usage"]["prompt_tokens"]
    for name in ("prefill-0", "decode-0"):
        pod = wired.pods[name]
        computed = await pod.metric("prompt_tokens_by_source_total", source="local_compute")
        assert computed == tokens


async def test_nobody_prefills_and_the_request_is_refused_with_the_stage(wire):
    wired = await wire("decode")
    status, answer = await wired.chat()
    assert status == 503
    assert "stage prefill" in answer["error"]["message"]
    assert wired.pods.ports() == []


async def test_a_fallback_serves_what_nobody_prefills(wire):
    wired = await wire("decode", fallback=FALLBACK)
    assert (await wired.chat())[0] == 200
    assert wired.pods.ports() == ["decode-0 sidecar", "decode-0 engine"]
