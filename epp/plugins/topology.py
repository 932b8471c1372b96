"""Affinity to the endpoint of the other stage, by topology: a filter and a scorer.

The KV cache of a request moves from its prefill endpoint to its decode endpoint. The transfer is
faster within a host, rack or zone. The stage that is chosen second uses these plugins to choose an
endpoint near the first.

Source: llm-d/llm-d-router, `scheduling/filter/topologyaffinity` and
`scheduling/scorer/topologyaffinity`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Final

import numpy as np

from epp.core.knowledge.topology import Nearness
from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
)


class Affinity(StrEnum):
    """The values of a parameter that names a level of the topology, such as zone."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"
    REGION = "region"


_LEVELS: Final[Mapping[Affinity, Nearness]] = {
    Affinity.HOST: Nearness.HOST,
    Affinity.RACK: Nearness.RACK,
    Affinity.ZONE: Nearness.ZONE,
    Affinity.REGION: Nearness.REGION,
}
_SCORES: Final = np.array([0.0, 0.02, 0.05, 0.20, 1.00])
"""Score by `Nearness`, as in llm-d-router."""


class TopologyAffinityFilter(Parameters, frozen=True):
    """Keep endpoints that share a host, rack, zone or region with the endpoint of the other stage.

    `min_affinity` is the widest of these places that suffices. All endpoints stay if no other stage
    was chosen before, if the places of its endpoint are unknown, or if no endpoint is that near. An
    endpoint with unknown places is near to none.
    """

    type_name: ClassVar[str] = "topology-affinity-filter"
    abilities: ClassVar[Abilities] = Abilities(reads=("nearness",))

    min_affinity: Affinity = Affinity.HOST
    topology_producer_name: str = ""
    """Name of the `topology-extractor` to use; there is at most one."""

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        near: Bools = candidates.nearness >= _LEVELS[self.min_affinity]
        return near if near.any() else np.ones(len(candidates), dtype=np.bool_)


class TopologyAffinityScorer(Parameters, frozen=True):
    """Prefer endpoints near the endpoint of the other stage, by the nearest place that they share.

    The score is 1 for the same host, 0.2 for the same rack, 0.05 for the same zone and 0.02 for the
    same region. The score is 0 without a common place, and for all endpoints if no other stage was
    chosen before.
    """

    type_name: ClassVar[str] = "topology-affinity-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("nearness",))

    topology_producer_name: str = ""
    """Name of the `topology-extractor` to use; there is at most one."""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        scores: Floats = _SCORES[candidates.nearness]
        return scores
