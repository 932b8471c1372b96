"""Encoding of decisions, refusals and ends of requests as records of a few hundred bytes.

A record consists of a head of fixed size, which is overwritten when the request ends, the time of
the record, and the packed rest. It contains no part of a prompt or an answer. Of the headers it
contains at most the request id, the path, a model name and the id of the flow.
"""

import math
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from epp.core.decision.choice import predicted_tokens
from epp.core.decision.costs import Cost
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.protocol.session import Exchange, StreamFailure
from epp.core.types import Seconds

TEXT_CHARACTERS_MAX: Final = 256
"""Maximum number of recorded characters of a model name, request id or path, which come from
clients.
"""
DECIDED: Final = b"d"
REFUSED: Final = b"r"
SERVED: Final = b"s"
"""Kinds of records: a decision, a refusal, and an endpoint that served instead of the chosen one.

The kind is a record's first byte.
"""

_HEAD: Final = struct.Struct("<cBB?hfffi")
"""Binary layout of a record's head, which is overwritten when the request ends.

It contains kind, ending, failure, whether the gateway itself answered, status, the seconds to the
end, to the response headers and to the first output, and the cached tokens.
"""
_AT: Final = struct.Struct("<dq")
"""Binary layout of the part after a record's head: Unix time of the record, and position of all
candidates' scores.
"""
PACKED_FROM: Final = _HEAD.size + _AT.size
"""Position in a record from which the packed rest begins, in bytes."""
_ENDINGS: Final = tuple(Ending)
_FAILURES: Final = tuple(StreamFailure)
_UNKNOWN: Final = -1
_STATUS_MAX: Final = 2**15 - 1
_TOKENS_MAX: Final = 2**31 - 1


_OPEN: Final = {
    kind: _HEAD.pack(kind, 0, 0, False, 0, math.nan, math.nan, math.nan, _UNKNOWN)
    for kind in (DECIDED, REFUSED, SERVED)
}
_pack: Final = msgspec.msgpack.Encoder().encode


class DecidedLeg(Struct, frozen=True, gc=False, array_like=True):
    """The recorded data of the leg of a prefill or encode stage, without its request and lease."""

    stage: str
    """Stage of the request: `prefill` or `encode`."""
    endpoint: str
    """Name of the endpoint that was chosen for the stage."""
    address: str
    """Address of the endpoint that was chosen for the stage."""
    others: tuple[str, ...]
    """Addresses of further endpoints that work on the encode stage; () for the prefill stage."""
    setting: int
    """Number of the record of the scorers and weights that chose the endpoint."""
    matched_blocks: int
    """Number of prompt blocks that the endpoint was estimated to have cached."""
    eliminated: Mapping[str, int]
    """Number of endpoints that were not scored, by reason: the name of the filter that dropped them,
    or why they were not available.
    """
    candidates: int
    """Number of endpoints that were scored for the stage."""
    parts: list[float]
    """Parts of the chosen endpoint's score, by scorer."""
    prefill_tokens: float
    """Number of prompt tokens that the chosen endpoint must compute for this request, already
    included in `numbers`.
    """
    numbers: tuple[float, ...]
    """Load of the chosen endpoint in the order of `epp.core.knowledge.candidates.NUMBERS`; () if it
    is not recorded.
    """
    runner_up: str = ""
    """Name of the second-best endpoint for the stage, or "" if there was none."""
    runner_up_scores: bytes = b""
    """Scores of the runner-up without weights, as float64[scorers]."""


