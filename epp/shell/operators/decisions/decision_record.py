"""How a decision, a refusal and the end of a request are kept: as a few hundred bytes each.

A record is a head of fixed size, which is written anew when the request ends, the time at which it was
kept, and the rest packed. Nothing of a prompt, of a header but the name of the request, or of an answer
is in it.
"""

import math
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from epp.core.decision.account import predicted_tokens
from epp.core.decision.costs import Cost
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.protocol.session import Exchange, StreamFailure
from epp.core.types import Seconds

TEXT_CHARACTERS_MAX: Final = 256
"""What a client can write, a model name or a request id, is cut here."""
DECIDED: Final = b"d"
REFUSED: Final = b"r"
SERVED: Final = b"s"
"""Kinds of records: their first byte."""

_HEAD: Final = struct.Struct("<cBB?hfffi")
"""Before each record: kind, ending, failure, whether the gateway answered, status, seconds to the end, to
the response headers and to the first output, cached tokens. Written anew when the request ends."""
_AT: Final = struct.Struct("<dq")
"""After it: when it was kept, by the clock of the day, and the place of the scores of all candidates."""
PACKED_FROM: Final = _HEAD.size + _AT.size
"""Where the packed rest of a record begins."""
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


class Decided(Struct, frozen=True, gc=False, array_like=True):
    """What is kept of a decision: not its request, nor its lease."""

    number: int
    setting: int
    """Which of the configurations that decided."""
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
    """Of the chosen endpoint's score."""
    prefill_tokens: float
    """Of this request, which `numbers` count already."""
    numbers: tuple[float, ...]
    """`NUMBERS` of the chosen endpoint."""
    members: int
    """Generation of the pool."""
    states: int
    """Which of the states that were told of endpoints that were not simply ready."""
    runner_up: str = ""
    """The best of the others; "": there was none."""
    runner_up_scores: bytes = b""
    """float64[scorers], without their weights."""
    runner_up_numbers: tuple[float, ...] = ()
    shadow: dict[str, object] | None = None
    """What the shadow profile would have done; None: there is none."""
    answer_tokens: float | None = None
    """As of `Moment`."""
    matched_most: int = 0
    """The most blocks that any candidate held; 0: it does not matter."""
    costs: tuple[Cost, ...] | None = None
    """As of `Leg`."""


class Refused(Struct, frozen=True, gc=False, array_like=True):
    """What is kept of a refusal: not its sentence, which may quote the client."""

    request_id: str
    model: str
    path: str
    priority: int
    reason: str
    status: int
    eliminated: Mapping[str, int]
    states: int
    """As of a decision."""


class Served(Struct, frozen=True, gc=False, array_like=True):
    """The gateway went elsewhere than it was told."""

    number: int
    address: str
    endpoint: str = ""
    """The name of who has that address; "": nobody of the pool."""
    matched_blocks: int = 0
    """What it was believed to hold of the prompt when it was known to serve it."""


def served_at(told: Decided, served: Served | None) -> str:
    """The endpoint where a request was in the end, as far as is known: its name, else its address."""
    if served is None:
        return told.endpoint
    return served.endpoint or served.address


def predicted_at(told: Decided, served: Served | None) -> int:
    """Tokens of the prompt that were believed to be cached there."""
    matched = told.matched_blocks if served is None else served.matched_blocks
    return predicted_tokens(matched, told.block_tokens, told.prompt_tokens)


class Scores(Struct, frozen=True, gc=False, array_like=True):
    """What is kept of the scores of n candidates: the decision's own arrays, as bytes."""

    picked: int
    slot: bytes
    """int64[n]"""
    scores: bytes
    """float64[scorers, n]"""
    dropped: dict[str, bytes]
    """Name of the filter -> int64[k], slots of the endpoints that it dropped."""


class Ended(Struct, frozen=True, kw_only=True):
    """How a request ended; None: not known."""

    ending: str
    failure: str | None
    status: int | None
    by_gateway: bool
    duration_s: Seconds | None
    response_headers_s: Seconds | None
    first_output_s: Seconds | None
    cached_tokens: int | None
    """Prompt tokens that the engine found in its cache."""


class Numbered(Struct, frozen=True, gc=False, array_like=True):
    """What a packed decision begins with."""

    number: int


unpack_number: Final = msgspec.msgpack.Decoder(Numbered).decode
unpack_decided: Final = msgspec.msgpack.Decoder(Decided).decode
unpack_refused: Final = msgspec.msgpack.Decoder(Refused).decode
unpack_served: Final = msgspec.msgpack.Decoder(Served).decode
unpack_scores: Final = msgspec.msgpack.Decoder(Scores).decode


def record_of(
    kind: bytes, at_s: float, told: Decided | Refused | Served, scores_at: int = -1
) -> bytes:
    """A new record, kept at `at_s`; its request has not ended. `scores_at`: of a decision."""
    return _OPEN[kind] + _AT.pack(at_s, scores_at) + _pack(told)


def scores_of(scores: Scores) -> bytes:
    """A record of another kind, without a head."""
    return _pack(scores)


def ended_head(exchange: Exchange, outcome: Outcome, now: Seconds) -> bytes:
    """What the record of a decision begins with from the end of its request on."""
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
    """When it was kept, by the clock of the day."""
    at_s: float = _AT.unpack_from(record, _HEAD.size)[0]
    return at_s


def scores_at_of(record: bytes) -> int:
    """The place of the scores of all candidates, which are kept as long as there is room."""
    scores_at: int = _AT.unpack_from(record, _HEAD.size)[1]
    return scores_at


def end_of(record: bytes) -> Ended | None:
    """How its request ended; None: it has not, as far as is known."""
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
    """Cut, and as UTF-8 can carry it: clients may send anything."""
    cut = text[:TEXT_CHARACTERS_MAX]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()
