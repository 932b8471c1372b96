"""The performance report: its generator, its accounting and its rules, without measuring."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from bench.report import operators, workloads
from bench.report.accounting import (
    Disturbance,
    Machine,
    Watch,
    forget_peak,
    memory_bytes,
    memory_of,
    process_cpu_s,
    session,
    session_cpu_s,
    session_of,
)
from bench.report.contestants import (
    GO,
    GO_SOURCES,
    ContestantError,
    doing_nothing,
    go_server,
    homing,
    nothing,
)
from bench.report.generator import Load, _Run, due_times
from bench.report.measuring import Reading, Results, Sample, idle_name
from bench.report.rows import Reported, rows, tail
from bench.report.script import Shape, framed, nonces, payload, script
from bench.report.verdicts import Figure, Verdict, crosses, figure, judge, quantile, ratios
from bench.report.writing import to_json, to_markdown, to_svg
from bench.servers.answers import CHUNK_BYTES_MAX, Conversation
from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from epp.flags.command_lines import parse_serve

QUIET = Disturbance(0.0, 0.0)
LOUD = Disturbance(0.5, 0.0)


def test_a_quantile_is_a_value_that_was_seen():
    """The least that so many do not exceed."""
    values = [float(number) for number in range(1, 101)]
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 0.99) == 99.0
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([], 0.5) == 0.0


def test_ratios_pair_what_was_measured_in_the_same_round():
    """A round that one of both lacks is left out."""
    assert ratios({0: 4.0, 1: 6.0, 2: 9.0}, {0: 2.0, 2: 3.0}) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("seen", "disturbances", "shares", "verdict"),
    [
        (Figure(0.9, 0.8, 1.2, 5), [QUIET] * 5, [0.5], Verdict.MET),
        (Figure(1.1, 0.8, 1.2, 5), [QUIET] * 5, [0.5], Verdict.NOT_MET),
        (Figure(0.9, 0.8, 0.9, 4), [QUIET] * 4, [0.5], Verdict.FEW),
        (Figure(0.9, 0.8, 0.9, 5), [QUIET] * 4 + [LOUD], [0.5], Verdict.MET),
        (Figure(0.9, 0.8, 0.9, 5), [QUIET] * 3 + [LOUD] * 2, [0.5], Verdict.BUSY),
        (Figure(0.9, 0.8, 0.9, 5), [Disturbance(0.0, 0.5)] * 5, [0.5], Verdict.BUSY),
        (Figure(0.9, 0.8, 0.9, 5), [QUIET] * 5, [0.5, 0.95], Verdict.STARVED),
        (None, [QUIET] * 5, [0.5], Verdict.MISSING),
    ],
)
def test_a_verdict_is_refused_where_it_would_be_about_something_else(
    seen, disturbances, shares, verdict
):
    """About others on the machine, about the generator, about chance, about nothing."""
    assert judge(seen, 1.0, disturbances=disturbances, generator_shares=shares) is verdict


def test_it_is_told_when_single_rounds_disagree_with_their_median():
    """An aim within the spread is not safely met."""
    assert crosses(figure([0.9, 0.9, 1.1]), 1.0)
    assert not crosses(figure([0.8, 0.9, 1.0]), 1.0)


def test_a_server_that_keeps_everybody_waiting_alike_has_no_short_tail():
    """Half a second for all is not good because it is even."""
    assert tail(p50_ms=500.0, p99_ms=600.0, alone_p50_ms=1.0) == 500.0
    assert tail(p50_ms=1.0, p99_ms=4.0, alone_p50_ms=0.9) == 4.0


def test_arrivals_are_the_same_for_a_seed_and_as_many_as_the_rate_says():
    """The open loop of a round is played to every server alike."""
    times = list(due_times(1_000.0, 10.0, 3, 5.0))
    assert times == list(due_times(1_000.0, 10.0, 3, 5.0))
    assert times == sorted(times)
    assert 5.0 < times[0] <= times[-1] < 15.0
    assert 9_500 < len(times) < 10_500


def test_the_session_is_read_behind_a_name_with_brackets():
    """A command may call itself anything."""
    assert session_of("12 (a) b (c) S 1 12 77 0 -1 4194304") == 77


def test_the_machine_is_read_without_idling_and_waiting():
    """user, nice, system, interrupts; what is stolen stands apart."""
    ticks = os.sysconf("SC_CLK_TCK")
    text = f"cpu  {ticks} {ticks} {ticks} 900 900 {ticks} {ticks} {2 * ticks} 0 0\ncpu0 1 1\n"
    assert Machine.read(text) == Machine(5.0, 2.0)


def test_memory_is_read_in_bytes_and_its_peak_can_be_forgotten():
    """VmHWM falls back to what is held."""
    assert memory_of("Name:\tx\nVmRSS:\t  12 kB\n", "VmRSS") == 12 * 1024
    held = bytearray(os.urandom(1)) * (64 * 2**20)
    del held
    before = memory_bytes(os.getpid(), "VmHWM")
    forget_peak(os.getpid())
    assert memory_bytes(os.getpid(), "VmHWM") < before


def test_cpu_of_a_process_is_what_the_kernel_counts_all_threads_included():
    """Another thread's work counts, and a sleep does not."""
    before_s, own_before_s = process_cpu_s(os.getpid()), time.process_time()
    worker = threading.Thread(target=lambda: sum(number * number for number in range(300_000)))
    worker.start()
    worker.join()
    counted_s, own_s = process_cpu_s(os.getpid()) - before_s, time.process_time() - own_before_s
    assert counted_s > 0.0
    assert counted_s == pytest.approx(own_s, rel=0.2)