class Decided(Struct, frozen=True, gc=False, array_like=True):
    """The part of a routing decision that the journal stores: the names, scores and loads of
    the chosen endpoint and the runner-up, and facts about the request and the candidates. The
    prompt, the headers and the lease are not stored.

    The endpoint is that to which the gateway sends the request. If other endpoints work on the
    prefill or encode stages, their data is in `earlier`.
    """

    number: int
    setting: int
    """Number of the record of the scorers and weights that chose the endpoint."""
    request_id: str
    model: str
    priority: int
    prompt_tokens: int
    output_tokens_max: int | None
    endpoint: str
    address: str
    fallbacks: tuple[str, ...]
    matched_blocks: int
    total_blocks: int
    block_tokens: int
    ready: int
    eliminated: Mapping[str, int]
    candidates: int
    parts: list[float]
    """Parts of the chosen endpoint's total score, by scorer."""
    prefill_tokens: float
    """Number of prompt tokens of this request that the chosen endpoint must compute.

    `numbers` already include them.
    """
    numbers: tuple[float, ...]
    """Values of the chosen endpoint in the order of `epp.core.knowledge.candidates.NUMBERS`,
    including this request.
    """
    members: int
    """Generation of the pool's endpoints at the decision."""
    states: int
    """Number of the record of the endpoint states at the time of the decision."""
    runner_up: str = ""
    """Name of the endpoint with the second-best score, or "" if there was none."""
    runner_up_scores: bytes = b""
    """Scores of the second-best endpoint without weights, as float64[scorers] in bytes."""
    runner_up_numbers: tuple[float, ...] = ()
    shadow: dict[str, object] | None = None
    """Choice of the shadow profile for this request, or None if it was not applied."""
    answer_tokens: float | None = None
    """Median over the pool's endpoints of the average number of tokens in an answer at the time of
    the decision, as in `Moment`; None if it was unknown.
    """
    matched_most: int = 0
    """Maximum number of the prompt's blocks that any candidate is estimated to have cached, or 0 if
    it does not matter for explanations.
    """
    costs: tuple[Cost, ...] | None = None
    """Costs of the chosen endpoint and the runner-up by scorer, as in `Leg`; None if not
    recorded.
    """
    route: str = ""
    """Route of the request through its endpoints (`Route`), or "" if the configuration has one
    stage.
    """
    uncached_tokens: int = 0
    """Number of prompt tokens that the chosen endpoint, that of the decode stage, was estimated not
    to have cached; 0 if there is no route.
    """
    earlier: tuple[DecidedLeg, ...] = ()
    """Legs of the prefill and encode stages, if other endpoints work on them."""
    queued: dict[str, object] | None = None
    """Wait of the request in the picker's queue, or None if it did not wait there."""
    predicted: tuple[float, ...] = ()
    """Predicted time to first token and per output token at the endpoint in seconds, and the median
    errors of both predictions; NaN where unknown or unused. () if no latency is predicted.
    """


class Refused(Struct, frozen=True, gc=False, array_like=True):
    """The recorded data of a refusal, without its error sentence, which may quote the client."""

    request_id: str
    model: str
    path: str
    priority: int
    reason: str
    status: int
    eliminated: Mapping[str, int]
    states: int
    """Number of the record of the endpoint states at the time of the refusal."""
    queued: dict[str, object] | None = None
    """Wait of the request in the picker's queue, or None if it did not wait there."""


class Served(Struct, frozen=True, gc=False, array_like=True):
    """The recorded data of an endpoint to which the gateway sent a request instead of the chosen
    one.
    """

    number: int
    address: str
    endpoint: str = ""
    """Name of the endpoint with this address, or "" if the pool has none."""
    matched_blocks: int = 0
    """Number of blocks of the prompt that this endpoint was estimated to have cached when the
    picker learnt that it served the request; 0 if the decision is derived from a capture.
    """


def served_at(told: Decided, served: Served | None) -> str:
    """Return the name, or else the address, of the endpoint that served the request, as far as
    known.
    """
    if served is None:
        return told.endpoint
    return served.endpoint or served.address


def predicted_at(told: Decided, served: Served | None) -> int:
    """Return the number of prompt tokens that were estimated as cached at the endpoint that served
    the request.
    """
    matched = told.matched_blocks if served is None else served.matched_blocks
    return predicted_tokens(matched, told.block_tokens, told.prompt_tokens)


class Scores(Struct, frozen=True, gc=False, array_like=True):
    """The scores of all n candidates of a decision, as the bytes of its arrays."""

    picked: int
    slot: bytes
    """Slots of the candidates, int64[n] as bytes."""
    scores: bytes
    """Scores of the candidates, float64[scorers, n] as bytes."""
    dropped: dict[str, bytes]
    """Slots of the k endpoints that were not scored for one reason, int64[k] as bytes, by reason: the
    name of the filter that dropped them, or why they were not available.
    """


