"""The gRPC pump, with a real client on loopback."""

import asyncio

import grpc
import pytest
import structlog
from envoy_data_plane.envoy.service.ext_proc import v3
from grpc_health.v1 import health_pb2

import epp.shell.gateway.server
from epp.core.protocol.messages import ResponseHeaders
from epp.core.protocol.session import _HANDLERS, Phase, Session, SessionSettings
from epp.shell.gateway.health import Health
from epp.shell.gateway.server import ExtProcServer, grpc_server
from tests import gateway as gw
from tests.envoy.rig import until
from tests.streams import TIMEOUT_S, Call, channel_to
from tests.test_hermetic import pods

RECEIVE_BYTES_MAX = 32 * 1024 * 1024
BYPASSED = gw.protocol(response=gw.NONE)


class Told(gw.Told):
    """Also what is told of streams."""

    def __init__(self):
        super().__init__()
        self.opened = 0
        self.codes = []

    def stream_opened(self):
        self.opened += 1

    def stream_closed(self, code, duration_s):
        assert duration_s >= 0
        self.codes.append(code)

    def stream_shed(self, refusal):
        self.events.append(f"shed {refusal.status}")

    def connection_cut(self):
        self.events.append("connection cut")

    def drain_cut(self, streams):
        raise AssertionError("whoever drains tells it, not the server")


class Rig:
    """A server on loopback and what is behind it."""

    def __init__(self):
        self.scheduler = pods((0, 0.1), (0, 0.1))
        self.told = Told()
        self.gateways = []
        self.ext_proc = ExtProcServer(self._session, self.told)
        self.health = Health()
        self.address = ""
        self.channel = None

    def _session(self, gateway):
        self.gateways.append(gateway)
        return Session(self.scheduler, SessionSettings(), gateway, self.told, lambda: "generated")

    @property
    def leases(self):
        return self.scheduler.ledger.open_leases

    def call(self, channel=None):
        return Call(channel or self.channel)

    async def closed(self, streams):
        """Until so many streams have been closed, none being open."""
        await until(
            lambda: len(self.told.codes) == streams and not self.ext_proc.open_streams,
            f"the end of {streams} streams, {self.told.codes} have ended",
        )

    async def served_response(self):
        """Let the server learn that this gateway shows responses."""
        call = self.call()
        await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
        await call.exchange(gw.response_headers(end=True), answers=1)
        assert await call.end() is grpc.StatusCode.OK
        await self.closed(len(self.told.codes) or 1)


@pytest.fixture
async def rig():
    rig = Rig()
    server = grpc_server(RECEIVE_BYTES_MAX)
    rig.ext_proc.add_to(server)
    rig.health.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    rig.address = f"127.0.0.1:{port}"
    rig.server = server
    await server.start()
    async with channel_to(rig.address) as channel:
        rig.channel = channel
        yield rig
    rig.health.close()
    await server.stop(0)


async def test_a_request_and_its_response_go_through_one_stream(rig):
    """Every phase of full duplex, and the lease ends with the response."""
    call = rig.call()
    head, body = await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    assert gw.destination(head).startswith("192.168.1.")
    assert gw.streamed([body]) == (gw.prompt(), [True])
    assert rig.leases == 1
    answers = await call.exchange(
        gw.response_headers(200), gw.response_body(b"data", end=False), answers=2
    )
    assert rig.leases == 1
    answers += await call.exchange(gw.response_trailers(), answers=1)
    assert gw.kinds(answers) == ["response_headers", "response_body", "response_trailers"]
    assert rig.leases == 0
    assert await call.end() is grpc.StatusCode.OK
    await rig.closed(1)
    assert rig.told.codes == ["OK"]
    assert rig.told.events == ["decided", "response started", "completed complete"]


