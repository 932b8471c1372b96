"""`epp serve` as a whole: in this process where its state is looked at, else as a child."""

import asyncio
import json
import os
import re
import signal
import ssl
import sys
import time
from contextlib import asynccontextmanager
from importlib.util import find_spec

import grpc
import pytest
import structlog
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from grpc_health.v1 import health_pb2
from opentelemetry.exporter.otlp.proto.grpc import exporter as over_grpc
from prometheus_client import generate_latest

from epp.app.wiring import EndpointPicker
from epp.commands.serve import until_signal
from epp.configuration.build import plugin_tables
from epp.core.decision.inputs import PageScraped, Reconfigured
from epp.core.decision.scheduler import Scheduler
from epp.core.types import EndpointMetrics
from epp.flags.command_lines import parse_serve
from epp.journal.reenacting import decide_again
from epp.shell.engines.scrape import Scraper
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.pages.debug_pages import Wanted
from epp.shell.process.event_loop import loop_factory
from epp.shell.starting import StartError
from tests import gateway as gw
from tests.envoy.rig import free_ports, until
from tests.shell.engines.kv_event_pod import KVEventPod
from tests.shell.operators.collectors import attributes, collector
from tests.streams import Call, channel_to
from tests.transports import TRANSPORTS

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
    weight: {prefix}
  - pluginRef: queue-scorer
    weight: {queue}
  - pluginRef: max-score-picker
"""
PREFIX_FIRST = CONFIG.format(prefix=3, queue=1)
QUEUE_FIRST = CONFIG.format(prefix=1, queue=3)
LONG = gw.prompt("once upon a time " * 100)
TWO = [
    {"name": "a", "address": "10.0.0.1", "port": 8000, "metrics": None},
    {"name": "b", "address": "10.0.0.2", "port": 8000, "metrics": None},
]


# A picker in this process.


class Running:
    """A picker that serves, and one channel to it."""

    def __init__(self, picker, channel, stop, hurry, lines):
        self.picker = picker
        self.scheduler = picker.scheduler
        self.channel = channel
        self.stop = stop
        self.hurry = hurry
        self.lines = lines

    def metric(self, name, /, **labels):
        return self.picker.registry.get_sample_value(f"homing_{name}", labels)

    def logged(self, event):
        return [line for line in self.lines if line["event"] == event]

    async def answers(self, *messages, answers):
        """Of a request whose response ends at its headers."""
        call = Call(self.channel)
        found = await call.exchange(*messages, answers=answers)
        if gw.kind(found[0]) != "immediate_response":
            await call.exchange(gw.response_headers(end=True), answers=1)
        await call.grpc.done_writing()
        return found

    async def pick(self, body=LONG, **headers):
        """The destination of a chat."""
        named = gw.COMPLETIONS | {name.replace("_", "-"): at for name, at in headers.items()}
        head, *_ = await self.answers(gw.request_headers(named), gw.request_body(body), answers=2)
        return gw.destination(head)

    async def refused(self, hint=None, **headers):
        """(status, error object) of a chat."""
        named = gw.COMPLETIONS | {name.replace("_", "-"): at for name, at in headers.items()}
        head = gw.request_headers(named, hint=hint)
        (answer,) = await self.answers(head, gw.request_body(LONG), answers=1)
        return gw.refusal(answer)

    async def refused_at_once(self):
        """(status, error object) of a request that is refused at its first message."""
        (answer,) = await Call(self.channel).exchange(gw.request_headers(), answers=1)
        return gw.refusal(answer)

    def observe(self, **waiting):
        """As if each endpoint had just reported so many waiting requests."""
        for slot, endpoint in self.scheduler.pool.endpoints():
            if endpoint.name in waiting:
                found = EndpointMetrics(
                    waiting_requests=waiting[endpoint.name], running_requests=0, kv_cache_usage=0
                )
                self.scheduler.take(PageScraped(slot, found), time.monotonic())


def arguments_for(tmp_path, endpoints, config=None, objectives=None):
    """Files, free ports, and a drain that takes no time; the ports."""
    write_endpoints(tmp_path, endpoints, objectives)
    grpc_port, health_port, metrics_port = ports = free_ports(3)
    given = [
        f"--endpoints-file={tmp_path / 'endpoints.yaml'}",
        f"--grpc-port={grpc_port}",
        f"--grpc-health-port={health_port}",
        f"--metrics-port={metrics_port}",
        "--drain-grace=0s",
        "--drain-timeout=1s",
        "--seed=1",
    ]
    if config is not None:
        replace(tmp_path / "config.yaml", config)
        given.append(f"--config-file={tmp_path / 'config.yaml'}")
    return given, ports


def replace(path, text):
    """In one go, as editors and `mv` do."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


def write_endpoints(tmp_path, endpoints, objectives=None):
    document = {"endpoints": endpoints, "objectives": objectives or {}}
    replace(tmp_path / "endpoints.yaml", json.dumps(document))


@asynccontextmanager
async def serving(
    tmp_path, endpoints, *more, config=None, objectives=None, tls=False, first_pass=True
):
    """A picker in this process; `first_pass`: as if its endpoints had all been asked."""
    given, (port, *_) = arguments_for(tmp_path, endpoints, config, objectives)
    secure = [] if tls else ["--secure-serving=false"]
    with structlog.testing.capture_logs() as lines:
        picker = EndpointPicker(parse_serve([*given, *secure, *more], {}))
        stop, hurry = asyncio.Event(), asyncio.Event()
        served = asyncio.create_task(picker.serve(stop, hurry))
        served_line = {"event": "picker serving"}.items()
        await until(
            lambda: served.done() or any(served_line <= line.items() for line in lines),
            "the picker to serve",
        )
        if first_pass:
            # Endpoints without metrics would keep it from being ready for their five seconds.
            picker.readiness.scraped = True
            picker.readiness.update()
            await until(lambda: served.done() or picker.health.ready, "the picker to be ready")
        assert not served.done(), await served
        credentials = await trusting(port) if tls else None
        try:
            async with channel_to(f"localhost:{port}", credentials=credentials) as channel:
                yield Running(picker, channel, stop, hurry, lines)
        finally:
            stop.set()
            async with asyncio.timeout(15):
                await served
    assert picker.scheduler.ledger.open_leases == 0 or picker.ext_proc.open_streams == 0


async def trusting(port):
    """Credentials of a client that trusts what the port shows."""
    shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    return grpc.ssl_channel_credentials(root_certificates=shown.encode())


def ready_at_once(running):
    """Let static endpoints without metrics not wait for their five seconds."""
    names = [endpoint.name for _, endpoint in running.scheduler.pool.endpoints()]
    running.observe(**dict.fromkeys(names, 0))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plaintext"])
async def test_a_request_over_grpc_is_decided(tls, transport, tmp_path):
    """Counted, logged, and its lease given back."""
    flags = ("--v=4", f"--transport={transport}")
    async with serving(tmp_path, TWO, *flags, tls=tls) as running:
        running.observe(a=10, b=0)
        assert await running.pick() == "10.0.0.2:8000"
        assert running.scheduler.decisions == 1
        await until(lambda: not running.scheduler.ledger.open_leases, "the end of the lease")
        (line,) = running.logged("decision")
        assert (line["endpoint"], line["model"]) == ("b", "my-model")
        labels = {"model_name": "my-model", "target_model_name": "my-model", "priority": "0"}
        assert running.metric("request_total", **labels) == 1
        assert running.metric("known_endpoints", name="") == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_with_tracing_a_request_is_a_span(transport, tmp_path, monkeypatch):
    """At the collector, its parent the client's, that of the model server to come; and counted."""
    trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with collector("grpc") as collected:
        for name, value in collected.variables.items():
            monkeypatch.setenv(name, value)
        flags = ("--tracing", f"--transport={transport}")
        async with serving(tmp_path, TWO, *flags) as running:
            ready_at_once(running)
            told = gw.COMPLETIONS | {"traceparent": f"00-{trace_id}-{parent_id}-01"}
            messages = gw.request_headers(told), gw.request_body(LONG)
            head, *_ = await running.answers(*messages, answers=2)
            await until(lambda: running.metric("spans_total", result="exported"), "the span")
            assert running.metric("spans_total", result="dropped") == 0
    (span,) = collected.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
    sent = gw.set_headers(head)["traceparent"]
    assert sent == f"00-{trace_id}-{span.span_id.hex()}-01"
    assert attributes(span)["http.response.status_code"] == 200
    assert collected.resource["service.name"] == "homing-epp"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "--tracing: OTEL_TRACES_EXPORTER: expected otlp"),
        (
            {"OTEL_SPAN_EVENT_COUNT_LIMIT": "few"},
            "--tracing: the OTEL_.* cannot be used: OTEL_SPAN_EVENT_COUNT_LIMIT must be",
        ),
        (None, r"--tracing needs the extra `otel`: pip install homing-epp\[otel\]"),
    ],
    ids=["wrong variable", "wrong limit", "not installed"],
)
def test_tracing_that_cannot_be_is_refused_at_the_start(variables, sentence, tmp_path, monkeypatch):
    """In a sentence that says what to do."""
    if variables is None:
        monkeypatch.setitem(sys.modules, over_grpc.__name__, None)
        monkeypatch.delitem(sys.modules, "epp.shell.operators.traces.otlp", raising=False)
    for name, value in (variables or {}).items():
        monkeypatch.setenv(name, value)
    given, _ = arguments_for(tmp_path, TWO)
    with pytest.raises(StartError, match=sentence):
        EndpointPicker(parse_serve([*given, "--tracing"], {}))