class Ended(Struct, frozen=True, kw_only=True):
    """The recorded end of a request; a field is None if its value is unknown, and `failure` also if
    the stream did not fail.
    """

    ending: str
    failure: str | None
    status: int | None
    by_gateway: bool
    duration_s: Seconds | None
    response_headers_s: Seconds | None
    first_output_s: Seconds | None
    cached_tokens: int | None
    """Number of prompt tokens that the engine found in its cache."""


class Numbered(Struct, frozen=True, gc=False, array_like=True):
    """The first field of a packed decision, decoded alone: the decision's number."""

    number: int


unpack_number: Final = msgspec.msgpack.Decoder(Numbered).decode
unpack_decided: Final = msgspec.msgpack.Decoder(Decided).decode
unpack_refused: Final = msgspec.msgpack.Decoder(Refused).decode
unpack_served: Final = msgspec.msgpack.Decoder(Served).decode
unpack_scores: Final = msgspec.msgpack.Decoder(Scores).decode


def record_of(
    kind: bytes, at_s: float, told: Decided | Refused | Served, scores_at: int = -1
) -> bytes:
    """Return the bytes of a new record, created at Unix time `at_s`, of a request that has not
    ended.

    `scores_at` is the position of the scores of all candidates, or -1 if there are none.
    """
    return _OPEN[kind] + _AT.pack(at_s, scores_at) + _pack(told)


def scores_of(scores: Scores) -> bytes:
    """Return the bytes of a record with the scores of all candidates, which has no head."""
    return _pack(scores)


def ended_head(exchange: Exchange, outcome: Outcome, now: Seconds) -> bytes:
    """Return the head that replaces the head of a decision's record when its request ends."""
    usage, failure = exchange.usage, exchange.failure
    started_s = exchange.started_at_s
    headers_s, output_s = exchange.response_started_at_s, exchange.first_output_at_s
    cached = usage.cached_tokens if usage else None
    return _HEAD.pack(
        DECIDED,
        1 + _ENDINGS.index(outcome.ending),
        0 if failure is None else 1 + _FAILURES.index(failure),
        outcome.by_gateway,
        0 if outcome.status is None else min(outcome.status, _STATUS_MAX),
        now - started_s,
        math.nan if headers_s is None else headers_s - started_s,
        math.nan if output_s is None else output_s - started_s,
        _UNKNOWN if cached is None else min(max(cached, 0), _TOKENS_MAX),
    )


def kept_at_s(record: bytes) -> float:
    """Return the Unix time at which `record` was created."""
    at_s: float = _AT.unpack_from(record, _HEAD.size)[0]
    return at_s


def scores_at_of(record: bytes) -> int:
    """Return the position of the scores of all candidates of the decision in `record`, or -1 if
    there are none.

    The scores may have been dropped for newer ones.
    """
    scores_at: int = _AT.unpack_from(record, _HEAD.size)[1]
    return scores_at


def end_of(record: bytes) -> Ended | None:
    """Return the recorded end of the request in `record`, or None if the request is not known to
    have ended.
    """
    head = _HEAD.unpack_from(record)
    _, ending, failure, by_gateway, status, elapsed_s, headers_s, output_s, cached = head
    if not ending:
        return None
    return Ended(
        ending=_ENDINGS[ending - 1].value,
        failure=_FAILURES[failure - 1].value if failure else None,
        status=status or None,
        by_gateway=by_gateway,
        duration_s=_seconds(elapsed_s),
        response_headers_s=_seconds(headers_s),
        first_output_s=_seconds(output_s),
        cached_tokens=None if cached == _UNKNOWN else cached,
    )


def _seconds(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def kept_text(text: str) -> str:
    """Return the first `TEXT_CHARACTERS_MAX` characters of a client's text.

    Characters that UTF-8 cannot encode are replaced by "?".
    """
    cut = text[:TEXT_CHARACTERS_MAX]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()
