"""What each thing that engines do besides was checked against: reports say it of what a run uses."""

from collections.abc import Mapping
from typing import Final

from sim.caches.offload import Offload
from sim.cluster.simulated_pod import PodKind
from sim.engine.features import Ranks, Speculative, WholePrompts

EXPERTS: Final = "expert-curve"
"""`expert_s` of a profile, by name."""
SHARED: Final = f"{Offload.type_name}-shared"
"""The tier of `Offload` that all pods have together, by name."""

BY_CONTEXT: Final = f"{Speculative.type_name}-by-context"
"""Acceptance that depends on the length of the context, by name."""

EVIDENCE: Final[Mapping[str, str]] = {
    WholePrompts.type_name: (
        "unchecked: vLLM's rule is followed (a prompt that does not fit into what is left of a pass ends "
        "the scheduling of that pass), no recording of it is at hand"
    ),
    Speculative.type_name: (
        "checked against vLLM 0.10.1 with EAGLE, three drafted tokens, Llama-3.1-8B on an H100, as "
        "SpecDecode-Bench publishes it (arXiv 2601.11580): passes of 1 to 16 requests within 7 %, of 32 "
        "to 128 17 to 32 % too short; 128 requests of GSM8K gain 1.15 times where 1.21 is published; "
        "acceptance is what you tell"
    ),
    BY_CONTEXT: (
        "unchecked: how acceptance changes with the context is yours, and that it is on the line between "
        "two lengths is a guess; no recording of it is at hand"
    ),
    Ranks.type_name: (
        "unchecked: the balancer is vLLM's rule with counts of now in the place of those of the last "
        "100 ms, no recording of it is at hand"
    ),
    EXPERTS: (
        "unchecked: the curve is yours, and that a pass waits for its slowest rank is taken from vLLM's "
        "design"
    ),
    Offload.type_name: (
        "unchecked: hits follow from sizes and transfers from bytes and speed, no recording of them is at "
        "hand; vLLM loads while others compute, here they wait"
    ),
    SHARED: "unchecked: stores are at hand at once and readers do not slow each other down",
}
"""Name -> a sentence that begins with "unchecked" where nothing was checked."""


def features_used(kind: PodKind) -> list[str]:
    """Names of `EVIDENCE` for a pod, in its order."""
    used = {feature.type_name for feature in kind.features}
    if any(isinstance(one, Speculative) and one.speculation().longer for one in kind.features):
        used.add(BY_CONTEXT)
    if kind.profile.expert_s:
        used.add(EXPERTS)
    if isinstance(kind.cache, Offload):
        used.add(kind.cache.type_name)
        if kind.cache.shared_bytes:
            used.add(SHARED)
    return [name for name in EVIDENCE if name in used]
