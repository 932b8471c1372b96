"""One ext_proc stream as a state machine: events in, answers out. No I/O, no clock.

Theory. Envoy opens one stream for each HTTP request. It sends request headers, request body chunks
and request trailers, then the same of the response. It sends each kind only if the gateway is
configured to. Every message needs exactly one answer, in order, except for full-duplex body chunks.
The answers of the request phase depend on the body mode that the first message announces:

* FULL_DUPLEX_STREAMED, or nothing announced: Envoy does not keep the body. The session holds the
  answer to the headers until the body is complete. Then it sends headers, the body in chunks, and
  trailers.
* BUFFERED, BUFFERED_PARTIAL: headers are answered at once. The answer to the one body message has
  the destination.
* STREAMED, NONE, unknown: the header answer must have the destination (otherwise Envoy 1.40 answers
  503), so the request is scheduled without its body.

A request without a body, such as GET /v1/models, is scheduled at its headers in every mode. So is a
request for another protocol in full duplex (a WebSocket by an upgrade or by an extended CONNECT),
because its body has no end. Its data is passed back as it arrives. A gateway that buffers such a
request hangs before the picker can detect it.

Only this module decides when a lease ends: at the end of the response, or at the end of the stream.
A stream may end before any response headers. If this gateway is known to send response headers, the
client has left. Otherwise no more is ever received about the request, and the scheduler keeps the
lease for the request's probable duration.

A parsed request may have to wait before it is placed: for information about it
(`core/protocol/waiting`), and then for an endpoint with room (`core/protocol/flow_queue`). Until it
is resolved, the stream is WAITING in every body mode. Messages about the request that arrive
meanwhile are stored in order, within the same limits, and answered after it. Any other end of the
stream ends the wait.

In full duplex, Envoy has no timeout for a header answer that is held. In the other modes it answers
504 after its `message_timeout`. A request that enters the queue then asks once for a longer one. If
the gateway ends waits all the same, always after the same time, later requests are refused a little
earlier than that.

A request of priority below 0 may be evicted after it was placed, as long as its gateway is known to
send response headers and these have not come: `evicted` then refuses it and ends its lease.

A body with a content encoding is decoded while it arrives, a bounded amount in each turn of the
event loop (`core/prompt/encodings`). While `undecoded` is true, the driver of the stream calls
`carry_on` in later turns. If the body is already complete, the stream is WAITING too. The endpoint
receives the original bytes, unless the model is rewritten.

The module also limits the cost of a stream. The pieces of its body count against the limit of one
body and against the budget of all streams (`BodyBudget`). A body in too small pieces is refused,
because each piece costs the same at any size. The driver of the stream calls `time_out` if a
request is `incomplete` for too long.

`_HANDLERS` lists all legal transitions as (phase, event) -> handler. Any other event is a protocol
violation of the gateway and ends the stream.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from msgspec import Struct, field, structs

from epp.core.decision.account import Queued
from epp.core.decision.explaining import Explained, explained, explaining_headers
from epp.core.decision.inputs import (
    LoadReported,
    OutputStarted,
    RequestEnded,
    ResponseStarted,
    ServedBy,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.flow.eviction import Running
from epp.core.knowledge.inflight import MAY_BE_FULL, Ending, Outcome
from epp.core.knowledge.load_report import (
    LOAD_REPORT_FORMAT,
    LOAD_REPORT_HEADER,
    LOAD_REPORT_REQUEST_HEADER,
)
from epp.core.prompt.encodings import CONTENT_ENCODING, EncodedBody, is_identity
from epp.core.prompt.parse import (
    ALL_PARSERS,
    Parsed,
    ParserSet,
    claim_of,
    opaque_request,
    parse_request,
)
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.budget import PIECE_BYTES, BodyBudget
from epp.core.protocol.flow_queue import FlowQueue, Place
from epp.core.protocol.messages import (
    BODY_CHUNK_BYTES_MAX,
    CONTROL_HEADERS,
    ENCODE_HEADER,
    ENGINE_PRIORITY_HEADER,
    OBJECTIVE_HEADERS,
    PREFILL_HEADER,
    RANK_ADDRESS_HEADER,
    REQUEST_ID_HEADER,
    REWRITE_HEADERS,
    UPGRADE_HEADER,
    Answer,
    BodyMode,
    BodyModes,
    Destination,
    Event,
    RequestBody,
    RequestBodyAnswer,
    RequestBodyChunk,
    RequestHeaders,
    RequestHeadersAnswer,
    RequestTrailers,
    RequestTrailersAnswer,
    ResponseBody,
    ResponseBodyAnswer,
    ResponseBodyChunk,
    ResponseHeaders,
    ResponseHeadersAnswer,
    ResponseTrailers,
    ResponseTrailersAnswer,
    TimeoutAnswer,
    first_of,
    refusing,
    returnable,
)
from epp.core.protocol.retry_after import retry_after_s
from epp.core.protocol.usage import Usage, UsageReader
from epp.core.protocol.waiting import Resolution, Resolver, Resume, Wait
from epp.core.types import Endpoint, Refusal, RefusalReason, Seconds


class Gateway:
    """The state of one gateway that is kept from one ext_proc stream to the next."""

    __slots__ = ("_cuts_s", "_patience_s", "_patient_until_s", "sends_response_headers", "unseen")

    def __init__(self) -> None:
        self.sends_response_headers = False
        self._cuts_s: list[Seconds] = []
        """Seconds that the last requests had waited in the queue when their streams ended, in body
        modes in which the gateway has a timeout.
        """
        self._patience_s: Seconds | None = None
        self._patient_until_s: Seconds = -math.inf
        self.unseen = 0
        """Number of streams with a placed request that ended without a response, counted while the
        gateway has never sent one.
        """

    def patience_s(self, now: Seconds) -> Seconds | None:
        """Return the seconds for which a request may wait in the queue before the gateway ends its
        stream, in body modes in which the gateway has a timeout. Return None if no limit is known.
        """
        if self._patience_s is not None and now >= self._patient_until_s:
            self._patience_s = None
        return self._patience_s

    def cut(self, waited_s: Seconds, now: Seconds) -> None:
        """Note that a stream ended while its request had waited in the queue for `waited_s`
        seconds, in a body mode in which the gateway has a timeout. After `CUTS_ALIKE` equal waits
        in a row, `patience_s` is `PATIENCE_USED` times the shortest of them for `PATIENCE_KEPT_S`.

        Clients leave after any time. A gateway's timeout is always the same.
        """
        cuts_s = self._cuts_s
        cuts_s.append(waited_s)
        del cuts_s[:-CUTS_ALIKE]
        if len(cuts_s) == CUTS_ALIKE and max(cuts_s) - min(cuts_s) <= CUT_SPREAD * max(cuts_s):
            self._patience_s = PATIENCE_USED * min(cuts_s)
            self._patient_until_s = now + PATIENCE_KEPT_S
            cuts_s.clear()


CUTS_ALIKE: Final = 4
"""Number of consecutive waits in the queue, of those that ended with their streams, that must have
lasted equally long before that counts as the gateway's timeout.
"""
CUT_SPREAD: Final = 0.05
"""Largest relative difference of waits that count as having ended after the same time."""
PATIENCE_USED: Final = 0.9
"""Share of the gateway's timeout after which a request that still waits in the queue is refused."""
PATIENCE_KEPT_S: Final = 600.0
"""Seconds after which a learned timeout is forgotten, because the gateway's may have changed."""
TIMEOUT_S_MAX: Final = 3_600.0
"""Longest timeout in seconds that Envoy accepts in an answer."""
UNSEEN_TOLD: Final = 20
"""Number of streams without a response after which the picker reports that the gateway sends no
responses. It is above 1, because clients may leave.
"""
PIECES_FREE: Final = 1_024
PIECE_MEAN_BYTES_MIN: Final = 256
"""Number of bytes of a request body that allow one more piece beyond `PIECES_FREE`. A gateway sends
what one read of a socket returns: some kilobytes, in full duplex up to 64 KB.
"""


