"""The workloads of published benchmarks, and workloads that test weaknesses of schedulers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from sim.traces.arrival import FieldError
from sim.traces.lengths import Spread, around, fixed, lognormal
from sim.traces.workloads import (
    Adapters,
    AgentTree,
    ClosedLoad,
    Concurrency,
    Conversations,
    Generated,
    Lengths,
    OpenLoad,
    SharedPrefix,
    Stage,
    Workload,
    cannot_be_steady,
)


def _poisson(rate_per_s: float, duration_s: float = 300.0) -> OpenLoad:
    return OpenLoad(stages=(Stage(rate_per_s=rate_per_s, duration_s=duration_s),))


def _ladder(*steps: tuple[float, float], gap_s: float = 0.0) -> OpenLoad:
    """Return an open load (requests arrive at random times, whether or not earlier ones were
    answered) with a stage for each step, which is (requests a second, seconds). `gap_s` is the
    pause between stages.
    """
    stages = (Stage(rate_per_s=rate, duration_s=duration) for rate, duration in steps)
    return OpenLoad(stages=tuple(stages), gap_s=gap_s)


def _shared(groups: int, prompts: int, system: int, question: float, output: float) -> SharedPrefix:
    return SharedPrefix(
        groups=groups,
        prompts_per_group=prompts,
        system_tokens=system,
        question=fixed(question),
        output=fixed(output),
    )


def _varied(groups: int, prompts: int, system: int, question: float, output: float) -> SharedPrefix:
    return SharedPrefix(
        groups=groups,
        prompts_per_group=prompts,
        system_tokens=system,
        question=around(question),
        output=around(output),
    )


def _lanes(*steps: tuple[int, int]) -> ClosedLoad:
    """Return a closed load with a stage for each step (concurrent requests, requests in total)."""
    stages = (Concurrency(lanes=lanes, requests=requests) for lanes, requests in steps)
    return ClosedLoad(stages=tuple(stages))


def _lone(prompt: float, output: float) -> Workload:
    return Workload(
        content=Lengths(prompt=fixed(prompt), output=fixed(output)),
        load=_poisson(10),
        source="inference-sim/inference-sim defaults.yaml",
    )


_BENCHMARK: Final = "llm-d/llm-d-benchmark workload/profiles/inference-perf/"
_CATALOG: Final = "kubernetes-sigs/inference-perf workload-catalog/"
_B2B: Final = _ladder(
    *((15, 50), (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21)),
    *((40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25)),
    gap_s=30,
)
_CHAT: Final = Conversations(
    conversations=0,
    shared_tokens=1000,
    own=lognormal(4000, 2500, 500, 15_000),
    turns=lognormal(4, 2.5, 1, 15),
    question=lognormal(50, 40, 10, 1000),
    output=Spread(mean=300, std_dev=150, min=10, max=1000),
    think_s=lognormal(45, 40, 5, 300),
)

_AZURE_CONVERSATION: Final = Lengths(
    prompt=lognormal(1155, 1100, 16, 14_050), output=lognormal(211, 160, 1, 1000)
)
_BATCH: Final = Lengths(prompt=lognormal(2000, 1500, 100, 12_000), output=around(500))
_FOREVER_S: Final = 1e9

OVERLOADS: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        "two-tenants": Workload(
            content=_AZURE_CONVERSATION,
            load=_poisson(56.0, _FOREVER_S),
            headers=(("x-llm-d-inference-fairness-id", "large"),),
            beside=(
                Workload(
                    content=_AZURE_CONVERSATION,
                    load=_poisson(5.6, _FOREVER_S),
                    headers=(("x-llm-d-inference-fairness-id", "small"),),
                ),
            ),
        ),
        "chat-and-batch": Workload(
            content=_AZURE_CONVERSATION,
            load=_poisson(8.0, _FOREVER_S),
            priority=1,
            beside=(Workload(content=_BATCH, load=_poisson(22.0, _FOREVER_S)),),
        ),
        "one-burst": Workload(
            content=_AZURE_CONVERSATION,
            load=_ladder((15, 20), (150, 5), (15, _FOREVER_S)),
        ),
    }
)
"""Workloads that send more than four pods of `qwen3-32b-h100-tp2` can serve, to measure queues.

