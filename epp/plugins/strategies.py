"""Routing strategies made of built-in plugins: Homing's own, and those that llm-d-router and the
Gateway API inference extension ship.

Strategies of other routers are in a distribution of their own, `rivals/`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from epp.plugins.strategy import Step, Strategy, config_of, named, producer, step

_APPROXIMATE: Final = "approx-prefix-cache-producer"
_BURST: Final = "burst-prefix-cache-producer"
_UNTIL_FIRST_TOKEN: Final = producer("inflight-load-producer", peakPrefillThroughput=1)
"""The producer of load in flight, with a prefill speed so low that tokens in flight hardly drain
over time. They stay until the first token of the answer is seen or counted.
"""
_ADAPTERS: Final = step("lora-affinity-scorer", 1)
"""The scorer that prefers endpoints with the requested LoRA adapter, with the weight on
llm-d-router's page and in its sample configuration.
"""


def _sticky(*more: Step) -> str:
    # The speed is the guide's measurement of Qwen3-32B on two H100s; other pods need another value.
    return config_of(
        producer(_APPROXIMATE),
        *(one for one in more if not one.decides),
        step(
            "prefix-cache-affinity-filter",
            affinityThreshold=0.8,
            maxTTFTPenaltyMs=18_000,
            peakPrefillThroughput=15_928,
        ),
        step("token-load-scorer", 1),
        *(one for one in more if one.decides),
    )


def _prefix_of(index: str) -> Step:
    # The pickers that ship this strategy have no agreement between replicas.
    return step("prefix-cache-scorer", 3, prefixMatchInfoProducerName=index, agreement="none")


_ALL: Final = (
    Strategy(
        name="homing",
        idea="Homing: the endpoint at which the request adds the least time to all requests.",
        config=config_of(step("added-time-scorer")),
    ),
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
    Strategy(
        name="llm-d-3-2-2",
        idea="llm-d without a configuration: prefix 3, queue 2, KV cache 2, over Homing's index.",
        omissions="llm-d's own index, which is `llm-d-approximate`",
        config=config_of(
            step("prefix-cache-scorer", 3),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
        ),
    ),
    Strategy(
        name="llm-d-3-2-2-lora",
        idea="llm-d without a configuration, plus its scorer of adapters with weight 1.",
        omissions=(
            "llm-d's own index, which is `llm-d-approximate-lora`; its score of 0.6 for an "
            "adapter that waits"
        ),
        config=config_of(
            step("prefix-cache-scorer", 3),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
            _ADAPTERS,
        ),
    ),
    Strategy(
        name="sticky-until-saturated",
        idea=(
            "llm-d's guide optimized-baseline since August 2026: only endpoints with 0.8 of the "
            "prompt cached, unless they are 18 s slower; of these the one with the fewest "
            "uncached tokens."
        ),
        omissions=(
            "tokens in flight until the first chunk: here metrics pages and time reduce them; "
            "llm-d's own index"
        ),
        config=_sticky(),
    ),
    Strategy(
        name="sticky-until-saturated-first-token",
        idea=(
            "llm-d's guide optimized-baseline, with tokens in flight until a first token is seen "
            "or counted, as in llm-d."
        ),
        omissions=(
            "first chunks that llm-d sees: here metrics pages count first tokens; llm-d's own index"
        ),
        config=_sticky(_UNTIL_FIRST_TOKEN),
    ),
    Strategy(
        name="sticky-until-saturated-lora",
        idea=(
            "llm-d's guide optimized-baseline, plus its scorer of adapters with weight 1, which "
            "the guide does not use."
        ),
        omissions=(
            "tokens in flight until the first chunk: here metrics pages and time reduce them; "
            "llm-d's own index"
        ),
        config=_sticky(_ADAPTERS),
    ),
    Strategy(
        name="llm-d-no-hit-lru",
        idea=(
            "llm-d's guide before August 2026: prefix 3, queue 2, KV cache 2 and 2 for the "
            "endpoint that received an unknown prompt the longest ago."
        ),
        omissions="llm-d's own index; a scorer of adapters, as in `llm-d-3-2-2-lora`",
        config=config_of(
            step("prefix-cache-scorer", 3, agreement="none"),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
            step("no-hit-lru-scorer", 2),
        ),
    ),
    Strategy(
        name="llm-d-burst",
        idea=(
            "llm-d's burst co-scheduling beside its prefix index: the same endpoint for equal "
            "prompts within 100 ms (3), prefix 3, queue 2, KV cache 2."
        ),
        omissions="llm-d's own index; a scorer of adapters, as in `llm-d-3-2-2-lora`",
        config=config_of(
            producer(_BURST),
            producer(_APPROXIMATE),
            named("burst-scorer", _prefix_of(_BURST)),
            _prefix_of(_APPROXIMATE),
            step("queue-scorer", 2),
            step("kv-cache-utilization-scorer", 2),
        ),
    ),
)

STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType({one.name: one for one in _ALL})
"""All built-in strategies by name, in the order in which tables list them."""
