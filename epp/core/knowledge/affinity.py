"""Two small affinity indexes: the last endpoint of each session, and the order of cold prompts."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import numpy as np
import xxhash
from msgspec import Meta, Struct

from epp.core.abilities import Abilities
from epp.core.duration import Duration, check_above_zero
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.index import AffinityIndex, IndexMeasures
from epp.core.parameters import Parameters
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

SESSION_HEADER: Final = "x-session-id"
SESSION_ATTRIBUTE: Final = "SessionIDDataKey"
"""Name of the attribute under which llm-d-router's `session-id-producer` publishes the session id."""
_COOKIE_BYTES_MAX: Final = 16 * 1024
"""Maximum size of a cookie header in bytes; the picker ignores a longer one when it looks for the
session id.
"""
_KEY_BYTES: Final = 16
"""Size in bytes of the hash that stands for a session id."""
_COLD: Final = (b"cold",)
_SESSION_BYTES: Final = 240
"""Memory in bytes of one session with an id of 36 characters just after the table has grown, by
`tracemalloc`.
"""
_USED_SLOT_BYTES: Final = 170
"""Memory in bytes of one endpoint's entry in the index `NoHitLru`, rounded up from 166 by
`tracemalloc`.
"""
_Sent: TypeAlias = tuple[int, Seconds]
"""Slot of the endpoint to which a session's last request was sent, and the time of that request."""


class SessionSource(Parameters, frozen=True):
    """A place where a request may name its session: a header, or an attribute. Raises `ValueError`
    if both or neither are given, or if the attribute is unknown.
    """

    header: str = ""
    attribute: str = ""
    """Attribute that names the session. Only `SessionIDDataKey` is possible: the header or cookie
    of the `session-id-producer`.
    """
    producer: str = ""
    """Name of the `session-id-producer` that provides the attribute. It has no effect, because
    there is only one such producer.
    """

    def __post_init__(self) -> None:
        if bool(self.header.strip()) == bool(self.attribute):
            raise ValueError("a session source needs either header or attribute")
        if self.attribute and self.attribute != SESSION_ATTRIBUTE:
            raise ValueError(
                f"no producer provides the attribute {self.attribute} of requests; expected "
                f"{SESSION_ATTRIBUTE}, or a header that names the session"
            )

    @property
    def described(self) -> dict[str, str]:
        """Return this session source as a mapping with the parameters that are not empty, as in a
        configuration document.
        """
        told = {"header": self.header, "attribute": self.attribute, "producer": self.producer}
        return {name: value for name, value in told.items() if value}


SessionSources: TypeAlias = Annotated[tuple[SessionSource, ...], Meta(max_length=16)]
"""Places where a request may name its session, in order. The first place that is present in a
request decides.
"""