The pods serve 41 requests per second of the tenants, or 16.5 of the batch. The large tenant sends
ten times as many tokens as the small one. Both tenants together, and the interactive requests of
priority 1 together with the batch requests, need 1.5 times as much as the pods can serve. The burst
is ten times the usual rate for 5 s.
"""

STANDARD: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        **OVERLOADS,
        "b2b": Workload(
            content=_shared(150, 5, 6000, 1200, 1000),
            load=_B2B,
            source=_BENCHMARK + "guide_optimized-baseline_1.yaml.in",
        ),
        "b2b-small": Workload(
            content=_shared(150, 5, 2000, 500, 500),
            load=_ladder(*((rate, 30) for rate in (3, 10, 15, 20, 25, 30)), gap_s=30),
            source=_BENCHMARK + "guide_optimized-baseline_2.yaml.in; the steps are ours",
        ),
        "tiered": Workload(
            content=_shared(250, 5, 16_000, 256, 256),
            load=_ladder(*((rate, 30) for rate in (5, 10, 20, 30, 40)), gap_s=30),
            source=_BENCHMARK + "guide_tiered-prefix-cache_1.yaml.in; the steps are ours",
        ),
        "shared-prefix": Workload(
            content=_shared(32, 32, 2048, 256, 256),
            load=_ladder(*((rate, 50) for rate in (2, 5, 8, 10, 12, 15, 20))),
            source=_BENCHMARK + "shared_prefix_synthetic.yaml.in",
        ),
        "ladder": Workload(
            content=_shared(512, 8, 2048, 256, 128),
            load=_ladder(*((rate, 60) for rate in (4, 8, 16, 32, 48, 64, 96))),
            source="llm-d/llm-d-benchmark#1908",
        ),
        "zero-reuse": Workload(
            content=Lengths(prompt=fixed(2300), output=fixed(128)),
            load=_poisson(10),
            source="control of llm-d/llm-d-benchmark#1908: no prompt shares anything",
        ),
        "multi-turn": Workload(
            content=SharedPrefix(
                groups=1,
                prompts_per_group=20,
                system_tokens=1000,
                question=fixed(200),
                output=fixed(200),
                multi_turn=True,
            ),
            load=_poisson(2),
            source=_BENCHMARK + "shared_prefix_multi_turn_chat.yaml.in",
        ),
        **{
            f"predicted-latency-{name}": Workload(
                content=_varied(groups, prompts, system, question, 1000),
                load=_poisson(10),
                source=_BENCHMARK + "guide_predicted-latency-routing_1.yaml",
            )
            for name, groups, prompts, system, question in (
                ("a", 6, 1000, 1000, 30),
                ("b", 6, 1000, 1000, 3000),
                ("c", 150, 5, 6000, 1200),
                ("d", 150, 5, 1000, 6200),
            )
        },
        "interactive-chat": Workload(
            content=_CHAT, load=_poisson(1), source=_CATALOG + "interactive-chat; arrivals open"
        ),
        "code-generation": Workload(
            content=Conversations(
                conversations=40,
                shared_tokens=3000,
                own=lognormal(160_000, 233_600, 10_000, 990_000),
                turns=lognormal(540, 48_600, 1, 3000),
                question=lognormal(1500, 1200, 100, 10_000),
                output=lognormal(425, 825, 50, 10_000),
                think_s=lognormal(15, 55, 1, 100),
                context_tokens_max=262_144,
            ),
            load=_lanes((5, 100), (10, 200), (20, 400), (30, 600), (40, 800)),
            source=_CATALOG + "code-generation",
        ),
        "deep-research": Workload(
            content=Conversations(
                conversations=5,
                shared_tokens=2000,
                own=lognormal(45_000, 20_000, 5000, 120_000),
                turns=fixed(15),
                question=lognormal(3000, 2000, 200, 15_000),
                output=lognormal(300, 200, 50, 2000),
                think_s=lognormal(25, 20, 2, 120),
            ),
            load=_lanes((1, 30), (3, 90), (5, 150)),
            source=_CATALOG + "deep-research; spreads are ours",
        ),
        "rag": Workload(
            content=Conversations(
                conversations=0,
                shared_tokens=500,
                own=fixed(0),
                turns=fixed(1),
                question=lognormal(15_000, 22_000, 1000, 80_000),
                output=lognormal(500, 300, 50, 2000),
            ),
            load=_lanes((6, 120), (15, 300), (30, 600)),
            source=_CATALOG + "batch-summarization-rag",
        ),
        "synthetic-data": Workload(
            content=Conversations(
                conversations=0,
                shared_tokens=2000,
                own=fixed(0),
                turns=fixed(1),
                question=fixed(500),
                output=lognormal(4000, 1500, 500, 8000),
            ),
            load=_lanes((8, 80), (20, 200), (40, 400)),
            source=_CATALOG + "batch-synthetic-data-generation; spreads are ours",
        ),
        "reasoning": Workload(
            content=Conversations(
                conversations=0,
                shared_tokens=250,
                own=fixed(0),
                turns=fixed(1),
                question=fixed(1000),
                output=lognormal(8000, 6000, 500, 32_000),
            ),
            load=_lanes((2, 20), (5, 50), (10, 100)),
            source=_CATALOG + "reasoning; spreads are ours",
        ),
        "chatbot": _lone(256, 256),
        "content": _lone(1024, 1024),
        "summarisation": _lone(4096, 512),
        "multi-document": _lone(10_240, 1536),
        "ray-prefix": Workload(
            content=_shared(64, 64, 512, 128, 128),
            load=_poisson(10),
            source="Ray Serve LLM documentation; groups are ours",
        ),
        "prefix-repetition": Workload(
            content=_shared(600, 1, 1024, 128, 128),
            load=_poisson(10),
            source="vllm bench serve, smg-project/smg#1652",
        ),
        "agent-tree": Workload(content=AgentTree(), load=_poisson(0.5)),
        "hot-spot": Workload(
            content=SharedPrefix(
                groups=200,
                prompts_per_group=50,
                system_tokens=3000,
                question=around(300),
                output=around(200),
                skew=1.2,
            ),
            load=_poisson(20),
        ),
        "lora-mix": Workload(
            content=_shared(20, 100, 1000, 300, 200),
            load=_poisson(15),
            adapters=Adapters(
                weights=tuple((f"adapter-{rank}", 1 / rank) for rank in range(1, 33))
            ),
        ),
        "bursts": Workload(
            content=_shared(100, 50, 2000, 500, 200),
            load=OpenLoad(stages=(Stage(rate_per_s=10, duration_s=300),), burstiness=4.0),
        ),
    }
)
"""Standard workloads of `sim trace generate` by name. Those without a source are Homing's own."""