class SessionSettings(Struct, frozen=True, kw_only=True):
    request_body_bytes_max: int = 32 * 1024 * 1024
    parsers: ParserSet = ALL_PARSERS
    parse_response_usage: bool = False
    decline_response_bodies: bool = False
    """True to ask a gateway that streams response bodies not to send them; the gateway must allow a
    mode override.
    """
    subset_filter: bool = True
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority by name of an objective. Requests with a priority below 0 may be shed."""
    trust_model_rewrite: bool = False
    """True if the gateway removes clients' `REWRITE_HEADERS`, so that these headers may name the
    model to serve.
    """
    pass_from_bytes: int | None = None
    """Size in bytes of a request body, with its decoder, from which it is routed unread and not
    stored, because memory is scarce, unless its model may be rewritten. None for no limit.
    """
    explain_headers: bool = False
    """True to report the chosen endpoint, and a short reason, to clients in response headers."""
    request_load_metrics: bool = False
    """True to request the engine's load in response headers, even if the client does not."""
    engine_priority: bool = False
    """True to send the priority of each request to the engine, in `ENGINE_PRIORITY_HEADER`."""
    rewrite: Callable[[str], str | None] | None = None
    """Function that returns the model to serve for the model of the body, or None if no rule
    applies. None if there are no rules.
    """


class Trace(Protocol):
    """The state of a tracer for one request and its response, and the headers that it sets on and
    removes from the request.
    """

    own_header: tuple[str, str]
    remove_headers: tuple[str, ...]


