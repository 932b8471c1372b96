"""Weighted scores: what `epp serve` decided by before it added up times."""

from typing import Final

from epp.strategies.strategy import Strategy, config_of, step

STRATEGIES: Final = (
    Strategy(
        name="weighted-scores",
        idea="Homing's weights: prefix 3, queue 2, KV cache 2, LoRA 1, requests in flight 1.",
        config=config_of(
            step("prefix-cache-scorer", 3),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
            step("lora-affinity-scorer", 1),
            step("active-request-scorer", 1),
        ),
    ),
)
