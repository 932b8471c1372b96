"""The evidence for the model of each optional engine feature, or the statement that there is none.

Reports show it for the features that a run uses.
"""

from collections.abc import Mapping
from typing import Final

from sim.caches.offload import Offload
from sim.cluster.simulated_pod import PodKind
from sim.engine.features import Ranks, Speculative, WholePrompts

EXPERTS: Final = "expert-curve"
"""Name in `EVIDENCE` of the feature that `Profile.expert_s` enables: a cost curve for mixtures of
experts.
"""
CONNECTOR: Final = "kv-connector"
"""Name in `EVIDENCE` of legs of disaggregated requests, which need `EngineSettings.kv_connector`.
"""
SHARED: Final = f"{Offload.type_name}-shared"
"""Name in `EVIDENCE` of an offload tier that all pods share."""

BY_CONTEXT: Final = f"{Speculative.type_name}-by-context"
"""Name in `EVIDENCE` of speculative decoding whose acceptance depends on the context length."""

EVIDENCE: Final[Mapping[str, str]] = {
    WholePrompts.type_name: (
        "unchecked: the model follows vLLM's rule (a prompt that does not fit into the rest of a "
        "pass ends the scheduling of that pass), but no recording is available"
    ),
    Speculative.type_name: (
        "checked against vLLM 0.10.1 with EAGLE, three draft tokens, Llama-3.1-8B on an H100, as "
        "published by SpecDecode-Bench (arXiv 2601.11580): passes of 1 to 16 requests are within "
        "7 %, passes of 32 to 128 requests are 17 to 32 % too short; 128 requests of GSM8K speed "
        "up by 1.15 (published: 1.21); acceptance is the configured value"
    ),
    BY_CONTEXT: (
        "unchecked: you configure how acceptance changes with the context length, and linear "
        "interpolation between two lengths is a guess; no recording is available"
    ),
    Ranks.type_name: (
        "unchecked: the balancer follows vLLM's rule with current counts instead of counts of the "
        "last 100 ms; no recording is available"
    ),
    EXPERTS: (
        "unchecked: you configure the curve, and the rule that a pass waits for its slowest rank "
        "comes from vLLM's design"
    ),
    Offload.type_name: (
        "unchecked: hits follow from sizes, and transfers from bytes and speed; no recording is "
        "available; vLLM loads while other requests compute, in the simulator they wait"
    ),
    CONNECTOR: (
        "checked against llm-d's guide pd-disaggregation: times per token are within 20 % of the "
        "first published run, disaggregation shortens them by 2.1 times instead of 2.9, and "
        "first tokens come 1.9 to 4.3 times sooner"
    ),
    SHARED: "unchecked: stored blocks are available at once, and readers do not slow each other down",
}
"""Evidence for each optional engine feature, by its name. The text begins with "unchecked" if the
model was not compared with a recording.
"""


def features_used(kind: PodKind) -> list[str]:
    """Return the names of the optional engine features that a pod of this kind uses, in the order
    of `EVIDENCE`.
    """
    used = {feature.type_name for feature in kind.features}
    if any(isinstance(one, Speculative) and one.speculation().longer for one in kind.features):
        used.add(BY_CONTEXT)
    if kind.engine.kv_connector is not None:
        used.add(CONNECTOR)
    if kind.profile.expert_s:
        used.add(EXPERTS)
    if isinstance(kind.cache, Offload):
        used.add(kind.cache.type_name)
        if kind.cache.shared_bytes:
            used.add(SHARED)
    return [name for name in EVIDENCE if name in used]
