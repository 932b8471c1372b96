"""DualMap: two hashes select two endpoints for each prefix, and the request goes to the better of
the two.

Source: ICLR 2026, arXiv 2602.06502.
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.lexicographic import scores_by_rank
from homing_rivals.prefix_popularity import PrefixPopularitySettings

_INDEX: Final = PrefixPopularitySettings.type_name
_APPROXIMATE: Final = "approx-prefix-cache-producer"
_OTHER: Final = 0x9E3779B97F4A7C15
"""Number that changes the key of a prefix for the second hash: 2^64 divided by the golden ratio."""


class TwoHashes(Parameters, frozen=True):
    """DualMap: prefer the one of a prefix's two endpoints that has more of the prompt cached, or
    the less loaded one if the first would be too late.

    The two endpoints of a prefix are those that the hashes h1(prefix) and h2(prefix) select. An
    endpoint e would be too late if (P(e) + T - hit(e)) / v(e) > `ttft_slo`. P(e) is the number of
    uncached tokens waiting at e, which is also its load; T the number of tokens of the prompt;
    hit(e) the number of them that e is estimated to have cached; v(e) the prefill speed of e. The
    preferred endpoint scores 1, the other one of the two 0.5, and all other endpoints 0. A prompt
    without a full block has no such two endpoints and is placed by load.

    Different from the paper: rendezvous hashing replaces the two hash rings, with the same
    stability; `ttft_slo` and the length of a prefix are our choice, because the paper's are unknown
    (`prefix-popularity-producer`); a request that waits at an endpoint does not move to the other
    one, because it has left the picker.
    """

    type_name: ClassVar[str] = "two-hashes-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            "inflight_prefill_tokens",
            "matched_blocks",
            "prefill_tokens_per_s",
            "prompts",
            "rendezvous",
            "uncached_tokens",
        ),
        reads_index=True,
    )
    producer_type: ClassVar[str] = _INDEX
    producer: ClassVar[str] = producer_type

    ttft_slo: contract.Duration = contract.Duration(5.0)
    block_tokens: Annotated[int, Meta(ge=16, le=4_096)] = 64
    """Number of tokens in a block of the prompt; it must be that of `prefix-popularity-producer`.
    """

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        ahead = candidates.inflight_prefill_tokens
        blocks = candidates.affinity(self.producer_type).matched
        key = request.block_hash(self.block_tokens * contract.BYTES_PER_TOKEN, int(blocks[0]))
        if key is None or not blocks[0]:
            return contract.scores_of_cost(ahead)
        pair = _two(candidates, key)
        some = candidates.take(pair)
        late_s = (ahead[pair] + some.uncached_tokens) / some.prefill_tokens_per_s
        order = scores_by_rank(-some.matched_blocks.astype(np.float64), late_s)
        if late_s[order.argmax()] > self.ttft_slo:
            order = scores_by_rank(ahead[pair], late_s)
        scores = np.zeros(len(candidates))
        scores[pair] = np.maximum(order, 0.5)
        return scores


def _two(candidates: Candidates, key: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the positions of the candidates that the two hashes of `key` select; only one if there
    is only one candidate.
    """
    first = int(candidates.rendezvous(key).argmax())
    weights = candidates.rendezvous(key ^ _OTHER)
    weights[first] = 0
    second = int(weights.argmax())
    return np.array([first] if first == second else [first, second], dtype=np.int64)


INDEXES: Final = (PrefixPopularitySettings,)
SCORERS: Final = (TwoHashes,)

STRATEGIES: Final = (
    contract.Strategy(
        name="dualmap",
        idea=(
            "DualMap: of the two endpoints that two hashes of the prefix select, the one with "
            "more of it cached, or, if that takes over 5 s, the less loaded one."
        ),
        omissions=(
            "moving waiting requests to their other endpoint; the constants of the paper, which "
            "are unknown; its formula ignores adapters"
        ),
        config=contract.config_of(
            contract.producer(_APPROXIMATE),
            contract.producer(_INDEX),
            contract.step(TwoHashes.type_name),
        ),
    ),
)
