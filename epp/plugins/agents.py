"""Agent sessions: the scorer that keeps them at their endpoints, and the identity of a session.

Types, parameters and defaults are those of llm-d-router, where `thunder-agent` is a draft
(llm-d-router#2964).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    AGENT_HEADERS,
    AGENT_SESSIONS,
    ROOM,
    Abilities,
    Bools,
    Candidates,
    Filter,
    Floats,
    InferenceRequest,
    Parameters,
)

HEAD_WAIT_MS: Final = 30_000.0


class AgentIdentity(Parameters, frozen=True):
    """`agent-identity`: the headers in which agents name their session.

    A request without a header for its flow belongs to the flow of its session. `thunder-agent`
    counts the sessions. The known headers are those of Claude Code (`x-claude-code-session-id`),
    OpenCode (`x-session-affinity`) and Codex (`session-id`, `session_id`).
    """

    type_name: ClassVar[str] = "agent-identity"

    additional_session_headers: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    """Names of headers that may name the session; they take precedence over the known headers."""

    @property
    def headers(self) -> tuple[str, ...]:
        """Return all headers that may name a session, in lower case and in order."""
        return (*(name.lower() for name in self.additional_session_headers), *AGENT_HEADERS)


class AgentSessionRoom(Parameters, frozen=True):
    """Keep the endpoints that have most room for a session that is not admitted.

    Endpoints with free room come first, then those where other sessions must be paused. All are
    kept for an admitted session, and for a request without a session.
    """

    type_name: ClassVar[str] = "thunder-agent"
    abilities: ClassVar[Abilities] = Abilities(reads=("headers", "session_id"), reads_index=True)
    producer_type: ClassVar[str] = AGENT_SESSIONS

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        room = candidates.affinity(self.producer_type).columns.get(ROOM)
        if room is None:
            return np.ones(len(candidates), dtype=np.bool_)
        kept: Bools = room == room.max()
        return kept


class ThunderAgent(Parameters, frozen=True):
    """Prefer the endpoint of the session's last turn, and admit new sessions where there is room
    for them.

    The score is 1 for the endpoint of the last turn and 0 for others. It is unknown if that
    endpoint is no candidate, and for a request without a session. A band of the queue with
    `thunder-agent` as `fairnessPolicyRef` lets turns of admitted sessions pass. A new session waits
    until an endpoint has room for its tokens, first come, first served. `thunder-agent` as
    `saturationDetector` reports no endpoint as full, so that requests wait for the admission of
    their session only.
    """

    type_name: ClassVar[str] = "thunder-agent"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("headers", "session_id"),
        reads_index=True,
        configures_index=True,
        brings_filter=True,
        warns=True,
        differs=(
            "sessions that wait are admitted first come, first served, not smallest first; a paused "
            "session may continue at any endpoint with room"
        ),
    )
    producer_type: ClassVar[str] = AGENT_SESSIONS

    capacity_tokens: Annotated[int, Meta(ge=1)] = 4_194_304
    """Size in tokens of the KV cache of an endpoint that does not report it."""
    util_threshold: Annotated[float, Meta(gt=0, le=10)] = 1.0
    """Share of the KV cache that the sessions of an endpoint may need together. A prompt that several
    sessions share counts for each.
    """
    idle_lease_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """Time after its last turn for which a session keeps its room against sessions that are not
    admitted, about the time of a tool call.
    """
    head_wait_starvation_ms: Annotated[float, Meta(ge=0)] = HEAD_WAIT_MS
    """Milliseconds after which a waiting session is admitted even without room; 0 for never. After
    half of this time, it comes before the other waiting sessions and may take the room of any idle
    one.
    """
    eviction_ttl_seconds: Annotated[float, Meta(gt=0)] = 3_600.0
    """Time after its last request at which a session is forgotten."""
    eviction_sweep_seconds: Annotated[float, Meta(gt=0)] = 10.0
    """No effect, because sessions are checked every second."""

    def __post_init__(self) -> None:
        if self.eviction_ttl_seconds * 1e3 <= self.head_wait_starvation_ms:
            raise ValueError(
                f"evictionTtlSeconds is {self.eviction_ttl_seconds:g}; it must be more than "
                f"headWaitStarvationMs, which is {self.head_wait_starvation_ms:g} ms"
            )

    @property
    def producer(self) -> str | None:
        return self.producer_type

    @property
    def producer_parameters(self) -> Mapping[str, Any]:
        """Return the parameters of the index of sessions."""
        return {
            "capacityTokens": self.capacity_tokens,
            "utilThreshold": self.util_threshold,
            "idleLeaseSeconds": self.idle_lease_seconds,
            "evictionTtlSeconds": self.eviction_ttl_seconds,
        }

    @property
    def filter(self) -> Filter | None:
        """Return the filter by the room that endpoints have for the agent session of a request."""
        return AgentSessionRoom()

    def warnings(self) -> Sequence[str]:
        """Return a sentence for each parameter that is set although it has no effect."""
        if self.eviction_sweep_seconds == 10.0:
            return ()
        return ("evictionSweepSeconds has no effect, because sessions are checked every second",)

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        affinity = candidates.affinity(self.producer_type)
        if not affinity.total or not affinity.matched.any():
            return None
        return affinity.matched.astype(np.float64)
