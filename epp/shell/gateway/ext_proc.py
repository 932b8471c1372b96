"""The ext_proc service, independent of the gRPC transport. Each stream is one session, which
handles one request.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import structlog

from epp.core.protocol.messages import Answer, refusing
from epp.core.protocol.session import Gateway, Session, StreamFailure
from epp.core.protocol.waiting import Resolution
from epp.core.types import Refusal, RefusalReason, Seconds
from epp.shell.gateway.calls import DEFECT, OK, Call, Code, Cut, EndedCall, Opener, Status, Wire
from epp.shell.gateway.codec import MalformedMessageError, encode
from epp.shell.gateway.turns import Turns
from epp.shell.gateway.wire import Decoder

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS: Final = f"/{SERVICE}/Process"
GATEWAYS_MAX: Final = 10_000
STREAMS_MAX: Final = 20_000
"""Default of the maximum number of open ext_proc streams of all gateways together; with grpcio each
takes about 26 KB.
"""
SHEDDING_STREAMS_MAX: Final = 1_000
"""Maximum number of streams above the limit of open streams that stay open until their first
message, with which they are refused. Further streams are ended at once.
"""
REQUEST_TIMEOUT_S: Final = 60.0
OVERDUE_POLL_S: Final = 1.0
EAGER_ANSWERS_MAX: Final = 4
"""Maximum number of answers to one message that are encoded at once. Longer sequences, such as a
long body in chunks, are encoded as they are sent.
"""

_VIOLATION: Final = Status(
    Code.INVALID_ARGUMENT, "the gateway sent a message that the phase of the stream does not allow"
)

_log = structlog.get_logger(__name__)


class StreamObserver(Protocol):
    """An observer of ext_proc streams and connections. Its methods must not raise."""

    def stream_failed(self) -> None:
        """Count a stream that failed by a defect of the picker while it was opened or closed,
        outside its request.
        """
        ...

    def stream_closed(self, code: str, duration_s: float) -> None: ...
    def stream_shed(self, refusal: Refusal) -> None:
        """Count a stream that was refused without processing, because too many streams are open."""
        ...

    def connection_cut(self, reason: Cut) -> None:
        """Count a connection that the picker closed, rejected or asked to leave, although its
        gateway would have kept it open.
        """
        ...

    def drain_cut(self, streams: int) -> None: ...


class ExtProc:
    """The ext_proc service, which opens a call for each stream of `ExternalProcessor/Process`.

    `new_session(gateway)` creates the session, the state machine of one stream. Gateways are
    identified by the host of their gRPC peer address, and their number is bounded. `clock` provides
    the `now` of each message.
    """

    def __init__(
        self,
        new_session: Callable[[Gateway], Session],
        observer: StreamObserver,
        clock: Callable[[], Seconds] = time.monotonic,
        *,
        streams_max: int = STREAMS_MAX,
        request_timeout_s: Seconds = REQUEST_TIMEOUT_S,
        decoder: Decoder | None = None,
    ) -> None:
        """Create the ext_proc service.

        Streams above `streams_max` are refused at their first message, which is not read. A request
        that is incomplete after `request_timeout_s` is refused by `refuse_overdue`.
        """
        self._new_session = new_session
        self.observer = observer
        self.clock = clock
        self._streams_max = streams_max
        self._request_timeout_s = request_timeout_s
        self.decoder = decoder or Decoder()
        overloaded = Refusal(
            reason=RefusalReason.OVERLOADED,
            status=503,
            message=f"the picker is overloaded: {streams_max} requests are open",
        )
        self._overloaded = overloaded
        self._overloaded_answer = encode(refusing(overloaded))
        self._gateways: OrderedDict[str, Gateway] = OrderedDict()
        self._calls: set[_ExtProcCall] = set()
        self._decoding = Turns(clock)
        self._opened_at_s = -math.inf
        self.shedding = 0
        """Number of open streams above the limit, each of which is refused at its first message."""
        self.draining = False

    @property
    def methods(self) -> Mapping[str, Opener]:
        """Functions that open a call for a new stream, by gRPC path, as transports need them."""
        return {PROCESS: self.open}

    @property
    def open_streams(self) -> int:
        return len(self._calls)

    def quiet_for_s(self) -> float:
        """Return the seconds since a stream was last opened, 0 while an ext_proc stream is open, or
        infinity if none was ever opened.
        """
        return 0.0 if self._calls or self.shedding else self.clock() - self._opened_at_s

    def end_bypassed(self) -> None:
        """End each ext_proc stream, from now on, with OK as soon as its response no longer needs the
        picker.
        """
        self.draining = True
        for call in list(self._calls):
            if call.session.may_end_for_drain():
                call.wire.end(OK)

    async def watch(self) -> None:
        """Refuse, periodically and until cancelled, each request that is incomplete after the
        timeout.
        """
        while True:
            await asyncio.sleep(OVERDUE_POLL_S)
            self.refuse_overdue(self.clock())

    def refuse_overdue(self, now: Seconds) -> None:
        """Refuse each open request that is still incomplete `request_timeout_s` after its stream
        was opened.
        """
        for call in list(self._calls):
            late = now - call.opened_at_s > self._request_timeout_s
            if late and call.session.incomplete:
                for answer in call.session.time_out(now):
                    call.wire.push(encode(answer))
                call.wire.end(OK)

    def open(self, peer: str, wire: Wire) -> Call:
        """Return the call that serves a new stream of the gateway `peer` or, above the limit of
        open streams, refuses it. Never raises.
        """
        self._opened_at_s = self.clock()
        try:
            if len(self._calls) >= self._streams_max:
                return self._shed()
            call = _ExtProcCall(self, self._new_session(self._gateway(peer)), wire)
        except Exception:  # noqa: BLE001  the boundary of a stream
            _log.exception("opening an ext_proc stream failed")
            self.observer.stream_failed()
            return EndedCall(DEFECT)
        self._calls.add(call)
        return call

    def decode_later(self, call: "_ExtProcCall") -> None:
        """Schedule turns in which `call` decodes the rest of its request body; it must not have
        turns yet.
        """
        self._decoding.due(call)

    def forget(self, call: "_ExtProcCall") -> None:
        """Remove `call`, whose stream has ended, from the open calls."""
        self._calls.discard(call)

    def _shed(self) -> Call:
        self.observer.stream_shed(self._overloaded)
        if self.shedding >= SHEDDING_STREAMS_MAX:
            # Too many streams wait for their first message, so the gateway decides how the client
            # sees this error.
            return EndedCall(Status(Code.RESOURCE_EXHAUSTED, self._overloaded.message))
        return _ShedCall(self, self._overloaded_answer)

    def _gateway(self, peer: str) -> Gateway:
        host = peer.rpartition(":")[0]
        gateway = self._gateways.get(host)
        if gateway is None:
            gateway = self._gateways[host] = Gateway()
            if len(self._gateways) > GATEWAYS_MAX:
                self._gateways.popitem(last=False)
        else:
            self._gateways.move_to_end(host)
        return gateway


class _ExtProcCall:
    """The call of one request's stream: its session processes the messages, and the call encodes
    the session's answers.
    """

    __slots__ = ("_decoding", "_half_closed", "_service", "ended", "opened_at_s", "session", "wire")

    def __init__(self, service: ExtProc, session: Session, wire: Wire) -> None:
        self._service = service
        self.session = session
        session.came_at_s = wire.came_at_s
        self.wire = wire
        self.opened_at_s = service.clock()
        self.ended: Status | None = None
        self._half_closed = False
        self._decoding = False
        """True if turns to decode the request body are scheduled."""
        if session.may_wait:
            session.resume = self._resume
            session.evict = self._evict

    def receive(self, message: bytes) -> Iterable[bytes]:
        session = self.session
        try:
            service = self._service
            answers = session.receive(service.decoder.decode(message), service.clock())
            if session.undecoded and not self._decoding:
                self._decoding = True
                service.decode_later(self)
            encoded = self._encoded(answers)
        except MalformedMessageError as error:
            session.failed(StreamFailure.MALFORMED)
            self.ended = Status(Code.INVALID_ARGUMENT, str(error))
            return ()
        except Exception:  # noqa: BLE001  the boundary of a request: a defect fails one stream only
            self._defect()
            return ()
        if session.violated:
            self.ended = _VIOLATION
        elif session.finished or (self._service.draining and session.may_end_for_drain()):
            self.ended = OK
        return encoded

    def half_close(self) -> Iterable[bytes]:
        self._half_closed = True
        try:
            encoded = self._encoded(self.session.half_closed(self._service.clock()))
        except Exception:  # noqa: BLE001  as above
            self._defect()
            return ()
        if not self.session.waiting:
            self.ended = OK
        return encoded

    def turn(self) -> bool:
        """Decode a further part of the request body and return whether more of it remains."""
        self._go_on(self.session.carry_on)
        self._decoding = self.session.undecoded
        return self._decoding

    def _resume(self, resolution: Resolution) -> None:
        """Continue a request that waited for `resolution`, and send its answers."""
        self._go_on(partial(self.session.resolved, resolution))

    def _evict(self, refusal: Refusal) -> None:
        """Refuse, with `refusal`, a request whose response has not begun."""
        self._go_on(partial(self.session.evicted, refusal))

    def _go_on(self, step: Callable[[Seconds], Sequence[Answer]]) -> None:
        """Send the answers that `step` returns at the current time, and end the stream if its
        session is over. `step` is a call of the session that follows the end of a wait or of work
        in parts, and not a new message of the stream.
        """
        session, service = self.session, self._service
        try:
            for answer in step(service.clock()):
                self.wire.push(encode(answer))
        except Exception:  # noqa: BLE001  the boundary of a request
            self._defect()
            self.wire.end(DEFECT)
            return
        drained = service.draining and session.may_end_for_drain()
        half_closed = self._half_closed and not session.waiting
        if session.violated:
            self.wire.end(_VIOLATION)
        elif session.finished or half_closed or drained:
            self.wire.end(OK)

    def sent(self) -> None:
        self.session.sent()

    def closed(self, status: Status) -> bool:
        service = self._service
        service.forget(self)
        waited = self.session.waiting
        try:
            now = service.clock()
            service.observer.stream_closed(status.code.name, now - self.opened_at_s)
            self.session.closed(now)
            # The session and the call refer to each other.
            self.session.resume = self.session.evict = None
            news = service.decoder.report()
            if news is not None:
                _log.info(news)
        except Exception:  # noqa: BLE001  the boundary of a stream
            _log.exception("closing an ext_proc stream failed")
            service.observer.stream_failed()
        return waited

    def _encoded(self, answers: Sequence[Answer]) -> Iterable[bytes]:
        if not answers:
            return ()
        if len(answers) == 1:
            # Nearly every message has one answer, such as each chunk of a streamed response.
            return (encode(answers[0]),)
        if len(answers) <= EAGER_ANSWERS_MAX:
            return [encode(answer) for answer in answers]
        return self._one_by_one(answers)

    def _one_by_one(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        try:
            for answer in answers:
                yield encode(answer)
        except Exception:  # noqa: BLE001  the boundary of a request
            self._defect()

    def _defect(self) -> None:
        self.session.failed(StreamFailure.INTERNAL)
        _log.exception(
            "an ext_proc stream failed because of a defect of the picker",
            session=repr(self.session),
        )
        self.ended = DEFECT


class _ShedCall:
    """The call of a stream above the limit of open streams. The stream is refused at its first
    message, which is not read.
    """

    __slots__ = ("_answer", "_service", "ended")

    def __init__(self, service: ExtProc, answer: bytes) -> None:
        self._service = service
        self._answer = answer
        self.ended: Status | None = None
        service.shedding += 1

    def receive(self, _: bytes) -> Iterable[bytes]:
        self.ended = OK
        return (self._answer,)

    def half_close(self) -> Iterable[bytes]:
        self.ended = OK
        return ()

    def sent(self) -> None:
        """Do nothing after the refusal was sent, because the refused stream has no session."""

    def closed(self, _: Status) -> bool:
        self._service.shedding -= 1
        return False