async def test_the_environment_can_forbid_tracing(tmp_path, monkeypatch):
    """As the specification has it; the picker says so, and serves."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with serving(tmp_path, TWO, "--tracing") as running:
        ready_at_once(running)
        assert await running.pick()
        assert running.metric("spans_total", result="exported") is None
        (line,) = [line for line in running.lines if "--tracing has no effect" in line["event"]]
        assert line["log_level"] == "warning"


async def test_an_endpoint_that_fails_is_told_of(tmp_path):
    """Once in the log, and on the page, under the names of the field too where that is set."""
    async with serving(tmp_path, TWO, "--compat-metrics=gie") as running:
        running.observe(a=0, b=9)
        for number in range(3):
            call = Call(running.channel)
            body = gw.request_body(gw.prompt(f"prompt {number}"))
            head, *_ = await call.exchange(gw.request_headers(gw.COMPLETIONS), body, answers=2)
            assert gw.destination(head) == "10.0.0.1:8000"
            await call.exchange(gw.response_headers(500, end=True, date="today"), answers=1)
            await call.grpc.done_writing()
        await until(lambda: running.logged("endpoint is an outlier"), "the line of the log")
        (line,) = running.logged("endpoint is an outlier")
        assert (line["endpoint"], line["cause"], line["ejected"]) == ("a", "failing", True)
        pod = {"endpoint_name": "a", "namespace": "", "port": "8000"}
        assert running.metric("per_endpoint_outlier", cause="failing", **pod) == 1
        assert running.metric("per_endpoint_error_total", status="5xx", **pod) == 3
        port = running.picker.flags.metrics_port
        async with ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as page:
            text = await page.text()
        assert 'inference_pool_per_pod_queue_size{model_server_pod="b"' in text
        assert await running.pick() == "10.0.0.2:8000"


async def test_a_picker_is_ready_when_its_endpoints_have_been_asked(tmp_path):
    """So that a restart answers no 503: not before one has answered and the others were tried."""
    asked = asyncio.Event()

    async def page(_):
        await asked.wait()
        return web.Response(text="vllm:num_requests_waiting 0\n")

    application = web.Application()
    application.add_routes([web.get("/metrics", page)])
    runner = web.AppRunner(application)
    await runner.setup()
    (answers, refuses) = free_ports(2)
    await web.TCPSite(runner, "127.0.0.1", answers).start()
    endpoints = [
        {"name": str(port), "address": "127.0.0.1", "port": port} for port in (answers, refuses)
    ]
    async with serving(tmp_path, endpoints, first_pass=False) as running:
        picker = running.picker
        refusing = next(
            at for _, at in running.scheduler.pool.endpoints() if at.name == str(refuses)
        )
        await until(lambda: picker._scraper.problem_of(refusing), "the first scrape in vain")
        assert not picker.health.ready
        asked.set()
        await until(lambda: picker.health.ready, "the first pass")
        assert await running.pick() == f"127.0.0.1:{answers}"
        # Later ones join a picker that serves.
        write_endpoints(tmp_path, [*endpoints, {"name": "new", "address": "127.0.0.1", "port": 9}])
        await until(lambda: len(running.scheduler.pool) == 3, "the new endpoint")
        assert picker.health.ready
    await runner.cleanup()


@pytest.mark.parametrize("endpoints", [[], TWO], ids=["none", "without metrics"])
async def test_nobody_to_ask_keeps_a_picker_not_ready_for_no_longer_than_the_bound(
    endpoints, tmp_path, monkeypatch
):
    """No endpoints is an answer; those that never answer are not waited for for ever."""
    monkeypatch.setattr("epp.app.readiness.FIRST_PASS_S_MAX", 0.5)
    async with serving(tmp_path, endpoints, first_pass=False) as running:
        if not endpoints:
            assert running.picker.health.ready
        else:
            assert not running.picker.health.ready
            await until(lambda: running.picker.health.ready, "the bound")
            assert (await running.refused())[0] == 503


async def test_health_is_on_both_ports_and_ends_with_the_drain(tmp_path):
    """In plaintext on its own port; operators see the same on /readyz."""
    given, (_, health_port, metrics_port) = arguments_for(tmp_path, [])
    picker = EndpointPicker(parse_serve([*given, "--drain-grace=10m", "--drain-timeout=10m"], {}))
    stop, hurry = asyncio.Event(), asyncio.Event()
    served = asyncio.create_task(picker.serve(stop, hurry))
    await until(lambda: picker.health.ready, "the picker to serve")
    async with (
        channel_to(f"localhost:{health_port}") as channel,
        ClientSession(f"http://localhost:{metrics_port}") as http,
    ):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def told(service):
            answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=15)
            async with http.get("/readyz") as response:
                return answer.status, response.status

        serving_now = health_pb2.HealthCheckResponse.SERVING
        assert await told("readiness") == (serving_now, 200)
        stop.set()
        await until(lambda: not picker.health.ready, "the drain")
        assert await told("readiness") == (health_pb2.HealthCheckResponse.NOT_SERVING, 503)
        assert (await told("liveness"))[0] == serving_now
        hurry.set()
        async with asyncio.timeout(15):
            await served


async def test_a_picker_that_is_alone_shows_no_series_of_links_to_peers(tmp_path):
    """A dashboard that finds them would count a replica that misses all the others."""
    async with serving(tmp_path, TWO) as running:
        page = generate_latest(running.picker.registry).decode()
        links = re.findall(
            r"^homing_peers?_(?:known|frames|bytes|failures|snapshots).*", page, re.MULTILINE
        )
        assert not links


ENGINES_TELL = PREFIX_FIRST.replace(
    "- type: prefix-cache-scorer\n",
    "- type: precise-prefix-cache-producer\n"
    "  parameters: {tokenProcessorConfig: {blockSizeTokens: 16}, speculativeIndexing: false}\n"
    "- type: prefix-cache-scorer\n",
)


def heard_of(running):
    """KV events by type."""
    return {kind: running.metric("kv_events_total", type=kind) for kind in ("stored", "cleared")}


async def test_a_prompt_goes_to_who_says_that_it_holds_it(tmp_path):
    """Whatever was decided before; a configuration without the index lets all connections go."""
    tokens = [*range(1_000, 1_200)]
    async with KVEventPod() as one, KVEventPod() as other:
        pods = [
            {"name": name, "address": "127.0.0.1", "port": pod.port, "metrics": None}
            for name, pod in (("a", one), ("b", other))
        ]
        other.serve(tokens)
        async with serving(tmp_path, pods, config=ENGINES_TELL) as running:
            await until(
                lambda: running.metric("kv_event_streams", state="live") == 2, "both to be heard"
            )
            ready_at_once(running)
            for _ in range(3):
                picked = await running.pick(gw.prompt(tokens))
                assert picked == f"127.0.0.1:{other.port}"
            other.engine.clear()
            one.serve(tokens)
            other.serve([1] * 20)
            events = {"stored": 3, "cleared": 1}
            await until(
                lambda: events.items() <= heard_of(running).items(), "what both say to be heard"
            )
            assert await running.pick(gw.prompt(tokens)) == f"127.0.0.1:{one.port}"
            replace(tmp_path / "config.yaml", QUEUE_FIRST)
            await until(lambda: not one.subscribers and not other.subscribers, "both to be let go")
            assert running.metric("kv_event_streams", state="live") is None


async def test_new_weights_decide_without_forgetting_anything(tmp_path):
    """Index, counters and leases stay; what changed is logged; a bad file changes nothing."""
    path = tmp_path / "config.yaml"
    async with serving(tmp_path, TWO, config=PREFIX_FIRST) as running:
        scheduler = running.scheduler
        running.observe(a=0, b=10)
        assert await running.pick() == "10.0.0.1:8000"
        running.observe(a=10, b=0)
        assert await running.pick() == "10.0.0.1:8000", "the prefix weighs more"
        (index,) = scheduler.indexes.values()
        entries = index.entries
        assert entries > 0

        replace(path, QUEUE_FIRST)
        await until(lambda: running.logged("configuration replaced"), "the new configuration")
        (line,) = running.logged("configuration replaced")
        assert line["changes"] == [
            "scorer prefix-cache-scorer: weight 3 -> 1",
            "scorer queue-scorer: weight 1 -> 3",
        ]
        assert line["indexes_started_anew"] == []
        assert running.metric("scorer_weight", profile="default", scorer="queue-scorer") == 3
        assert list(scheduler.indexes.values()) == [index]
        assert index.entries == entries
        running.observe(a=10, b=0)
        assert await running.pick() == "10.0.0.2:8000", "the queue weighs more"
        assert scheduler.decisions == 3

        replace(path, QUEUE_FIRST.replace("weight: 3", "weight: -3").replace("kind:", "king:"))
        await until(
            lambda: running.metric("config_last_reload_successful") == 0,
            "the refused configuration",
        )
        problems = [
            line["problem"]
            for line in running.logged("configuration rejected, the last valid one stays in force")
        ]
        assert len(problems) >= 2, "all of them at once"
        assert all(problem.startswith(str(path)) for problem in problems)
        assert running.metric("config_reloads_total", result="failure") == 1
        assert running.metric("scorer_weight", profile="default", scorer="queue-scorer") == 3
        running.observe(a=10, b=0)
        assert await running.pick() == "10.0.0.2:8000"

        replace(path, PREFIX_FIRST)
        await until(lambda: running.metric("config_last_reload_successful") == 1, "the mended one")
        assert len(running.logged("configuration replaced")) == 2


async def test_the_symlink_swap_of_the_kubelet_is_a_reload(tmp_path):
    """A mounted ConfigMap changes two links above the file."""
    for name, text in (("one", PREFIX_FIRST), ("two", QUEUE_FIRST)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "mounted.yaml").symlink_to("..data/config.yaml")
    config = f"--config-file={tmp_path / 'mounted.yaml'}"
    async with serving(tmp_path, TWO, config) as running:
        assert running.metric("scorer_weight", profile="default", scorer="queue-scorer") == 1
        (tmp_path / "..data_tmp").symlink_to("two")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        await until(lambda: running.logged("configuration replaced"), "the new configuration")
        assert running.metric("scorer_weight", profile="default", scorer="queue-scorer") == 3


ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a task, a generator or the process unless somebody catches it."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, *ENDS])
async def test_a_configuration_that_fails_to_apply_changes_nothing(kind, tmp_path, monkeypatch):
    """An installed plugin may raise anything; the picker goes on as before."""

    async with serving(tmp_path, TWO, config=PREFIX_FIRST) as running:
        take = running.scheduler.take

        def broken(given, now):
            if isinstance(given, Reconfigured):
                raise kind("the defect")
            return take(given, now)

        monkeypatch.setattr(running.scheduler, "take", broken)
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        event = "applying a valid configuration failed, the last applied one stays in force"
        await until(lambda: running.logged(event), "the failure")
        assert running.metric("config_last_reload_successful") == 0
        assert running.metric("scorer_weight", profile="default", scorer="queue-scorer") == 1
        running.observe(a=0, b=10)
        assert await running.pick() == "10.0.0.1:8000"
        monkeypatch.undo()
        replace(tmp_path / "config.yaml", PREFIX_FIRST + "\n")
        await until(
            lambda: running.logged("configuration replaced"), "the watcher to be there still"
        )


TOUCHY = """\
from asyncio import CancelledError

