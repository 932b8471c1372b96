"""Standalone mode: an Envoy beside each picker, which ends when the picker has drained it."""

import asyncio
import signal
import time
from contextlib import asynccontextmanager

import pytest
import yaml

from epp.flags.values import BodyMode
from epp.shell.gateway.bootstrap import BootstrapOptions
from epp.shell.gateway.service import QUIET_S
from tests.envoy.process import EppProcess
from tests.envoy.rig import http_client, running_envoy, until
from tests.envoy.test_departures import (
    REST,
    ClosedLoop,
    body,
    forwarding,
    half_read,
    rest_of,
    status_of,
)
from tests.envoy.upstream import running_pods

pytestmark = [pytest.mark.envoy]

CLIENTS = 16


class Beside:
    """A picker and the Envoy of its pod."""

    def __init__(self, picker, envoy):
        self.picker = picker
        self.envoy = envoy


@asynccontextmanager
async def standalone(folder, pods, *flags, second="", **options):
    """As the chart has them in one pod; `second`: where Envoy asks while its own picker is away."""
    folder.mkdir()
    endpoints = [{"name": pod.name, "address": "127.0.0.1", "port": pod.port} for pod in pods]
    file = folder / "endpoints.yaml"
    file.write_text(yaml.safe_dump({"endpoints": endpoints}))
    picker = EppProcess(folder / "epp.log", f"--endpoints-file={file}", "--secure-serving=false")
    chosen = BootstrapOptions(
        picker_address=picker.address, second_picker_address=second, plaintext=True, **options
    )
    async with running_envoy(chosen, folder) as envoy:
        port = envoy.admin_url.rpartition(":")[2]
        await picker.start(f"--envoy-admin-port={port}", "--drain-grace=200ms", *flags)
        await until(lambda: envoy.counter("cluster.ext_proc.health_check.success"), "a check")
        try:
            yield Beside(picker, envoy)
        finally:
            if picker.alive:
                await picker.kill()


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
async def test_the_picker_stays_until_its_envoy_has_nothing_to_do(mode, opened, tmp_path):
    """Also where the answers bypass the picker, which has no stream open then."""
    (pod,) = await opened.enter_async_context(running_pods(1))
    inside = await opened.enter_async_context(
        standalone(tmp_path / "one", [pod], response_body_mode=mode)
    )
    client = await opened.enter_async_context(http_client(inside.envoy))
    responses = await half_read(client, 20)
    inside.picker.terminate()
    await until(lambda: "drain started" in inside.picker.log_text(), "the drain")
    quiet_s = time.monotonic() + 2 * QUIET_S
    while time.monotonic() < quiet_s:
        # Whoever still comes is served, and sent away.
        async with client.post("/v1/completions", data=body()) as response:
            assert response.status == 200
            assert response.headers["connection"] == "close"
    assert inside.picker.alive
    pod.resume.set()
    assert await rest_of(responses) == {REST: 20}
    assert await inside.picker.exit_code() == 0
    assert "streams were cut" not in inside.picker.log_text()


async def test_what_its_envoy_has_open_at_the_end_is_counted_as_cut(opened, tmp_path):
    """Nobody else could tell: the picker has no stream of it."""
    (pod,) = await opened.enter_async_context(running_pods(1))
    inside = await opened.enter_async_context(
        standalone(tmp_path / "one", [pod], "--drain-timeout=2s")
    )
    client = await opened.enter_async_context(http_client(inside.envoy))
    responses = await half_read(client, 3)
    inside.picker.terminate()
    assert await inside.picker.exit_code() == 0
    (line,) = (at for at in inside.picker.log_text().splitlines() if "streams were cut" in at)
    assert '"streams": 3' in line
    pod.resume.set()
    assert await rest_of(responses) == {REST: 3}


@pytest.fixture
def two_pods(opened, tmp_path):
    """Two of them before the same model servers; each Envoy has the other's picker as second."""

    async def start(*flags):
        served = await opened.enter_async_context(running_pods(2))
        # The address of a process is known before it runs.
        staying = await opened.enter_async_context(standalone(tmp_path / "b", served, *flags))
        leaving = await opened.enter_async_context(
            standalone(tmp_path / "a", served, *flags, second=staying.picker.address)
        )
        return served, leaving, staying

    return start


async def test_a_pod_that_goes_refuses_nobody_and_cuts_nobody(two_pods, opened):
    """Clients that keep their connections are sent elsewhere before Envoy ends."""
    served, leaving, staying = await two_pods()
    targets = [leaving.envoy.port, staying.envoy.port]
    port = await opened.enter_async_context(forwarding(targets))
    url = type("Behind", (), {"url": f"http://127.0.0.1:{port}"})
    traffic = ClosedLoop(await opened.enter_async_context(http_client(url)), served, CLIENTS)
    await traffic.more(100)
    # As a Service does, when a pod is told to go.
    targets.remove(leaving.envoy.port)
    leaving.picker.terminate()
    assert await leaving.picker.exit_code() == 0
    assert not await leaving.envoy.counter("http.inference.downstream_cx_active")
    await traffic.more(100)
    await traffic.end()
    assert set(traffic.statuses) == {200}
    assert await staying.envoy.counter("http.inference.downstream_rq_2xx") > 100


async def test_an_envoy_whose_picker_was_killed_asks_the_other(two_pods, opened):
    """Its clients keep their connections, and each loses one answer at most."""
    served, leaving, _ = await two_pods()
    client = await opened.enter_async_context(http_client(leaving.envoy))
    traffic = ClosedLoop(client, served, CLIENTS)
    await traffic.more(100)
    leaving.picker.signal(signal.SIGKILL)
    await traffic.more(200)
    failed = traffic.statuses.total() - traffic.statuses[200]
    assert failed <= CLIENTS, traffic.statuses
    await traffic.more(300)
    await traffic.end()
    assert traffic.statuses.total() - traffic.statuses[200] == failed, traffic.statuses


async def test_without_another_picker_a_draining_one_is_asked_on(opened, tmp_path):
    """Where the second choice finds nobody the first is better than none, however it feels."""
    (pod,) = await opened.enter_async_context(running_pods(1))
    inside = await opened.enter_async_context(
        standalone(tmp_path / "one", [pod], "--drain-grace=1h", second="localhost:1")
    )
    client = await opened.enter_async_context(http_client(inside.envoy))
    assert await status_of(client) == 200
    inside.picker.terminate()
    gone = "cluster.ext_proc.health_check.failure"
    await until(lambda: inside.envoy.counter(gone), "Envoy to notice")
    healthy = "cluster.ext_proc.membership_healthy"

    async def nobody():
        return not await inside.envoy.counter(healthy)

    await until(nobody, "nobody to be healthy")
    assert await asyncio.gather(*(status_of(client) for _ in range(20))) == [200] * 20
