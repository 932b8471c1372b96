"""The index of llm-d's endpoint picker and of its predecessor, as they ship it.

Sources: llm-d/llm-d-router v0.10; kubernetes-sigs/gateway-api-inference-extension v1 and its
proposal 0602. The scorers and filters of these strategies are Homing's own; only their prefix
index, `routed-blocks-producer`, differs. The documentation of llm-d-router's `lora-affinity-scorer`
gives adapters a weight of 1. The sample configuration of both projects,
`test/integration/epp/testdata/default-config.yaml` (GIE v1.5.0), has this scorer beside the other
three, each with a weight of 1.

Different from llm-d-router: an adapter with only waiting requests counts as running, as in vLLM's
lists; llm-d-router scores it 0.6.
"""

from typing import Final

from epp.plugins.contract import Step, Strategy, config_of, producer, step
from homing_rivals.routed_blocks import RoutedBlocksSettings

_ROUTED: Final = RoutedBlocksSettings.type_name


def _weighted(index: Step, prefix: float, queue: float, kv_cache: float, adapters: float) -> str:
    """Return the configuration of the weighted scorers with the prefix index `index`.

    The scorer of adapters is left out if its weight is 0.
    """
    return config_of(
        index,
        # The original has no keys on which replicas agree.
        step(
            "prefix-cache-scorer",
            prefix,
            prefixMatchInfoProducerName=index.type_name,
            agreement="none",
        ),
        step("queue-scorer", queue),
        step("kv-cache-utilization-scorer", kv_cache),
        *([step("lora-affinity-scorer", adapters)] if adapters else []),
    )


def _three_two_two(index: Step, adapters: float = 0) -> str:
    return _weighted(index, 3, 2, 2, adapters)


_LLM_D: Final = producer(_ROUTED, blockTokens=64, autoTune=True, lastPartialBlock=True)
_V1: Final = {
    "blockTokens": 16,
    "blocksPerRequestMax": 256,
    "blocksPerEndpointMax": 31_250,
}

INDEXES: Final = (RoutedBlocksSettings,)

STRATEGIES: Final = (
    Strategy(
        name="llm-d-approximate",
        idea=(
            "llm-d's approximate index as shipped: blocks of 64 tokens and the last partial one, "
            "heads dropped first, blocks after gaps count; prefix 3, queue 2, KV cache 2."
        ),
        omissions="a scorer of adapters, as in `llm-d-approximate-lora`",
        config=_three_two_two(_LLM_D),
    ),
    Strategy(
        name="llm-d-approximate-lora",
        idea="llm-d's approximate index as shipped, and its scorer of adapters: 3, 2, 2 and 1.",
        omissions="its score of 0.6 for an adapter that waits",
        config=_three_two_two(_LLM_D, adapters=1),
    ),
    Strategy(
        name="gie-v1",
        idea=(
            "GIE v1 as shipped: 256 blocks of 64 characters at most, heads dropped first, blocks "
            "after gaps count; prefix 3, queue 2, KV cache 2."
        ),
        omissions="a scorer of adapters, as in `gie-v1-lora`",
        config=_three_two_two(producer(_ROUTED, **_V1)),
    ),
    Strategy(
        name="gie-v1-lora",
        idea="GIE v1 by its sample configuration with adapters: prefix, queue, KV cache, LoRA, 1 each.",
        omissions="its score of 0.6 for an adapter that waits",
        config=_weighted(producer(_ROUTED, **_V1), 1, 1, 1, 1),
    ),
    Strategy(
        name="gie-v1-fixed",
        idea="GIE v1, except that tails are dropped first and no block after a gap counts.",
        omissions="as `gie-v1`",
        config=_three_two_two(producer(_ROUTED, **_V1, contiguous=True, tailFirst=True)),
    ),
)