import numpy as np
from epp.plugins.contract import Parameters

class Touchy(Parameters, frozen=True):
    type_name = "touchy-scorer"
    sound: bool = True

    def score(self, request, candidates, /):
        if not self.sound or "x-secret" in request.headers:
            raise KIND(str(request))
        return np.ones(len(candidates))
"""
WITH_TOUCHY = PREFIX_FIRST.replace("plugins:\n", "plugins:\n- type: touchy-scorer\n", 1).replace(
    "  plugins:\n", "  plugins:\n  - pluginRef: touchy-scorer\n", 1
)
UNSOUND = WITH_TOUCHY.replace("touchy-scorer\n", "touchy-scorer\n  parameters: {sound: false}\n", 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", [KeyError, *ENDS])
async def test_a_plugin_that_fails_in_service_costs_only_what_it_adds(
    kind, transport, tmp_path, offer
):
    """Every request is routed, on the same connection; it is counted by name, logged once a second,
    and nothing is told.
    """
    module = f"plugin_touchy_{kind.__name__}_{transport}".lower()
    offer(module, TOUCHY.replace("KIND", kind.__name__), f"{module}:Touchy")
    chosen = f"--transport={transport}"
    async with serving(tmp_path, TWO, chosen, config=WITH_TOUCHY) as running:
        assert running.metric("plugin_errors_total", plugin="touchy-scorer") == 0
        running.observe(a=0, b=10)
        for _ in range(5):
            assert await running.pick(x_secret="canary-of-a-client") == "10.0.0.1:8000"
        assert running.metric("plugin_errors_total", plugin="touchy-scorer") == 5
        event = "plugin failed, requests are routed without it"
        await until(lambda: running.logged(event), "the line")
        told = running.logged(event)
        assert sum(line["failures"] for line in told) == 5
        assert len(told) <= 2
        assert "canary" not in str(running.lines)
        assert told[0]["last"].startswith(f"score raised {kind.__name__} at ")
        assert f"{module}.py:" in told[0]["last"]


async def test_a_decision_that_cannot_be_counted_is_told_of_though_nobody_asks(
    tmp_path, monkeypatch
):
    """Within a second, without a scrape; the next one is counted."""
    async with serving(tmp_path, TWO) as running:
        ready_at_once(running)
        with monkeypatch.context() as broken:
            broken.setattr(Telemetry, "_count", lambda *_: 1 / 0)
            await running.pick()
            await until(
                lambda: running.logged("recording metrics or log lines of an event failed"),
                "the line",
            )
        await running.pick()
        assert running.metric("telemetry_failures_total", event="decided") == 1
        assert running.metric("scheduler_e2e_duration_seconds_count") == 1


@pytest.mark.parametrize("kind", [KeyError, *ENDS])
async def test_a_document_whose_plugin_fails_is_refused_by_its_name(kind, tmp_path, offer):
    """At a reload the last good one stays, at start it is fatal."""
    module = f"plugin_unsound_{kind.__name__}".lower()
    offer(module, TOUCHY.replace("KIND", kind.__name__), f"{module}:Touchy")
    said = f"config.yaml: plugins[0] (touchy-scorer): score raised {kind.__name__} at "
    async with serving(tmp_path, TWO, config=PREFIX_FIRST) as running:
        replace(tmp_path / "config.yaml", UNSOUND)
        event = "configuration rejected, the last valid one stays in force"
        await until(lambda: running.logged(event), "the refusal")
        (line,) = running.logged(event)
        assert said in line["problem"]
        assert running.metric("config_last_reload_successful") == 0
        running.observe(a=0, b=10)
        assert await running.pick() == "10.0.0.1:8000"
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        await until(
            lambda: running.logged("configuration replaced"), "the watcher to be there still"
        )
    given, _ = arguments_for(tmp_path, TWO, UNSOUND)
    with pytest.raises(StartError) as error:
        EndpointPicker(parse_serve(given, {}))
    assert said in str(error.value)


STICKY = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: session-affinity-scorer
"""


