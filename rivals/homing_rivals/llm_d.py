"""The index of llm-d's endpoint picker and of the one it grew from, as they ship it.

Sources: llm-d/llm-d-router v0.10; kubernetes-sigs/gateway-api-inference-extension v1 and its proposal
0602. Their scorers and filters are Homing's own; what differs here is the index.
"""

from typing import Final

from epp.plugins.contract import (
    Step,
    Strategy,
    config_of,
    producer,
    step,
)
from homing_rivals.routed_blocks import RoutedBlocksSettings

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
        name="llm-d-approximate",
        idea=(
            "llm-d's approximate index as shipped: blocks of 64 tokens and the last partial one, "
            "heads pushed out first, counts behind gaps; prefix 3, queue 2, KV cache 2."
        ),
        omissions="a scorer of adapters, as in `llm-d-approximate-lora`",
        config=_three_two_two(
            producer(_ROUTED, blockTokens=64, autoTune=True, lastPartialBlock=True)
        ),
    ),
    Strategy(
        name="gie-v1",
        idea=(
            "GIE v1 as shipped: 256 blocks of 64 characters at most, heads pushed out first, counts "
            "behind gaps; prefix 3, queue 2, KV cache 2."
        ),
        omissions="a scorer of adapters, as in `gie-v1-lora`",
        config=_three_two_two(producer(_ROUTED, **_V1)),
    ),
    Strategy(
        name="gie-v1-fixed",
        idea="GIE v1, but tails are pushed out first and nothing counts behind a gap.",
        omissions="as `gie-v1`",
        config=_three_two_two(producer(_ROUTED, **_V1, contiguous=True, tailFirst=True)),
    ),
)
