"""vllm-router (vllm-project/router, wheel 0.1.17): policies that begin with the session."""

from typing import ClassVar, Final

from epp.core.knowledge.affinity import SessionIndexSettings
from epp.plugins.contract import Bools, Candidates, Floats, InferenceRequest, Parameters
from epp.strategies.narrowing import least_of, only
from epp.strategies.radix_tree import RadixTreeSettings
from epp.strategies.smg_cache_aware import CacheAware1, Miss
from epp.strategies.strategy import Strategy, config_of, producer, step


def _holder(candidates: Candidates) -> Bools:
    """bool[n]: where the request's session went last; nobody, if it has none or that one is gone."""
    return candidates.affinity(SessionIndexSettings.type_name).matched > 0


class SessionThenCacheAware(CacheAware1, frozen=True):
    """`cache_aware`: the endpoint of the session, else generation 1 of SGLang's router.

    An exact map from sessions to endpoints (idle 3,600 s) comes before the tree and before any look
    at the load. Thresholds are those of generation 1: 0.3, 64, 1.5.

    Differs: as generation 1; a miss is taken to go to the smallest tree, as in the code that it was
    forked from. The session is the request's id of one or the header that the index names.
    Kept: a session stays on a saturated endpoint; one endpoint with too many requests turns prefixes
    off for all (vllm-project/router #238).
    """

    type_name: ClassVar[str] = "session-then-cache-aware-scorer"

    miss: Miss = Miss.SMALLEST_TREE

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        held = _holder(candidates)
        return only(held) if held.any() else super().score(request, candidates)


class StickyLeastLoaded(Parameters, frozen=True):
    """`sticky_least_loaded`: the endpoint of the session; at first the fewest requests in flight.

    Inferred from its name and from how the wheel behaves, not from its source.

    Differs: ties take turns. Kept: a session stays on a saturated endpoint.
    """

    type_name: ClassVar[str] = "sticky-least-loaded-scorer"
    producer_type: ClassVar[str] = SessionIndexSettings.type_name

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        held = _holder(candidates)
        return only(held if held.any() else least_of(candidates.inflight_requests))


SCORERS: Final = (SessionThenCacheAware, StickyLeastLoaded)

_SESSIONS: Final = producer(SessionIndexSettings.type_name, ttl="3600s")

STRATEGIES: Final = (
    Strategy(
        name="vllm-router-cache-aware",
        idea="vllm-router cache_aware: where the session went, else as SGLang's first generation.",
        config=config_of(
            _SESSIONS,
            producer(RadixTreeSettings.type_name, blockSizeTokens=16, lruCapacityPerServer=524_288),
            step(SessionThenCacheAware.type_name),
        ),
    ),
    Strategy(
        name="vllm-router-sticky-least-loaded",
        idea="vllm-router sticky_least_loaded: where the session went, else the fewest requests.",
        config=config_of(_SESSIONS, step(StickyLeastLoaded.type_name)),
    ),
)