class SessionIndexSettings(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """`session-id-producer`: the strategy `session_id` of llm-d-router's session affinity.

    `headerName` and `ttl` with its default of 300 s are those of llm-d-router; `sessionsMax` is an
    addition.
    """

    type_name: ClassVar[str] = "session-id-producer"
    abilities: ClassVar[Abilities] = Abilities(names_sessions=True, shares=True, measures=True)

    header_name: Annotated[str, Meta(min_length=1)] = SESSION_HEADER
    """Request header with the session id, used if the request has no `session_id` of its own; see
    `cookieName` and `sources`.
    """
    cookie_name: str = ""
    """Cookie with the session id, used instead of the header `headerName`."""
    sources: SessionSources = ()
    """Places that may name the session; the first that a request has decides. Each is a `header`,
    or an `attribute` `SessionIDDataKey`, which stands for `cookieName` if set, else for
    `headerName`. If `sources` is empty, only that one applies. A request's own `session_id` takes
    precedence.
    """
    ttl: Duration = Duration(300.0)
    """Time after the last request of a session at which the index forgets it."""
    sessions_max: Annotated[int, Meta(ge=1)] = 65_536
    """Maximum number of sessions in the index; above it the least recently used session is dropped."""

    def __post_init__(self) -> None:
        check_above_zero("ttl", self.ttl)
        if self.cookie_name and self.header_name != SESSION_HEADER:
            raise ValueError(
                f"headerName is {self.header_name} and cookieName is {self.cookie_name}; set only "
                "one of the two"
            )

    def session_in(self, request: InferenceRequest, /) -> str:
        """Return the session that `request` names, or "" if it names none."""
        return request.session_id or self._named_by(request.headers)

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Return (header, cookie) for each place that may name a session, in order; the cookie is
        "" if the whole header is the session id.
        """
        own = ("cookie", self.cookie_name) if self.cookie_name else (self.header_name.lower(), "")
        named = ((source.header.strip().lower(), "") for source in self.sources)
        return tuple(place if place[0] else own for place in named) or (own,)

    def _named_by(self, headers: Mapping[str, str]) -> str:
        for header, cookie in self.places:
            value = headers.get(header, "")
            session = (_cookie(value, cookie) if cookie else value).strip()
            if session:
                return session
        return ""

    def open(self) -> AffinityIndex:
        """Return a new, empty session index."""
        return SessionIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to `index`, which keeps its sessions. Return False if `index` is of
        another type than `SessionIndex`.
        """
        return isinstance(index, SessionIndex) and index.configure(self)


class SessionIndex:
    """An affinity index of the slot to which each session was last sent. A match counts sessions: 1
    of 1, or 0 of 1.

    A request without a session id matches 0 of 0.
    """

    def __init__(self, settings: SessionIndexSettings) -> None:
        self._sessions: OrderedDict[bytes, _Sent] = OrderedDict()
        """Slot and time of the last request of each session, by the hash of its id, least recently
        used session first.
        """
        self._lookups = {"full": 0, "none": 0}
        """Number of look-ups of a session in the index, by result: "full" if the session was found,
        "none" if not.
        """
        self.configure(settings)

    def configure(self, settings: SessionIndexSettings) -> bool:
        """Apply `settings`, and drop the sessions above the new maximum at once. Return True."""
        self._settings = settings
        self._ttl_s = float(settings.ttl)
        self._sessions_max = settings.sessions_max
        self._fit()
        return True

    def __len__(self) -> int:
        return len(self._sessions)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return a match of 1 at the slot to which the session of `request` was last sent within the
        TTL, and 0 at all others. Count the look-up of a request with a session.
        """
        matched = np.zeros(slots, dtype=np.int64)
        session = self._key_of(request)
        slot, sent_at = self._sessions.get(session, (-1, -math.inf))
        found = 0 <= slot < slots and sent_at >= now - self._ttl_s
        if found:
            matched[slot] = 1
        if session:
            self._lookups["full" if found else "none"] += 1
        return Affinity(matched, 1 if session else 0)

    def measures(self) -> IndexMeasures:
        """Return the number of sessions, their memory in bytes, and the look-ups of this index."""
        return IndexMeasures(
            entries=len(self._sessions),
            memory_bytes=len(self._sessions) * _SESSION_BYTES,
            lookups=dict(self._lookups),
        )

    def record(
        self, request: InferenceRequest, slot: int, now: Seconds
    ) -> tuple[_Sent, _Sent | None] | None:
        """Assign the session of `request` to `slot`. Return the new and the previous assignment,
        each as (slot, time), or None if the request names no session. The previous one is None if
        there was none.
        """
        session = self._key_of(request)
        if not session:
            return None
        before, sent = self._sessions.get(session), (slot, now)
        self._sessions[session] = sent
        self._sessions.move_to_end(session)
        self._fit()
        return sent, before

    @property
    def signature(self) -> str:
        """Return the signature of the session keys. Peers share sessions only if it is equal, that
        is, if they use the same headers and cookies.
        """
        named = (f"{header} {cookie}".rstrip() for header, cookie in self._settings.places)
        return "session:" + ",".join(named)

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """Return the key of the session of `request`, or () if the request names none."""
        session = self._key_of(request)
        return (session,) if session else ()

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """Record that a peer sent the sessions `keys` to `slot` at `stamp`. Ignore a session with a
        known assignment that is not earlier, a stamp older than the TTL and an invalid key.
        """
        for session in keys:
            known_at = self._sessions.get(session, (-1, -math.inf))[1]
            if len(session) != _KEY_BYTES or stamp <= known_at or stamp < now - self._ttl_s:
                continue
            self._sessions[session] = (slot, min(stamp, now))
            # The record arrives a few milliseconds late, and is placed among the most recent.
            self._sessions.move_to_end(session)
        self._fit()

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Yield (slot, time, keys) of every session in the index, least recently used first."""
        for session, (slot, sent_at) in tuple(self._sessions.items()):
            yield slot, sent_at, (session,)

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo the assignment of the session of `request` to `slot`, unless it was assigned again
        since. The session stays there if `slot` was its previous assignment as well; else the index
        forgets it.
        """
        session = self._key_of(request)
        if recorded is None or self._sessions.get(session) is not recorded[0]:
            return  # The session was assigned again since, or is forgotten.
        before = recorded[1]
        if before is not None and before[0] == slot:
            self._sessions[session] = before
        else:
            del self._sessions[session]

    def forget(self, slot: int) -> None:
        """Drop the sessions whose last request was sent to `slot`."""
        gone = [session for session, (at, _) in self._sessions.items() if at == slot]
        for session in gone:
            del self._sessions[session]

    def expire(self, now: Seconds) -> None:
        """Drop sessions that sent no request for the TTL, at most 4,096 of them per call."""
        for _ in range(4_096):
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or oldest[1] >= now - self._ttl_s:
                return
            self._sessions.popitem(last=False)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Do nothing, because the number of sessions does not depend on the size of an engine's KV
        cache.
        """

    def _key_of(self, request: InferenceRequest) -> bytes:
        """Return a 16-byte hash of the session's id, or b"" if the request names none."""
        session = self._settings.session_in(request)
        if not session:
            return b""
        return xxhash.xxh3_128_digest(session.encode("utf-8", "surrogatepass"))

    def _fit(self) -> None:
        while len(self._sessions) > self._sessions_max:
            self._sessions.popitem(last=False)


def _cookie(header: str, name: str) -> str:
    """Return the value of the first cookie `name` in a cookie header, or "" if there is none."""
    if len(header) > _COOKIE_BYTES_MAX:
        return ""
    for pair in header.split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value
    return ""


class NoHitLruSettings(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Settings of the index `NoHitLru`. A configuration document may declare `no-hit-lru-producer`;
    otherwise the settings are created with the `lruSize` of `no-hit-lru-scorer`.
    """

    type_name: ClassVar[str] = "no-hit-lru-producer"
    abilities: ClassVar[Abilities] = Abilities(shares=True, measures=True)

    lru_size: Annotated[int, Meta(ge=1)] = 1_024
    """Maximum number of endpoints whose last cold prompt is remembered."""

    def open(self) -> AffinityIndex:
        """Return a new, empty index of cold prompts."""
        return NoHitLru(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to `index`, which keeps its content up to the new `lru_size`. Return
        False if `index` is of another type than `NoHitLru`.
        """
        return isinstance(index, NoHitLru) and index.configure(self)


class NoHitLru:
    """An affinity index of the order in which endpoints last received a cold prompt, that is, a
    prompt of which no endpoint was estimated to have cached a part (with several stages, no
    candidate of the stage).

    A match is a rank: 0 if no cold prompt of the endpoint is remembered, 1 for the least recently
    used endpoint, up to the number of remembered endpoints, which is the total.
    """

    def __init__(self, settings: NoHitLruSettings) -> None:
        self._slots: OrderedDict[int, Seconds] = OrderedDict()
        """Time of each endpoint's last cold prompt by slot, least recently used endpoint first."""
        self.configure(settings)

    def configure(self, settings: NoHitLruSettings) -> bool:
        """Apply `settings`. If more endpoints are remembered than the new `lru_size`, forget the least
        recently used ones at once. Return True.
        """
        self._lru_size = settings.lru_size
        self._fit()
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return a match whose `matched` is the rank of each endpoint by the time of its last cold
        prompt: 0 if none is remembered, 1 for the longest ago.
        """
        ranks = np.zeros(max(slots, max(self._slots, default=0) + 1), dtype=np.int64)
        if self._slots:
            ranks[list(self._slots)] = np.arange(1, len(self._slots) + 1)
        return Affinity(ranks[:slots], len(self._slots))

    def measures(self) -> IndexMeasures:
        """Return the number of remembered endpoints and their memory in bytes."""
        return IndexMeasures(
            entries=len(self._slots), memory_bytes=len(self._slots) * _USED_SLOT_BYTES
        )

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """Make `slot` the most recently used slot if the prompt of `request` is cold."""
        if not request.moment.cold:
            return
        self._slots[slot] = now
        self._slots.move_to_end(slot)
        self._fit()

    signature: ClassVar[str] = "cold"
    """Signature of the keys of this index. Peers share their cold prompts if it is equal."""

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """Return the key that stands for any cold prompt if `request` is cold, else ()."""
        return _COLD if request.moment.cold else ()

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """Record that a peer sent a cold prompt to `slot` at `stamp`, unless a later one is known."""
        if not keys or stamp <= self._slots.get(slot, -math.inf):
            return
        newer = [at for at, used in takewhile(_used_after(stamp), reversed(self._slots.items()))]
        self._slots[slot] = min(stamp, now)
        self._slots.move_to_end(slot)
        for other in reversed(newer):
            self._slots.move_to_end(other)
        self._fit()

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Yield (slot, time, keys) of each slot that received a cold prompt and still has it as its
        last one, least recently used first. Slots whose last one was retracted are left out.
        """
        for slot, used_at in tuple(self._slots.items()):
            if used_at > -math.inf:
                yield slot, used_at, _COLD

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Make `slot` the least recently used slot if `request` is cold, because the request was not
        served there after all.
        """
        if request.moment.cold and slot in self._slots:
            self._slots[slot] = -math.inf
            self._slots.move_to_end(slot, last=False)

    def forget(self, slot: int) -> None:
        """Forget that the endpoint in `slot` ever received a cold prompt."""
        self._slots.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Do nothing, because entries of this index do not expire."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Do nothing, because cold prompts do not depend on the size of an engine's KV cache."""

    def _fit(self) -> None:
        while len(self._slots) > self._lru_size:
            self._slots.popitem(last=False)


def _used_after(stamp: Seconds) -> Callable[[tuple[int, Seconds]], bool]:
    return lambda entry: entry[1] > stamp
