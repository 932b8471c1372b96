"""The gRPC pump, with a real client on loopback."""

import asyncio
import gc
import time
from contextlib import asynccontextmanager

import grpc
import pytest
import structlog
from envoy_data_plane.envoy.service.ext_proc import v3
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2

import epp.shell.gateway.ext_proc
import epp.shell.gateway.grpcio
from bench.raw_http2 import RawConnection
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.messages import ResponseHeaders
from epp.core.protocol.session import _HANDLERS, Phase, Session, SessionSettings
from epp.shell.gateway.connections import ALLOWANCE_MAX
from epp.shell.gateway.ext_proc import SHEDDING_STREAMS_MAX, ExtProc
from epp.shell.gateway.grpcio import GrpcioServer
from epp.shell.gateway.health import Health
from epp.shell.gateway.wire import Decoder
from epp.shell.process.memory import malloc_trim, resident_bytes
from tests import gateway as gw
from tests.envoy.rig import until
from tests.streams import TIMEOUT_S, Call, channel_to
from tests.test_hermetic import pods
from tests.transports import TRANSPORTS, carried, transport_of

RECEIVE_BYTES_MAX = 32 * 1024 * 1024
BYPASSED = gw.protocol(response=gw.NONE)


class Told(gw.Told):
    """Also what is told of streams."""

    def __init__(self):
        super().__init__()
        self.codes = []

    def stream_failed(self):
        self.events.append("stream failed")

    def stream_closed(self, code, duration_s):
        assert duration_s >= 0
        self.codes.append(code)

    def stream_shed(self, refusal):
        self.events.append(f"shed {refusal.status}")

    def connection_cut(self, reason):
        self.events.append(f"connection cut for {reason}")

    def drain_cut(self, streams):
        raise AssertionError("whoever drains tells it, not the server")


class Quiet(Decoder):
    """Says nothing of how it reads."""

    def report(self):
        return None


class Rig:
    """A server on loopback and what is behind it."""

    def __init__(self, resolver=None, **options):
        self.resolver = resolver
        self.queue = None
        self.settings = SessionSettings()
        self.scheduler = pods((0, 0.1), (0, 0.1))
        self.told = Told()
        self.budget = BodyBudget(64 * 1024 * 1024)
        self.gateways = []
        self.ext_proc = ExtProc(self._session, self.told, decoder=Quiet(), **options)
        self.health = Health()
        self.address = ""
        self.channel = None

    def _session(self, gateway):
        self.gateways.append(gateway)
        return Session(
            self.scheduler,
            self.settings,
            gateway,
            self.told,
            lambda: "generated",
            self.budget,
            self.resolver,
            self.queue,
        )

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


@asynccontextmanager
async def serving(transport="grpcio", age_max_s=None, **options):
    rig = Rig(**options)
    rig.server = transport_of(
        transport,
        {**rig.ext_proc.methods, **rig.health.methods},
        bytes_max=RECEIVE_BYTES_MAX,
        budget=rig.budget,
        age_max_s=age_max_s,
        cut=rig.told.connection_cut,
    )
    async with carried(rig.server) as port:
        rig.address = f"127.0.0.1:{port}"
        async with channel_to(rig.address) as channel:
            rig.channel = channel
            yield rig
        rig.health.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
async def rig(transport):
    async with serving(transport) as rig:
        yield rig


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
    if messages:
        await until(lambda: rig.told.codes and rig.ext_proc.open_streams == 1, "the stream")
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
    assert rig.told.events == ["failed: malformed-message"]
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
    assert "failed: protocol-violation" in rig.told.events


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
    assert (line["event"], line["log_level"]) == (
        "an ext_proc stream failed because of a defect of the picker",
        "error",
    )
    assert "routed" in line["session"]
    assert "test1" not in str(line), "prompts never reach a log"
    await until(lambda: rig.told.codes == ["OK", "INTERNAL"], "the end of the stream")
    assert rig.told.events.count("failed: internal") == 1
    assert rig.leases == 0
    assert len(await other.exchange(gw.request_body(gw.prompt()), answers=2)) == 2