def test_a_child_counts_for_the_session_that_it_belongs_to():
    """Servers may have processes of their own."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        give_up_s = time.monotonic() + 20
        while len(members := session(child.pid)) < 2:
            assert time.monotonic() < give_up_s
        assert session_cpu_s(child.pid) >= max(map(process_cpu_s, members)) > 0.0
    finally:
        child.stdin.close()
        child.wait(20)


def test_what_ours_use_is_not_the_others():
    """A watch of a process that works sees less of others than one that forgot it."""
    knowing, ignorant = Watch([os.getpid()]), Watch([])
    until_s = process_cpu_s(os.getpid()) + 0.2
    while process_cpu_s(os.getpid()) < until_s:
        pass
    assert knowing.passed().others_cores < ignorant.passed().others_cores


# What is played.


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("body_bytes", [2_000, 8_000, 100_000])
def test_every_prompt_is_another_and_every_message_can_be_read(body_bytes, shares):
    """The number stands in the last message of the chat, or in the first if nothing is shared."""
    opening = script(Shape(body_bytes=body_bytes, shares=shares)).openings[0]
    numbers = nonces()
    bodies = []
    for stream in (1, 3):
        nonce = next(numbers)
        sent = payload(opening, nonce)
        frames, joined = bytes(framed(opening, stream, nonce)), b""
        at = 0
        while at < len(frames):
            size = int.from_bytes(frames[at : at + 3], "big")
            assert int.from_bytes(frames[at + 5 : at + 9], "big") == stream
            joined += frames[at + 9 : at + 9 + size] if frames[at + 3] == 0 else b""
            at += 9 + size
        assert joined == sent
        first, *rest = _grpc_messages(sent)
        assert ProcessingRequest.FromString(first).HasField("request_headers")
        pieces = [ProcessingRequest.FromString(each).request_body for each in rest]
        assert [each.end_of_stream for each in pieces] == [False] * (len(pieces) - 1) + [True]
        body = b"".join(each.body for each in pieces)
        assert len(body) == opening.body_bytes
        bodies.append(json.loads(body)["messages"])
    assert bodies[0][0 if not shares else -1] != bodies[1][0 if not shares else -1]
    assert (bodies[0][:-1] == bodies[1][:-1]) is shares


def _grpc_messages(data):
    while data:
        size = int.from_bytes(data[1:5], "big")
        yield data[5 : 5 + size]
        data = data[5 + size :]


def test_a_server_that_does_nothing_says_what_a_picker_says():
    """Headers with a destination, then the body as it came, in messages a gateway takes."""
    shape = Shape(body_bytes=200_000, response_chunks=2)
    made = script(shape)
    conversation = Conversation()
    answers, sent = [], b""
    for message in _grpc_messages(made.openings[0].payload):
        sent += ProcessingRequest.FromString(message).request_body.body
        answers += conversation.answers(message)
    first, *rest = map(ProcessingResponse.FromString, answers)
    (option,) = first.request_headers.response.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    assert first.request_headers.response.clear_route_cache
    told = [
        each.request_body.response.body_mutation.streamed_response.SerializeToString()
        for each in rest
    ]
    assert max(map(len, told)) <= CHUNK_BYTES_MAX + 10
    streamed = [each.request_body.response.body_mutation.streamed_response for each in rest]
    assert b"".join(each.body for each in streamed) == sent
    assert [each.end_of_stream for each in streamed] == [False] * (len(rest) - 1) + [True]
    headers, chunk, last = (
        ProcessingResponse.FromString(answer)
        for (message,) in (list(_grpc_messages(each)) for each in made.later)
        for answer in conversation.answers(message)
    )
    assert headers.WhichOneof("response") == "response_headers"
    echoed = [each.response_body.response.body_mutation.streamed_response for each in (chunk, last)]
    assert echoed[0].body.startswith(b"data: ")
    assert echoed[1].body.endswith(b"data: [DONE]\n\n")
    assert [each.end_of_stream for each in echoed] == [False, True]


def _play(**load):
    made = Load(**load)
    return _Run(made, script(made.shape), nonces()).run()


@pytest.mark.parametrize("transport", ["grpcio", "ngh2"])
def test_every_kind_of_load_is_played_to_its_end(transport):
    """Large bodies stall on windows, chunks wait for one another, bursts queue: none is lost."""
    if transport == "ngh2":
        pytest.importorskip("ngh2")
    command = [sys.executable, "-m", f"bench.servers.on_{transport}"]
    core = frozenset(os.sched_getaffinity(0))
    with doing_nothing(nothing(transport), command, core) as server:
        for load in (
            {"shape": Shape(body_bytes=2_000, response_headers=True), "at_once": 40},
            {"shape": Shape(body_bytes=300_000), "at_once": 6},
            {"shape": Shape(body_bytes=2_000, response_chunks=20), "at_once": 5},
            {"shape": Shape(body_bytes=2_000), "rate_per_s": 300.0, "duration_s": 0.1},
            {"shape": Shape(body_bytes=2_000), "streams": 4, "duration_s": 0.05},
        ):
            measured = _play(port=server.port, **load)
            assert measured.failed == {}
            begun = load.get("at_once") or len(measured.late_s)
            assert measured.completed == len(measured.latencies_s) == begun > 0
            assert measured.generator_cpu_s > 0.0
        assert server.cpu_s() > 0.0


class _Faulty:
    """A server whose stream n does what n says; each is another fault."""

    def __init__(self, fault):
        self._fault = fault

    async def process(self, requests, context):
        conversation = Conversation()
        while (message := await context.read()) is not grpc.aio.EOF:
            for answer in conversation.answers(message):
                if self._fault == "immediate response":
                    immediate = ProcessingResponse()
                    immediate.immediate_response.status.code = 503
                    await context.write(immediate.SerializeToString())
                    return
                if self._fault == "ended early":
                    return
                if self._fault == "grpc-status 8":
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")
                if self._fault == "body cut short" and answer[0] == 0x1A:
                    (cut,) = Conversation().answers(
                        ProcessingRequest(
                            request_body={"body": b"x", "end_of_stream": True}
                        ).SerializeToString()
                    )[1:]
                    await context.write(cut)
                    continue
                await context.write(answer)


@contextlib.contextmanager
def _serving(fault):
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports = []

    async def serve():
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(_Faulty(fault).process)
        service = "envoy.service.ext_proc.v3.ExternalProcessor"
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Process": handler}),)
        )
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop(None)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@pytest.mark.parametrize(
    "fault", ["immediate response", "ended early", "grpc-status 8", "body cut short"]
)
def test_a_stream_that_does_not_go_to_its_end_is_counted_by_what_went_wrong(fault):
    """A refusal, an end without answers, a status, a body that lacks something."""
    with _serving(fault) as port:
        measured = _play(port=port, shape=Shape(body_bytes=2_000), at_once=3, connections=1)
    assert measured.failed == {fault: 3}
    assert measured.completed == 0
    assert measured.latencies_s == []


class _Stalling:
    """Answers nothing for a while, then everything."""

    def __init__(self, stalls_s):
        self._until_s = time.monotonic() + stalls_s

    async def process(self, requests, context):
        conversation = Conversation()
        while (message := await context.read()) is not grpc.aio.EOF:
            await asyncio.sleep(max(0.0, self._until_s - time.monotonic()))
            for answer in conversation.answers(message):
                await context.write(answer)


def test_a_stall_is_seen_by_every_request_that_was_due_in_it(monkeypatch):
    """Coordinated omission: waiting counts from when a request was due, not from when it was sent."""
    monkeypatch.setattr(sys.modules[__name__], "_Faulty", lambda fault: _Stalling(0.4))
    with _serving("") as port:
        measured = _play(port=port, shape=Shape(body_bytes=2_000), rate_per_s=500.0, duration_s=0.2)
    assert measured.failed == {}
    # Nothing is answered before 0.2 s have passed since the last of them was due; less the start.
    assert len(measured.latencies_s) > 50
    assert min(measured.latencies_s) > 0.05
    assert max(measured.latencies_s) - min(measured.latencies_s) > 0.05


# What is told.


def sample(workload, contestant, number, **changed):
    """A round in which nothing special happened."""
    told = {
        "completed": 100,
        "failed": {},
        "cpu_us": 100.0,
        "requests_per_s": 500.0,
        "p50_ms": 1.0,
        "p99_ms": 3.0,
        "late_p99_ms": 0.1,
        "generator_cpu_us": 20.0,
        "generator_share": 0.2,
        "disturbance": QUIET,
    }
    return Sample(workload=workload, contestant=contestant, round=number, **told | changed)


def results(*, cpu_us, disturbance=QUIET, failed=0):
    """Of every load, with Homing on both transports."""
    names = {GO: 100.0, nothing("grpcio"): 250.0, nothing("ngh2"): 20.0}
    names |= {homing("grpcio"): 450.0, homing("ngh2"): cpu_us}
    samples = [
        sample(
            load.name,
            name,
            number,
            cpu_us=cost_us,
            disturbance=disturbance,
            failed={"reset 8": failed} if failed and name == homing("ngh2") else {},
        )
        for load in workloads.LOADS
        for number in range(5)
        for name, cost_us in names.items()
    ]
    samples += [
        sample("endpoints", f"{homing(each)}, {count} endpoints", number, disturbance=disturbance)
        for each in ("grpcio", "ngh2")
        for count in ("10", "1,000")
        for number in range(5)
    ]
    samples += [
        sample(
            load.name,
            homing("ngh2", name),
            number,
            cpu_us=100.0 + min(at, 5),
            disturbance=disturbance,
        )
        for load in workloads.OPERATED
        for at, name in enumerate(operators.NAMES)
        for number in range(5)
    ]
    readings = [
        Reading(
            name=name,
            contestant=homing("ngh2"),
            round=number,
            value=0.01,
            disturbance=disturbance,
        )
        for name in ("memory", idle_name("200ms"), idle_name(""))
        for number in range(5)
    ]
    return Results(samples=samples, readings=readings, missing=[])


TRANSPORTS = ["grpcio", "ngh2"]


def test_the_verdict_is_about_the_lean_transport_and_every_aim_has_a_row():
    """Ratios to G of the same rounds, both transports shown."""
    told = rows(results(cpu_us=25.0), TRANSPORTS)
    aimed = [row for row in told if row.aim_max is not None]
    assert {row.verdict for row in aimed} == {Verdict.MET}
    assert {row.judged for row in aimed} == {"ngh2"}
    first = told[0]
    assert first.seen["grpcio"].median == 4.5
    assert first.seen["ngh2"].median == 0.25
    lean = next(row for row in told if "units of grpcio" in row.measure)
    assert lean.seen["ngh2"].median == pytest.approx(25 / 450)
    assert len(aimed) == 21
    operated = [row for row in told if "nothing of it" in row.measure]
    assert [row.seen["ngh2"].median for row in operated] == 2 * [1.01, 1.02, 1.03, 1.04, 1.05]
    assert [row.aim_max for row in operated] == 2 * ([None] * 3 + [1.05] * 2)


def test_a_picker_for_each_thing_that_operators_switch_on_begins(tmp_path):
    """Each is a configuration and flags that are taken."""
    told = operators.operated(tmp_path, "http://127.0.0.1:4318")
    assert [settings.name for settings in told] == list(operators.NAMES)
    for settings in told:
        parsed = parse_serve(("--endpoints-file=x", *settings.flags), {})
        text = Path(parsed.config_file).read_text() if parsed.config_file else ""
        config = load_config(text, "it", plugin_tables()) if text else None
        assert (config is not None and config.shadow is not None) == (
            settings.name in {operators.EVERYTHING, operators.SPARINGLY}
        )


def test_spans_are_taken_by_a_collector_that_keeps_none():
    """So that sending them costs what it costs."""
    with operators.collecting() as url, urllib.request.urlopen(f"{url}/v1/traces", b"x") as told:
        assert told.status == 200


def test_an_aim_that_is_not_met_shows_its_floor_and_why():
    """Either the transport alone is above it, or the rest is our own work."""
    told = rows(results(cpu_us=300.0), TRANSPORTS)[0]
    assert told.verdict is Verdict.NOT_MET
    assert told.floor["ngh2"].median == 0.2
    assert told.reason == (
        "the server on ngh2 that does nothing takes 0.2, the remaining 2.8 is the picker's own work"
    )
    only_grpcio = rows(results(cpu_us=300.0), ["grpcio"])[0]
    assert only_grpcio.reason == "the floor of grpcio alone is 2.5"


def test_a_picker_that_loses_requests_meets_no_aim_by_being_cheap():
    """What failed cost nothing."""
    told = rows(results(cpu_us=25.0, failed=2), TRANSPORTS)
    assert told[0].verdict is Verdict.NOT_MET
    assert told[0].reason == "10 requests failed"
    burst = next(row for row in told if "4,000" in row.title)
    assert burst.verdict is Verdict.NOT_MET
    assert burst.seen["ngh2"].high == 2.0


@pytest.mark.parametrize(
    ("loser", "titles"),
    [
        (homing("ngh2", "10 endpoints"), ["8 KB, 1,000 endpoints against 10"]),
        (homing("ngh2", "1,000 endpoints"), ["8 KB, 1,000 endpoints against 10"]),
        (
            homing("ngh2", operators.EVERYTHING),
            [f"{load.title}: {operators.EVERYTHING}" for load in workloads.OPERATED],
        ),
        (
            homing("ngh2", operators.NOTHING),
            [
                f"{load.title}: {name}"
                for load in workloads.OPERATED
                for name in (operators.EVERYTHING, operators.SPARINGLY)
            ],
        ),
    ],
)
def test_requests_lost_by_a_compared_picker_fail_the_aims_of_its_comparisons(loser, titles):
    """A comparison names its two pickers by their settings, unlike the other rows."""
    played = results(cpu_us=25.0)
    samples = [
        msgspec.structs.replace(each, failed={"reset 8": 2} if each.contestant == loser else {})
        for each in played.samples
    ]
    told = rows(msgspec.structs.replace(played, samples=samples), TRANSPORTS)
    not_met = [row for row in told if row.verdict is Verdict.NOT_MET]
    assert [row.title for row in not_met] == titles
    assert {row.reason for row in not_met} == {"10 requests failed"}


def test_on_a_busy_machine_no_row_has_a_verdict():
    """Neither a good one nor a bad one."""
    told = results(cpu_us=25.0, disturbance=LOUD)
    reported = Reported(told, rows(told, TRANSPORTS), TRANSPORTS)
    assert reported.was_busy
    aimed = [row for row in reported.rows if row.aim_max is not None]
    assert {row.verdict for row in aimed} == {Verdict.BUSY}
    assert "The machine was busy" in to_markdown(reported, {"cores": 2})


def test_the_report_is_written_for_people_programs_and_eyes():
    """The same rows in Markdown and JSON; the plot is well-formed and holds every bar."""
    told = results(cpu_us=25.0)
    reported = Reported(told, rows(told, TRANSPORTS), TRANSPORTS)
    document = json.loads(to_json(reported, {"cores": 2}))
    assert document["schema"] == 1
    assert document["busy"] is False
    assert len(document["rows"]) == len(reported.rows)
    assert len(document["samples"]) == len(told.samples)
    text = to_markdown(reported, {"cores": 2})
    for row in reported.rows:
        assert f"| {row.title} | {row.measure} |" in text
    plot = ET.fromstring(to_svg(reported))
    bars = [each for each in plot.iter() if each.tag.endswith("rect")]
    loads = sum(load.floors for load in workloads.LOADS)
    assert len(bars) == 1 + 4 + 4 * loads


def test_each_table_of_cpu_has_the_servers_of_its_workloads():
    """Pickers with features for operators are in a table of their own, for both lengths of prompts."""
    told = results(cpu_us=25.0)
    text = to_markdown(Reported(told, rows(told, TRANSPORTS), TRANSPORTS), {"cores": 2})
    cpu = text.partition("## CPU of the server, µs per request")[2].partition("##")[0]
    first, second = cpu.strip().split("\n\n")
    servers = [GO, nothing("grpcio"), nothing("ngh2"), homing("grpcio"), homing("ngh2")]
    assert first.splitlines()[0] == f"| workload | {' | '.join(servers)} |"
    assert [line.split(" | ")[0] for line in second.splitlines()[2:]] == [
        f"| {load.title}" for load in workloads.OPERATED
    ]
    generator = text.partition("## The generator")[2]
    for load in workloads.OPERATED:
        assert f"| {load.name} |" in generator


def test_without_go_one_sentence_says_so(tmp_path):
    """The report goes on without a G."""
    with pytest.raises(ContestantError, match=r"^there is no go on PATH$"):
        go_server({"HOME": str(tmp_path), "PATH": str(tmp_path)})


def test_what_is_built_is_pinned_by_checksums():
    """A module of its own, outside of every other."""
    module = (GO_SOURCES / "go.mod").read_text(encoding="utf-8")
    sums = (GO_SOURCES / "go.sum").read_text(encoding="utf-8")
    for line in module.splitlines():
        parts = line.removesuffix(" // indirect").split()
        if line.startswith("\t"):
            assert f"{parts[0]} {parts[1]} h1:" in sums


def test_an_unknown_workload_is_a_sentence():
    """Nothing is started for it."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--only", "9kb"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert "--only must name some of 8kb," in done.stderr