_DURATION_S_DEFAULT: Final = 300.0
_Above0 = Annotated[float, Meta(gt=0, le=1e9)]


class Drawing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of `sim trace generate`.

    A generated capture contains them, so that its requests can be generated again.
    """

    kind: str
    """Name of the standard workload, a key of `STANDARD`."""
    seed: int = 1
    requests: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of requests; None for no limit except the end of the load."""
    rate_per_s: _Above0 | None = None
    """Arrival rate per second that replaces the workload's own stages for `duration_s`; None for
    the workload's own stages. A workload of several kinds of traffic cannot have one.
    """
    duration_s: _Above0 | None = None
    """Duration of `rate_per_s` in seconds; None for 300 s, or until there are `requests` if they
    are given.
    """
    burstiness: Annotated[float, Meta(ge=0, le=100)] | None = None
    """Coefficient of variation of the gaps between arrivals; None for the workload's own. It needs
    a workload of one kind of traffic, with a load that does not wait for answers.
    """
    steady: bool = False
    """True if sessions are already running at the start and no request arrives after the end of the
    load.
    """

    def generated(self) -> Generated:
        """Return the workload with its rate, seed and limits.

        Raises `FieldError` if `kind` is unknown, if its load cannot be bursty or steady although
        that is requested, or if it has several kinds of traffic and a rate or a burstiness is given.
        """
        workload = STANDARD.get(self.kind)
        if workload is None:
            raise FieldError("workload.kind", f"Expected a standard workload, got {self.kind!r}")
        load = workload.load
        if workload.beside and (self.rate_per_s or self.burstiness is not None):
            raise FieldError(
                "workload.kind",
                "Expected a workload of one kind of traffic, because a rate or a burstiness is given, "
                f"got {self.kind!r}",
            )
        if self.rate_per_s:
            duration_s = self.duration_s or (_FOREVER_S if self.requests else _DURATION_S_DEFAULT)
            load = OpenLoad(stages=(Stage(rate_per_s=self.rate_per_s, duration_s=duration_s),))
        if self.burstiness is not None:
            if not isinstance(load, OpenLoad):
                raise FieldError(
                    "workload.burstiness", "Expected a load that does not wait for answers"
                )
            load = replace(load, burstiness=self.burstiness)
        workload = replace(workload, load=load)
        if self.steady and (problem := cannot_be_steady(workload)):
            raise FieldError("workload.steady", problem)
        return Generated(
            workload=workload, seed=self.seed, requests_max=self.requests, steady=self.steady
        )
