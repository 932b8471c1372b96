"""Requests through every transport to a picker that asks a renderer, configured and all."""

import json

import pytest

from epp.core.decision.inputs import EventsHeard, StreamChanged
from epp.core.kv_events.payload import Stored
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.token_ids import packed
from tests import gateway as gw
from tests.app.test_wiring import LONG, TWO, ready_at_once, replace, serving
from tests.envoy.rig import until
from tests.shell.engines.tokens.renderers import FakeRenderer, never, rendered
from tests.shell.operators.pages.test_metrics_server import get
from tests.streams import Call
from tests.transports import TRANSPORTS

SECRET = "a phrase that nobody else must read"
CHAT = json.dumps({"model": "my-model", "messages": [{"role": "user", "content": SECRET}]}).encode()
RENDER = "/v1/chat/completions/render"

CONFIG = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: max-score-picker
{tokens}
{index}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
  - pluginRef: max-score-picker
"""
EXACT = """\
- type: precise-prefix-cache-producer
  parameters:
    kvEventsConfig: {discoverPods: false}
"""
PRODUCER = """\
- type: token-producer
  parameters:
    tokenizeTimeout: {timeout}
    vllm: {{url: "{url}"}}
"""


def asking(url, timeout="30s", index=EXACT):
    return CONFIG.format(tokens=PRODUCER.format(url=url, timeout=timeout), index=index)


class Witness:
    """What the picker knew of each request when it decided."""

    def __init__(self, running):
        self.token_ids = []
        running.scheduler.witness = self

    def asked(self, request):
        self.token_ids.append(request.token_ids)

    def decided(self, request, decision, now):
        pass

    def took(self, given, effects, now):
        pass


async def chat(running, answers=2, body=CHAT):
    call = Call(running.channel)
    await call.send(gw.request_headers(gw.CHAT | {"authorization": "Bearer key"}))
    await call.send(gw.request_body(body))
    return call, await call.answers(answers)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_request_is_placed_with_its_tokens(transport, tmp_path):
    """It waits for them; the gateway sees no difference, and nobody else sees the prompt."""
    async with FakeRenderer({RENDER: rendered(5, 6)}) as fake:
        flags = (f"--transport={transport}", "--v=5")
        async with serving(tmp_path, TWO, *flags, config=asking(fake.url)) as running:
            ready_at_once(running)
            witness = Witness(running)
            call, answered = await chat(running)
            assert gw.kinds(answered) == ["request_headers", "request_body"]
            await call.end()
            assert witness.token_ids == [(packed([5, 6]),)]
            ((_, headers, body),) = fake.asked
            assert (headers["authorization"], body) == ("Bearer key", CHAT)
            metrics = running.picker.registry
            labels = {"backend": "vllm", "result": "found"}
            assert metrics.get_sample_value("homing_tokenize_requests_total", labels) == 1
            name = "homing_tokenize_duration_seconds_count"
            assert metrics.get_sample_value(name, {"backend": "vllm"}) == 1
    assert SECRET not in json.dumps(running.lines, default=str)
    assert "token_ids" not in json.dumps(running.lines, default=str)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_renderer_that_hangs_costs_the_deadline(transport, tmp_path):
    """Then the request is placed by its bytes."""
    async with FakeRenderer({RENDER: never}) as fake:
        config = asking(fake.url, timeout="10ms")
        async with serving(tmp_path, TWO, f"--transport={transport}", config=config) as running:
            ready_at_once(running)
            witness = Witness(running)
            call, answered = await chat(running)
            assert gw.kinds(answered) == ["request_headers", "request_body"]
            assert witness.token_ids == [()]
            await call.end()
            results = running.picker.tokens.resolver.results
            assert results == {"timeout": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_that_leaves_while_it_waits_leaves_nothing(transport, tmp_path):
    """No lease, no body, no question."""
    async with FakeRenderer({RENDER: never}) as fake:
        config = asking(fake.url)
        async with serving(tmp_path, TWO, f"--transport={transport}", config=config) as running:
            ready_at_once(running)
            call = Call(running.channel)
            await call.send(gw.request_headers(gw.CHAT), gw.request_body(CHAT))
            await until(lambda: fake.asked, "the question")
            assert running.picker.tokens.resolver.waiting == 1
            call.grpc.cancel()
            await until(lambda: not running.picker.ext_proc.open_streams, "the end of the stream")
            assert running.picker.tokens.resolver.waiting == 0
            assert running.picker.bodies.held_bytes == 0
            await until(lambda: fake.left == 1, "the question to be taken back")


async def test_prompts_of_another_model_are_asked_for_under_its_name(tmp_path):
    """The renderer knows both."""

    async def answer(body):
        return rendered(1) if json.loads(body)["model"] == "one" else rendered(2)

    async with (
        FakeRenderer({RENDER: answer}) as fake,
        serving(tmp_path, TWO, config=asking(fake.url)) as running,
    ):
        ready_at_once(running)
        witness = Witness(running)
        for model in ("one", "other"):
            call, _ = await chat(running, body=CHAT.replace(b"my-model", model.encode()))
            await call.end()
        assert witness.token_ids == [(packed([1]),), (packed([2]),)]


async def test_tokens_come_and_go_with_the_configuration(tmp_path):
    """Who waits when they go is placed."""
    async with FakeRenderer({RENDER: never}) as fake:
        plain = CONFIG.format(tokens="", index="")
        async with serving(tmp_path, TWO, config=plain) as running:
            ready_at_once(running)
            file = tmp_path / "config.yaml"
            assert running.picker.tokens.resolver is None
            replace(file, asking(fake.url))
            await until(lambda: running.picker.tokens.resolver, "the renderer")
            ready_at_once(running)
            call = Call(running.channel)
            await call.send(gw.request_headers(gw.CHAT), gw.request_body(CHAT))
            await until(lambda: fake.asked, "the question")
            replace(file, plain)
            assert gw.kinds(await call.answers(2)) == ["request_headers", "request_body"]
            await call.end()
            assert running.picker.tokens.resolver is None


async def test_files_of_tls_that_are_not_there_refuse_the_configuration(tmp_path):
    """The last good one stays."""
    async with serving(tmp_path, TWO, config=CONFIG.format(tokens="", index="")) as running:
        bad = PRODUCER.format(url="https://renderer", timeout="1s").replace(
            "}", ', caCertPath: "/none.pem"}'
        )
        replace(tmp_path / "config.yaml", CONFIG.format(tokens=bad, index=EXACT))
        await until(
            lambda: any("TLS cannot be used" in str(line.get("problem")) for line in running.lines),
            "the refusal",
        )
        assert running.picker.live.generation == 1


async def test_its_page_tells_of_it(tmp_path):
    """As text and as JSON."""
    async with (
        FakeRenderer({RENDER: rendered(1)}) as fake,
        serving(tmp_path, TWO, config=asking(fake.url)) as running,
    ):
        ready_at_once(running)
        call, _ = await chat(running)
        await call.end()

        class Port:
            port = running.picker.flags.metrics_port

        status, _, body = await get(Port, "/debug/tokens", Accept="application/json")
        told = json.loads(body)
        assert status == 200
        assert (told["backend"], told["results"]) == ("vllm", {"found": 1})
        assert told["parts"][0]["renderer"] == fake.url
        status, _, body = await get(Port, "/debug/tokens")
        assert (status, "1 found" in body) == (200, True)


async def test_without_a_producer_nobody_waits(tmp_path):
    """Sessions are not even asked."""
    async with serving(tmp_path, TWO, config=CONFIG.format(tokens="", index="")) as running:
        ready_at_once(running)
        call = Call(running.channel)
        assert await call.exchange(gw.request_headers(), gw.request_body(LONG), answers=2)
        await call.end()
        assert running.picker.tokens.snapshots() == []


async def test_without_an_index_that_reads_them_nobody_waits(tmp_path):
    """The renderer is not asked, and it is said once, with the configuration's name."""
    async with FakeRenderer({RENDER: never}) as fake:
        config = asking(fake.url, index="")
        async with serving(tmp_path, TWO, config=config) as running:
            ready_at_once(running)
            call, answered = await chat(running)
            assert gw.kinds(answered) == ["request_headers", "request_body"]
            await call.end()
            assert running.picker.tokens.resolver is None
            assert fake.asked == []
            told = [line for line in running.lines if "reads token ids" in line["event"]]
            assert len(told) == 1
            assert "config.yaml" in told[0]["event"]


@pytest.mark.parametrize(("stored", "result"), [(128, "agrees"), (64, "differs")])
async def test_ids_are_compared_with_those_that_the_engine_stores(stored, result, tmp_path):
    """As its events tell them: here all of the prompt, or its first block and then others."""
    ids = list(range(1_000, 1_130))
    events = Stored([1, 2], None, packed([*ids[:stored], *range(128 - stored)]), 64)
    async with (
        FakeRenderer({RENDER: rendered(*ids)}) as fake,
        serving(tmp_path, TWO, config=asking(fake.url)) as running,
    ):
        ready_at_once(running)
        call, _ = await chat(running)
        for slot, _ in running.scheduler.pool.endpoints():
            running.scheduler.take(StreamChanged(slot, StreamState.LIVE, complete=True), 0.0)
            running.scheduler.take(EventsHeard(slot, (events,)), 0.0)
        await call.exchange(gw.response_headers(end=True, date="today"), answers=1)
        await call.end()
        labels = {"backend": "vllm", "result": result}
        await until(
            lambda: running.metric("tokenize_compared_total", **labels) == 1, "the comparison"
        )
        (row,) = running.picker.tokens.described()["compared"]
        assert (row["model"], row["agreed"]) == ("my-model", int(result == "agrees"))
