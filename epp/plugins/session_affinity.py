"""Session affinity: a scorer that prefers a session's previous endpoint, and a filter that requires
it.

Strategies and parameters are those of llm-d-router v0.10. Tokens are signed, unlike there.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta, field

from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Endpoint,
    Floats,
    InferenceRequest,
    Parameters,
    SessionSources,
)

TOKEN_HEADER: Final = "x-session-token"  # noqa: S105  the name of a header


class SessionStrategy(StrEnum):
    ENCODED_ENDPOINT_HEADER = "encoded_endpoint_header"
    SESSION_ID = "session_id"


class EncodedEndpointHeader(Parameters, frozen=True):
    header: str = ""


class SessionIdSettings(Parameters, frozen=True):
    """Settings of the strategy `session_id`: the places where requests name their sessions, and the
    lifetime of sessions.
    """

    sources: SessionSources = ()
    eviction_ttl_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Lifetime in seconds of a session without requests; 0 for 300."""
    eviction_sweep_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """No effect, because an expired session is never found, even before it is removed."""


class _SessionAffinity(Parameters, frozen=True):
    """Parameters that `session-affinity-scorer` and `session-affinity-filter` have in common."""

    abilities: ClassVar[Abilities] = Abilities(
        reads=("headers", "session_tokens", "endpoints"),
        reads_index=True,
        configures_index=True,
        reads_session_tokens=True,
        marks_responses=True,
        warns=True,
    )
    producer_type: ClassVar[str] = "session-id-producer"

    strategy: SessionStrategy = SessionStrategy.ENCODED_ENDPOINT_HEADER
    header_name: Annotated[str, Meta(min_length=1)] = TOKEN_HEADER
    """Header that carries the session token; llm-d-router's spelling is
    `encodedEndpointHeaderConfig.header`.
    """
    encoded_endpoint_header_config: EncodedEndpointHeader = field(
        default_factory=EncodedEndpointHeader
    )
    """Settings of the strategy `encoded_endpoint_header`: `header` is the name of the header that
    carries the session token.
    """
    session_id_config: SessionIdSettings = field(default_factory=SessionIdSettings)
    """Settings of the strategy `session_id`.

    The first of `sources` that a request has names its session; each is a `header`, or an
    `attribute` and its `producer`. `evictionTtlSeconds` is 300 by default, and
    `evictionSweepSeconds` has no effect.
    """
    profile_name: str = ""
    """No effect, because the session's endpoint is always the one to which the gateway sends the
    request.
    """

    def __post_init__(self) -> None:
        given = self.encoded_endpoint_header_config.header.strip().lower()
        if given and self.header_name != TOKEN_HEADER and given != self.header_name.strip().lower():
            raise ValueError(
                f"headerName is {self.header_name} but encodedEndpointHeaderConfig.header is "
                f"{self.encoded_endpoint_header_config.header}; set only one of the two"
            )

    @property
    def token_header(self) -> str:
        """Return the name of the session token's header in lower case, as in request headers."""
        given = self.encoded_endpoint_header_config.header.strip() or self.header_name.strip()
        return given.lower() or TOKEN_HEADER

    @property
    def reads_tokens(self) -> bool:
        """Return True if session tokens determine the endpoint, not session ids."""
        return self.strategy is SessionStrategy.ENCODED_ENDPOINT_HEADER

    @property
    def producer(self) -> str | None:
        return self.producer_type if self.strategy is SessionStrategy.SESSION_ID else None

    @property
    def producer_parameters(self) -> Mapping[str, Any]:
        """Return the parameters of the session index that this plugin sets."""
        told: dict[str, Any] = {}
        if self.session_id_config.sources:
            told["sources"] = [source.described for source in self.session_id_config.sources]
        if self.session_id_config.eviction_ttl_seconds:
            told["ttl"] = f"{self.session_id_config.eviction_ttl_seconds:f}s"
        return told

    def warnings(self) -> Sequence[str]:
        """Return one sentence for each parameter set without effect; the caller adds the plugin's
        place in the document.
        """
        found = []
        if self.profile_name:
            found.append(
                "profileName has no effect, because it cannot change the endpoint of a session"
            )
        if self.session_id_config.eviction_sweep_seconds:
            found.append(
                "evictionSweepSeconds has no effect, because an expired session is never found"
            )
        return found

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        """Return a header with the session token of `endpoint`, which the client sends back with
        the session's next request.

        Return {} with the strategy `session_id`, or if there is no key for tokens.
        """
        if self.strategy is SessionStrategy.SESSION_ID:
            return {}
        token = request.moment.session_tokens.of(endpoint)
        return {self.token_header: token} if token else {}

    def _holders(self, request: InferenceRequest, candidates: Candidates) -> Bools:
        """Return bool[n]: True for the previous endpoint of the session of `request`; all False if
        the session is unknown.
        """
        if self.strategy is SessionStrategy.SESSION_ID:
            return candidates.affinity(self.producer_type).matched > 0
        token = request.headers.get(self.token_header)
        if not token:
            return np.zeros(len(candidates), dtype=np.bool_)
        holders = request.moment.session_tokens.holders(token, candidates.endpoints)
        return np.array(holders, dtype=np.bool_)


class SessionAffinityScorer(_SessionAffinity, frozen=True):
    """Score 1 for the session's previous endpoint, 0 for the others; all 0 if it is unknown or no
    candidate.

    If the strategy is `encoded_endpoint_header`, a response header carries a session token, and the
    client sends this token with the session's next request. A session token is a keyed hash of the
    endpoint. The token reveals nothing about the endpoint, and only pickers with the key can create
    it (an exception is `--accept-unsigned-session-tokens`). If a request has an invalid token, or
    the token of an endpoint that is not a candidate, no endpoint is preferred. If the strategy is
    `session_id`, an affinity index remembers the endpoint of each session.
    """

    type_name: ClassVar[str] = "session-affinity-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return self._holders(request, candidates).astype(np.float64)


class SessionAffinityFilter(_SessionAffinity, frozen=True):
    """Keep only the session's previous endpoint, while it is a candidate; otherwise keep all
    endpoints.

    The strategies, which recognize a session, are those of `session-affinity-scorer`. The filter
    keeps a session at its first endpoint even if this endpoint is overloaded;
    `session-affinity-scorer` with a weight is less strict.
    """

    type_name: ClassVar[str] = "session-affinity-filter"

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        holders = self._holders(request, candidates)
        return holders if holders.any() else np.ones(len(candidates), dtype=np.bool_)
