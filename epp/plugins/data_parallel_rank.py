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
    """`data-parallel-rank-producer`: the request names the rank of the chosen endpoint that must
    serve it.

    This applies to an endpoint with several ranks behind one address whose engine sends KV-cache
    events. The header `x-data-parallel-rank` names the rank with most of the prompt cached. The
    named rank must have at least `minCachedTokenDelta` tokens more than every other rank. If
    several ranks have as much, or none has any, the engine's own balancer chooses. A client's
    header of that name is removed.

    A popular prompt does not overload its rank. A rank receives at most `maxRequestsAhead` more of
    this picker's running requests than the rank with the fewest. The rank that serves the next one
    also caches the prompt, so several ranks soon have it.

    The named rank exists at each fallback endpoint, because an engine refuses a request for a rank
    that it does not have.

    The plugin has an effect once it is declared; a profile does not name it. The picker does not
    receive the events of engines with several ranks without it.
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