async def session_token(running, **headers):
    """The token that a response sets."""
    call = Call(running.channel)
    named = gw.COMPLETIONS | {name.replace("_", "-"): at for name, at in headers.items()}
    messages = (gw.request_headers(named), gw.request_body(LONG), gw.response_headers(end=True))
    *_, told = await call.exchange(*messages, answers=3)
    await call.grpc.done_writing()
    return gw.set_headers(told)["x-session-token"]


async def test_replicas_with_one_key_file_read_each_others_session_tokens(tmp_path):
    """Before, while and after the keys are changed; one without the file has a key of its own."""
    keys = tmp_path / "keys"
    keys.write_text("o" * 32)
    given = f"--session-token-key-file={keys}"
    (tmp_path / "two").mkdir()
    (tmp_path / "three").mkdir()
    async with (
        serving(tmp_path, TWO, given, config=STICKY) as one,
        serving(tmp_path / "two", TWO, given, config=STICKY) as two,
    ):
        for running in (one, two):
            running.observe(a=0, b=0)
        token = await session_token(one)
        assert {await two.pick(x_session_token=token) for _ in range(4)} == {"10.0.0.1:8000"}
        assert not [line for line in one.lines if "--session-token-key-file" in line["event"]]
        replace(keys, "n" * 32 + "\n" + "o" * 32)
        # What both log is caught by the one that opened last.
        await until(lambda: len(two.logged("session token keys replaced")) == 2, "new keys")
        for running in (one, two):
            running.observe(a=0, b=0)
        newer = await session_token(two, x_session_token=token)
        assert newer != token
        assert {await one.pick(x_session_token=newer) for _ in range(4)} == {"10.0.0.1:8000"}
        assert "o" * 32 not in str(one.lines + two.lines)
    async with serving(tmp_path / "three", TWO, config=STICKY) as alone:
        alone.observe(a=0, b=0)
        assert len({await alone.pick(x_session_token=newer) for _ in range(4)}) == 2
        (warning,) = [
            line for line in alone.lines if "set --session-token-key-file" in line["event"]
        ]
        assert warning["log_level"] == "warning"
        assert "session-affinity-scorer" in warning["event"]


async def test_replicas_that_share_nothing_send_a_chat_to_one_endpoint(tmp_path):
    """Its turns, and at whichever picker; alone each goes by its own load."""
    folders = [tmp_path / name for name in "abcdef"]
    for folder in folders:
        folder.mkdir()
    pods = [{**TWO[0], "name": f"pod-{n}", "address": f"10.0.0.{n}"} for n in range(1, 7)]

    async def destinations(*flags):
        found = []
        for folder in folders[:3]:
            async with serving(folder, pods, *flags) as running:
                running.observe(**{pod["name"]: 0 for pod in pods})
                turned = len(found)
                # Whoever is picked first by each would be the first of the list otherwise.
                running.scheduler.decisions = turned
                found.append(await running.pick())
        return found

    assert len(set(await destinations("--replicas=3"))) == 1
    assert len(set(await destinations())) == 3


async def test_without_a_configuration_the_roles_of_endpoints_choose_the_default(tmp_path):
    """The change is logged with its reason, and the prefix index keeps its content."""
    prefill = {
        "name": "p",
        "address": "10.0.0.3",
        "port": 8000,
        "metrics": None,
        "labels": {"llm-d.ai/role": "prefill"},
    }
    async with serving(tmp_path, TWO) as running:
        assert running.scheduler.settings.stages.alone
        running.observe(a=0, b=0)
        await running.pick()
        entries = [index.entries for index in running.scheduler.indexes.values()]
        live = running.picker.live
        before = live.hash

        write_endpoints(tmp_path, [*TWO, prefill])
        chosen = "default configuration chosen by roles of endpoints"
        await until(lambda: running.logged("endpoints replaced"), "the prefill endpoint")
        (line,) = running.logged(chosen)
        assert line["config"] == "built-in default by role"
        assert line["roles"] == {"no role": 2, "prefill": 1}
        assert not running.scheduler.settings.stages.alone
        assert [index.entries for index in running.scheduler.indexes.values()] == entries
        changes = running.picker._changes.applied.changes
        assert changes[0] == "roles of endpoints: 2 no role, 1 prefill"
        assert running.metric("config_info", hash=live.hash, generation="2") == 1
        assert await running.pick() in {"10.0.0.1:8000", "10.0.0.2:8000"}

        write_endpoints(tmp_path, TWO)
        await until(lambda: len(running.logged(chosen)) == 2, "the usual default")
        assert live.hash == before


async def test_the_endpoints_file_adds_removes_and_gives_priorities(tmp_path):
    """Who stays keeps what is known of it; a bad file changes nothing."""
    async with serving(tmp_path, TWO, config=PREFIX_FIRST) as running:
        running.observe(a=0, b=10)
        assert await running.pick() == "10.0.0.1:8000"
        entries = [index.entries for index in running.scheduler.indexes.values()]

        third = {"name": "c", "address": "fd00::3", "port": 8000, "metrics": None}
        write_endpoints(tmp_path, [TWO[0], third], {"batch": -1})
        await until(lambda: len(running.logged("endpoints replaced")) == 1, "the new endpoints")
        assert [index.entries for index in running.scheduler.indexes.values()] == entries
        running.observe(a=10, c=0)
        assert await running.pick(gw.prompt("another")) == "[fd00::3]:8000"
        assert await running.pick() == "10.0.0.1:8000", "its prefix was kept"

        running.observe(a=1000, c=1000)
        status, error = await running.refused(x_gateway_inference_objective="batch")
        assert (status, error["code"]) == (429, "rejected-saturated")
        assert await running.pick(x_gateway_inference_objective="unheard-of")

        replace(tmp_path / "endpoints.yaml", '{"endpoints": [{"name": "d"}, 7]}')
        event = "endpoints rejected, the last valid ones stay in force"
        await until(lambda: running.logged(event), "the refused endpoints")
        assert len(running.logged(event)) == 2, "all problems at once"
        assert len(running.scheduler.pool) == 2

        write_endpoints(tmp_path, [])
        await until(lambda: not len(running.scheduler.pool), "the empty pool")
        status, error = await running.refused()
        assert (status, error["code"]) == (503, "rejected-no-endpoints")


async def test_a_missing_file_changes_nothing_and_is_logged(tmp_path):
    """Between two writes of a careless editor there may be none."""
    async with serving(tmp_path, TWO, config=PREFIX_FIRST) as running:
        (tmp_path / "config.yaml").unlink()
        (tmp_path / "endpoints.yaml").unlink()
        event = "watched file cannot be read, its last content stays in force"
        await until(lambda: len(running.logged(event)) == 2, "both reports")
        running.observe(a=0, b=10)
        assert await running.pick() == "10.0.0.1:8000"


@pytest.mark.parametrize("missing", [False, True], ids=["not parseable", "missing"])
async def test_a_start_with_broken_files_goes_by_the_copies_that_were_kept(missing, tmp_path):
    """It serves as before, says so in log and metrics, and takes the files once they are mended."""
    config = tmp_path / "config.yaml"
    kept = f"--last-good-dir={tmp_path / 'kept'}"
    copies = [tmp_path / "kept" / name for name in ("configuration", "endpoints")]
    async with serving(tmp_path, TWO[:1], kept, config=PREFIX_FIRST) as running:
        replace(config, QUEUE_FIRST)
        write_endpoints(tmp_path, TWO)
        await until(lambda: running.logged("configuration replaced"), "the new configuration")
        await until(lambda: running.logged("endpoints replaced"), "the new endpoints")
        texts = (QUEUE_FIRST.encode(), b'"10.0.0.2"')
        await until(
            lambda: all(
                path.exists() and text in path.read_bytes()
                for path, text in zip(copies, texts, strict=True)
            ),
            "both copies",
        )

    broken = "file is broken, its last-good copy is in force until the file is repaired"
    endpoints = tmp_path / "broken.yaml"
    if missing:
        config.unlink()
        reasons = ("No such file or directory", "No such file or directory")
    else:
        config.write_text("[")
        endpoints.write_text("{}")
        reasons = (f"{config}: line 2", "needs field `endpoints`")
    given = [kept, f"--endpoints-file={endpoints}", f"--config-file={config}"]
    async with serving(tmp_path, [], *given) as running:
        lines = running.logged(broken)
        assert [line["file"] for line in lines] == ["configuration", "endpoints"]
        for line, reason in zip(lines, reasons, strict=True):
            assert reason in line["problems"][0]
        for file in ("configuration", "endpoints"):
            assert running.metric("last_good_in_force", file=file) == 1
        assert running.metric("config_last_reload_successful") == 0
        assert running.metric("scorer_weight", profile="default", scorer="queue-scorer") == 3
        running.observe(a=10, b=0)
        assert await running.pick() == "10.0.0.2:8000"

        replace(endpoints, json.dumps({"endpoints": TWO[:1]}))
        await until(lambda: running.logged("endpoints replaced"), "the mended endpoints")
        assert running.metric("last_good_in_force", file="endpoints") == 0
        assert running.metric("last_good_in_force", file="configuration") == 1
        assert running.metric("config_reloads_total", result="failure") == 1
        replace(config, PREFIX_FIRST)
        await until(lambda: running.logged("configuration replaced"), "the mended configuration")
        assert running.metric("last_good_in_force", file="configuration") == 0
        assert running.metric("config_last_reload_successful") == 1
        await until(lambda: PREFIX_FIRST.encode() in copies[0].read_bytes(), "the copy")


