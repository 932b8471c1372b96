"""At which data-parallel rank of an endpoint a prompt is served.

Ranks behind the balancer of one vLLM server have a cache each, and the balancer looks at no prompt. A
header of the request places it on a rank.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from epp.plugins.contract import Abilities, Parameters

RANK_HEADER: Final = "x-data-parallel-rank"


class DataParallelRank(Parameters, frozen=True):
    """`data-parallel-rank-producer`: the request says which rank of the chosen endpoint is to serve it.

    Of an endpoint that has several ranks behind one address, and says what each holds, that rank is set
    as `x-data-parallel-rank` which holds most of the prompt, if it holds at least `minCachedTokenDelta`
    tokens more than every other. Where several hold as much, or nobody holds any, the engine's own
    balancer chooses. What a client says there is removed.

    A hot prompt does not drown its rank: of the requests that this picker placed and that run still, no
    rank gets more than `maxRequestsAhead` more than the rank with fewest. Whoever else gets them learns
    the prompt, and soon several ranks hold it.

    With fallback endpoints a rank is named that each of them has: an engine refuses a request for a rank
    that it has not.

    It works by being declared; no profile names it. Without it engines with several ranks are not heard.
    """

    type_name: ClassVar[str] = "data-parallel-rank-producer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, chooses_ranks=True)
    producer_type: ClassVar[str] = "precise-prefix-cache-producer"
    rank_header: ClassVar[str] = RANK_HEADER

    min_cached_token_delta: Annotated[int, Meta(ge=1)] = 1
    """Tokens, below which the least loaded rank is better than the one that holds most."""
    max_requests_ahead: Annotated[int, Meta(ge=1)] = 3
    """How many more may be placed at one rank than at another. More finds more of prompts in caches, and
    has answers of a crowded rank come more slowly."""

    @property
    def producer(self) -> str | None:
        return ""

    def rank_of(self, held_tokens: Sequence[int], sent: Sequence[int], /) -> int | None:
        second, first = sorted(held_tokens)[-2:]
        if first - second < self.min_cached_token_delta:
            return None
        rank = held_tokens.index(first)
        return rank if sent[rank] - min(sent) < self.max_requests_ahead else None
