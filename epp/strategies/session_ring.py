"""production-stack's session routing: a ring for sessions, the fewest recent arrivals for the rest.

Source: vllm-project/production-stack, `routing_logic.py`, policy `session` (2026-08).
"""

from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins.contract import Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.arrival_rate import ArrivalRate
from epp.strategies.ring import ring_of, within_bound
from epp.strategies.strategy import Strategy, config_of, step


class SessionRing(Parameters, frozen=True):
    """The next endpoint clockwise from h(session); without a session as `arrival-rate-scorer`.

    The ring has the 160 points of a ketama node for each endpoint.

    Kept: no load term, so a busy session stays where it is, and what falls back sees what was sent
    and not what is still there. With a `load_factor` endpoints with more requests in flight than so
    many times the mean are passed over on the ring.

    Differs: the key is the request's own session where it has one; engines' names are hashed with
    xxHash instead of MD5.
    """

    type_name: ClassVar[str] = "session-ring-scorer"
    producer_type: ClassVar[str] = ArrivalRate.producer_type

    session_header: Annotated[str, Meta(min_length=1)] = "x-session-id"
    """Request header with the session."""
    points: Annotated[int, Meta(ge=1, le=1024)] = 160
    load_factor: Annotated[float, Meta(ge=1)] | None = None

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        session = request.session_id or request.headers.get(self.session_header.lower(), "")
        if session:
            key = xxhash.xxh64_intdigest(session.encode("utf-8", "surrogatepass"))
            accepted = np.ones(len(candidates), dtype=np.bool_)
            if self.load_factor is not None:
                accepted = within_bound(candidates.inflight_requests, self.load_factor)
            scores = np.zeros(len(candidates))
            scores[ring_of(candidates, self.points).first(key, accepted)] = 1.0
            return scores
        return ArrivalRate().score(request, candidates)


SCORERS: Final = (SessionRing,)

STRATEGIES: Final = (
    Strategy(
        name="production-stack-session",
        idea="production-stack: sessions on a ring, others where the fewest arrived in a minute.",
        config=config_of(step(SessionRing.type_name)),
    ),
    Strategy(
        name="production-stack-session-fixed",
        idea="production-stack's ring of sessions that passes over who is 25 % above the mean.",
        config=config_of(step(SessionRing.type_name, loadFactor=1.25)),
    ),
)
