"""Rings keyed by what a client says of itself: smg's `consistent_hashing` and vllm-router's.

Source: smg-project/smg and vllm-project/router (2026-08); what happens without a key was observed.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins.contract import Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.ring import ring_of
from epp.strategies.strategy import Strategy, config_of, step


class Keyless(StrEnum):
    """Where a request without a key goes."""

    ANYBODY = "anybody"
    ONE = "one"
    """All to the owner of the empty key."""


class KeyedRing(Parameters, frozen=True):
    """The next endpoint clockwise from h(the first of `headers` that is sent).

    The session of a request stands behind the first header. There is no bound: what is locked onto
    a saturated endpoint stays there (prime-rl #3255: hits fell from 98 % to 5 %).

    Differs: xxHash in place of BLAKE3; smg's header that names a worker is not obeyed, because
    clients do not choose endpoints here.
    """

    type_name: ClassVar[str] = "keyed-ring-scorer"

    headers: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = ("x-session-id",)
    points: Annotated[int, Meta(ge=1, le=1024)] = 150
    """Of each endpoint on the ring."""
    keyless: Keyless = Keyless.ANYBODY

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        first, *others = (request.headers.get(name.lower(), "") for name in self.headers)
        key = next(filter(None, (first, request.session_id, *others)), "")
        if not key and self.keyless is Keyless.ANYBODY:
            return np.ones(len(candidates))
        digest = xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"))
        everybody = np.ones(len(candidates), dtype=np.bool_)
        scores = np.zeros(len(candidates))
        scores[ring_of(candidates, self.points).first(digest, everybody)] = 1.0
        return scores


SCORERS: Final = (KeyedRing,)

STRATEGIES: Final = (
    Strategy(
        name="smg-consistent-hashing",
        idea="smg, consistent_hashing: the client's routing key on a ring, without one anybody.",
        config=config_of(
            step(
                KeyedRing.type_name,
                headers=["x-smg-routing-key", "authorization", "x-forwarded-for", "cookie"],
            ),
            picker=step("random-tie-picker"),
        ),
    ),
    Strategy(
        name="vllm-router-consistent-hash",
        idea="vllm-router, consistent_hash: session, user or tenant on a ring, without any: one.",
        config=config_of(
            step(
                KeyedRing.type_name,
                headers=["x-session-id", "x-user-id", "x-tenant-id", "x-request-id"],
                points=160,
                keyless=Keyless.ONE.value,
            )
        ),
    ),
)
