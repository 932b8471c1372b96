"""Session affinity: an endpoint keeps its sessions for ever, or until it is too busy for them."""

from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters


class BoundedSession(Parameters, frozen=True):
    """Keep a session at its endpoint, its home, while R(home) <= `skew` x max(mean R, 1), else move
    it to the endpoint with the least R.

    R is the number of an endpoint's requests in flight without this request. Users ask for this
    rule when sessions stick to a saturated pod (sgl-project/sglang #33625 and #33959, skew 1.5).
    The index of sessions records the endpoint of the session's last request, which becomes the
    session's home. A request without a session goes to the endpoint with the least R.
    """

    type_name: ClassVar[str] = "bounded-session-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = "session-id-producer"
    producer: ClassVar[str] = producer_type

    skew: Annotated[float, Meta(ge=1)] = 1.5

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        limit = self.skew * max(float(inflight.mean()), 1.0)
        home = candidates.affinity(self.producer_type).matched > 0
        stays = home & (inflight <= limit)
        if stays.any():
            return stays.astype(np.float64)
        return contract.scores_of_cost(inflight.astype(np.float64))


class RendezvousSession(Parameters, frozen=True):
    """Prefer the endpoint with the highest h(session, endpoint), which is the same at every picker;
    any endpoint if the request has no session.

    AIBrix hashes its session key in this way (FNV-64). This rule stores nothing, and an endpoint
    that leaves moves only its own sessions. This rule has no upper limit for the load of an
    endpoint.
    """

    type_name: ClassVar[str] = "rendezvous-session-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("headers", "rendezvous", "session_id"))

    session_header: Annotated[str, Meta(min_length=1)] = "x-session-id"
    """Request header whose value identifies the session, if the request has no session id of its
    own.
    """

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        session = request.session_id or request.headers.get(self.session_header.lower(), "")
        if not session:
            return np.ones(len(candidates))
        key = xxhash.xxh64_intdigest(session.encode("utf-8", "surrogatepass"))
        scores = np.zeros(len(candidates))
        scores[candidates.rendezvous(key).argmax()] = 1.0
        return scores


SCORERS: Final = (BoundedSession, RendezvousSession)

STRATEGIES: Final = (
    contract.Strategy(
        name="session-sticky",
        idea=(
            "Session affinity, plain: the session's last endpoint, else the one with the fewest "
            "requests in flight."
        ),
        # The scores of load are at most 1.
        config=contract.config_of(
            contract.step("session-affinity-scorer", 2, strategy="session_id"),
            contract.step("active-request-scorer"),
        ),
    ),
    contract.Strategy(
        name="session-bounded",
        idea=(
            "Session affinity, bounded: the session's last endpoint until it has 1.5 times the "
            "mean number of requests in flight."
        ),
        config=contract.config_of(contract.step(BoundedSession.type_name)),
    ),
    contract.Strategy(
        name="session-rendezvous",
        idea=(
            "Session affinity without stored sessions, as in AIBrix: the endpoint that a hash of "
            "the session selects, whatever its load."
        ),
        config=contract.config_of(
            contract.step(RendezvousSession.type_name), picker=contract.step("random-tie-picker")
        ),
    ),
)