async def test_a_copy_that_does_not_fit_starts_nothing(tmp_path):
    """The picker ends as without one, with the reasons of the file."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "endpoints").write_text('{"endpoints": []}')
    given, _ = arguments_for(tmp_path, TWO)
    replace(tmp_path / "endpoints.yaml", "{}")
    with pytest.raises(StartError, match=r"endpoints\.yaml: needs field"):
        EndpointPicker(parse_serve([*given, f"--last-good-dir={tmp_path / 'kept'}"], {}))


async def test_no_endpoints_are_a_valid_start_that_serves_503(tmp_path):
    """The gateway is told at once, with the reason."""
    async with serving(tmp_path, []) as running:
        status, error = await running.refused()
        assert (status, error["code"]) == (503, "rejected-no-endpoints")
        assert running.metric("refusals_total", reason="rejected-no-endpoints") == 1


@pytest.mark.parametrize("ignored", [False, True])
async def test_the_subset_hint_is_obeyed_unless_a_flag_says_otherwise(ignored, tmp_path):
    """`--disable-endpoint-subset-filter` ignores it."""
    flag = ["--disable-endpoint-subset-filter"] if ignored else []
    async with serving(tmp_path, TWO, *flag) as running:
        running.observe(a=0, b=10)
        hint = gw.subset(gw.string("10.0.0.2:8000"))
        head, *_ = await running.answers(
            gw.request_headers(hint=hint), gw.request_body(LONG), answers=2
        )
        assert gw.destination(head) == ("10.0.0.1:8000" if ignored else "10.0.0.2:8000")


async def test_how_old_metrics_may_be_follows_the_number_of_endpoints(tmp_path):
    """A large pool is read less often; the saturation detector must not take it for full."""
    async with serving(tmp_path, TWO) as running:

        def threshold_s():
            return running.scheduler.settings.saturation.metrics_staleness_threshold

        assert threshold_s() == 1.0
        many = [
            {"name": f"m{i}", "address": f"10.1.{i // 250}.{i % 250}", "port": 1, "metrics": None}
            for i in range(1000)
        ]
        write_endpoints(tmp_path, many)
        await until(lambda: running.logged("endpoints replaced"), "the large pool")
        assert threshold_s() == 2.5


# Pods that are scraped.


class PodPage:
    """A pod that serves nothing but its metrics, at any path, on one port for ever."""

    def __init__(self, name):
        self.name = name
        self.waiting = 0
        self.started = 1.0
        self.more = ""
        self.paths = []
        (self.port,) = free_ports(1)
        self._server = None

    async def start(self):
        application = web.Application()
        application.add_routes([web.get("/{path:.*}", self._page)])
        self._server = TestServer(application, port=self.port)
        await self._server.start_server()

    async def stop(self):
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _page(self, request):
        self.paths.append(request.path)
        return web.Response(
            text=f"vllm:num_requests_waiting {self.waiting}\n"
            "vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"
            f"process_start_time_seconds {self.started}\n{self.more}"
        )

    @property
    def entry(self):
        return {"name": self.name, "address": "127.0.0.1", "port": self.port}

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def pod_pages(names):
    pods = [PodPage(name) for name in names]
    for pod in pods:
        await pod.start()
    yield pods
    for pod in pods:
        await pod.stop()


@pytest.fixture
async def three_pods():
    async with pod_pages("abc") as pods:
        yield pods


async def test_pods_that_die_are_left_and_used_again_when_they_are_back(three_pods, tmp_path):
    """Two of three die: all goes to the third, busy as it is; back again, they are preferred."""
    a, b, c = three_pods
    c.waiting = 50
    entries = [pod.entry for pod in three_pods]
    flags = ("--refresh-metrics-interval=20ms", "--metrics-staleness-threshold=500ms")
    async with serving(tmp_path, entries, *flags) as running:
        number = 0

        async def picked():
            nonlocal number
            number += 1
            return await running.pick(gw.prompt(f"prompt {number}"))

        def ready():
            return running.metric("ready_endpoints", name="")

        async def found(addresses):
            return {await picked() for _ in range(6)} == addresses

        await until(lambda: ready() == 3, "three ready pods")
        await until(lambda: found({a.address, b.address}), "the idle pods to be used")
        await asyncio.gather(a.stop(), b.stop())
        await until(lambda: found({c.address}), "the busy pod to be used")
        assert running.metric("scrape_errors_total", kind="refused") > 0
        assert running.metric("scrape_duration_seconds_count") > 0
        await asyncio.gather(a.start(), b.start())
        await until(lambda: found({a.address, b.address}), "the idle pods to be used again")


@pytest.mark.parametrize(("threshold", "backoff_s_max"), [("500ms", 0.25), ("1h", 1.0)])
async def test_no_back_off_makes_metrics_stale(threshold, backoff_s_max, tmp_path):
    """There are two tries within the staleness threshold, however short, and one a second at least."""
    given, _ = arguments_for(tmp_path, TWO)
    flags = parse_serve([*given, f"--metrics-staleness-threshold={threshold}"], {})
    assert EndpointPicker(flags)._scraper._backoff_s_max == backoff_s_max


async def test_three_of_four_pods_die_and_return_and_each_is_told_of_once(tmp_path):
    """Unreachable within three scrapes of the fourth, ready again within three, and then all four
    get traffic.
    """
    async with (
        pod_pages("abcd") as pods,
        serving(tmp_path, [pod.entry for pod in pods]) as running,
    ):
        *gone, left = pods

        def standings():
            told = running.scheduler.standings(time.monotonic())
            return [str(standing) for standing in told.values()]

        async def became(expected, ready, what):
            scrapes = len(left.paths)
            await until(lambda: standings() == expected, what)
            assert len(left.paths) - scrapes <= 3
            assert running.metric("ready_endpoints", name="") == ready

        await until(lambda: standings() == ["ready"] * 4, "four ready pods")
        await asyncio.gather(*(pod.stop() for pod in gone))
        await became(["unreachable"] * 3 + ["ready"], 1, "three unreachable pods")
        assert {await running.pick(gw.prompt(f"one {n}")) for n in range(4)} == {left.address}
        await until(lambda: len(running.logged("endpoint is unreachable")) == 3, "three lines")
        await asyncio.gather(*(pod.start() for pod in gone))
        await became(["ready"] * 4, 4, "four ready pods")
        found = {await running.pick(gw.prompt(f"two {n}")) for n in range(40)}
        assert found == {pod.address for pod in pods}
        await until(lambda: len(running.logged("endpoint is ready again")) == 3, "three lines")
    for line in running.logged("endpoint is unreachable"):
        assert (line["log_level"], line["kind"], line["was"]) == ("info", "refused", "ready")
        assert "cannot be reached" in line["problem"]
    lines = [line for line in running.lines if line["event"].startswith("endpoint is")]
    assert sorted(line["endpoint"] for line in lines) == sorted("aabbcc")


async def test_the_scraper_is_told_of_each_endpoint_that_serves(three_pods, tmp_path, monkeypatch):
    """A response is a sign of life, for which a scrape that backs off must not wait."""
    answered = []
    monkeypatch.setattr(Scraper, "answered", lambda self, endpoint: answered.append(endpoint.name))
    a, *_ = three_pods
    async with serving(tmp_path, [a.entry]) as running:
        await until(lambda: running.metric("ready_endpoints", name="") == 1, "the pod")
        await running.pick()
    assert answered == ["a"]


async def test_a_page_beyond_all_limits_neither_ends_nor_stops_the_picker(three_pods, tmp_path):
    """It is a failed scrape of its endpoint; what no column can hold is not known."""
    a, b, c = three_pods
    a.more = "vllm:num_requests_waiting 1\n" * 20_000
    b.more = "vllm:max_gpu_lora_adapters 1e300\n"
    async with serving(tmp_path, [pod.entry for pod in three_pods]) as running:
        await until(lambda: running.metric("ready_endpoints", name="") == 2, "two ready pods")
        await until(lambda: len(c.paths) > 3, "more scrapes")
        assert running.metric("scrape_errors_total", kind="page") > 0
        standings = running.scheduler.standings(time.monotonic())
        assert list(standings.values()) == ["never scraped", "ready", "ready"]


async def test_first_tokens_by_an_engines_own_clock_are_passed_on(three_pods, tmp_path):
    """Through its restart too, and with the endpoint they go."""
    a, b, _ = three_pods

    def page(sum_s, count):
        name = "vllm:time_to_first_token_seconds"
        labels = '{engine="0",model_name="m"}'
        return (
            f"# TYPE {name} histogram\n{name}_count{labels} {count}\n{name}_sum{labels} {sum_s}\n"
        )

    def told(part):
        labels = {"endpoint_name": "a", "namespace": "", "port": str(a.port)}
        return running.metric(f"per_endpoint_engine_ttft_seconds_{part}", **labels)

    a.more = page(50.0, 100)
    entries = [a.entry, b.entry]
    async with serving(tmp_path, entries, "--refresh-metrics-interval=20ms") as running:
        await until(lambda: (told("sum"), told("count")) == (50.0, 100.0), "the engine's word")
        a.more = page(0.5, 2)
        await until(lambda: (told("sum"), told("count")) == (50.5, 102.0), "its restart")
        write_endpoints(tmp_path, [b.entry])
        await until(lambda: told("sum") is None, "it to leave")


async def test_a_restarted_pod_is_known_by_its_metrics_and_forgotten(three_pods, tmp_path):
    """What its cache held is gone with the process."""
    a, *_ = three_pods
    async with serving(tmp_path, [a.entry], "--refresh-metrics-interval=20ms") as running:
        await until(lambda: running.metric("ready_endpoints", name="") == 1, "the pod")
        await running.pick()
        (index,) = running.scheduler.indexes.values()
        assert index.entries > 0
        a.started = 2.0
        await until(lambda: index.entries == 0, "the index to forget it")


async def test_near_the_memory_limit_indexes_shrink_then_long_bodies_pass_until_it_is_over(
    three_pods, tmp_path
):
    """Nobody is refused for it, and who reads the metrics sees it."""
    a, *_ = three_pods
    config = PREFIX_FIRST
    async with serving(
        tmp_path, [a.entry], "--memory-limit=1Gi", "--refresh-metrics-interval=20ms", config=config
    ) as running:
        picker = running.picker
        await until(lambda: running.metric("ready_endpoints", name="") == 1, "the pod")
        (index,) = running.scheduler.indexes.values()
        usual_bytes = index._memory_max_bytes
        used = 0.0
        picker.memory_return._resident = lambda: int(used * 2**30)
        long = gw.prompt("long " * 20_000)

        def passed():
            return running.metric("scheduled_without_prefix_total", mode="memory")

        used = 0.82
        picker.memory_return.weigh()
        assert index._memory_max_bytes < usual_bytes
        assert running.metric("memory_pressure") == 1
        await running.pick(long)
        assert not passed()
        used = 0.95
        picker.memory_return.weigh()
        assert running.metric("memory_pressure") == 2
        assert await running.pick(long) == a.address
        await running.pick()
        assert passed() == 1
        # A reload in the middle does not end it.
        replace(tmp_path / "config.yaml", config + "\n# another\n")
        await until(lambda: picker.live.generation == 2, "the reload")
        assert index._memory_max_bytes < usual_bytes
        used = 0.3
        for _ in range(8):
            picker.memory_return.weigh()
        assert index._memory_max_bytes == usual_bytes
        assert running.metric("memory_pressure") == 0
        await running.pick(long)
        assert passed() == 1
        changes = [line for line in running.lines if line["event"] == "memory pressure changed"]
        assert [line["level"] for line in changes][:2] == [1, 2]


async def test_with_adaptive_scraping_what_is_idle_is_asked_seldom(three_pods, tmp_path):
    """Of three pods one has a queue; each scrape of an idle one stands for two of it at least."""
    a, b, c = three_pods
    c.waiting = 3
    flags = ("--refresh-metrics-interval=20ms", "--adaptive-scraping")
    async with serving(tmp_path, [pod.entry for pod in three_pods], *flags) as running:
        await until(lambda: running.metric("ready_endpoints", name="") == 3, "three ready pods")
        before = len(a.paths), len(b.paths), len(c.paths)
        await until(lambda: len(c.paths) > before[2] + 40, "scrapes of the busy pod")
        assert 4 <= len(a.paths) - before[0] <= 20
        assert 4 <= len(b.paths) - before[1] <= 20
        target = running.picker._scraper._targets[f"a:{a.port}"]
        await until(lambda: target.idle and target.resting is not None, "the idle pod at rest")
        assert await running.pick() in {a.address, b.address}


async def test_a_new_source_of_metrics_is_read_at_once(three_pods, tmp_path):
    """Also where the endpoints do not change."""
    a, *_ = three_pods
    plugin = "- type: metrics-data-source\n  parameters: {{path: {}}}\nschedulingProfiles:"

    def config(path):
        return PREFIX_FIRST.replace("schedulingProfiles:", plugin.format(path))

    async with serving(tmp_path, [a.entry], config=config("/one")):
        await until(lambda: "/one" in a.paths, "a scrape")
        replace(tmp_path / "config.yaml", config("/two"))
        await until(lambda: "/two" in a.paths, "a scrape of the new path")


async def test_gpus_that_are_busy_get_nothing(three_pods, tmp_path):
    """By what the exporter says of each pod, from the configuration on that asks it."""
    a, b, exporter = three_pods
    exporter.more = (
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="a"} 97\nDCGM_FI_DEV_GPU_UTIL{gpu="1",pod="b"} 20\n'
    )
    config = f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: dcgm-data-source
  parameters: {{port: {exporter.port}}}
- type: dcgm-extractor
- type: endpoint-attribute-filter
  parameters:
    attribute: GPUUtilization
    producer: dcgm-extractor
    algorithm: {{type: threshold, threshold: {{operator: LessThan, value: 0.9}}}}
- type: queue-scorer
"""
    b.waiting = 5
    async with serving(tmp_path, [a.entry, b.entry], config=QUEUE_FIRST) as running:
        await until(lambda: running.metric("ready_endpoints", name="") == 2, "two ready pods")
        assert await running.pick() == a.address
        assert running.metric("endpoint_pages_unread", page="gpus") is None
        replace(tmp_path / "config.yaml", config)

        async def found():
            return await running.pick() == b.address

        await until(found, "the idle GPU to be used")
        assert running.metric("endpoint_pages_unread", page="gpus") == 0
        exporter.more = ""
        await until(
            lambda: running.metric("endpoint_pages_unread", page="gpus") == 2, "unread pages"
        )


