"""vllm-router (vllm-project/router, wheel 0.1.17): sessions, or SGLang's first generation."""

from typing import ClassVar, Final

from epp.core.knowledge.affinity import SessionIndexSettings
from epp.plugins.contract import Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.narrowing import least_of, only
from epp.strategies.radix_tree import RadixTreeSettings
from epp.strategies.smg_cache_aware import CacheAware1, Miss
from epp.strategies.strategy import Strategy, config_of, producer, step


class StickyLeastLoaded(Parameters, frozen=True):
    """`sticky_least_loaded`: the endpoint of the session; at first the fewest requests in flight.

    Differs: the wheel counts the sessions that it gave each endpoint, whether they have requests or
    not; ties take turns. Kept: a session stays on a saturated endpoint.
    """

    type_name: ClassVar[str] = "sticky-least-loaded-scorer"
    producer_type: ClassVar[str] = SessionIndexSettings.type_name

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        held = candidates.affinity(self.producer_type).matched > 0
        return only(held if held.any() else least_of(candidates.inflight_requests))


SCORERS: Final = (StickyLeastLoaded,)

_SESSIONS: Final = producer(SessionIndexSettings.type_name, ttl="3600s")

STRATEGIES: Final = (
    Strategy(
        name="vllm-router-cache-aware",
        idea="vllm-router 0.1.17 cache_aware: as SGLang router 0.3.2, by tokens.",
        # No session: only versions before it asked for one.
        config=config_of(
            producer(RadixTreeSettings.type_name, blockSizeTokens=16, lruCapacityPerServer=524_288),
            step(CacheAware1.type_name, miss=Miss.LEAST_LOAD.value),
        ),
    ),
    Strategy(
        name="vllm-router-sticky-least-loaded",
        idea="vllm-router sticky_least_loaded: where the session went, else the fewest requests.",
        config=config_of(_SESSIONS, step(StickyLeastLoaded.type_name)),
    ),
)
