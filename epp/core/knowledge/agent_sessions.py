"""The KV-cache tokens of agent sessions, and which sessions are admitted at which endpoint.

A turn of an agent repeats the whole history of its session, so a turn is cheap only while the
history is cached. Between two turns the session waits for a tool, and the engine reports its blocks
as unused. If the sessions at an endpoint need more than its KV cache, each turn is computed from the
beginning. `AgentSessions` counts these tokens, so that flow control can admit sessions only while
they fit (ThunderAgent, arXiv 2602.13692).

A session is admitted by its first turn and counts at the endpoint of its last turn. An idle session
gives up its room if the sessions at its endpoint do not fit: it is paused, and its next turn must be
admitted again. The longest idle session is paused first. Parameters that llm-d-router has too keep
its names and defaults.
"""

from collections import OrderedDict
from collections.abc import Mapping
from enum import IntEnum
from itertools import islice
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta, Struct

from epp.core.abilities import Abilities
from epp.core.knowledge.candidates import Affinity, Bools, Floats
from epp.core.knowledge.index import AffinityIndex, IndexMeasures
from epp.core.knowledge.inflight import OUTPUT_TOKENS_ESTIMATE
from epp.core.parameters import Parameters
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

AGENT_SESSIONS: Final = "agent-session-producer"
AGENT_HEADERS: Final = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)
"""Headers in which Claude Code, OpenCode and Codex name their session."""
ROOM: Final = "room"
"""Name of the column with the `Room` that the session of a request has at each endpoint."""
IDLE_MAX: Final = 64
"""Maximum number of idle sessions of an endpoint whose room `rooms` adds up for a new session."""
_SESSION_BYTES: Final = 480
"""Memory in bytes of one session with its entries in the tables, rounded up."""


class Standing(IntEnum):
    """The standing of the session of a request. A lower one is served first."""

    ADMITTED = 0
    """The session is admitted, or the request names none."""
    PAUSED = 1
    NEW = 2


class Room(IntEnum):
    """The way in which an endpoint has room for a session that is not admitted."""

    NONE = 0
    OF_IDLE = 1
    """The endpoint has room if idle sessions are paused, including some that are idle for less than
    `idle_lease_seconds`.
    """
    OF_LONG_IDLE = 2
    """The endpoint has room if only sessions are paused that are idle for longer than
    `idle_lease_seconds`.
    """
    FREE = 3