# The drain.


async def test_what_the_drain_cuts_is_counted_and_logged(tmp_path):
    """A full-duplex stream that does not end is served until the time is up."""
    async with serving(tmp_path, TWO) as running:
        ready_at_once(running)
        stuck, done = Call(running.channel), Call(running.channel)
        for call in (stuck, done):
            await call.exchange(gw.request_headers(), gw.request_body(LONG), answers=2)
        assert running.metric("extproc_streams_inflight") == 2
        running.stop.set()
        await until(lambda: running.logged("drain started"), "the drain")
        # Whoever ends in time is not cut.
        await done.exchange(gw.response_headers(end=True), answers=1)
        assert await done.end() is grpc.StatusCode.OK
        await until(lambda: running.logged("picker stopped"), "the end")
        assert running.metric("drain_cut_streams_total") == 1
        (line,) = running.logged("streams were cut by the end of the drain")
        assert line["streams"] == 1
        assert running.metric("extproc_streams_inflight") == 0
        assert (await stuck.failed())[0] is grpc.StatusCode.UNAVAILABLE


async def test_streams_are_taken_until_no_gateway_opens_one(tmp_path):
    """After the grace gRPC would refuse what is under way: it is stopped when it is quiet."""
    flags = ("--drain-grace=0s", "--drain-timeout=10m")
    async with serving(tmp_path, TWO, *flags) as running:
        ready_at_once(running)
        held = Call(running.channel)
        await held.exchange(gw.request_headers(), gw.request_body(LONG), answers=2)
        running.stop.set()
        await until(lambda: running.logged("drain started"), "the drain")
        for _ in range(20):
            assert await running.pick()
        assert not running.logged("picker stopped")
        await held.exchange(gw.response_headers(end=True), answers=1)
        assert await held.end() is grpc.StatusCode.OK
        await until(lambda: running.logged("picker stopped"), "the end")
        assert running.metric("drain_cut_streams_total") == 0


