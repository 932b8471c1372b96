"""smg's `prefix_hash`: the head of the prompt is the key of a ring, which is left under load."""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.contract import Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.narrowing import least_of, only
from epp.strategies.strategy import Strategy, config_of, step


class PrefixHashRing(Parameters, frozen=True):
    """The ring's owner of hash(first 256 tokens), unless it is overloaded.

    Overloaded is R(e) > `load_factor` * mean and R(e) > mean + `balance_abs`, with the mean
    (total R + 1) / n: then the fewest requests among those that are not. Source: smg 1.13.0.

    Differs: owners by rendezvous hashing of endpoint identities instead of points on a ring, so that
    also here an endpoint that leaves takes along only its own keys; the head is full blocks of the
    prefix index, so 256 tokens are 4 of 64, and a prompt without a full block goes to the fewest
    requests; smg 1.13.0 has no ring for workers that speak HTTP, so that there each prompt goes to
    the fewest requests. Kept: prompts that share 256 tokens of preamble share one owner until the margin of ten
    requests is used up.
    """

    type_name: ClassVar[str] = "prefix-hash-ring-scorer"
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"

    prefix_tokens: Annotated[int, Meta(ge=1)] = 256
    load_factor: Annotated[float, Meta(ge=1)] = 1.25
    balance_abs: Annotated[float, Meta(ge=0)] = 10.0

    @property
    def producer(self) -> str | None:
        return ""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        blocks = max(1, self.prefix_tokens // candidates.block_tokens)
        key = request.block_hash(candidates.block_tokens * BYTES_PER_TOKEN, blocks)
        if key is None:
            return only(least_of(inflight))
        owner = np.zeros(len(inflight), dtype=np.bool_)
        owner[candidates.rendezvous(key).argmax()] = True
        mean = (float(inflight.sum()) + 1.0) / len(inflight)
        overloaded = (inflight > self.load_factor * mean) & (inflight > mean + self.balance_abs)
        if not (owner & overloaded).any():
            return only(owner)
        # Somebody is not above the mean.
        return only(least_of(inflight, ~overloaded))


SCORERS: Final = (PrefixHashRing,)

STRATEGIES: Final = (
    Strategy(
        name="smg-prefix-hash",
        idea="smg prefix_hash: who owns the first 256 tokens on a ring, unless it is overloaded.",
        config=config_of(step(PrefixHashRing.type_name)),
    ),
)