async def test_streams_of_one_connection_do_not_mix(rig):
    """A gateway multiplexes; each stream gets its own body back, all being open at once."""
    calls = [rig.call() for _ in range(50)]
    bodies = [gw.prompt(f"prompt {number}" * number) for number in range(len(calls))]
    for call in calls:
        await call.send(gw.request_headers())
    await until(lambda: rig.ext_proc.open_streams == len(calls), "all streams to be open")
    for call, body in zip(calls, bodies, strict=True):
        await call.send(gw.request_body(body[:9], end=False), gw.request_body(body[9:]))
    for call, body in zip(calls, bodies, strict=True):
        head, *echo = await call.answers(2)
        assert gw.kind(head) == "request_headers"
        assert gw.streamed(echo)[0] == body
    assert rig.leases == len(calls)
    for call in calls:
        await call.exchange(gw.response_headers(end=True), answers=1)
        assert await call.end() is grpc.StatusCode.OK
    await rig.closed(len(calls))
    assert rig.leases == 0


async def test_a_gateway_may_open_a_connection_a_request(rig):
    """It is still one gateway."""
    for _ in range(5):
        async with channel_to(rig.address, use_local_subchannel_pool=1) as channel:
            call = rig.call(channel)
            await call.exchange(gw.request_headers(end=True), answers=1)
            await call.exchange(gw.response_headers(end=True), answers=1)
            assert await call.end() is grpc.StatusCode.OK
    await rig.closed(5)
    assert len({id(gateway) for gateway in rig.gateways}) == 1
    assert rig.leases == 0


async def test_a_half_close_right_after_the_body_is_answered(rig):
    """Some gateways send the body without its end and close their side."""
    call = rig.call()
    await call.send(gw.request_headers(), gw.request_body(gw.prompt(), end=False))
    await call.grpc.done_writing()
    head, body = await call.answers(2)
    assert gw.destination(head)
    assert gw.streamed([body]) == (gw.prompt(), [True])
    assert await call.ended() is grpc.StatusCode.OK


async def test_a_stream_without_a_message_ends_well(rig):
    """Envoy opens streams before it knows whether it needs them."""
    assert await rig.call().end() is grpc.StatusCode.OK
    await rig.closed(1)
    assert rig.told.events == []


@pytest.mark.parametrize(
    ("messages", "answers"),
    [
        pytest.param([], 0, id="before a message"),
        pytest.param([gw.request_headers()], 0, id="after the headers"),
        pytest.param([gw.request_headers(), gw.request_body(b"{", end=False)], 0, id="in the body"),
        pytest.param(
            [gw.request_headers(), gw.request_body(gw.prompt())], 2, id="after the decision"
        ),
        pytest.param(
            [gw.request_headers(), gw.request_body(gw.prompt()), gw.response_headers()],
            3,
            id="after the response headers",
        ),
        pytest.param(
            [
                gw.request_headers(),
                gw.request_body(gw.prompt()),
                gw.response_headers(),
                gw.response_body(b"x", end=False),
            ],
            4,
            id="in the response",
        ),
    ],
)
@pytest.mark.parametrize("way", ["cancelled", "half-closed"])
async def test_whenever_a_stream_ends_its_lease_ends(rig, messages, answers, way):
    """The gateway is known to show responses, so there is nothing to wait for."""
    await rig.served_response()
    call = rig.call()
    await call.exchange(*messages, answers=answers)
    await until(lambda: rig.told.opened == (2 if messages else rig.told.opened), "the stream")
    if way == "cancelled":
        call.grpc.cancel()
    else:
        await call.grpc.done_writing()
    await until(lambda: not rig.ext_proc.open_streams and not rig.leases, "the end of the lease")
    assert rig.scheduler.pool.columns.inflight_requests[:2].tolist() == [0, 0]


async def test_a_lost_connection_ends_the_leases_of_all_its_streams(rig):
    """A gateway that dies says no goodbye."""
    await rig.served_response()
    async with channel_to(rig.address, use_local_subchannel_pool=1) as channel:
        for _ in range(8):
            await rig.call(channel).exchange(gw.request_headers(end=True), answers=1)
        assert rig.leases == 8
    await rig.closed(9)
    assert rig.leases == 0
    # gRPC tells it as the end of the messages or as a cancellation, whichever it sees first.
    assert set(rig.told.codes[1:]) <= {"OK", "CANCELLED"}