@pytest.mark.parametrize("method", ["__init__", "closed"])
async def test_a_defect_at_either_end_of_a_stream_is_not_told_to_the_gateway(
    rig, monkeypatch, method
):
    """Nothing of it is quoted; it is counted, and no stream stays open for it."""

    def broken(*_):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(Session, method, broken)
    with structlog.testing.capture_logs() as lines:
        call = rig.call()
        if method == "__init__":
            code, details = await call.failed()
            assert (code, details) == (grpc.StatusCode.INTERNAL, "the picker failed")
        else:
            await call.send(gw.request_headers())
            assert await call.end() is grpc.StatusCode.OK
        await until(lambda: rig.told.events, "what is told of it")
    (line,) = lines
    assert (
        line["event"]
        == f"{'opening' if method == '__init__' else 'closing'} an ext_proc stream failed"
    )
    assert rig.told.events == ["stream failed"]
    assert rig.ext_proc.open_streams == 0
    assert len(rig.told.codes) == (method != "__init__")


async def test_a_refusal_ends_the_stream_with_ok(rig):
    """It is an answer, not an error of the stream; the gateway need not close it."""
    call = rig.call()
    (answer,) = await call.exchange(gw.request_headers(), gw.request_body(b"{"), answers=1)
    assert gw.refusal(answer)[0] == 400
    assert await call.ended() is grpc.StatusCode.OK
    await rig.closed(1)
    assert rig.told.codes == ["OK"]


async def test_a_request_that_does_not_become_whole_is_refused_in_time(rig):
    """Whatever is missing; those that are routed wait for their pods as long as they like."""
    silent, headless, unfinished, routed = (rig.call() for _ in range(4))
    await headless.send(gw.request_headers())
    await unfinished.send(gw.request_headers(), gw.request_body(gw.prompt()[:9], end=False))
    await routed.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    await until(lambda: rig.ext_proc.open_streams == 4, "all streams")
    await until(lambda: rig.budget.held_bytes, "the piece of a body")
    opened_s = time.monotonic()
    rig.ext_proc.refuse_overdue(opened_s + 59)
    assert rig.told.codes == []
    rig.ext_proc.refuse_overdue(opened_s + 61)
    rig.ext_proc.refuse_overdue(opened_s + 61)
    for call in (silent, headless, unfinished):
        (answer,) = await call.answers(1)
        assert gw.refusal(answer)[0] == 408
        assert await call.ended() is grpc.StatusCode.OK
    await until(lambda: rig.ext_proc.open_streams == 1, "the end of three")
    assert rig.told.codes == ["OK"] * 3
    assert rig.budget.held_bytes == 0
    assert len(await routed.exchange(gw.response_headers(end=True), answers=1)) == 1
    assert await routed.end() is grpc.StatusCode.OK


async def test_a_body_counts_until_the_gateway_has_taken_it(rig):
    """One that does not read its answers holds us, and is counted for it."""
    body = gw.prompt("x" * 24_000_000)
    call = rig.call()
    await call.send(gw.request_headers(modes=BYPASSED), gw.request_body(body))
    await until(lambda: rig.leases, "the decision")
    assert rig.budget.held_bytes >= len(body)

    async def take():
        while (await call.grpc.read()) is not grpc.aio.EOF:
            pass

    # Who has read the last answer may know it before we do.
    taking = asyncio.create_task(take())
    await until(lambda: not rig.budget.held_bytes, "the last byte to be taken")
    call.grpc.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await rig.closed(1)


async def test_nothing_is_kept_of_requests_that_are_refused(rig):
    """Their bodies least of all: gRPC has ways of being used in which it keeps each last message."""
    trim = malloc_trim()
    if trim is None:
        pytest.skip("the allocator of this machine has no malloc_trim")

    async def refused():
        call = rig.call()
        await call.send(gw.request_headers(), gw.request_body(b"x" * 4_000_000))
        (answer,) = await call.answers(1)
        assert gw.refusal(answer)[0] == 400
        assert await call.ended() is grpc.StatusCode.OK

    for _ in range(3):
        await refused()
    gc.collect()
    trim()
    before = resident_bytes()
    for _ in range(25):
        await refused()
    await rig.closed(28)
    gc.collect()
    trim()
    assert resident_bytes() - before < 30 * 2**20


