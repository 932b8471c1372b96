"""WebSockets, as the realtime API uses them: picked by their headers, then left alone."""

import asyncio

import pytest

from epp.flags.values import BodyMode
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.h2_client import http2_client
from tests.envoy.rig import http_client, http_connections, running_envoy, until
from tests.envoy.upstream import running_pods

pytestmark = pytest.mark.envoy

PATH = "/v1/realtime"


async def echoed(socket, count):
    """Send `count` messages, one after another, and return what comes back."""
    received = []
    for number in range(count):
        await socket.send_str(f"message {number}")
        async with asyncio.timeout(10):
            received.append((await socket.receive()).data)
    return received


@pytest.mark.parametrize("mode", BodyMode)
async def test_a_websocket_works_in_every_mode(mode, wire):
    """Waiting for the end of its body would be waiting for ever; its lease ends when it closes."""
    wired = await wire(request_body_mode=mode)
    async with wired.client.ws_connect(PATH) as socket:
        assert await echoed(socket, 3) == [f"message {number}" for number in range(3)]
        assert wired.last_stream.destination() == wired.pod.address
        assert wired.picker.open_leases == 1
    await until(lambda: not wired.picker.open_leases, "the lease to be released")
    assert wired.last_stream.count("> request_body") == 0


def connect(path):
    """The headers of an extended CONNECT, as a browser sends them."""
    return [
        (":method", "CONNECT"),
        (":protocol", "websocket"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "llm"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ]


@pytest.mark.parametrize("mode", BodyMode)
async def test_a_websocket_over_http2_works_in_every_mode(mode, wire):
    """It is an extended CONNECT (RFC 8441), whose stream stays open like that of an upgrade."""
    wired = await wire(request_body_mode=mode)
    async with http2_client(wired.envoy.port) as client:
        assert client.takes_extended_connect
        stream = await client.open(connect(PATH))
        await client.until(lambda: stream in client.statuses)
        assert client.statuses[stream] == "200"
        for number in range(3):
            await client.send_text(stream, f"message {number}")
            assert await client.received_text(stream) == f"message {number}"
        assert wired.last_stream.destination() == wired.pod.address
        assert wired.picker.open_leases == 1
    await until(lambda: not wired.picker.open_leases, "the lease to be released")
    assert wired.last_stream.count("> request_body") == 0


@pytest.mark.parametrize("response_mode", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
async def test_a_websocket_over_http2_works_through_a_full_duplex_gateway(response_mode, wire):
    """The picker answers at the headers, and passes the messages back as they come."""
    wired = await wire(edit=no_filters_of_its_own, response_body_mode=response_mode)
    async with http2_client(wired.envoy.port) as client:
        stream = await client.open(connect(PATH))
        await client.until(lambda: stream in client.statuses)
        for number in range(3):
            await client.send_text(stream, f"message {number}")
            assert await client.received_text(stream) == f"message {number}"
        assert wired.last_stream.order[:2] == ["> request_headers", "< request_headers"]
        assert wired.last_stream.count("> request_body") >= 3
    await until(lambda: not wired.picker.open_leases, "the lease to be released")


def no_filters_of_its_own(document):
    http_connections(document)["upgrade_configs"] = [{"upgrade_type": "websocket"}]


@pytest.mark.parametrize("response_mode", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
async def test_a_websocket_works_through_a_full_duplex_gateway(response_mode, wire):
    """Another gateway has one ext_proc for all: the picker chooses at once and echoes the rest."""
    wired = await wire(edit=no_filters_of_its_own, response_body_mode=response_mode)
    async with wired.client.ws_connect(PATH) as socket:
        assert await echoed(socket, 3) == [f"message {number}" for number in range(3)]
        assert wired.last_stream.order[:2] == ["> request_headers", "< request_headers"]
        assert wired.last_stream.count("> request_body") >= 3
        # What the picker passes back it also sees through when it drains.
        wired.picker.server.end_bypassed()
        assert wired.picker.server.open_streams == 1
        assert await echoed(socket, 1) == ["message 0"]
    await until(lambda: not wired.picker.open_leases, "the lease to be released")


async def test_a_websocket_works_in_the_round_robin_arm(tmp_path):
    """There is no picker to ask, and nothing else is different."""
    async with running_pods(1) as (pod,):
        options = BootstrapOptions(round_robin=(pod.address,))
        async with (
            running_envoy(options, tmp_path) as envoy,
            http_client(envoy) as client,
            client.ws_connect(PATH) as socket,
        ):
            assert await echoed(socket, 2) == ["message 0", "message 1"]