async def test_a_message_over_the_limit_costs_its_stream_alone(rig):
    """The connection and its other streams live."""
    other, call = rig.call(), rig.call()
    await other.send(gw.request_headers())
    await call.send(gw.request_headers())
    await until(lambda: rig.ext_proc.open_streams == 2, "both streams")
    await call.send(gw.request_body(bytes(RECEIVE_BYTES_MAX)))
    code, _ = await call.failed()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: rig.ext_proc.open_streams == 1, "the end of the stream")
    assert len(await other.exchange(gw.request_body(gw.prompt()), answers=2)) == 2


async def test_bytes_that_are_no_message_are_an_invalid_argument(rig):
    """Said in one sentence, counted, nothing logged as a failure of ours."""
    with structlog.testing.capture_logs() as lines:
        call = rig.call()
        await call.send(b"\xff\xff")
        code, details = await call.failed()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "the message is not an ext_proc ProcessingRequest"
    await rig.closed(1)
    assert rig.told.codes == ["INVALID_ARGUMENT"]
    assert lines == []


async def test_a_message_that_its_phase_does_not_allow_is_an_invalid_argument(rig):
    """And what the stream held is given back."""
    await rig.served_response()
    call = rig.call()
    await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    await call.send(gw.request_headers())
    code, details = await call.failed()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "phase" in details
    await rig.closed(2)
    assert rig.leases == 0
    assert "violated: RequestHeaders in routed" in rig.told.events


async def test_a_defect_costs_one_stream_and_is_logged(rig, monkeypatch):
    """The gateway is told INTERNAL, the log has the exception, other streams go on."""
    await rig.served_response()
    other, call = rig.call(), rig.call()
    await other.send(gw.request_headers())
    await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)

    def broken(*_):
        raise ZeroDivisionError("the defect")

    monkeypatch.setitem(_HANDLERS, (Phase.ROUTED, ResponseHeaders), broken)
    with structlog.testing.capture_logs() as lines:
        await call.send(gw.response_headers())
        code, details = await call.failed()
    assert (code, details) == (grpc.StatusCode.INTERNAL, "the picker failed")
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("a stream failed", "error")
    assert "routed" in line["session"]
    assert "test1" not in str(line), "prompts never reach a log"
    await until(lambda: rig.told.codes == ["OK", "INTERNAL"], "the end of the stream")
    assert rig.leases == 0
    assert len(await other.exchange(gw.request_body(gw.prompt()), answers=2)) == 2


async def test_a_refusal_ends_the_stream_with_ok(rig):
    """It is an answer, not an error of the stream; the gateway need not close it."""
    call = rig.call()
    (answer,) = await call.exchange(gw.request_headers(), gw.request_body(b"{"), answers=1)
    assert gw.refusal(answer)[0] == 400
    assert await call.ended() is grpc.StatusCode.OK
    await rig.closed(1)
    assert rig.told.codes == ["OK"]


async def test_draining_ends_bypassed_streams_and_leaves_the_others(rig):
    """OK where no byte of the response is lost by it; full duplex and unrouted ones live on."""
    bypassed, full_duplex, unrouted = rig.call(), rig.call(), rig.call()
    await bypassed.exchange(
        gw.request_headers(modes=BYPASSED), gw.request_body(gw.prompt()), answers=2
    )
    await full_duplex.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    await unrouted.send(gw.request_headers(modes=BYPASSED))
    await until(lambda: rig.ext_proc.open_streams == 3, "all streams")
    rig.ext_proc.end_bypassed()
    assert await bypassed.ended() is grpc.StatusCode.OK
    await until(lambda: rig.ext_proc.open_streams == 2, "the end of the one")
    assert rig.told.codes == ["OK"]

    # Full duplex is echoed to its end.
    answers = await full_duplex.exchange(
        gw.response_headers(), gw.response_body(b"x", end=False), gw.response_body(b"y"), answers=3
    )
    assert gw.streamed(answers[1:]) == (b"xy", [False, True])
    assert await full_duplex.end() is grpc.StatusCode.OK
    # The other one is routed first, and then no longer needed.
    assert len(await unrouted.exchange(gw.request_body(gw.prompt()), answers=2)) == 2
    assert await unrouted.ended() is grpc.StatusCode.OK


