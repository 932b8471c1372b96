"""Requests reach the pod byte for byte, in every mode that a gateway may choose."""

import asyncio
import hashlib
import io

import grpc.aio
import pytest

from epp.core.protocol.messages import BODY_CHUNK_BYTES_MAX, DESTINATION_HEADER
from epp.core.protocol.session import SessionSettings
from epp.flags.values import BodyMode
from tests.envoy.rig import RawConnection, http_connections, until

pytestmark = pytest.mark.envoy

SIZES_BYTES = (20, 8_192, 1_000_000, 8_000_000)
PATH = "/v1/completions"
TOKENS_PATH = "/inference/v1/generate"
TOKENS_BODY = b'{"token_ids":[1, 2]}'
"""The only prompt that fits into 20 bytes: completions need 25."""
OPAQUE_PATH = "/tokenize"
"""Not an API that the picker reads: whatever the body is, it is passed on."""
LATE_S = 0.5


def body_of(size_bytes):
    """A completions body of exactly that size, with text beyond ASCII; token ids in 20 bytes."""
    if size_bytes == len(TOKENS_BODY):
        return TOKENS_BODY
    head, tail = b'{"model":"m","prompt":"', b'"}'
    room = size_bytes - len(head) - len(tail)
    text = ("prompt é ü 漢 " * (room // 16 + 1)).encode()[:room]
    return head + text.decode(errors="ignore").encode().ljust(room) + tail


async def post(client, body):
    path = TOKENS_PATH if body == TOKENS_BODY else PATH
    async with client.post(path, data=io.BytesIO(body)) as response:
        await response.read()
        return response.status


def assert_arrived(pod, body):
    received = pod.received[-1]
    assert received.body_bytes == len(body)
    assert received.body_sha256 == hashlib.sha256(body).hexdigest()


def streamed_pieces(stream):
    return [
        answer.request_body.response.body_mutation.streamed_response
        for answer in stream.answered
        if answer.request_body is not None
    ]


@pytest.mark.parametrize("size_bytes", SIZES_BYTES)
def test_the_bodies_of_these_tests_have_the_size_they_say(size_bytes):
    """Otherwise the tests below would show less than they claim."""
    assert len(body_of(size_bytes)) == size_bytes


async def test_full_duplex_bodies_arrive_byte_for_byte(wire):
    """From 20 bytes to 8 MB; nothing is answered before the last chunk has come."""
    wired = await wire()
    for size_bytes in SIZES_BYTES:
        body = body_of(size_bytes)
        assert await post(wired.client, body) == 200
        assert_arrived(wired.pod, body)
        stream = wired.last_stream
        asked_last = max(i for i, entry in enumerate(stream.order) if entry == "> request_body")
        assert stream.order.index("< request_headers") > asked_last
        pieces = streamed_pieces(stream)
        assert b"".join(piece.body for piece in pieces) == body
        assert max(len(piece.body) for piece in pieces) <= BODY_CHUNK_BYTES_MAX
        assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_buffered_bodies_arrive_byte_for_byte(wire):
    """Headers are answered at once, the one body message with the destination."""
    wired = await wire(request_body_mode=BodyMode.BUFFERED)
    for size_bytes in SIZES_BYTES:
        body = body_of(size_bytes)
        assert await post(wired.client, body) == 200
        assert_arrived(wired.pod, body)
        assert wired.last_stream.order[:4] == [
            "> request_headers",
            "< request_headers",
            "> request_body",
            "< request_body",
        ]
        assert wired.last_stream.destination() == wired.pod.address


async def test_a_body_beyond_the_partial_buffer_arrives_byte_for_byte(wire):
    """BUFFERED_PARTIAL shows the picker a part; the pod gets the whole."""
    wired = await wire(request_body_mode=BodyMode.BUFFERED_PARTIAL)
    for size_bytes in (8_192, 1_000_000):
        body = body_of(size_bytes)
        assert await post(wired.client, body) == 200
        assert_arrived(wired.pod, body)
        assert wired.last_stream.count("> request_body") == 1


async def test_a_streamed_body_may_come_long_after_its_headers(wire):
    """STREAMED: the destination is in the header answer, the body comes 500 ms after that."""
    wired = await wire(request_body_mode=BodyMode.STREAMED)
    body = body_of(200_000)
    async with RawConnection.open(wired.envoy.port) as connection:
        await connection.send_head("POST", PATH, content_length=len(body))
        await until(
            lambda: wired.recorder.streams and wired.last_stream.destination(),
            "the picker to answer the headers",
        )
        assert wired.last_stream.order == ["> request_headers", "< request_headers"]
        assert wired.last_stream.destination() == wired.pod.address
        # What a slow client does; nothing is waited for.
        await asyncio.sleep(LATE_S)
        await connection.send(body)
        status, _ = await connection.read_head()
    assert status == 200
    assert_arrived(wired.pod, body)


async def test_a_body_that_the_picker_never_sees_arrives(wire):
    """NONE: scheduled at the headers, the body passes by."""
    wired = await wire(request_body_mode=BodyMode.NONE)
    body = body_of(200_000)
    assert await post(wired.client, body) == 200
    assert_arrived(wired.pod, body)
    assert wired.last_stream.count("> request_body") == 0


@pytest.mark.parametrize("mode", BodyMode)
async def test_a_request_without_a_body_is_served_in_every_mode(mode, wire):
    """GET /v1/models has nothing to wait for: it is answered at its headers."""
    wired = await wire(request_body_mode=mode)
    async with wired.client.get("/v1/models") as response:
        assert response.status == 200
        assert (await response.json())["pod"] == wired.pod.name
    assert wired.last_stream.order[:2] == ["> request_headers", "< request_headers"]
    await until(lambda: not wired.picker.open_leases, "the lease to be released")


async def test_a_body_without_its_length_arrives(wire):
    """Chunked transfer encoding, one chunk at a time."""
    wired = await wire()
    body = body_of(100_000)
    async with RawConnection.open(wired.envoy.port) as connection:
        await connection.send_head("POST", PATH, transfer_encoding="chunked")
        for start in range(0, len(body), 10_000):
            await connection.send(b"%x\r\n%b\r\n" % (10_000, body[start : start + 10_000]))
        await connection.send(b"0\r\n\r\n")
        status, _ = await connection.read_head()
    assert status == 200
    assert_arrived(wired.pod, body)


async def test_the_pod_sees_the_clients_headers_and_no_control_headers(wire):
    """Ordinary headers pass once and unchanged, repeated ones stay repeated; ours are removed."""
    wired = await wire()
    headers = [
        ("x-custom", "kept"),
        ("cookie", "a=1"),
        ("x-llm-d-inference-objective", "interactive"),
        ("x-prefiller-host-port", "10.0.0.1:1"),
        ("x-vllm-priority", "-99"),
        ("x-request-id", "from-the-client"),
    ]
    async with wired.client.post(PATH, data=body_of(100), headers=headers) as response:
        assert response.status == 200
    received = wired.pod.received[-1].headers
    assert received["x-custom"] == "kept"
    assert received["cookie"] == "a=1"
    assert received["x-request-id"] == "from-the-client"
    assert received[DESTINATION_HEADER] == wired.pod.address
    assert "x-llm-d-inference-objective" not in received
    assert "x-prefiller-host-port" not in received
    assert "x-vllm-priority" not in received


@pytest.mark.parametrize("mode", BodyMode)
async def test_the_pod_sees_the_priority_of_the_objective_and_not_that_of_the_client(mode, wire):
    """With a body and without one. A request whose objective is unknown has priority 0."""
    settings = SessionSettings(priorities={"urgent": 7, "normal": 2}, engine_priority=True)
    wired = await wire(settings=settings, request_body_mode=mode)
    for objective, expected in (("urgent", "-7"), ("normal", "-2"), ("unknown", "0")):
        headers = {"x-vllm-priority": "-99", "x-llm-d-inference-objective": objective}
        async with wired.client.post(PATH, data=body_of(100), headers=headers) as response:
            assert response.status == 200
        assert wired.pod.received[-1].headers["x-vllm-priority"] == expected
        async with wired.client.get("/v1/models", headers=headers) as response:
            assert response.status == 200
        assert wired.pod.received[-1].headers["x-vllm-priority"] == expected


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
@pytest.mark.parametrize("target", ["a", "a-model-with-a-much-longer-name"])
async def test_a_rewritten_model_is_all_that_changes(mode, target, wire):
    """The pod gets the new name, shorter or longer, and every other byte as it was."""
    settings = SessionSettings(rewrite={"asked-for": target}.get)
    wired = await wire(request_body_mode=mode, settings=settings)
    template = (
        b'{ "prompt" : "h\\u00e9 <&> 1.50", "n":1.0,\n"model":  "%b" , "x": 12345678901234567890 }'
    )
    # A client that says so itself is not heard: the gateway strips it.
    headers = {"x-llm-d-model-name-rewrite": "of-the-client"}
    async with wired.client.post(PATH, data=template % b"asked-for", headers=headers) as response:
        assert response.status == 200
    assert_arrived(wired.pod, template % target.encode())


async def test_a_client_that_expects_100_continue_is_told_to_go_on(wire):
    """As curl does for large bodies: Envoy says so itself, the picker waits for the body."""
    wired = await wire()
    body = body_of(1_000_000)
    async with RawConnection.open(wired.envoy.port) as connection:
        await connection.send_head("POST", PATH, content_length=len(body), expect="100-continue")
        assert (await connection.read_head())[0] == 100
        await connection.send(body)
        assert (await connection.read_head())[0] == 200
    assert_arrived(wired.pod, body)


def accept_http1_trailers(document):
    connections = http_connections(document)
    connections["http_protocol_options"] = {"enable_trailers": True}


@pytest.mark.parametrize("mode", [m for m in BodyMode if m is not BodyMode.BUFFERED_PARTIAL])
async def test_a_request_with_trailers_is_served(mode, wire):
    """The end of the body comes in the trailers, not in a last chunk."""
    wired = await wire(request_body_mode=mode, edit=accept_http1_trailers)
    body = body_of(100_000)
    async with RawConnection.open(wired.envoy.port) as connection:
        await connection.send_head(
            "POST", PATH, transfer_encoding="chunked", te="trailers", trailer="x-end"
        )
        await connection.send(b"%x\r\n%b\r\n0\r\nx-end: yes\r\n\r\n" % (len(body), body))
        assert (await connection.read_head())[0] == 200
    assert_arrived(wired.pod, body)
    await until(lambda: not wired.picker.open_leases, "the lease to be released")


async def test_a_body_over_http2_arrives(wire):
    """The last chunk itself ends the stream there; gRPC's client sends it, framed its own way."""
    wired = await wire()
    message = b"m" * 300_000
    async with grpc.aio.insecure_channel(f"127.0.0.1:{wired.envoy.port}") as channel:
        # The pod does not answer as a gRPC server would: what counts is what it got.
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(OPAQUE_PATH)(message, timeout=10)
    assert_arrived(wired.pod, b"\0" + len(message).to_bytes(4, "big") + message)
    last = wired.last_stream.asked
    bodies = [question.request_body for question in last if question.request_body is not None]
    assert bodies[-1].end_of_stream


async def test_bodies_that_come_at_the_same_time_do_not_mix(wire):
    """Fifty clients at once, each body its own."""
    wired = await wire()
    bodies = [body_of(100_000 + number) for number in range(50)]
    statuses = await asyncio.gather(*(post(wired.client, body) for body in bodies))
    assert statuses == [200] * len(bodies)
    arrived = {(received.body_bytes, received.body_sha256) for received in wired.pod.received}
    assert arrived == {(len(body), hashlib.sha256(body).hexdigest()) for body in bodies}
