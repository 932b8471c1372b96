"""Engines that connect to the picker, honest ones and others."""

import asyncio
import socket

import pytest

from epp.core.knowledge.exact_parameters import PodDiscoveryConfig
from epp.core.kv_events.stream import StreamState
from epp.shell.engines import kv_event_server, kv_events
from epp.shell.engines.kv_event_server import Rejection, address_in
from tests.shell.engines.kv_event_picker import Picker, eventually, prompt
from tests.shell.engines.kv_event_pod import KVEventPod

CENTRAL = {"zmq_endpoint": "tcp://127.0.0.1:0", "discover_pods": False}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes seconds takes parts of them."""
    for name in ("BACKOFF_S", "BACKOFF_S_MAX", "WATCH_S", "NO_SOURCE_S"):
        monkeypatch.setattr(kv_events, name, 0.02)


async def port_of(picker):
    """Where engines connect to."""
    server = picker.listener.server
    await eventually(lambda: server.port)
    return server.port


def turned(picker, why):
    return picker.listener.server.turned[why]


def topic_of(endpoint):
    return f"kv@{endpoint.address}@model".encode()


async def gone(reader):
    """Until the picker closes a connection."""
    async with asyncio.timeout(20.0):
        try:
            while await reader.read(65_536):
                pass
        except ConnectionError:
            pass


async def test_an_engine_that_connects_is_heard():
    """By its address, whatever its topic; and named when it is gone."""
    async with KVEventPod() as pod, Picker(pod, **CENTRAL) as picker:
        assert "has not connected to port" in picker.row().problem
        await pod.connect(await port_of(picker))
        await eventually(lambda: picker.live)
        pod.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)
        row = picker.row()
        assert (row.problem, row.complete) == ("", True)
        assert pod.asked == 0, "it is not asked where it publishes"
        pod.cut()
        await eventually(lambda: "closed the connection" in picker.row().problem)
        await pod.connect(await port_of(picker))
        await eventually(lambda: not picker.row().problem)


async def test_engines_of_one_address_are_told_apart_by_their_topics():
    async with KVEventPod() as one, KVEventPod() as other, Picker(one, other, **CENTRAL) as picker:
        port = await port_of(picker)
        for pod, endpoint in zip((one, other), picker.endpoints, strict=True):
            await pod.connect(port, topic=topic_of(endpoint))
        one.serve(prompt(1))
        other.serve(prompt(2))
        await eventually(lambda: picker.believed(prompt(1), slot=0) == 32)
        await eventually(lambda: picker.believed(prompt(2), slot=1) == 32)
        assert picker.believed(prompt(1), slot=1) == picker.believed(prompt(2), slot=0) == 0


async def test_what_an_engine_kept_is_asked_for_where_it_says():
    """Engines that connect bind the port of old events all the same."""
    async with KVEventPod() as pod:
        pod.serve(prompt(1))
        ports = PodDiscoveryConfig(replay_socket_port=pod.replay_port)
        async with Picker(pod, **CENTRAL, pod_discovery_config=ports) as picker:
            await pod.connect(await port_of(picker))
            await eventually(lambda: picker.believed(prompt(1)) == 32)
            assert pod.replayed == 1


async def test_nobody_speaks_for_another(monkeypatch):
    """What it says is counted, and after some of it its address is not listened to for a while."""
    monkeypatch.setattr(kv_event_server, "UNKNOWN_MESSAGES_MAX", 3)
    async with KVEventPod() as liar, KVEventPod() as honest:
        liar.host = "127.0.0.2"
        async with Picker(liar, honest, **CENTRAL) as picker:
            port = await port_of(picker)
            topic = topic_of(picker.endpoints[1])
            reader = await liar.connect(port, host="127.0.0.2", topic=topic)
            for part in range(5):
                liar.serve(prompt(part))
            await gone(reader)
            assert turned(picker, Rejection.LIE) == 4
            assert picker.believed(prompt(0), slot=1) == 0
            await liar.connect(port, host="127.0.0.2")
            await eventually(lambda: turned(picker, Rejection.STRANGER) == 1)
            assert picker.listener.snapshot().faults[Rejection.LIE] == 4


@pytest.mark.parametrize("topic", [b"kv@127.0.0.1:1@model", b"kv@127.0.0.1@model", b"", b"else"])
async def test_a_topic_that_names_none_of_several_is_counted(topic):
    async with KVEventPod() as one, KVEventPod() as other, Picker(one, other, **CENTRAL) as picker:
        await one.connect(await port_of(picker), topic=topic)
        one.serve(prompt(1))
        await eventually(lambda: turned(picker, Rejection.TOPIC) == 1)
        assert picker.believed(prompt(1)) == 0


async def test_what_is_no_message_of_events_is_counted():
    async with KVEventPod() as pod, Picker(pod, **CENTRAL) as picker:
        await pod.connect(await port_of(picker))
        pod.send(b"one part")
        await eventually(lambda: turned(picker, Rejection.TOPIC) == 1)
        pod.serve(prompt(1))
        await eventually(lambda: picker.believed(prompt(1)) == 32)


async def test_a_stranger_is_kept_unread_and_closed(monkeypatch):
    """And of them no more than a few."""
    monkeypatch.setattr(kv_event_server, "HANDSHAKE_S_MAX", 0.2)
    monkeypatch.setattr(kv_event_server, "STRANGERS_MAX", 1)
    async with KVEventPod() as pod, Picker(pod, **CENTRAL) as picker:
        port = await port_of(picker)
        readers = [await pod.connect(port, host="127.0.0.9") for _ in range(3)]
        for reader in readers:
            await gone(reader)
        assert turned(picker, Rejection.STRANGER) == 3


async def test_who_does_not_say_who_it_is_is_closed(monkeypatch):
    monkeypatch.setattr(kv_event_server, "HANDSHAKE_S_MAX", 0.1)
    async with KVEventPod() as pod, Picker(pod, **CENTRAL) as picker:
        reader, writer = await asyncio.open_connection("127.0.0.1", await port_of(picker))
        await gone(reader)
        writer.close()
        reader = await pod.connect(await port_of(picker), kind=b"REQ")
        await gone(reader)


async def test_connections_of_one_address_are_bounded():
    """One more than it has endpoints."""
    async with KVEventPod() as pod, Picker(pod, **CENTRAL) as picker:
        port = await port_of(picker)
        for _ in range(2):
            await pod.connect(port)
        await eventually(lambda: picker.live)
        await gone(await pod.connect(port))
        assert turned(picker, Rejection.CONNECTIONS) == 1


async def test_an_endpoint_has_one_source_at_a_time(monkeypatch):
    """Another takes over once the first has long been quiet."""
    async with KVEventPod() as pod, KVEventPod() as again, Picker(pod, **CENTRAL) as picker:
        port = await port_of(picker)
        first = await pod.connect(port)
        await eventually(lambda: picker.live)
        await again.connect(port)
        again.serve(prompt(1))
        await eventually(lambda: turned(picker, Rejection.TAKEN) == 1)
        assert picker.believed(prompt(1)) == 0
        monkeypatch.setattr(kv_events, "TAKEN_OVER_S", 0.0)
        again.serve(prompt(2))
        await gone(first)
        await eventually(lambda: picker.believed(prompt(2)) == 32)


async def test_who_has_connected_is_not_called():
    """Both ways are open; an endpoint is heard on one."""
    both = {"zmq_endpoint": "tcp://127.0.0.1:0"}
    async with KVEventPod(sources=b"{}") as pod, Picker(pod, **both) as picker:
        await eventually(lambda: "lists no source" in picker.row().problem)
        await pod.connect(await port_of(picker))
        await eventually(lambda: picker.live)
        assert picker.row().problem == ""
        pod.cut()
        asked = pod.asked
        await eventually(lambda: pod.asked > asked)


async def test_an_endpoint_that_left_does_not_speak():
    async with KVEventPod() as pod, Picker(pod, **CENTRAL) as picker:
        reader = await pod.connect(await port_of(picker))
        await eventually(lambda: picker.live)
        picker.replace()
        await gone(reader)
        assert picker.listener.rows() == []


async def test_a_port_that_is_taken_is_named_and_tried_again(monkeypatch):
    monkeypatch.setattr(kv_event_server, "LISTEN_AGAIN_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with KVEventPod() as pod:
            at = CENTRAL | {"zmq_endpoint": f"tcp://127.0.0.1:{port}"}
            async with Picker(pod, **at) as picker:
                await eventually(lambda: "cannot be opened" in picker.row().problem)
                taken.close()
                await eventually(lambda: "has not connected" in picker.row().problem)
                assert picker.row().state is StreamState.NONE


@pytest.mark.parametrize(
    ("topic", "address"),
    [
        (b"kv@10.0.0.1:8000@meta/llama", "10.0.0.1:8000"),
        (b"kv@10.0.0.1@model", "10.0.0.1"),
        (b"kv@[fe80::1]:1", "[fe80::1]:1"),
        (b"", ""),
        (b"kv-events", ""),
        (b"kv@\xff@m", "\ufffd"),
    ],
)
def test_an_address_is_read_of_a_topic(topic, address):
    assert address_in(topic) == address