async def test_a_stream_opened_while_draining_is_served(rig):
    """Routed as any other, and ended as soon as nothing is lost by it."""
    rig.ext_proc.end_bypassed()
    call = rig.call()
    head, _ = await call.exchange(
        gw.request_headers(modes=BYPASSED), gw.request_body(gw.prompt()), answers=2
    )
    assert gw.destination(head)
    assert await call.ended() is grpc.StatusCode.OK
    await rig.closed(1)


async def test_draining_never_cuts_answers_that_are_on_their_way(rig):
    """A slow gateway still gets the whole body of a request that is routed."""
    body = gw.prompt("x" * 24_000_000)
    call = rig.call()
    await call.send(gw.request_headers(modes=BYPASSED), gw.request_body(body))
    # Routed, but the gateway reads nothing: the answers cannot all be on the wire.
    await until(lambda: rig.leases, "the decision")
    rig.ext_proc.end_bypassed()
    answers = []
    while (message := await call.grpc.read()) is not grpc.aio.EOF:
        answers.append(v3.ProcessingResponse.parse(message))
    assert gw.streamed(answers[1:])[0] == body
    assert await call.grpc.code() is grpc.StatusCode.OK


async def test_draining_twice_is_draining_once(rig):
    """Whoever drains may be hurried."""
    call = rig.call()
    await call.exchange(gw.request_headers(modes=BYPASSED), gw.request_body(gw.prompt()), answers=2)
    rig.ext_proc.end_bypassed()
    rig.ext_proc.end_bypassed()
    assert await call.ended() is grpc.StatusCode.OK
    await rig.closed(1)


async def test_gateways_are_told_apart_by_host_and_few_are_remembered(rig, monkeypatch, tmp_path):
    """The one unheard of for the longest is forgotten."""
    monkeypatch.setattr(epp.shell.gateway.server, "GATEWAYS_MAX", 1)
    server = grpc_server(RECEIVE_BYTES_MAX)
    rig.ext_proc.add_to(server)
    socket = f"unix:{tmp_path}/picker"
    server.add_insecure_port(socket)
    await server.start()
    async with channel_to(socket) as other:
        for channel in (rig.channel, rig.channel, other, other, rig.channel):
            assert await rig.call(channel).end() is grpc.StatusCode.OK
    await server.stop(0)
    first, again, second, second_again, first_anew = rig.gateways
    assert first is again
    assert second is second_again
    assert second is not first
    assert first_anew is not first, "it was forgotten for the second"


async def test_health_is_served_on_the_same_port(rig):
    """For the gateway that checks the port that it uses."""
    check = rig.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    request = health_pb2.HealthCheckRequest(service="envoy.service.ext_proc.v3.ExternalProcessor")
    answer = await check(request, timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    rig.health.set_ready(True)
    answer = await check(request, timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_stopping_the_server_ends_every_stream(rig):
    """Nothing is left open, no lease is left, whoever is cut is told so."""
    await rig.served_response()
    calls = [rig.call() for _ in range(3)]
    for call in calls:
        await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    async with asyncio.timeout(TIMEOUT_S):
        await rig.server.stop(0)
    await rig.closed(4)
    assert rig.leases == 0
    for call in calls:
        code, _ = await call.failed()
        assert code is grpc.StatusCode.UNAVAILABLE
