"""Sessions that go where they went before: a scorer that prefers it and a filter that insists.

Strategies and parameters are those of llm-d-router v0.10, and the tokens are signed here.
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
    """How the strategy `session_id` tells sessions apart, and how long it remembers them."""

    sources: SessionSources = ()
    eviction_ttl_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """0: 300."""
    eviction_sweep_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """No effect: a session that is too old is never found."""


class _SessionAffinity(Parameters, frozen=True):
    """What the scorer and the filter are told."""

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
    """Header of the token, which the field spells `encodedEndpointHeaderConfig.header`."""
    encoded_endpoint_header_config: EncodedEndpointHeader = field(
        default_factory=EncodedEndpointHeader
    )
    """`header`: that of the token."""
    session_id_config: SessionIdSettings = field(default_factory=SessionIdSettings)
    """`sources`, each a `header` or an `attribute` and its `producer`: the first that a request has
    names its session; `evictionTtlSeconds`, 300; `evictionSweepSeconds`, without effect."""
    profile_name: str = ""
    """No effect: there is one profile."""

    def __post_init__(self) -> None:
        given = self.encoded_endpoint_header_config.header.strip().lower()
        if given and self.header_name != TOKEN_HEADER and given != self.header_name.strip().lower():
            raise ValueError(
                f"headerName is {self.header_name} and encodedEndpointHeaderConfig.header is "
                f"{self.encoded_endpoint_header_config.header}, expected one of the two"
            )

    @property
    def token_header(self) -> str:
        """Lower case, as headers of requests are."""
        given = self.encoded_endpoint_header_config.header.strip() or self.header_name.strip()
        return given.lower() or TOKEN_HEADER

    @property
    def reads_tokens(self) -> bool:
        """Whether session tokens decide."""
        return self.strategy is SessionStrategy.ENCODED_ENDPOINT_HEADER

    @property
    def producer(self) -> str | None:
        return self.producer_type if self.strategy is SessionStrategy.SESSION_ID else None

    @property
    def producer_parameters(self) -> Mapping[str, Any]:
        """Of the index of sessions, as far as they are given."""
        told: dict[str, Any] = {}
        if self.session_id_config.sources:
            told["sources"] = [source.described for source in self.session_id_config.sources]
        if self.session_id_config.eviction_ttl_seconds:
            told["ttl"] = f"{self.session_id_config.eviction_ttl_seconds:f}s"
        return told

    def warnings(self) -> Sequence[str]:
        """What is told and does nothing, without the place."""
        found = []
        if self.profile_name:
            found.append("profileName has no effect, there is one profile")
        if self.session_id_config.eviction_sweep_seconds:
            found.append(
                "evictionSweepSeconds has no effect, a session that is too old is never found"
            )
        return found

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        """The token of `endpoint`, to be sent back with the session's next request."""
        if self.strategy is SessionStrategy.SESSION_ID:
            return {}
        token = request.moment.session_tokens.of(endpoint)
        return {self.token_header: token} if token else {}

    def _holders(self, request: InferenceRequest, candidates: Candidates) -> Bools:
        """bool[n]: who served the session of `request` before; nobody, if it is not known."""
        if self.strategy is SessionStrategy.SESSION_ID:
            return candidates.affinity(self.producer_type).matched > 0
        token = request.headers.get(self.token_header)
        if not token:
            return np.zeros(len(candidates), dtype=np.bool_)
        holders = request.moment.session_tokens.holders(token, candidates.endpoints)
        return np.array(holders, dtype=np.bool_)


class SessionAffinityScorer(_SessionAffinity, frozen=True):
    """1 for the endpoint that served this session before, 0 for the others; all 0 if none did.

    `encoded_endpoint_header`: the client sends back, in a header, the token that the response gave
    it: a keyed hash of the endpoint, which shows nothing and which nobody else can make. A token that
    is none, or of an endpoint that is not a candidate, prefers nobody. `session_id`: an affinity
    index remembers where each session went.
    """

    type_name: ClassVar[str] = "session-affinity-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        return self._holders(request, candidates).astype(np.float64)


class SessionAffinityFilter(_SessionAffinity, frozen=True):
    """Keep the endpoint that served this session before, while it is a candidate; else all.

    Strategies are those of `session-affinity-scorer`. A session stays wherever it began, however
    busy that is: the scorer with a weight is milder.
    """

    type_name: ClassVar[str] = "session-affinity-filter"

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        holders = self._holders(request, candidates)
        return holders if holders.any() else np.ones(len(candidates), dtype=np.bool_)