async def served(rig):
    call = rig.call()
    await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    await call.exchange(gw.response_headers(end=True), answers=1)
    assert await call.end() is grpc.StatusCode.OK


async def refused(rig):
    call = rig.call()
    await call.send(gw.request_headers(), gw.request_body(b"{"))
    (answer,) = await call.answers(1)
    assert gw.refusal(answer)[0] == 400
    assert await call.ended() is grpc.StatusCode.OK


async def left(rig):
    call = rig.call()
    await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    call.grpc.cancel()


async def malformed(rig):
    call = rig.call()
    await call.send(b"\xff")
    assert (await call.failed())[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("end", [served, refused, left, malformed])
async def test_a_stream_that_is_over_waits_for_no_garbage_collector(rig, end):
    """Else its body is held until the collector runs, and that holds the loop all the longer."""
    streams = 10
    await end(rig)
    await rig.closed(1)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(streams):
            await end(rig)
        await rig.closed(1 + streams)
        gc.collect()
        kinds = {type(each) for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert [kind for kind in kinds if kind.__module__.startswith("epp.")] == []


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


async def test_gateways_are_told_apart_by_host_and_few_are_remembered(rig, monkeypatch, transport):
    """The one unheard of for the longest is forgotten."""
    monkeypatch.setattr(epp.shell.gateway.ext_proc, "GATEWAYS_MAX", 1)
    elsewhere = transport_of(transport, rig.ext_proc.methods)
    async with (
        # A client on IPv6 comes from another host than one on IPv4.
        carried(elsewhere, host="::1") as port,
        channel_to(f"[::1]:{port}", use_local_subchannel_pool=1) as other,
    ):
        for channel in (rig.channel, rig.channel, other, other, rig.channel):
            assert await rig.call(channel).end() is grpc.StatusCode.OK
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


class DeadContext:
    """Of a stream that gives `messages`, and then fails with `error`, as every write does."""

    def __init__(self, error, *messages):
        self._error = error
        self._messages = [*messages]
        self.code = None

    def peer(self):
        return "ipv4:127.0.0.1:1"

    async def read(self):
        if not self._messages:
            raise self._error
        return self._messages.pop(0)

    async def write(self, message):
        raise self._error

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        pass


GONE = [
    pytest.param(cygrpc.ExecuteBatchError("failed"), id="the stream is dead"),
    pytest.param(cygrpc._ServerStoppedError("stopped"), id="the server has stopped"),
]


@pytest.mark.parametrize("error", GONE)
@pytest.mark.parametrize("where", ["write", "read"])
async def test_a_stream_that_is_gone_is_cancelled_and_nothing_is_logged(error, where):
    """gRPC may tell it by a failing read or write, before it cancels the handler."""
    rig = Rig()
    given = (gw.request_headers(), gw.request_body(gw.prompt("a secret prompt")))
    context = DeadContext(error, *(given if where == "write" else ()))
    with structlog.testing.capture_logs() as lines, pytest.raises(asyncio.CancelledError):
        await GrpcioServer({}, receive_bytes_max=1)._serve(rig.ext_proc.open, context)
    assert rig.told.codes == ["CANCELLED"]
    assert lines == []
    assert rig.ext_proc.open_streams == 0
    assert "completed client left" not in rig.told.events[:1]


async def test_a_wrong_use_of_grpc_is_a_defect():
    """It is ours, so it is counted and logged as such."""
    rig = Rig()
    given = (gw.request_headers(), gw.request_body(gw.prompt()))
    context = DeadContext(grpc.aio.UsageError("already finished"), *given)
    with structlog.testing.capture_logs() as lines:
        await GrpcioServer({}, receive_bytes_max=1)._serve(rig.ext_proc.open, context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert [line["event"] for line in lines] == [
        "a gRPC stream failed because of a defect of the transport"
    ]
    assert rig.ext_proc.open_streams == 0


async def test_above_the_bound_of_open_streams_a_request_gets_503_with_a_reason(transport):
    """Told like any refusal, before a look at the message; with a place free again it is served."""
    async with serving(transport, streams_max=2) as rig:
        held = [rig.call(), rig.call()]
        for call in held:
            await call.send(gw.request_headers())
        await until(lambda: rig.ext_proc.open_streams == 2, "both streams")
        shed = rig.call()
        (answer,) = await shed.exchange(b"\xff no message at all", answers=1)
        status, error = gw.refusal(answer)
        assert status == 503
        assert error["code"] == "rejected-overloaded"
        assert error["type"] == "service_unavailable"
        assert gw.set_headers(answer) == {
            "content-type": "application/json",
            "x-llm-d-request-dropped-reason": "rejected-overloaded",
            "retry-after": "1",
        }
        assert await shed.ended() is grpc.StatusCode.OK
        assert rig.told.events == ["shed 503"]
        assert rig.ext_proc.open_streams == 2
        await held[0].exchange(gw.request_body(gw.prompt()), answers=2)
        assert await held[0].end() is grpc.StatusCode.OK
        await until(lambda: rig.ext_proc.open_streams == 1, "a free place")
        served = rig.call()
        await served.exchange(gw.request_headers(end=True), answers=1)
        assert await served.end() is grpc.StatusCode.OK


async def test_of_shed_streams_only_so_many_are_waited_for(monkeypatch, transport):
    """Whoever opens streams and says nothing does not hold the picker's memory."""
    monkeypatch.setattr(epp.shell.gateway.ext_proc, "SHEDDING_STREAMS_MAX", 3)
    assert SHEDDING_STREAMS_MAX > 3
    async with serving(transport, streams_max=1) as rig:
        await rig.call().send(gw.request_headers())
        await until(lambda: rig.ext_proc.open_streams == 1, "the one stream")
        silent = [rig.call() for _ in range(3)]
        for call in silent:
            await call.grpc.wait_for_connection()
        await until(lambda: rig.told.events == ["shed 503"] * 3, "the silent streams")
        code, details = await rig.call().failed()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "overloaded" in details
        silent[0].grpc.cancel()
        await until(lambda: rig.ext_proc.shedding == 2, "the end of a silent stream")


@asynccontextmanager
async def raw(rig, count=1):
    """Connections that can do what no gRPC client does."""
    port = int(rig.address.rpartition(":")[2])
    connections = [await RawConnection.open(port) for _ in range(count)]
    try:
        yield connections
    finally:
        for connection in connections:
            await connection.close()


async def test_four_thousand_requests_at_once_are_all_served(rig):
    """On four connections; gRPC's own limits would lose a third of them."""
    request = gw.request_headers(), gw.request_body(gw.prompt())
    async with raw(rig, 4) as connections:
        opened = [connection.open_streams(1_000, request) for connection in connections]
        async with asyncio.timeout(50):
            for connection, streams in zip(connections, opened, strict=True):
                await connection.all_ended(streams, 50)
        lost = [c.lost(streams) for c, streams in zip(connections, opened, strict=True)]
    assert lost == [0, 0, 0, 0]
    await rig.closed(4_000)
    assert set(rig.told.codes) == {"OK"}


async def test_a_connection_that_only_resets_is_cut_and_the_others_are_served(rig):
    """Its streams are cancelled, it is counted and logged once, an innocent one loses nothing."""
    request = gw.request_headers(), gw.request_body(gw.prompt())
    async with raw(rig, 2) as (innocent, hostile):
        with structlog.testing.capture_logs() as lines:
            # More than the allowance: gRPC drops some before Python hears of them.
            while not hostile.closed:
                hostile.open_and_reset(ALLOWANCE_MAX // 4)
                (stream,) = innocent.open_streams(1, request)
                await innocent.all_ended([stream], 15)
                assert innocent.lost([stream]) == 0
        assert not innocent.closed
        (line,) = lines
        assert line["event"].startswith("connection cut")
        assert rig.told.events.count("connection cut for resets") == 1
    await until(lambda: not rig.ext_proc.open_streams, "the end of all streams")


async def test_thousands_of_resets_at_once_cost_no_innocent_request(rig, monkeypatch):
    """Also where the connection cannot be cut: what waits behind them is served in its turn."""
    monkeypatch.setattr(epp.shell.gateway.grpcio, "cut", lambda peer: False)
    request = gw.request_headers(), gw.request_body(gw.prompt())
    async with raw(rig, 2) as (innocent, hostile):
        asked = []
        for _ in range(10):
            hostile.open_and_reset(500)
            asked += innocent.open_streams(2, request)
            await asyncio.sleep(0)
        await innocent.all_ended(asked, 30)
        assert innocent.lost(asked) == 0
        assert not hostile.closed


async def test_a_gateway_whose_clients_leave_early_is_not_cut(rig):
    """As long as it serves others: each answer gives its whole allowance back."""
    request = gw.request_headers(), gw.request_body(gw.prompt())
    async with raw(rig) as (gateway,):
        for _ in range(5):
            gateway.open_and_reset(ALLOWANCE_MAX // 2)
            streams = gateway.open_streams(1, request)
            await gateway.all_ended(streams, 15)
            assert gateway.lost(streams) == 0
        assert not gateway.closed
    assert "connection cut" not in rig.told.events


async def test_health_is_answered_before_a_burst_is_worked_off(rig):
    """It has a queue of its own: a gateway must not take a busy picker for a dead one."""
    request = gw.request_headers(), gw.request_body(gw.prompt())
    check = rig.channel.unary_unary("/grpc.health.v1.Health/Check")
    await check(b"", timeout=TIMEOUT_S)
    async with raw(rig) as (connection,):
        streams = connection.open_streams(2_000, request)
        await until(lambda: rig.told.codes, "the first of them")
        await check(b"", timeout=TIMEOUT_S)
        assert len(rig.told.codes) < 2_000
        await connection.all_ended(streams, 30)


async def test_a_connection_of_age_is_left_without_a_loss():
    """After the GOAWAY what is open goes on, what arrives is served, and then it is closed."""
    request = gw.request_headers(), gw.request_body(gw.prompt())
    async with serving(age_max_s=0.2) as rig, raw(rig) as (connection,):
        connection.answers_pings = False
        (held,) = connection.open_streams(1)
        await until(lambda: connection.goaways, "the GOAWAY")
        # The GOAWAY is under way to a gateway until it acknowledges the ping behind it.
        (late,) = connection.open_streams(1, request)
        await connection.all_ended([late], 15)
        assert connection.lost([late]) == 0
        connection.answer_pings()
        await until(lambda: len(connection.goaways) == 2, "the second GOAWAY")
        assert connection.goaways[1] == late
        assert not connection.closed
        connection.send(held, request)
        await connection.all_ended([held], 15)
        assert connection.lost([held]) == 0
        await until(lambda: connection.closed, "the end of the connection")


async def test_quiet_is_since_the_last_stream_was_opened_or_closed(transport):
    """None of a stream that is open; infinite before the first."""
    now = 100.0
    async with serving(transport, clock=lambda: now) as rig:
        assert rig.ext_proc.quiet_for_s() == float("inf")
        call = rig.call()
        await call.send(gw.request_headers())
        await until(lambda: rig.ext_proc.open_streams == 1, "the stream")
        now = 105.0
        assert rig.ext_proc.quiet_for_s() == 0
        call.grpc.cancel()
        await until(lambda: not rig.ext_proc.open_streams, "its end")
        now = 107.0
        assert rig.ext_proc.quiet_for_s() == 7
