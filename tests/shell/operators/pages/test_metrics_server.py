import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from epp.shell.operators.metrics.telemetry import PoolSnapshot, Telemetry
from epp.shell.operators.pages.metrics_server import (
    SAMPLES_PER_SLICE_MAX,
    MetricsServer,
    encode_in_slices,
)
from epp.shell.operators.pages.page_queue import WAITING_MAX
from tests.shell.operators.decided import make_candidates, make_decision


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    telemetry = Telemetry(registry, lambda: PoolSnapshot(candidates=make_candidates(300)))
    durations = {"scheduling_s": 1e-5, "processing_s": 1e-4}
    telemetry.decided(make_decision().leg, **durations, request_bytes=1)
    return registry


def server_of(registry, ready=lambda: True, **options):
    return MetricsServer(registry, ready, host="127.0.0.1", port=0, **options)


async def get(server, path, **headers):
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
        session.get(path, headers=headers) as response,
    ):
        return response.status, response.headers, await response.text()


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain", text_string_to_metric_families),
        ("text/plain;version=0.0.4", "text/plain", text_string_to_metric_families),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text",
            parse_openmetrics,
        ),
    ],
)
async def test_the_page_comes_in_the_format_asked_for(registry, accept, content_type, parse):
    """Text by default, OpenMetrics for who accepts it; both parse to the same decision count."""
    async with server_of(registry) as server:
        status, headers, page = await get(server, "/metrics", Accept=accept)
    assert status == 200
    assert headers["Content-Type"].startswith(content_type)
    values = {sample.name: sample.value for family in parse(page) for sample in family.samples}
    assert values["homing_known_endpoints"] == 300
    assert values["homing_scheduler_e2e_duration_seconds_count"] == 1


@pytest.mark.parametrize("encode", [generate_latest, generate_openmetrics])
async def test_slices_add_up_to_the_page_of_the_library(encode):
    """Cut in pieces the page is what the library would write, `_created` series aside."""
    registry = CollectorRegistry()
    counter = Counter("a_total", "A\nb.", ["n"], registry=registry)
    histogram = Histogram("b_seconds", "B.", ["n"], registry=registry)
    Counter("c_total", "Without children.", ["n"], registry=registry)
    for number in range(2 * SAMPLES_PER_SLICE_MAX // 3):
        counter.labels(str(number)).inc(number)
        histogram.labels(str(number)).observe(number)
    slices = [part async for part in encode_in_slices(registry, encode)]
    whole = encode(registry).decode().splitlines()
    expected = [line for line in whole if "_created" not in line]
    assert b"".join(slices).decode().splitlines() == expected
    assert max(part.count(b"\n") for part in slices) <= SAMPLES_PER_SLICE_MAX


async def test_the_loop_runs_while_a_page_is_made(registry):
    """Between slices other tasks get their turn."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    slices = [part async for part in encode_in_slices(registry, generate_latest)]
    counting.cancel()
    assert turns >= sum(1 for part in slices if not part.startswith(b"#")) > 5


async def test_probes_follow_readiness(registry):
    """/healthz is 200 for as long as it is answered; /readyz as told."""
    ready = False
    async with server_of(registry, lambda: ready) as server:
        assert (await get(server, "/healthz"))[0] == 200
        assert (await get(server, "/readyz"))[0] == 503
        ready = True
        assert (await get(server, "/readyz"))[0] == 200
        assert (await get(server, "/nothing"))[0] == 404


async def test_others_can_add_routes(registry):
    """There is room for /debug."""

    async def state(_):
        return web.Response(text="state")

    async with server_of(registry, routes=[web.get("/debug/state", state)]) as server:
        assert (await get(server, "/debug/state"))[2] == "state"


async def test_the_root_lists_the_pages(registry):
    """Each with what it shows, those of others too."""
    async with server_of(registry, pages={"/debug/state": "the state"}) as server:
        status, _, text = await get(server, "/")
    assert status == 200
    assert [line.split()[0] for line in text.splitlines()] == [
        *("/metrics", "/healthz", "/readyz", "/debug/state")
    ]
    assert "the state" in text


async def test_too_many_scrapes_at_once_are_refused(registry):
    """Pages are made one at a time and few wait for theirs; the rest are told when to come back."""
    turn = asyncio.Lock()
    async with server_of(registry, turn=turn) as server, asyncio.TaskGroup() as tasks:
        await turn.acquire()
        waiting = [tasks.create_task(get(server, "/metrics")) for _ in range(WAITING_MAX)]
        while server.scrapes.waiting < WAITING_MAX:
            await asyncio.sleep(0)
        status, headers, _ = await get(server, "/metrics")
        assert (status, headers["Retry-After"]) == (503, "1")
        turn.release()
        assert {(await scrape)[0] for scrape in waiting} == {200}


async def test_leaving_closes_the_port(registry):
    """Nothing listens any more; a second server can have the port."""
    async with server_of(registry) as server:
        port = server.port
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_taken_port_is_an_error_that_leaves_nothing_behind(registry):
    """The caller is told by OSError."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = MetricsServer(
            registry, lambda: True, host="127.0.0.1", port=taken.getsockname()[1]
        )
        with pytest.raises(OSError):
            await server.__aenter__()


async def test_requests_are_not_logged(registry, caplog):
    """Probes and scrapes come every few seconds: an access log would be noise."""
    caplog.set_level("DEBUG")
    async with server_of(registry) as server:
        await get(server, "/healthz")
    assert [record.name for record in caplog.records if "access" in record.name] == []
