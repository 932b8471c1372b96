"""What llm-d's endpoint picker and the one it grew from decide by, as their configurations say.

Sources: llm-d/llm-d-router v0.10; kubernetes-sigs/gateway-api-inference-extension
v1 and its proposal 0602; the guides of llm-d/llm-d. Their scorers and filters are in `epp/plugins`;
what differs between these strategies is the index, the weights and a filter.
"""

from typing import Final

from epp.strategies.routed_blocks import RoutedBlocksSettings
from epp.strategies.strategy import Step, Strategy, config_of, producer, step

_APPROXIMATE: Final = "approx-prefix-cache-producer"
_ROUTED: Final = RoutedBlocksSettings.type_name


def _three_two_two(index: Step) -> str:
    """Prefix 3, queue 2, KV cache 2, over `index`."""
    return config_of(
        index,
        # Those who ship it know nothing of keys on which replicas agree.
        step(
            "prefix-cache-scorer",
            3,
            prefixMatchInfoProducerName=index.type_name,
            agreement="none",
        ),
        step("queue-scorer", 2),
        step("kv-cache-utilization-scorer", 2),
    )


_V1: Final = {
    "blockTokens": 16,
    "blocksPerRequestMax": 256,
    "blocksPerEndpointMax": 31_250,
}

INDEXES: Final = (RoutedBlocksSettings,)

STRATEGIES: Final = (
    Strategy(
        name="llm-d-3-2-2",
        idea="llm-d without a configuration: prefix 3, queue 2, KV cache 2, over Homing's index.",
        config=config_of(
            step("prefix-cache-scorer", 3),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
        ),
    ),
    # The speed is what the guide measured of Qwen3-32B on two H100s: set another for other pods.
    Strategy(
        name="sticky-until-saturated",
        idea=(
            "llm-d's guide optimized-baseline since August 2026: who holds 0.8 of the prompt keeps "
            "it until 18 s behind, then the fewest uncached tokens."
        ),
        config=config_of(
            producer(_APPROXIMATE),
            step(
                "prefix-cache-affinity-filter",
                affinityThreshold=0.8,
                maxTTFTPenaltyMs=18_000,
                peakPrefillThroughput=15_928,
            ),
            step("token-load-scorer", 1),
        ),
    ),
    Strategy(
        name="llm-d-approximate",
        idea=(
            "llm-d's approximate index as shipped: blocks of 64 tokens and the last partial one, "
            "heads pushed out first, counts behind gaps; prefix 3, queue 2, KV cache 2."
        ),
        config=_three_two_two(
            producer(_ROUTED, blockTokens=64, autoTune=True, lastPartialBlock=True)
        ),
    ),
    Strategy(
        name="llm-d-no-hit-lru",
        idea=(
            "llm-d's guide before August 2026: prefix 3, queue 2, KV cache 2 and 2 for who got an "
            "unknown prompt the longest ago."
        ),
        config=config_of(
            step("prefix-cache-scorer", 3, agreement="none"),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
            step("no-hit-lru-scorer", 2),
        ),
    ),
    Strategy(
        name="gie-v1",
        idea=(
            "GIE v1 as shipped: 256 blocks of 64 characters at most, heads pushed out first, counts "
            "behind gaps; prefix 3, queue 2, KV cache 2."
        ),
        config=_three_two_two(producer(_ROUTED, **_V1)),
    ),
    Strategy(
        name="gie-v1-fixed",
        idea="GIE v1, but tails are pushed out first and nothing counts behind a gap.",
        config=_three_two_two(producer(_ROUTED, **_V1, contiguous=True, tailFirst=True)),
    ),
)
