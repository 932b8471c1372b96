"""The choice of the data-parallel rank that serves a prompt.

The ranks behind the load balancer of one vLLM server have a cache each, and the balancer does not
read prompts. A request header selects the rank.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from epp.plugins.contract import Abilities, Parameters

RANK_HEADER: Final = "x-data-parallel-rank"


class DataParallelRank(Parameters, frozen=True):
    """`data-parallel-rank-producer`: name, in each request, the data-parallel rank of the chosen
    endpoint that must serve the request.

    The plugin names a rank only for endpoints with several ranks behind one address whose engine
    sends KV-cache events. The request header `x-data-parallel-rank` names the rank with most of the
    prompt cached. The named rank must have at least `minCachedTokenDelta` cached tokens of the
    prompt more than every other rank. If several ranks have equally much of the prompt, or none has
    any, the picker names no rank and the engine's own balancer chooses. The picker removes a header
    of that name that a client sends.

    A limit prevents a popular prompt from overloading its rank: a rank receives at most
    `maxRequestsAhead` more of this picker's running requests than the rank with the fewest. Another
    rank then serves the next request with the popular prompt and also caches it, so several ranks
    soon have the prompt.

    The picker names only a rank that each fallback endpoint of the request has too, because an
    engine refuses a request for a rank that it does not have. The picker names no rank if another
    endpoint prefills, because that endpoint would receive the same header.

    Declaring `data-parallel-rank-producer` in the document enables it; no scheduling profile needs
    to name it. A picker without this plugin does not receive the events of engines with several
    ranks.
    """

    type_name: ClassVar[str] = "data-parallel-rank-producer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True, chooses_ranks=True)
    producer_type: ClassVar[str] = "precise-prefix-cache-producer"
    rank_header: ClassVar[str] = RANK_HEADER

    min_cached_token_delta: Annotated[int, Meta(ge=1)] = 1
    """Minimum advantage in cached tokens of a rank over every other for the picker to name it.

    With less, the engine's balancer chooses the least loaded rank.
    """
    max_requests_ahead: Annotated[int, Meta(ge=1)] = 3
    """Maximum number of running requests by which the picker lets one rank exceed the rank with the
    fewest.

    A higher value finds more of the prompts in caches, but slows the answers of a crowded rank.
    """

    @property
    def producer(self) -> str | None:
        return ""

    def rank_of(self, held_tokens: Sequence[int], sent: Sequence[int], /) -> int | None:
        second, first = sorted(held_tokens)[-2:]
        if first - second < self.min_cached_token_delta:
            return None
        rank = held_tokens.index(first)
        return rank if sent[rank] - min(sent) < self.max_requests_ahead else None