async def test_above_the_bound_of_open_requests_one_is_refused_and_counted(tmp_path):
    """`--concurrent-streams-max`; by the reason, in the metrics of refusals and of errors."""
    async with serving(tmp_path, TWO, "--concurrent-streams-max=1") as running:
        ready_at_once(running)
        held = Call(running.channel)
        await held.send(gw.request_headers())
        await until(lambda: running.picker.ext_proc.open_streams == 1, "the one stream")
        assert (await running.refused_at_once())[0] == 503
        reason = "rejected-overloaded"
        assert running.metric("refusals_total", reason=reason) == 1
        labels = {"model_name": "", "target_model_name": "", "priority": "0"}
        assert running.metric("request_error_total", **labels, error_code=reason) == 1
        (line,) = running.logged("refusal")
        assert line["reason"] == reason
        held.grpc.cancel()
        await until(lambda: not running.picker.ext_proc.open_streams, "a free place")
        assert await running.pick()


async def test_streams_are_taken_while_the_grace_lasts(tmp_path):
    """Gateways learn with a delay that this picker goes; bypassed streams end when it is over."""
    flags = ("--drain-grace=10m", "--drain-timeout=10m")
    async with serving(tmp_path, TWO, *flags) as running:
        ready_at_once(running)
        running.stop.set()
        await until(lambda: running.logged("drain started"), "the drain")
        assert await running.pick()
        bypassed = Call(running.channel)
        await bypassed.exchange(
            gw.request_headers(modes=gw.protocol(response=gw.NONE)),
            gw.request_body(LONG),
            answers=2,
        )
        running.hurry.set()
        assert await bypassed.ended() is grpc.StatusCode.OK
        await until(lambda: running.logged("picker stopped"), "the end")
        assert running.metric("drain_cut_streams_total") == 0


@pytest.mark.parametrize("which", range(3), ids=["grpc", "health", "metrics"])
async def test_a_port_in_use_is_told_by_its_flag(which, tmp_path):
    """Two pickers must not share a port, where each would see half of what is asked."""
    given, ports = arguments_for(tmp_path, [])
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port")
    async with serving_on(ports[which]):
        picker = EndpointPicker(parse_serve(given, {}))
        with pytest.raises(StartError) as refused:
            await picker.serve(asyncio.Event())
    assert str(refused.value) == (
        f"{flags[which]} {ports[which]} cannot be listened on: Address already in use"
    )


@asynccontextmanager
async def serving_on(port):
    server = await asyncio.start_server(lambda *_: None, "0.0.0.0", port)
    async with server:
        yield


# A picker in a process of its own.


class Child:
    """`epp serve` as a child; what it wrote."""

    def __init__(self, process):
        self.process = process
        self.lines = []

    async def until_logged(self, event):
        async with asyncio.timeout(20):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"the process ended without {event!r}: {self.lines}"
                self.lines.append(line.decode())
                if f'"event": "{event}"' in self.lines[-1]:
                    return

    async def end(self):
        """(exit code, standard error)."""
        async with asyncio.timeout(20):
            rest, errors = await self.process.communicate()
        self.lines += rest.decode().splitlines()
        return self.process.returncode, errors.decode()

    @property
    def events(self):
        return [json.loads(line)["event"] for line in self.lines]


@asynccontextmanager
async def child(*arguments):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epp", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_with_0(number, transport, tmp_path):
    """Every line is JSON, standard error is empty, and a second run finds its ports free."""
    given, _ = arguments_for(tmp_path, TWO)
    for _ in range(2):
        async with child(*given, f"--transport={transport}") as epp:
            await epp.until_logged("picker serving")
            epp.process.send_signal(number)
            assert await epp.end() == (0, "")
            assert epp.events == [
                "configuration loaded",
                "picker serving",
                "drain started",
                "picker stopped",
            ]
            assert all(json.loads(line)["timestamp"] for line in epp.lines)


async def test_a_hangup_ends_nothing(tmp_path):
    """Who sends it wants files to be read again, which they are; it is one line of the log."""
    given, _ = arguments_for(tmp_path, TWO)
    async with child(*given) as epp:
        await epp.until_logged("picker serving")
        epp.process.send_signal(signal.SIGHUP)
        await epp.until_logged("SIGHUP is ignored: files are read again when they change")
        epp.process.send_signal(signal.SIGTERM)
        assert await epp.end() == (0, "")
    assert epp.events[-2:] == ["drain started", "picker stopped"]


class Draining:
    """A picker with a gateway, whose drain ends when it is hurried."""

    has_gateway = True

    async def serve(self, stop, hurry):
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        await hurry.wait()


async def test_ctrl_c_waits_no_longer_than_somebody_at_the_keyboard():
    """However long `--drain-timeout` is; SIGTERM waits for that."""
    try:
        async with asyncio.timeout(20):
            await until_signal(Draining(), interrupted_max_s=0.1)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)


LONG_GRACE = ("--secure-serving=false", "--drain-grace=1h", "--drain-timeout=1h")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_ctrl_c_waits_for_nobody_where_no_gateway_is_connected(transport, tmp_path):
    """Whoever tries it out is not kept; the grace is longer than any test."""
    given, _ = arguments_for(tmp_path, TWO)
    async with child(*given, *LONG_GRACE, f"--transport={transport}") as epp:
        await epp.until_logged("picker serving")
        epp.process.send_signal(signal.SIGINT)
        assert await epp.end() == (0, "")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_grace_is_kept_where_a_gateway_may_come(number, transport, tmp_path):
    """One that is connected has to hear that we go; after SIGTERM one may still be on its way."""
    given, (port, *_) = arguments_for(tmp_path, TWO)
    async with child(*given, *LONG_GRACE, f"--transport={transport}") as epp:
        await epp.until_logged("picker serving")
        async with channel_to(f"localhost:{port}") as channel:
            asked = gw.request_headers(), gw.request_body(LONG)
            if number == signal.SIGINT:
                await Call(channel).exchange(*asked, answers=1)
            epp.process.send_signal(number)
            await epp.until_logged("drain started")
            assert await Call(channel).exchange(*asked, answers=1), "it is served"
        epp.process.send_signal(signal.SIGINT)
        assert await epp.end() == (0, "")


async def test_the_log_says_which_event_loop_serves(tmp_path):
    """It is uvloop's wherever that is installed."""
    given, _ = arguments_for(tmp_path, TWO)
    async with child(*given) as epp:
        await epp.until_logged("picker serving")
    expected = "uvloop" if find_spec("uvloop") else "asyncio"
    assert json.loads(epp.lines[-1])["event_loop"] == expected


_WHILE_SERVING = """
import gc, sys
from epp.commands import serve
from epp.configuration.build import plugin_tables
from epp.flags.command_lines import parse_serve
from epp.journal.reenacting import decide_again

async def looked_at(picker):
    print(gc.get_freeze_count(), len(gc.get_objects()), file=sys.stderr)

serve.until_signal = looked_at
sys.exit(serve.serve(parse_serve(sys.argv[1:], {}), sys.stdout, sys.stderr))
"""


