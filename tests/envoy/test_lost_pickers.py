"""Two pickers behind one Envoy, of which one is lost: what Envoy saves of the requests."""

import asyncio
import signal

import pytest

from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.picker import running_picker
from tests.envoy.process import running_epp
from tests.envoy.rig import http_client, refusing_port, running_envoy
from tests.envoy.test_departures import PATH, ClosedLoop, body, status_of
from tests.envoy.upstream import running_pods

pytestmark = [pytest.mark.envoy]

CLIENTS = 16


def picker_cluster(document):
    (found,) = (c for c in document["static_resources"]["clusters"] if c["name"] == "ext_proc")
    return found


def without_checks(document):
    """Nothing tells Envoy of the dead but their refusals."""
    del picker_cluster(document)["health_checks"]


def without_memory(document):
    """Whoever refused is asked again and again."""
    without_checks(document)
    del picker_cluster(document)["outlier_detection"]


@pytest.fixture
def one_of_two_refuses(opened, tmp_path):
    async def start(edit):
        pods = await opened.enter_async_context(running_pods(1))
        picker = await opened.enter_async_context(running_picker(pods))
        nobody = await opened.enter_async_context(refusing_port())
        options = BootstrapOptions(
            picker_address=f"127.0.0.1:{nobody},{picker.address}", plaintext=True
        )
        envoy = await opened.enter_async_context(running_envoy(options, tmp_path, edit))
        return envoy, await opened.enter_async_context(http_client(envoy))

    return start


async def test_a_refused_connection_costs_no_request(one_of_two_refuses):
    """Each stream that finds nobody goes to the other picker."""
    envoy, client = await one_of_two_refuses(without_memory)
    assert [await status_of(client) for _ in range(20)] == [200] * 20
    assert await envoy.counter("cluster.ext_proc.upstream_rq_retry_success") > 0


async def test_of_long_bodies_the_first_is_lost(one_of_two_refuses):
    """Envoy keeps 64 KiB to send again; what is longer is saved by the ejection, not by a retry."""
    _, client = await one_of_two_refuses(without_checks)
    statuses = [await status_of(client, "p" * 1_000_000) for _ in range(10)]
    assert set(statuses) <= {200, 500}
    assert statuses.count(200) > len(statuses) / 2
    assert statuses[-1] == 200


async def test_one_refused_connection_sets_a_picker_aside(one_of_two_refuses):
    """The next requests are not even tried there."""
    envoy, client = await one_of_two_refuses(without_checks)
    assert [await status_of(client) for _ in range(20)] == [200] * 20
    assert await envoy.counter("outlier_detection.ejections_active") == 1
    assert await envoy.counter("cluster.ext_proc.upstream_cx_connect_fail") < 10


async def test_many_may_be_sent_again_at_once(one_of_two_refuses):
    """The three that Envoy allows by default are fewer than whoever asks when a picker dies."""
    _, client = await one_of_two_refuses(without_memory)
    assert await asyncio.gather(*(status_of(client) for _ in range(200))) == [200] * 200


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=str)
async def test_a_lost_picker_costs_what_it_has_answered_and_nothing_else(way, opened, tmp_path):
    """Killed, frozen or told to go: of those who ask at that moment each loses one at most."""
    pods = await opened.enter_async_context(running_pods(2))
    pickers = []
    for name in ("lost", "staying"):
        (tmp_path / name).mkdir()
        flags = ("--secure-serving=false", "--drain-timeout=20s")
        running = running_epp(tmp_path / name, pods, *flags)
        pickers.append(await opened.enter_async_context(running))
    lost, staying = pickers
    options = BootstrapOptions(picker_address=f"{lost.address},{staying.address}", plaintext=True)
    envoy = await opened.enter_async_context(running_envoy(options, tmp_path))
    client = await opened.enter_async_context(http_client(envoy))
    traffic = ClosedLoop(client, pods, CLIENTS)
    await traffic.more(100)
    lost.signal(way)
    await traffic.more(300)
    failed_at_first = traffic.statuses.total() - traffic.statuses[200]
    await traffic.more(100)
    await traffic.end()
    failed = traffic.statuses.total() - traffic.statuses[200]
    assert failed == failed_at_first, traffic.statuses
    assert failed <= (0 if way == signal.SIGTERM else CLIENTS), traffic.statuses


async def test_a_request_goes_to_three_pickers_at_most(opened, tmp_path):
    """One that kills whoever reads it does not kill all of them."""
    pods = await opened.enter_async_context(running_pods(1))
    accepted = []

    async def die(reader, writer):
        await reader.read(1)
        accepted.append(writer.get_extra_info("sockname")[1])
        writer.transport.abort()

    servers = [
        await opened.enter_async_context(await asyncio.start_server(die, "127.0.0.1", 0))
        for _ in range(5)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    options = BootstrapOptions(
        picker_address=",".join(f"127.0.0.1:{port}" for port in ports), plaintext=True
    )
    envoy = await opened.enter_async_context(running_envoy(options, tmp_path, without_memory))
    client = await opened.enter_async_context(http_client(envoy))
    async with client.post(PATH, data=body()) as response:
        assert response.status == 500
    assert len(set(accepted)) == len(accepted) == 3
    assert not pods[0].received