class AgentSessionSettings(Parameters, frozen=True):
    """`agent-session-producer`: the KV-cache tokens of agent sessions at each endpoint, for
    `thunder-agent`, which sets the parameters.
    """

    type_name: ClassVar[str] = AGENT_SESSIONS
    abilities: ClassVar[Abilities] = Abilities(
        names_sessions=True, counts_inflight=True, measures=True
    )

    headers: tuple[str, ...] = ()
    """Headers that may name the session, in lower case; the first that a request has decides.
    `agent-identity` sets them. If empty, the headers of known agents apply.
    """
    capacity_tokens: Annotated[int, Meta(ge=1)] = 4_194_304
    """Size in tokens of the KV cache of an endpoint that does not report it."""
    util_threshold: Annotated[float, Meta(gt=0, le=10)] = 1.0
    """Share of the KV cache that sessions may need together."""
    idle_lease_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """Time after its last turn for which a session keeps its room against sessions that are not
    admitted, unless these have waited long.
    """
    eviction_ttl_seconds: Annotated[float, Meta(gt=0)] = 3_600.0
    """Time after its last request at which a session is forgotten."""
    sessions_max: Annotated[int, Meta(ge=1)] = 65_536
    """Maximum number of sessions; above it the least recently used one is forgotten."""

    def session_in(self, request: InferenceRequest, /) -> str:
        """Return the session that `request` names, or "" if it names none."""
        if request.session_id:
            return request.session_id
        headers = request.headers
        names = self.headers or AGENT_HEADERS
        return next((headers[name] for name in names if headers.get(name)), "")

    def open(self) -> AffinityIndex:
        """Return a new, empty index of agent sessions."""
        return AgentSessions(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to `index`, which keeps its sessions up to the new `sessions_max`.
        Return False if `index` is of another type than `AgentSessions`.
        """
        return isinstance(index, AgentSessions) and index.configure(self)


class SessionCounts(Struct, frozen=True, kw_only=True):
    """Counts of the agent sessions of one picker."""

    admitted: int
    """Number of admitted sessions."""
    tokens: float
    """Tokens of the KV cache that the admitted sessions need together."""
    admissions: int
    """Number of times that a session was admitted, since the start of the picker."""
    pauses: int
    """Number of times that a session gave up its room to others, since the start of the picker."""


class _Session(Struct, kw_only=True, eq=False):
    tokens: float = 0.0
    slot: int = -1
    """Slot of the endpoint of the last turn; -1 if that endpoint left or restarted."""
    admitted: bool = False
    running: int = 0
    """Number of the session's requests in flight."""
    idle_since_s: Seconds = 0.0
    used_at_s: Seconds = 0.0
    """Time of the session's last request."""


class AgentSessions:
    """An affinity index of agent sessions, which also counts the KV-cache tokens that the admitted
    sessions need. A match is 1 of 1 at the endpoint of the session's last turn, with the column
    `ROOM`.
    """

    def __init__(self, settings: AgentSessionSettings) -> None:
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        """Sessions by the hash of their id, least recently used first."""
        self._idle: dict[int, OrderedDict[bytes, _Session]] = {}
        """Admitted sessions without a request in flight by slot, longest idle first."""
        self._reported: Floats = np.empty(0)
        """Size in tokens of the KV cache by slot; NaN if the engine did not report it."""
        self._needed: Floats = np.empty(0)
        """Number of tokens that the admitted sessions of each endpoint need in its KV cache, by
        slot.
        """
        self._admitted: Floats = np.empty(0)
        """Number of sessions admitted at each endpoint, by slot."""
        self._admissions = 0
        self.paused = 0
        """Number of times that an idle session gave up its room to others."""
        self.configure(settings)

    def __repr__(self) -> str:
        return f"<AgentSessions [{len(self._sessions)} sessions]>"

    def configure(self, settings: AgentSessionSettings) -> bool:
        """Apply `settings`; all sessions stay. Return True."""
        self._settings = settings
        self._fit_table()
        return True

    # Questions of flow control.

    def session_of(self, request: InferenceRequest) -> str:
        """Return the session that `request` names, or ""."""
        return self._settings.session_in(request)

    def standing(self, request: InferenceRequest) -> Standing:
        """Return the standing of the session of `request`."""
        key = self._key_of(request)
        session = self._sessions.get(key)
        if session is None:
            return Standing.NEW if key else Standing.ADMITTED
        if session.admitted:
            return Standing.ADMITTED
        return Standing.PAUSED if session.slot >= 0 else Standing.NEW

    def rooms(self, request: InferenceRequest, slots: int, now: Seconds) -> Floats:
        """Return float64[slots]: the `Room` for the session of `request` in each slot."""
        self._grow(slots)
        size = _size_of(request)
        needed = self._needed[:slots]
        spare = self._capacity(slots) - needed
        found: Floats = np.where(spare >= size, float(Room.FREE), float(Room.NONE))
        # One session alone may need more than there is.
        found[self._admitted[:slots] == 0.0] = Room.FREE
        for slot, idle in self._idle.items():
            if idle and slot < slots and not found.item(slot):
                found[slot] = self._room_of_idle(idle, size - spare.item(slot), slot, now)
        return found

    def tokens_needed(self, slot: int) -> float:
        """Return the tokens of the admitted sessions in `slot`."""
        return self._needed.item(slot) if slot < len(self._needed) else 0.0

    def counts(self) -> SessionCounts:
        """Return the number and the tokens of the admitted sessions at all endpoints, and the
        numbers of admissions and pauses so far.
        """
        return SessionCounts(
            admitted=int(self._admitted.sum()),
            tokens=float(self._needed.sum()),
            admissions=self._admissions,
            pauses=self.paused,
        )

    # An affinity index.

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return a match of 1 in the slot of the session's last turn, with the column `ROOM`.

        The column is `Room.FREE` everywhere for an admitted session, and for a request that names
        no session.
        """
        matched = np.zeros(slots, dtype=np.int64)
        key = self._key_of(request)
        session = self._sessions.get(key)
        if session is not None and 0 <= session.slot < slots:
            matched[session.slot] = 1
        if not key or (session is not None and session.admitted):
            room = np.full(slots, float(Room.FREE))
        else:
            room = self.rooms(request, slots, now)
        return Affinity(matched, 1 if key else 0, {ROOM: room})

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> bytes | None:
        """Admit the session of `request` in `slot`, count the request as running, and pause idle
        sessions there if all together do not fit. Return the key of the session, or None if the
        request names none.
        """
        key = self._key_of(request)
        if not key:
            return None
        self._grow(slot + 1)
        session = self._sessions.setdefault(key, _Session())
        self._sessions.move_to_end(key)
        self._admissions += not session.admitted
        self._leave(key, session)
        size = _size_of(request)
        # Parallel requests of one session may have different histories.
        session.tokens = max(session.tokens, size) if session.running else size
        session.slot = slot
        session.running += 1
        session.used_at_s = now
        session.admitted = True
        self._needed[slot] += session.tokens
        self._admitted[slot] += 1.0
        self._pause(slot)
        self._fit_table()
        return key

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Note that a request of the session `recorded` has ended. After its last one the session is
        idle, and idle sessions at its endpoint are paused if all together do not fit.
        """
        session = None if recorded is None else self._sessions.get(recorded)
        if session is None or not session.running:
            return
        session.running -= 1
        if not session.running:
            session.idle_since_s = now
            if session.admitted:
                self._idle.setdefault(session.slot, OrderedDict())[recorded] = session
                self._pause(session.slot)

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Note that the request of the session `recorded` is not served in `slot`, as if it had
        ended; the session stays admitted there.
        """
        self.release(request, slot, recorded, now)

    def forget(self, slot: int) -> None:
        """Drop the endpoint in `slot`. Its sessions stay known, but must be admitted again as new."""
        for key, session in self._sessions.items():
            if session.slot == slot:
                self._leave(key, session)
                session.slot, session.running = -1, 0
        if slot < len(self._reported):
            self._reported[slot] = np.nan

    def expire(self, now: Seconds) -> None:
        """Forget sessions without a request for the TTL, at most 4,096 in a call."""
        for _ in range(4_096):
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or oldest.used_at_s > now - self._settings.eviction_ttl_seconds:
                return
            self._drop_oldest()

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Record the size of the KV cache of the engine in `slot`."""
        self._grow(slot + 1)
        self._reported[slot] = float(blocks_total * block_size_tokens)

    def measures(self) -> IndexMeasures:
        """Return the number of sessions and their memory in bytes."""
        count = len(self._sessions)
        return IndexMeasures(entries=count, memory_bytes=count * _SESSION_BYTES)

    # Rooms and sessions.

    def _key_of(self, request: InferenceRequest) -> bytes:
        """Return a 16-byte hash of the id of the session, or b"" if the request names none."""
        session = self._settings.session_in(request)
        if not session:
            return b""
        return xxhash.xxh3_128_digest(session.encode("utf-8", "surrogatepass"))

    def _capacity(self, slots: int) -> Floats:
        settings, reported = self._settings, self._reported[:slots]
        known: Bools = ~np.isnan(reported)
        found: Floats = np.where(known, reported, settings.capacity_tokens)
        return found * settings.util_threshold

    def _room_of_idle(
        self, idle: Mapping[bytes, _Session], lacking: float, slot: int, now: Seconds
    ) -> Room:
        """Return the room in `slot` if its `idle` sessions are paused, longest idle first, until
        `lacking` tokens are free.
        """
        until_s = now - self._settings.idle_lease_seconds
        room = Room.OF_LONG_IDLE
        admitted = self._admitted.item(slot)
        for count, session in enumerate(islice(idle.values(), IDLE_MAX), 1):
            if session.idle_since_s > until_s:
                room = Room.OF_IDLE
            lacking -= session.tokens
            # A session that is alone may need more than there is.
            if lacking <= 0.0 or count == admitted:
                return room
        return Room.NONE

    def _pause(self, slot: int) -> None:
        """Pause idle sessions in `slot`, longest idle first, until the admitted sessions fit, none
        of them is idle, or one is left.
        """
        idle = self._idle.get(slot)
        if not idle:
            return
        capacity = self._capacity(slot + 1).item(slot)
        while idle and self._needed.item(slot) > capacity and self._admitted.item(slot) > 1.0:
            key, session = next(iter(idle.items()))
            self._leave(key, session)
            self.paused += 1

    def _leave(self, key: bytes, session: _Session) -> None:
        """Let `session` give up its room, if it is admitted."""
        if not session.admitted:
            return
        slot = session.slot
        session.admitted = False
        self._admitted[slot] -= 1.0
        self._needed[slot] -= session.tokens
        if slot in self._idle:
            self._idle[slot].pop(key, None)

    def _drop_oldest(self) -> None:
        key, session = next(iter(self._sessions.items()))
        self._leave(key, session)
        del self._sessions[key]

    def _fit_table(self) -> None:
        while len(self._sessions) > self._settings.sessions_max:
            self._drop_oldest()

    def _grow(self, slots: int) -> None:
        before = len(self._needed)
        if slots <= before:
            return
        more = max(8, 2 * before, slots) - before
        self._reported = np.concatenate((self._reported, np.full(more, np.nan)))
        self._needed = np.concatenate((self._needed, np.zeros(more)))
        self._admitted = np.concatenate((self._admitted, np.zeros(more)))


def _size_of(request: InferenceRequest) -> float:
    """Return the tokens that a session needs after `request`: its prompt and the expected answer."""
    limit = request.output_tokens_max
    answer = OUTPUT_TOKENS_ESTIMATE if limit is None else min(limit, OUTPUT_TOKENS_ESTIMATE)
    return float(request.prompt_tokens + answer)