async def test_the_garbage_collector_looks_no_more_at_what_is_there_at_the_start(tmp_path):
    """Each look at all of it would hold the loop."""
    endpoints = tmp_path / "endpoints.json"
    endpoints.write_text('{"endpoints": []}')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _WHILE_SERVING, f"--endpoints-file={endpoints}"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert process.returncode == 0, told.decode()
    spared, looked_at = map(int, told.splitlines()[-1].split())
    assert looked_at < spared / 20


def test_without_uvloop_the_event_loop_is_that_of_asyncio(monkeypatch):
    """It has no wheel for every platform."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory() is None


async def test_a_second_signal_hurries_and_a_stuck_stream_is_cut(tmp_path):
    """The drain would take ten minutes."""
    given, (port, *_) = arguments_for(tmp_path, TWO)
    flags = ("--secure-serving=false", "--drain-grace=10m", "--drain-timeout=10m")
    async with child(*given, *flags) as epp, channel_to(f"localhost:{port}") as channel:
        await epp.until_logged("picker serving")
        stuck = Call(channel)
        # Its headers are answered, its body never comes.
        head = gw.request_headers(modes=gw.protocol(request=gw.BUFFERED))
        await stuck.exchange(head, answers=1)
        epp.process.send_signal(signal.SIGTERM)
        await epp.until_logged("drain started")
        epp.process.send_signal(signal.SIGTERM)
        assert await epp.end() == (0, "")
        assert "streams were cut by the end of the drain" in epp.events


async def test_logs_can_be_for_the_eye(tmp_path):
    """`--log-format console`."""
    given, _ = arguments_for(tmp_path, [])
    async with child(*given, "--log-format=console", "--config-text=[") as epp:
        code, errors = await epp.end()
    assert (code, errors) == (1, "")
    (line,) = epp.lines
    assert "[error" in line
    assert not line.startswith("{")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        pytest.param(["--nonsense"], 2, ["unknown flag '--nonsense'"], id="unknown flag"),
        pytest.param(["--grpc-port=70000"], 2, ["--grpc-port", "70000"], id="bad value"),
        pytest.param(
            ["--endpoints-file={tmp}/none.yaml"],
            1,
            ["--endpoints-file {tmp}/none.yaml cannot be read: No such file or directory"],
            id="no endpoints file",
        ),
        pytest.param(
            ["--config-file={tmp}/none.yaml"],
            1,
            ["--config-file {tmp}/none.yaml cannot be read: No such file or directory"],
            id="no configuration",
        ),
        pytest.param(
            ["--config-file={tmp}"],
            1,
            ["--config-file {tmp} cannot be read: Is a directory"],
            id="a directory",
        ),
        pytest.param(
            ["--config-text={{kind: a, apiVersion: b}}"],
            1,
            ["--config-text: kind is 'a'", "--config-text: apiVersion is 'b'"],
            id="bad configuration",
        ),
        pytest.param(
            ["--endpoints-file={tmp}/bad.yaml"],
            1,
            ["{tmp}/bad.yaml: endpoints[0]", "{tmp}/bad.yaml: endpoints[1].port"],
            id="bad endpoints",
        ),
        pytest.param(
            ["--cert-path={tmp}/none"],
            1,
            ["--cert-path: {tmp}/none/tls.crt: cannot be read: No such file or directory"],
            id="no certificate",
        ),
        pytest.param(
            ["--client-ca-file={tmp}/none.crt"],
            1,
            ["--client-ca-file: {tmp}/none.crt: cannot be read: No such file or directory"],
            id="no client authority",
        ),
        pytest.param(
            ["--grpc-port={taken}"],
            1,
            ["--grpc-port {taken} cannot be listened on: Address already in use"],
            id="port in use",
        ),
    ],
)
async def test_a_wrong_start_says_every_problem_in_one_sentence_each(flags, code, said, tmp_path):
    """2 for the command line, 1 for what it names; no traceback, nothing else on standard error."""
    given, _ = arguments_for(tmp_path, [])
    (tmp_path / "bad.yaml").write_text(
        "endpoints: [{name: a}, {name: b, address: 10.0.0.1, port: 99999}]"
    )
    (taken,) = free_ports(1)
    values = {"tmp": tmp_path, "taken": taken}
    async with serving_on(taken), child(*given, *(f.format(**values) for f in flags)) as epp:
        ended, errors = await epp.end()
    assert ended == code
    if code == 2:
        (line,) = errors.splitlines()
        assert line.startswith("epp serve: ")
        assert all(part in line for part in said)
        assert epp.lines == []
        return
    assert errors == ""
    told = [json.loads(line) for line in epp.lines]
    problems = [line["event"] for line in told if line["level"] == "error"]
    assert len(problems) == len(said)
    for problem, part in zip(problems, said, strict=True):
        assert problem.startswith(part.format(**values))


async def test_a_capture_is_decided_again(tmp_path):
    """Through gRPC, with scrapes and a reload; what peers see of it is in the metrics."""
    folder = tmp_path / "capture"
    async with serving(tmp_path, TWO, f"--capture={folder}", config=PREFIX_FIRST) as running:
        running.observe(a=3, b=0)
        for number in range(12):
            await running.pick(gw.prompt(f"conversation {number % 3} " * 100))
        replace(tmp_path / "config.yaml", QUEUE_FIRST)
        await until(lambda: running.picker.live.generation == 2, "the reload")
        running.observe(a=0, b=3)
        for number in range(12):
            await running.pick(gw.prompt(f"conversation {number % 3} " * 100))
        await until(lambda: running.metric("capture_requests_total") == 24, "the lines")
        assert running.metric("capture_dropped_total", reason="queue") == 0
    (result,) = decide_again(folder, plugin_tables()).values()
    assert (result.decisions, result.same, result.caveats()) == (24, 24, [])


async def test_a_capture_that_cannot_be_written_costs_no_request(tmp_path):
    """A file is where the directory should be; it is counted and logged once."""
    (tmp_path / "capture").write_text("")
    flag = f"--capture={tmp_path / 'capture'}"
    async with serving(tmp_path, TWO, flag) as running:
        running.observe(a=0, b=0)
        for _ in range(3):
            assert await running.pick() in {"10.0.0.1:8000", "10.0.0.2:8000"}
        await until(lambda: running.metric("capture_write_errors_total"), "the error to be counted")
        assert len(running.logged("capture cannot be written, requests continue")) == 1


def test_without_a_capture_nobody_listens(tmp_path):
    """The scheduler is the plain one: nothing is paid for what is off."""
    given, _ = arguments_for(tmp_path, TWO)
    picker = EndpointPicker(parse_serve(given, {}))
    assert type(picker.scheduler) is Scheduler
    assert picker.capture is None


def test_a_salt_file_that_is_missing_is_told(tmp_path):
    """Before anything is served."""
    given, _ = arguments_for(tmp_path, TWO)
    given += [f"--capture={tmp_path}", f"--capture-salt-file={tmp_path / 'salt'}"]
    with pytest.raises(StartError, match="cannot be read: No such file"):
        EndpointPicker(parse_serve(given, {}))


async def test_a_shadow_profile_is_counted_and_shown(tmp_path):
    """In the metrics, in the log, on the page of decisions; a reload takes it away."""
    shadow = "shadow: {plugins: [{pluginRef: queue-scorer}]}\n"
    async with serving(tmp_path, TWO, "--v=4", config=PREFIX_FIRST + shadow) as running:
        running.observe(a=0, b=0)
        first = await running.pick()
        held, other = ("a", "b") if first == "10.0.0.1:8000" else ("b", "a")
        running.observe(**{held: 5, other: 0})
        assert await running.pick() == first
        assert running.metric("shadow_decisions_total", verdict="differed") == 1
        tokens = [
            running.metric("shadow_uncached_tokens_total", profile=one)
            for one in ("shadow", "live")
        ]
        assert tokens[0] > tokens[1] > 0
        assert running.logged("decision")[-1]["shadow"]["endpoint"] == other
        rows = await running.picker._debug._recent.rows(1, Wanted())
        assert rows[0]["shadow"]["verdict"] == "differed"
        replace(tmp_path / "config.yaml", PREFIX_FIRST)
        await until(lambda: running.picker.live.generation == 2, "the reload")
        await running.pick()
        assert "shadow" not in running.logged("decision")[-1]
        assert running.metric("shadow_decisions_total", verdict="differed") is None