class Exchange(Struct, eq=False):
    """The record of one request and its response, for observers."""

    started_at_s: Seconds
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the request by lower-case name."""
    incoming_model: str = ""
    request: InferenceRequest | None = None
    request_bytes: int = 0
    decision: Decision | None = None
    queued: Queued | None = None
    """Wait in the queue of a request that was refused there, or None. A placed request has it in its
    decision record.
    """
    endpoint: Endpoint | None = None
    """Endpoint that received the request, or None if it is unknown or no longer in the pool."""
    unseen_body: BodyMode | None = None
    """Body mode because of which the picker scheduled the request without its body, or None if it
    did not.
    """
    passed_unread: bool = False
    """True if the request body was available, but was not read for lack of memory."""
    unparsed: str = ""
    """Reason why the request is placed without full knowledge of its prompt although its body was
    available, or "".
    """
    unparsed_api: str = ""
    """Suffix of the URL path by which a parser would have read the body, if a content encoding made
    the body unreadable; otherwise "".
    """
    answered_at_s: Seconds = 0.0
    """Time at which the request was placed or refused: that of the message, or of the end of the
    wait, that led to it.
    """
    response_started_at_s: Seconds | None = None
    first_output_at_s: Seconds | None = None
    status: int | None = None
    by_gateway: bool = False
    """True if the gateway itself seems to have created the response, because it has neither a
    `date` nor a `server` header: no endpoint answered.
    """
    retry_after_s: Seconds | None = None
    """Seconds after which a response 429 or 503 asks the client to retry; None if it does not."""
    served: str = ""
    """Address "ip:port" of the endpoint that sent the response, or "" if the gateway does not
    report it.
    """
    response_bytes: int = 0
    usage: Usage | None = None
    path: str = ""
    """Path of the request without the query. Like `request_id`, it is set only if the request is
    refused.
    """
    request_id: str = ""
    failure: "StreamFailure | None" = None
    trace: Trace | None = None
    """State of the tracer for this request, or None. An observer sets it in `decided` at the
    latest.
    """


class StreamFailure(StrEnum):
    """The reason why a stream, and with it its request, ends with an error."""

    MALFORMED = "malformed-message"
    VIOLATION = "protocol-violation"
    INTERNAL = "internal"


class Observer(Protocol):
    """An observer of requests, which is notified after each event. Its methods must not raise."""

    def decided(self, exchange: Exchange) -> None: ...
    def refused(self, exchange: Exchange, refusal: Refusal) -> None: ...
    def failed(self, exchange: Exchange, failure: StreamFailure) -> None: ...
    def response_started(self, exchange: Exchange) -> None: ...
    def completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None: ...
    def set_aside(self, endpoint: Endpoint) -> None: ...
    def unknown_body_mode(self, mode: int) -> None:
        """Count an announced body mode that the picker does not know; `mode` is its number."""
        ...

    def unknown_objective(self) -> None:
        """Count a request that names an unknown objective; its priority is 0."""
        ...

    def protocol_violated(self, phase: str, event: str) -> None: ...
    def response_body_declined(self) -> None:
        """Count a response whose body the picker asked the gateway not to send."""
        ...

    def usage_unseen(self) -> None:
        """Count a response whose usage cannot be read, because the gateway does not send its body."""
        ...

    def responses_unseen(self) -> None:
        """Report that the gateway sends no responses, so that failures of endpoints stay
        undetected.
        """
        ...


class Phase(StrEnum):
    START = "start"
    COLLECTING = "collecting"
    """The request body is arriving in full duplex, and the picker has answered nothing yet."""
    BUFFERED = "buffered"
    """The picker has answered the request headers, and the body will arrive in one message."""
    WAITING = "waiting"
    """The request waits for its placement, or until its body is decoded."""
    ROUTED = "routed"
    """The gateway knows the destination, and the picker passes the rest of the request through."""
    RESPONDING = "responding"
    ENDED = "ended"


# Members of enum classes that nearly every request reads; constants take a tenth of the time
# (`core/types`).
_COLLECTS: Final = Phase.COLLECTING
_ROUTED: Final = Phase.ROUTED
_ENDED: Final = Phase.ENDED
_STREAMED_BOTH_WAYS: Final = BodyMode.FULL_DUPLEX_STREAMED

_HOLDING: Final = frozenset({BodyMode.FULL_DUPLEX_STREAMED})
_BUFFERING: Final = frozenset({BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL})
_COLLECTING: Final = frozenset({Phase.COLLECTING, Phase.BUFFERED})
_UNPLACED: Final = frozenset({Phase.START, *_COLLECTING, Phase.WAITING})
_FULL_DUPLEX: Final = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


class _Pending(Struct, frozen=True):
    """A parsed request that is not placed yet, and the function that creates the answers for it."""

    request: InferenceRequest
    changed_body: bytes | None
    """Body with the rewritten model, or None if the body is unchanged."""
    answers: Callable[[Destination], list[Answer]]
    body: bytes = b""
    """Decoded body of the request, after any rewrite, or b"" if it was not read."""


class Session:
    """The state machine of one ext_proc stream, which is one request and its response.

    The caller passes every message to `receive` and sends the returned answers. It calls `sent`
    when the gateway has accepted them, and `closed` once when the stream has ended in any way. If
    `finished` is true, the caller ends the stream with OK.
    """

    # Every stream begins with these values, and most streams change few of them.

    resume: Resume | None = None
    evict: Callable[[Refusal], None] | None = None
    """Function that calls `evicted` and sends its answers, or None if requests are not evicted."""
    came_at_s: Seconds | None = None
    """Time at which the request came, which is the start of its time; None if it came when its first
    message is received.
    """
    violated = False
    """True if the gateway violated the protocol, so that the caller must end the stream with an
    error.
    """
    _phase = Phase.START
    _modes = _FULL_DUPLEX
    _headers: Mapping[str, str] = MappingProxyType({})
    _named = ""
    """Id of the request, or "" until it is first needed."""
    _endless = False
    """True if the bytes after the headers belong to another protocol, whose pieces may have any
    size.
    """
    _decoding_bytes = 0
    """Number of bytes in `_taken_bytes` that the decoder and its output use."""
    _recoded = False
    """True if the model was rewritten in a decoded body, which is then forwarded without its
    content encoding.
    """
    _read: Callable[[Seconds], list[Answer]] | None = None
    """Function that routes the complete body once it is decoded, or None if no body waits for that."""
    _wait: Wait | None = None
    _place_in_queue: Place | None = None
    """Place of the request in the queue, also after it was placed; None if it did not wait there."""
    _running: Running | None = None
    """Registration at the queue of a request that may be evicted, or None if it may not be."""
    _pending: _Pending | None = None
    _held_bytes = 0
    _explained: Explained | None = None
    _announced = False
    _declined = False
    """True if the picker asked the gateway not to send the response body, and none of it came."""
    _request_ended = False
    _completed = False

    def __init__(
        self,
        scheduler: Scheduler,
        settings: SessionSettings,
        gateway: Gateway,
        observer: Observer,
        new_request_id: Callable[[], str],
        budget: BodyBudget | None = None,
        resolver: Resolver | None = None,
        queue: FlowQueue | None = None,
    ) -> None:
        """Create the state machine of a new stream. `new_request_id` creates ids for requests
        without `x-request-id`.

        `budget` is shared by all streams; with None, only the size of a single body is limited. If
        there is a `resolver` or a `queue`, `resume` must be set to a function that calls `resolved`
        and sends its answers.
        """
        self._scheduler = scheduler
        self._settings = settings
        self._gateway = gateway
        self._observer = observer
        self._new_request_id = new_request_id
        self._budget = budget or BodyBudget(sys.maxsize)
        self._resolver = resolver
        self._queue = queue
        # Every stream reads these values. Reading an attribute of the class takes ten times as long
        # as one of the instance.
        self.finished = False
        self.undecoded = False
        """True if more of the body is to be decoded, so that the caller must call `carry_on` in a
        later turn of the event loop.
        """
        self._subset: tuple[str, ...] | None = None
        self._body_bytes = 0
        self._pieces = 0
        self._taken_bytes = 0
        """Number of bytes that this session has counted against the budget: for the body and the
        messages that it stores, and for the decoder.
        """
        self._encoded: EncodedBody | None = None
        """Decoder of the request body until the body is read; None if there is no content encoding
        to decode.
        """
        self._usage_reader: UsageReader | None = None
        self._exchange = Exchange(0.0)
        self._body: list[bytes | memoryview] = []
        self._held: list[RequestBody | RequestTrailers] = []
        """Messages about the request that arrived while it waits."""

    def __repr__(self) -> str:
        decision = self._exchange.decision
        where = decision.endpoint.address if decision else "nowhere"
        return f"<Session [{self._phase.value}, to {where}, {self._body_bytes} body bytes held]>"

    def receive(self, event: Event, now: Seconds) -> list[Answer]:
        """Process the next message of the gateway and return the answers to send, in order. A
        message that is not legal in the present phase sets `violated`, and once `finished` is true
        every message is ignored.
        """
        if self.finished:
            return []
        handler = _HANDLERS.get((self._phase, type(event)))
        if handler is None:
            return self._violate(type(event).__name__)
        return handler(self, event, now)

    def failed(self, failure: StreamFailure) -> None:
        """Record that the stream ends with an error; the caller calls `closed` afterwards."""
        self.finished = True
        self._end_wait()
        self._exchange.failure = failure
        self._observer.failed(self._exchange, failure)

    def half_closed(self, now: Seconds) -> list[Answer]:
        """Process the half-close of the stream, after which the gateway sends no more messages.
        Return the answers to send. Some gateways half-close the stream right after the body, and
        still need answers. A body that is collected counts as complete then if the gateway
        announced no body modes; otherwise return [].
        """
        if self._phase is Phase.COLLECTING and self._pieces and not self._announced:
            return self._route_full_duplex(now, trailers=False)
        return []

    def closed(self, now: Seconds) -> None:
        """Release the resources of the stream after it has ended in any way, and record the end of
        its request.
        """
        if self._place_in_queue is not None:
            self._note_cut(now)
        self._phase = _ENDED
        self._end_wait()
        # The answers of nearly every stream were sent, so that it holds nothing any more.
        if self._taken_bytes or self._body or self._encoded is not None:
            self._let_go()
        if self._exchange.decision is None or self._completed:
            return
        if self._exchange.status is not None:
            shown = self._modes.response is not BodyMode.NONE and not self._declined
            ending = Ending.CLIENT_LEFT if shown else Ending.COMPLETE
        elif self._gateway.sends_response_headers:
            ending = Ending.CLIENT_LEFT
        else:
            ending = Ending.UNSEEN
            self._gateway.unseen += 1
            if self._gateway.unseen == UNSEEN_TOLD:
                self._observer.responses_unseen()
        self._complete(ending, now)

    def sent(self) -> None:
        """Return the bytes of a placed or refused request to the budget of bodies, because the
        gateway has accepted the answers, which may repeat its body.
        """
        if self._taken_bytes and self._phase not in _UNPLACED:
            self._give_back()

    @property
    def incomplete(self) -> bool:
        """Return whether the request is not complete or not placed yet, so that the gateway waits
        for an answer. The queue itself limits the time in it, which does not count here.
        """
        return self._phase in _UNPLACED and not self._queued

    @property
    def may_wait(self) -> bool:
        """Return whether requests may have to wait before they are placed, so that `resume` must be
        set.
        """
        return self._resolver is not None or self._queue is not None

    @property
    def waiting(self) -> bool:
        """Return whether the request waits. Its answers then come from `resolved` or `carry_on`,
        even after a half-close.
        """
        return self._phase is Phase.WAITING

    @property
    def _queued(self) -> bool:
        return self._phase is Phase.WAITING and self._place_in_queue is not None

    def resolved(self, resolution: Resolution, now: Seconds) -> list[Answer]:
        """Place or refuse the request at the end of its wait, and return the answers to send, in
        order. The request may have to wait again, in the queue.

        The result is empty if the request does not wait any more.
        """
        pending = self._pending
        if self._phase is not Phase.WAITING or pending is None:
            return []
        self._wait = None
        held, self._held = self._held, []
        self._pending = None
        if isinstance(resolution, Refusal):
            self._exchange.answered_at_s = now
            if self._queue is not None and self._place_in_queue is not None:
                self._exchange.queued = self._queue.wait_of(self._place_in_queue, now)
            return self._refuse(resolution)
        if isinstance(resolution, Decision):
            self._exchange.answered_at_s = now
            answers = self._decided(pending, resolution)
        else:
            answers = self._placed(structs.replace(pending, request=resolution), now)
            if self.waiting:
                self._held = held
                return answers
        for event in held:
            answers += self.receive(event, now)
        return answers

    def evicted(self, refusal: Refusal, now: Seconds) -> list[Answer]:
        """End the placed request with `refusal`, and return the answer to send. The result is empty,
        and nothing happens, if its response has begun or it has ended.
        """
        if self._phase is not Phase.ROUTED or self.finished:
            return []
        self._phase = Phase.ENDED
        self.finished = True
        self._let_go()
        self._complete(Ending.EVICTED, now)
        return [refusing(refusal, self._request_id())]

    def carry_on(self, now: Seconds) -> list[Answer]:
        """Decode more of the request body, and return the answers to send, in order.

        It does nothing unless `undecoded` is true.
        """
        if not self.undecoded:
            return []
        encoded, read = self._encoded, self._read
        assert encoded is not None, "something is to be decoded"
        refused = self._work(encoded)
        if refused or read is None or encoded.unfinished:
            return refused
        self._read = None
        held, self._held = self._held, []
        answers = read(now)
        if self.waiting:
            self._held = held
            return answers
        for event in held:
            answers += self.receive(event, now)
        return answers

    def time_out(self, now: Seconds) -> list[Answer]:
        """Refuse a request that was not complete, or not placed, in time. Return the answer to
        send.
        """
        self._exchange.answered_at_s = now
        if self._phase is Phase.WAITING:
            return self._refuse(
                Refusal(
                    reason=RefusalReason.OVERLOADED,
                    status=503,
                    message="the request waited too long to be placed",
                )
            )
        return self._refuse(
            Refusal(
                reason=RefusalReason.REQUEST_TIMEOUT,
                status=408,
                message="the request did not become whole in time",
            )
        )

    def may_end_for_drain(self) -> bool:
        """Return whether the stream can be ended with OK without losing data of request or
        response.

        It can if the request is routed, has arrived completely if the picker passes it back, and
        the gateway sends no response body, or only streams copies of it. In full duplex an early
        end may lose data in every phase.
        """
        passed = self._request_ended or self._modes.request not in _HOLDING
        bypassed = self._modes.response in {BodyMode.NONE, BodyMode.STREAMED}
        return passed and bypassed and self._phase in {Phase.ROUTED, Phase.RESPONDING}

    # Handlers of the request phase.

    def _open(self, event: RequestHeaders, now: Seconds) -> list[Answer]:
        self._exchange.started_at_s = now if self.came_at_s is None else self.came_at_s
        self._exchange.answered_at_s = now
        self._headers = self._exchange.headers = event.headers
        self._learn_modes(event.modes)
        if event.subset is not None:
            self._hint(event.subset)
        mode = self._modes.request
        if event.end_of_stream:
            return self._route_headers(now)
        # A CONNECT, extended or not (RFC 9110 section 9.3.6, RFC 8441), or an upgrade.
        self._endless = event.headers.get(":method") == "CONNECT" or (
            UPGRADE_HEADER in event.headers and event.headers[UPGRADE_HEADER].lower() == "websocket"
        )
        if mode in _HOLDING and not self._endless:
            self._phase = _COLLECTS
            if CONTENT_ENCODING in event.headers:
                self._begin_decoding(event.headers[CONTENT_ENCODING])
            return []
        if mode in _BUFFERING:
            if CONTENT_ENCODING in event.headers:
                self._begin_decoding(event.headers[CONTENT_ENCODING])
            self._phase = Phase.BUFFERED
            return [RequestHeadersAnswer()]
        self._exchange.unseen_body = mode
        return self._route_headers(now, ends=False)

    def _collect(self, event: RequestBody, now: Seconds) -> list[Answer]:
        if event.subset is not None:
            self._hint(event.subset)
        refused = self._hold(event.body)
        if refused:
            return refused
        if self._encoded is not None:
            refused = self._decode(event.body)
            if refused:
                return refused
        if self._settings.pass_from_bytes is not None and self._is_to_pass():
            return self._route_unread(now, ends=event.end_of_stream)
        return self._route_full_duplex(now, trailers=False) if event.end_of_stream else []

    def _collect_trailers(self, event: RequestTrailers, now: Seconds) -> list[Answer]:
        if event.subset is not None:
            self._hint(event.subset)
        return self._route_full_duplex(now, trailers=True)

    def _buffered_body(self, event: RequestBody, now: Seconds) -> list[Answer]:
        if event.subset is not None:
            self._hint(event.subset)
        refused = self._hold(event.body)
        if refused:
            return refused
        partial = self._modes.request is BodyMode.BUFFERED_PARTIAL and not event.end_of_stream
        if partial:
            # The body did not fit into Envoy's buffer, so it is not a complete JSON document.
            self._exchange.unseen_body = self._modes.request
            return self._route_unread_buffered(now)
        self._body.clear()
        if self._encoded is not None:
            refused = self._decode(event.body)
            if refused:
                return refused
        if self._is_to_pass():
            self._exchange.passed_unread = True
            return self._route_unread_buffered(now)
        if self.undecoded:
            return self._wait_until_decoded(lambda at: self._route_buffered(bytes(event.body), at))
        return self._route_buffered(bytes(event.body), now)

    def _route_buffered(self, body: bytes, now: Seconds) -> list[Answer]:
        parsed = self._parse(body)
        if isinstance(parsed, Refusal):
            return self._refuse(parsed)
        changed = None if parsed.body is body else parsed.body

        def answers(destination: Destination) -> list[Answer]:
            return [RequestBodyAnswer(destination, changed)]

        text = parsed.decoded or parsed.body
        return self._place(_Pending(parsed.request, changed, answers, text), now)

    def _route_unread_buffered(self, now: Seconds) -> list[Answer]:
        def answers(destination: Destination) -> list[Answer]:
            return [RequestBodyAnswer(destination)]

        if self._encoded is not None:
            self._drop_decoder()
        return self._place(_Pending(self._opaque(), None, answers), now)

    def _buffered_trailers(self, event: RequestTrailers, now: Seconds) -> list[Answer]:
        """Refuse a buffered request with trailers but without a body, because its headers were
        already answered without a destination. Return the answer to send.
        """
        return self._refuse(_bad_request("the request has trailers but no body", None))

    def _pass_body(self, event: RequestBody, now: Seconds) -> list[Answer]:
        self._body_bytes += len(event.body)
        self._pieces += 1
        if self._in_small_pieces() and not self._endless:
            return self._violate("small pieces of a body")
        if self._request_ended:
            # Envoy may send the end of a large body twice (envoy#46237), and the first was
            # answered.
            return []
        self._request_ended = event.end_of_stream
        if self._modes.request in _HOLDING:
            return [
                RequestBodyChunk(*piece) for piece in chunks(event.body, ends=event.end_of_stream)
            ]
        return [RequestBodyAnswer()]

    def _pass_trailers(self, event: RequestTrailers, now: Seconds) -> list[Answer]:
        self._request_ended = True
        return [RequestTrailersAnswer()]

    # Handlers of the response phase.

    def _respond(self, event: ResponseHeaders, now: Seconds) -> list[Answer]:
        self._gateway.sends_response_headers = True
        self._learn_modes(event.modes)
        self._phase = Phase.RESPONDING
        if self._running is not None:
            self._keep()
        self._end_wait()
        self._let_go()
        exchange = self._exchange
        exchange.response_started_at_s = now
        exchange.status = _status(event.headers)
        # Every engine's web server sets `date` or `server`. Envoy's own answer to a failed
        # connection has neither at this point.
        exchange.by_gateway = not ("date" in event.headers or "server" in event.headers)
        if exchange.status in MAY_BE_FULL:
            exchange.retry_after_s = retry_after_s(event.headers)
        decision = exchange.decision
        set_headers: dict[str, str] = {}
        exchange.served = event.served
        if decision is not None:
            # With a primary port, the gateway knows the pod, but not the rank that serves.
            if event.served and not decision.primary_port:
                self._scheduler.take(ServedBy(decision.lease, event.served), now)
                exchange.endpoint = self._scheduler.state.endpoint_of(decision.lease)
            if decision.earlier and (exchange.status or 200) < 400:
                self._scheduler.take(ResponseStarted(decision.lease), now)
            if LOAD_REPORT_HEADER in event.headers:
                self._scheduler.take(
                    LoadReported(decision.lease, event.headers[LOAD_REPORT_HEADER]), now
                )
            request_id = returnable(decision.lease.request.request_id)
            if request_id and event.headers.get(REQUEST_ID_HEADER) != request_id:
                set_headers[REQUEST_ID_HEADER] = request_id
            if self._explained is not None:
                set_headers |= explaining_headers(self._explained, self._scheduler.failures)
            set_headers |= decision.response_headers(event.served)
            self._observer.response_started(exchange)
        if self._settings.parse_response_usage and is_identity(
            event.headers.get(CONTENT_ENCODING, "")
        ):
            content_type = event.headers.get("content-type", "")
            streamed = content_type.startswith("text/event-stream")
            self._usage_reader = UsageReader(event_stream=streamed)
            hidden = self._modes.response is BodyMode.NONE and not event.end_of_stream
            if hidden and not self._endless:
                self._observer.usage_unseen()
        if event.end_of_stream:
            self._end_response(now)
        self._declined = (
            self._settings.decline_response_bodies
            and not self._settings.parse_response_usage
            # In Envoy 1.40 (measured), an override has no effect if either mode is full duplex.
            and self._modes.request not in _HOLDING
            and self._modes.response is BodyMode.STREAMED
            and not event.end_of_stream
        )
        if self._declined:
            self._observer.response_body_declined()
        return [ResponseHeadersAnswer(tuple(set_headers.items()), self._declined)]

    def _response_body(self, event: ResponseBody, now: Seconds) -> list[Answer]:
        exchange = self._exchange
        # The gateway has ignored the request.
        self._declined = False
        exchange.response_bytes += len(event.body)
        if exchange.first_output_at_s is None and event.body:
            exchange.first_output_at_s = now
            # The body of an error is not output for the prompt.
            if exchange.decision is not None and (exchange.status or 200) < 400:
                self._scheduler.take(OutputStarted(exchange.decision.lease), now)
        if self._usage_reader is not None:
            self._usage_reader.feed(event.body, end=event.end_of_stream)
            exchange.usage = self._usage_reader.usage
        if event.end_of_stream:
            self._end_response(now)
        if self._modes.response is not _STREAMED_BOTH_WAYS:
            return [ResponseBodyAnswer()]
        if 0 < len(event.body) <= BODY_CHUNK_BYTES_MAX:
            return [ResponseBodyChunk(event.body, event.end_of_stream)]
        return [
            ResponseBodyChunk(piece, last)
            for piece, last in chunks(event.body, ends=event.end_of_stream)
        ]

    def _response_trailers(self, event: ResponseTrailers, now: Seconds) -> list[Answer]:
        self._end_response(now)
        return [ResponseTrailersAnswer()]

    # Functions that handlers share.

    def _learn_modes(self, modes: BodyModes | None) -> None:
        if modes is None:
            return
        self._modes = modes
        self._announced = True
        if modes.unknown is not None:
            self._observer.unknown_body_mode(modes.unknown)

    def _hint(self, subset: tuple[str, ...]) -> None:
        """Store the addresses of the gateway's subset hint; a hint in a later message replaces an
        earlier one.
        """
        if self._settings.subset_filter:
            self._subset = subset

    def _hold(self, body: bytes | memoryview) -> list[Answer]:
        """Store the next piece of the request body. Return the refusal if the body exceeds a limit,
        else [].
        """
        piece_bytes = len(body)
        self._body_bytes += piece_bytes
        self._pieces += 1
        limit = self._settings.request_body_bytes_max
        if self._body_bytes > limit:
            return self._refuse(_too_large(limit))
        if self._pieces > PIECES_FREE and self._in_small_pieces():
            sentence = f"the request body comes in pieces of less than {PIECE_MEAN_BYTES_MIN} bytes"
            return self._refuse(_bad_request(sentence, None))
        more_bytes = piece_bytes + PIECE_BYTES
        if not self._budget.take(more_bytes, self._taken_bytes):
            return self._refuse(_BODIES_HELD)
        self._taken_bytes += more_bytes
        if body:
            self._body.append(body)
        return []

    def _in_small_pieces(self) -> bool:
        """Return whether the request body came in too many pieces for its size."""
        return self._pieces > PIECES_FREE + self._body_bytes // PIECE_MEAN_BYTES_MIN

    def _let_go(self) -> None:
        """Release the request body, its decoder and its part of the budget."""
        self._body.clear()
        if self._encoded is not None:
            self._drop_decoder()
        self._give_back()

    def _give_back(self) -> None:
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0

    # Handling of content encodings.

    def _begin_decoding(self, encoding: str) -> None:
        """Create a decoder for the body that follows, if a parser reads it and it has a content
        encoding.
        """
        headers, settings = self._headers, self._settings
        if (
            is_identity(encoding)
            or claim_of(headers.get(":path", ""), headers, settings.parsers) is None
        ):
            return
        self._encoded = EncodedBody(encoding, settings.request_body_bytes_max)

    def _decode(self, chunk: bytes | memoryview) -> list[Answer]:
        """Decode the next encoded chunk for one turn of the event loop. Return a refusal if it
        exceeds a limit, else [].
        """
        assert self._encoded is not None, "the body has a content encoding"
        self._encoded.feed(bytes(chunk))
        return self._work(self._encoded)

    def _work(self, encoded: EncodedBody) -> list[Answer]:
        """Decode for one turn of the event loop. Return a refusal if the body exceeds a limit, else
        [].
        """
        encoded.work()
        if encoded.too_large:
            return self._refuse(_decoded_too_large(self._settings.request_body_bytes_max))
        if not self._count(encoded):
            return self._refuse(_BODIES_HELD)
        self.undecoded = encoded.unfinished
        return []

    def _count(self, encoded: EncodedBody) -> bool:
        """Count the memory that the decoder uses now against the budget. Return False if it does
        not fit.
        """
        more_bytes = encoded.held_bytes - self._decoding_bytes
        if more_bytes > 0 and not self._budget.take(more_bytes, self._taken_bytes):
            return False
        if more_bytes < 0:
            self._budget.give_back(-more_bytes)
        self._taken_bytes += more_bytes
        self._decoding_bytes += more_bytes
        return True

    def _wait_until_decoded(self, read: Callable[[Seconds], list[Answer]]) -> list[Answer]:
        """Let the request wait until `carry_on` has decoded the rest of its complete body; then
        `read` is called. Return [], because there is no answer yet.
        """
        self._phase = Phase.WAITING
        self._read = read
        return []

    def _drop_decoder(self) -> None:
        """Stop decoding the body. The bytes decoded so far stay counted until the request is
        answered.
        """
        self._encoded = None
        self._read = None
        self.undecoded = False

    def _parse_encoded(self, encoded: EncodedBody, body: bytes) -> Parsed | Refusal:
        """Return the request in a body with a content encoding. If the body cannot be decoded, note
        the reason in the exchange, and return a request without its prompt.
        """
        decoded = encoded.finish()
        self._count(encoded)
        self._drop_decoder()
        if decoded is None:
            assert encoded.problem is not None, "a body that is not decoded has a reason"
            reason = encoded.problem.value
            headers = self._headers
            claim = claim_of(headers.get(":path", ""), headers, self._settings.parsers)
            self._exchange.unparsed, self._exchange.unparsed_api = reason, claim or "unknown"
            return Parsed(request=self._opaque(), body=body, incoming_model="", unparsed=reason)
        parsed = self._parse(decoded)
        self._exchange.request_bytes = len(body)
        if isinstance(parsed, Refusal):
            return parsed
        if parsed.body is decoded:
            return structs.replace(parsed, body=body, decoded=decoded)
        self._recoded = True
        return parsed

    def _route_headers(self, now: Seconds, *, ends: bool = True) -> list[Answer]:
        """Schedule the request at its headers, because it has no body or the body would arrive too
        late. Return the answers to send.

        `ends` is True if nothing more of the request will arrive.
        """

        def answers(destination: Destination) -> list[Answer]:
            self._request_ended = ends
            return [RequestHeadersAnswer(destination)]

        return self._place(_Pending(self._opaque(), None, answers), now)

    def _route_full_duplex(self, now: Seconds, *, trailers: bool) -> list[Answer]:
        if self.undecoded:
            return self._wait_until_decoded(partial(self._route_full_duplex, trailers=trailers))
        # A single piece of type bytes is not copied here.
        body = b"".join(self._body)
        self._body.clear()
        parsed = self._parse(body)
        if isinstance(parsed, Refusal):
            return self._refuse(parsed)

        def answers(destination: Destination) -> list[Answer]:
            answered: list[Answer] = [RequestHeadersAnswer(destination)]
            for piece, last in chunks(parsed.body, ends=not trailers):
                answered.append(RequestBodyChunk(piece, last))
            if trailers:
                answered.append(RequestTrailersAnswer())
            return answered

        # The body is still the received object, unless the model was rewritten.
        changed = None if parsed.body is body else parsed.body
        text = parsed.decoded or parsed.body
        return self._place(_Pending(parsed.request, changed, answers, text), now)

    def _is_to_pass(self) -> bool:
        """Return whether the request body is to be passed on unread, because it is too large to be
        read while memory is scarce. Return False if the body needs a change.
        """
        settings = self._settings
        return (
            settings.pass_from_bytes is not None
            and self._body_bytes + self._decoding_bytes >= settings.pass_from_bytes
            and settings.rewrite is None
            and not (settings.trust_model_rewrite and first_of(self._headers, REWRITE_HEADERS))
        )

    def _route_unread(self, now: Seconds, *, ends: bool) -> list[Answer]:
        """Schedule the request without reading its body, and pass the body back: the stored part
        now, the rest as it arrives. Return the answers to send now.
        """
        body = b"".join(self._body)
        self._body.clear()
        if self._encoded is not None:
            self._drop_decoder()
        self._exchange.passed_unread = True

        def answers(destination: Destination) -> list[Answer]:
            self._request_ended = ends
            pieces = chunks(body, ends=ends)
            return [
                RequestHeadersAnswer(destination),
                *(RequestBodyChunk(*piece) for piece in pieces),
            ]

        return self._place(_Pending(self._opaque(), None, answers), now)

    def _place(self, pending: _Pending, now: Seconds) -> list[Answer]:
        """Place a parsed request, or let it wait if the resolver requires it. Return the answers to
        send.
        """
        if self._resolver is not None:
            assert self.resume is not None, "what drives a session that may wait can resume it"
            self._wait = self._resolver.begin(pending.request, pending.body, self.resume)
            if self._wait is not None:
                self._phase = Phase.WAITING
                self._pending = pending
                return []
        return self._placed(pending, now)

    def _placed(self, pending: _Pending, now: Seconds) -> list[Answer]:
        """Schedule a parsed request, with the priority of its objective and the subset hint, or let
        it wait in the queue. Return the answers to send.
        """
        request = pending.request
        objective = first_of(self._headers, OBJECTIVE_HEADERS)
        priority = self._priority(objective) if objective else 0
        if self._subset is not None or priority:
            request = structs.replace(request, subset=self._subset, priority=priority)
        exchange = self._exchange
        exchange.request = request
        exchange.answered_at_s = now
        if self._queue is not None:
            return self._enter(self._queue, pending, request, now)
        return self._decided(pending, self._scheduler.schedule(request, now))

    def _decided(self, pending: _Pending, decision: Decision | Refusal) -> list[Answer]:
        """Record the decision about the request of `pending`, notify the observer, and return the
        answers to send. From then on, a request of priority below 0 may be evicted.
        """
        if isinstance(decision, Refusal):
            return self._refuse(decision)
        exchange, leg = self._exchange, decision.leg
        request = exchange.request
        assert request is not None, "a request is decided"
        exchange.decision = decision
        # The stored lease refers to the request without its prompt.
        exchange.request = leg.lease.request
        exchange.endpoint = leg.endpoint
        if self._settings.explain_headers:
            self._explained = explained(leg, self._scheduler.state.outlying, decision.earlier)
        self._phase = _ROUTED
        self._request_ended = True
        self._observer.decided(exchange)
        if request.priority < 0 and self._queue is not None:
            self._offer(self._queue, decision)
        return pending.answers(self._destination(decision, request, pending.changed_body))

    # The queue.

    def _enter(
        self, queue: FlowQueue, pending: _Pending, request: InferenceRequest, now: Seconds
    ) -> list[Answer]:
        """Place `request`, or let it wait in the queue. Return the answers to send."""
        assert self.resume is not None, "what drives a session that may wait can resume it"
        timed = self._modes.request not in _HOLDING
        entered = queue.enter(
            request,
            self.resume,
            now,
            body_bytes=self._body_bytes,
            answer_within_s=self._gateway.patience_s(now) if timed else None,
        )
        # `isinstance` would be one more function call for most requests.
        if type(entered) is not Place:
            return self._decided(pending, entered)
        self._phase = Phase.WAITING
        self._pending = structs.replace(pending, request=request)
        self._wait = self._place_in_queue = entered
        if not timed:
            return []
        longest_s = queue.longest_wait_s(request.priority)
        return [TimeoutAnswer(min(longest_s or TIMEOUT_S_MAX, TIMEOUT_S_MAX))]

    def _offer(self, queue: FlowQueue, decision: Decision) -> None:
        """Let `queue` evict the request of `decision` until its response begins. The picker must see
        that, so the gateway must be one that sends response headers.
        """
        if self.evict is not None and self._gateway.sends_response_headers:
            self._running = queue.placed(decision, self.evict)

    def _keep(self) -> None:
        """Protect the request against eviction, because its response begins or it ends."""
        if self._running is not None and self._queue is not None:
            self._queue.spare(self._running)
            self._running = None

    def _note_cut(self, now: Seconds) -> None:
        """Note that the stream ended, if the request waited in the queue in a body mode in which
        the gateway has a timeout.
        """
        if self._queued and self._modes.request not in _HOLDING:
            self._gateway.cut(now - self._exchange.answered_at_s, now)

    def _hold_back(self, event: RequestBody | RequestTrailers, now: Seconds) -> list[Answer]:
        """Store a message about a request that waits, to answer it after the wait. Return a refusal
        if it exceeds a limit.
        """
        if event.subset is not None:
            self._hint(event.subset)
        more_bytes = PIECE_BYTES + (len(event.body) if isinstance(event, RequestBody) else 0)
        limit = self._settings.request_body_bytes_max
        if self._held_bytes + more_bytes > limit:
            return self._refuse(_too_large(limit))
        if not self._budget.take(more_bytes, self._taken_bytes):
            return self._refuse(_BODIES_HELD)
        self._taken_bytes += more_bytes
        self._held_bytes += more_bytes
        self._held.append(event)
        return []

    def _end_wait(self) -> None:
        if self._read is not None:
            self._read = None
            self._held.clear()
        if self._pending is None:
            return
        wait, self._wait, self._pending = self._wait, None, None
        self._held.clear()
        if wait is not None:
            wait.cancel()

    def _opaque(self) -> InferenceRequest:
        return opaque_request(headers=self._headers, request_id=self._request_id())

    def _parse(self, body: bytes) -> Parsed | Refusal:
        encoded = self._encoded
        if encoded is not None:
            return self._parse_encoded(encoded, body)
        self._exchange.request_bytes = len(body)
        parsed = parse_request(
            path=self._headers.get(":path", ""),
            headers=self._headers,
            body=body,
            request_id=self._request_id(),
            model_rewrite=first_of(self._headers, REWRITE_HEADERS)
            if self._settings.trust_model_rewrite
            else "",
            rewrite=self._settings.rewrite,
            parsers=self._settings.parsers,
            segments=self._scheduler.segments,
        )
        if not isinstance(parsed, Refusal):
            self._exchange.incoming_model = parsed.incoming_model
            self._exchange.unparsed = parsed.unparsed
        return parsed

    def _request_id(self) -> str:
        if not self._named:
            self._named = self._headers.get(REQUEST_ID_HEADER) or self._new_request_id()
        return self._named

    def _priority(self, objective: str) -> int:
        priority = self._settings.priorities.get(objective)
        if priority is None:
            self._observer.unknown_objective()
            return 0
        return priority

    def _destination(
        self, decision: Decision, request: InferenceRequest, changed_body: bytes | None
    ) -> Destination:
        headers = self._headers
        set_headers: list[tuple[str, str]] = []
        if headers.get(REQUEST_ID_HEADER) != request.request_id:
            set_headers.append((REQUEST_ID_HEADER, request.request_id))
        if changed_body is not None:
            set_headers.append(("content-length", str(len(changed_body))))
        if self._settings.request_load_metrics and LOAD_REPORT_REQUEST_HEADER not in headers:
            set_headers.append((LOAD_REPORT_REQUEST_HEADER, LOAD_REPORT_FORMAT))
        remove_headers: tuple[str, ...] = ()
        not_clients = CONTROL_HEADERS
        if decision.marks_requests:
            marked = decision.request_headers()
            set_headers += marked.items()
            not_clients = (CONTROL_HEADERS | decision.own_request_headers) - marked.keys()
        if decision.earlier:
            stage_headers = _stage_headers(decision)
            set_headers += stage_headers.items()
            not_clients = not_clients - stage_headers.keys()
        if decision.primary_port:
            set_headers.append((RANK_ADDRESS_HEADER, decision.endpoint.address))
            not_clients = not_clients - {RANK_ADDRESS_HEADER}
        if self._settings.engine_priority:
            set_headers.append((ENGINE_PRIORITY_HEADER, str(-request.priority)))
            not_clients = not_clients - {ENGINE_PRIORITY_HEADER}
        if not not_clients.isdisjoint(headers):
            remove_headers = tuple([name for name in headers if name in not_clients])
        if changed_body is not None and self._recoded:
            remove_headers += (CONTENT_ENCODING,)
        trace = self._exchange.trace
        if trace is not None:
            remove_headers += trace.remove_headers
        leg = decision.leg
        addresses: tuple[str, ...] = (leg.endpoint.address,)
        if leg.fallbacks:
            addresses += tuple([endpoint.address for endpoint in leg.fallbacks])
        if decision.primary_port:
            # Another pod's sidecar does not know the rank that the header names.
            addresses = (f"{leg.endpoint.host}:{decision.primary_port}",)
        return Destination(
            endpoints=addresses,
            set_headers=tuple(set_headers),
            remove_headers=remove_headers,
            own_header=None if trace is None else trace.own_header,
        )

    def _violate(self, event: str) -> list[Answer]:
        self._observer.protocol_violated(self._phase.value, event)
        self.violated = True
        self.failed(StreamFailure.VIOLATION)
        return []

    def _refuse(self, refusal: Refusal) -> list[Answer]:
        self._phase = Phase.ENDED
        self._end_wait()
        self._let_go()
        self.finished = True
        self._exchange.path = self._headers.get(":path", "").partition("?")[0]
        # Without headers there is no request that could have an id.
        self._exchange.request_id = self._request_id() if self._headers else ""
        self._observer.refused(self._exchange, refusal)
        return [refusing(refusal, self._exchange.request_id)]

    def _end_response(self, now: Seconds) -> None:
        if self._exchange.decision is not None and not self._completed:
            self._complete(Ending.COMPLETE, now)

    def _complete(self, ending: Ending, now: Seconds) -> None:
        self._completed = True
        if self._running is not None:
            self._keep()
        decision = self._exchange.decision
        assert decision is not None
        usage = self._exchange.usage
        outcome = Outcome(
            ending=ending,
            status=self._exchange.status,
            by_gateway=self._exchange.by_gateway,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            retry_after_s=self._exchange.retry_after_s,
        )
        if self._queue is not None and self._place_in_queue is not None:
            self._queue.settled(self._place_in_queue, outcome, now)
        set_aside = self._scheduler.take(RequestEnded(decision.lease, outcome), now).set_aside
        if set_aside is not None:
            self._observer.set_aside(set_aside)
        self._observer.completed(self._exchange, outcome, now)


_REQUEST_PHASES: Final = (
    Phase.START,
    Phase.COLLECTING,
    Phase.BUFFERED,
    Phase.WAITING,
    Phase.ROUTED,
)

_Handler: TypeAlias = Callable[..., list[Answer]]

_HANDLERS: Final[Mapping[tuple[Phase, type[Event]], _Handler]] = {
    (Phase.START, RequestHeaders): Session._open,
    (Phase.COLLECTING, RequestBody): Session._collect,
    (Phase.COLLECTING, RequestTrailers): Session._collect_trailers,
    (Phase.BUFFERED, RequestBody): Session._buffered_body,
    (Phase.BUFFERED, RequestTrailers): Session._buffered_trailers,
    (Phase.WAITING, RequestBody): Session._hold_back,
    (Phase.WAITING, RequestTrailers): Session._hold_back,
    **{(phase, RequestBody): Session._pass_body for phase in (Phase.ROUTED, Phase.RESPONDING)},
    **{
        (phase, RequestTrailers): Session._pass_trailers
        for phase in (Phase.ROUTED, Phase.RESPONDING)
    },
    # A gateway may send only responses, and a local reply may end the request phase early.
    **{(phase, ResponseHeaders): Session._respond for phase in _REQUEST_PHASES},
    (Phase.RESPONDING, ResponseBody): Session._response_body,
    (Phase.RESPONDING, ResponseTrailers): Session._response_trailers,
}


def chunks(body: bytes | memoryview, *, ends: bool) -> Sequence[tuple[bytes | memoryview, bool]]:
    """Return `body` as (piece, whether it is the last) in pieces that every gateway accepts,
    without copying. `ends` is True if neither more of the body nor trailers follow; only then is a
    piece the last.

    An empty body is one empty piece if `ends` is True, and no piece otherwise.
    """
    if len(body) <= BODY_CHUNK_BYTES_MAX:
        return ((body, ends),) if body or ends else ()
    view = memoryview(body)
    pieces = []
    for start in range(0, len(body), BODY_CHUNK_BYTES_MAX):
        stop = start + BODY_CHUNK_BYTES_MAX
        pieces.append((view[start:stop], ends and stop >= len(body)))
    return pieces


def _stage_headers(decision: Decision) -> dict[str, str]:
    """Return the headers that name the endpoints of the prefill and encode stages.

    The gateway may remove headers after it has set others, so these must not be removed.
    """
    found: dict[str, str] = {}
    prefiller, encoders = decision.prefiller, decision.encoders
    if prefiller is not None:
        found[PREFILL_HEADER] = prefiller.address
    if encoders:
        found[ENCODE_HEADER] = ",".join([encoder.address for encoder in encoders])
    return found


def _status(headers: Mapping[str, str]) -> int | None:
    status = headers.get(":status") or headers.get("status", "")
    return int(status) if status.isascii() and status.isdigit() else None


_BODIES_HELD: Final = Refusal(
    reason=RefusalReason.BODIES_HELD,
    status=503,
    message="the picker has reached its limit for unfinished request bodies",
)


def _too_large(limit: int) -> Refusal:
    return Refusal(
        reason=RefusalReason.BODY_TOO_LARGE,
        status=413,
        message=f"the request body is larger than {limit} bytes",
    )


def _decoded_too_large(limit: int) -> Refusal:
    return Refusal(
        reason=RefusalReason.BODY_TOO_LARGE,
        status=413,
        message=f"the decoded request body is larger than {limit} bytes",
    )


def _bad_request(message: str, param: str | None) -> Refusal:
    return Refusal(reason=RefusalReason.BAD_REQUEST, status=400, message=message, param=param)
