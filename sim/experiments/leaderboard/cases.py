"""The cases of the leaderboard. A case combines traffic, a pool of pods and the pool's pickers, and
is a row of the leaderboard's table.

Except in the cases of overload, request rates are about two thirds of the throughput that the pool
reaches with a thousand such requests that arrive at once, so that queues form and drain. They are
lower for cases with LoRA adapters. A hold-out resembles another case but has other parameters, and
must not be used for tuning.

Except in the case `speed-told-held`, pickers assume the prefill speed that `epp serve` assumes
without a configuration, whatever the pods' speed is, because that is what an operator gets after
installation. A strategy that configures a prefill speed uses its own.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.types import Seconds
from sim.cluster.incidents import Drain, Incident, Join, Restart, Slow
from sim.cluster.links import KVTransferSettings
from sim.cluster.prefill_rules import DECODE, PREFILL
from sim.cluster.scraping import ScrapeTrouble
from sim.cluster.settings import ClientSettings, ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.links import DEFAULT_LINK, LINKS
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.scenario_file import Scenario
from sim.measurement.measures import Targets
from sim.traces.arrival import Arrival
from sim.traces.lengths import around, lognormal
from sim.traces.standard import OVERLOADS, STANDARD
from sim.traces.workloads import (
    Adapters,
    AgentTree,
    ClosedLoad,
    Concurrency,
    Content,
    Conversations,
    Lengths,
    OpenLoad,
    SharedPrefix,
    Stage,
    Workload,
    arrivals,
)

_FOREVER_S: Final[Seconds] = 1e9
_ADAPTER_SLOTS: Final = 4
_RETRIES: Final = 5
_SLOWER: Final = "qwen3-32b-h100-tp2"
"""Profile on which requests take longer than on the default one, so that events during a request
and late scrapes have an effect.
"""
_CONTEXT_TOKENS_MAX: Final = 120_000
"""Limit on the tokens of a conversation's context, because some conversations would exceed the
maximum context of the pods.
"""

_DOCUMENTS: Final = Targets(ttft_s=2.0, tpot_s=0.1)
"""Latency targets of cases whose clients send a long document or a task."""
_OF_DOCUMENTS: Final = frozenset(
    {
        *("mooncake-conversation", "mooncake-synthetic", "mooncake-held", "speed-told-held"),
        *("unchunked-held", "b2b", "b2b-held", "tiered", "code-generation", "deep-research", "rag"),
        *("synthetic-data", "summarisation", "multi-document", "agent-tree", "kv-half-held"),
        *("set-below", "set-at", "set-above", "set-held"),
    }
)
"""Names of the cases whose clients send a long document or a task, and which therefore have the
latency targets `_DOCUMENTS`.
"""

_A100: Final = "llama-3.1-8b-a100-tp1"
_RTX_4090: Final = "llama-3.1-8b-rtx-4090-tp1"
_SLOWER_BY: Final = 2.0

Happening = Callable[[Seconds, PodKind], tuple[Incident, ...]]
"""Function (seconds between first and last arrival, kind of pod) -> incidents of the run."""
Engines = Callable[[PodKind, int], tuple[PodKind, ...]]
"""Function (kind of pod that pickers assume, number of pods) -> pods that are simulated."""


class Case(Struct, frozen=True, kw_only=True):
    """A case of the leaderboard: traffic, pods, pickers and incidents. It is a row of the table."""

    name: str
    says: str
    """Description of the case for the table, half a sentence."""
    workload: Workload | None = None
    """Workload that generates the requests, or None if the requests are read from `file`."""
    file: str = ""
    profile: str = DEFAULT_PROFILE
    pods: int = 4
    max_loras: int = 0
    replicas: int = 1
    """Number of pickers, which exchange no messages with each other."""
    scrape_interval_s: Seconds | None = None
    happens: str = ""
    """Name of the case's incidents in `HAPPENINGS`, or "" for no incidents."""
    engines: str = ""
    """Name in `ENGINES` of the change of the pods, or "" if the pods match their profile."""
    roles: tuple[tuple[str, int], ...] = ()
    """Number of pods of each role, which add up to `pods`; () if every pod serves whole requests."""
    link: str = DEFAULT_LINK
    """Network between pods with roles, a name of `LINKS`."""
    scrapes: str = ""
    """Name in `SCRAPES` of the trouble with metrics scrapes, or "" if all scrapes are answered."""
    speed_told: bool = False
    """True if pickers know the prefill speed of the pods, instead of assuming the default speed."""
    response_chunks: bool = False
    """True if gateways pass responses to pickers, which therefore observe each first token."""
    targets: Targets = Targets(ttft_s=0.5, tpot_s=0.05)
    """Latency targets of goodput, which counts requests that meet both. The defaults are for
    clients that read along.
    """
    hold_out: bool = False

    def arrivals(self, seed: int, requests: int) -> Iterator[Arrival]:
        """Yield the first `requests` requests that the case's workload generates with `seed`. The
        case must have a workload.

        Requests of a shared-prefix workload that repeat the same prompt carry the same session, as
        if one user sent them. Without sessions, strategies that route by session would choose at
        random.
        """
        assert self.workload is not None
        for arrival in arrivals(self.workload, seed, requests):
            again = isinstance(self.workload.content, SharedPrefix) and not arrival.session
            yield replace(arrival, session=f"{arrival.blocks[-1]}") if again else arrival

    def cluster(self) -> ClusterSettings:
        """Return the settings of the case's pods and pickers."""
        kind = PodKind.of(find_profile(self.profile), max_loras=self.max_loras)
        pods = ENGINES[self.engines](kind, self.pods) if self.engines else (kind,) * self.pods
        if self.roles:
            pods = tuple(kind.with_role(role) for role, count in self.roles for _ in range(count))
        return ClusterSettings(
            pods=pods,
            kv_transfer=KVTransferSettings(link=LINKS[self.link]) if self.roles else None,
            replicas=self.replicas,
            scrape_interval_s=self.scrape_interval_s,
            scrape_troubles=(SCRAPES[self.scrapes],) if self.scrapes else (),
            response_chunks=self.response_chunks,
            believed_prefill_tokens_per_s=None if self.speed_told else PREFILL_TOKENS_PER_S,
            # Clients retry; otherwise strategies that lose most requests would look fast.
            clients=ClientSettings(retries=_RETRIES) if self.happens else ClientSettings(),
        )

    def scenario(self, span_s: Seconds) -> Scenario | None:
        """Return the case's incidents, placed within the `span_s` seconds during which requests
        arrive, or None if the case has none.
        """
        if not self.happens:
            return None
        happening = HAPPENINGS[self.happens]
        cluster = self.cluster()
        incidents = happening(span_s, cluster.pods[0])
        return Scenario(file=self.happens, incidents=incidents, clients=cluster.clients)


def _slow_pod(span_s: Seconds, kind: PodKind) -> tuple[Incident, ...]:
    return (Slow(from_s=0.2 * span_s, to_s=0.8 * span_s, factor=4.0, pods=(0,)),)


def _churn(span_s: Seconds, kind: PodKind) -> tuple[Incident, ...]:
    """Return incidents: the crash of a pod, a new pod, the drain of a pod that does not return, and
    the graceful replacement of a pod.
    """
    tenth_s = span_s / 10
    return (
        Restart(at_s=2 * tenth_s, pods=(1,), startup_s=tenth_s),
        Join(at_s=4 * tenth_s, kinds=(kind,)),
        Drain(at_s=5 * tenth_s, pods=(2,), grace_s=tenth_s),
        Restart(at_s=7 * tenth_s, pods=(0,), grace_s=tenth_s, startup_s=tenth_s),
    )


HAPPENINGS: Final[Mapping[str, Happening]] = MappingProxyType(
    {"slow pod": _slow_pod, "churn": _churn}
)


def _prefill_by(factor: float) -> Engines:
    """Return a function that multiplies the pods' times per prompt token by `factor`. The time of
    steps with few tokens hardly changes.
    """

    def engines(kind: PodKind, pods: int) -> tuple[PodKind, ...]:
        usual = kind.profile
        profile = replace(
            usual,
            linear_s_per_token=factor * usual.linear_s_per_token,
            all_reduce_s_per_token=factor * usual.all_reduce_s_per_token,
            pair_s=factor * usual.pair_s,
        )
        return (replace(kind, profile=profile),) * pods

    return engines


def _slower_decode(kind: PodKind, pods: int) -> tuple[PodKind, ...]:
    """Return pods whose decode steps take about twice as long: reading the weights, and attention
    over the context.
    """
    usual = kind.profile
    profile = replace(
        usual,
        weight_read_s=_SLOWER_BY * usual.weight_read_s,
        decode_s=_SLOWER_BY * usual.decode_s,
        decode_s_per_context_token=_SLOWER_BY * usual.decode_s_per_context_token,
    )
    return (replace(kind, profile=profile),) * pods


def _half_the_cache(kind: PodKind, pods: int) -> tuple[PodKind, ...]:
    told = kind.engine.blocks_total
    engine = replace(kind.engine, blocks_total=told // 2)
    return (replace(kind, engine=engine, advertised_blocks=told),) * pods


def _half_a100(kind: PodKind, pods: int) -> tuple[PodKind, ...]:
    older = PodKind.of(find_profile(_A100), max_loras=kind.engine.max_loras)
    return (*(kind,) * (pods - pods // 2), *(older,) * (pods // 2))


def _three_kinds(kind: PodKind, pods: int) -> tuple[PodKind, ...]:
    """Return pods of three GPU types in about equal numbers, the slowest type last."""
    names = (DEFAULT_PROFILE, _A100, _RTX_4090)
    kinds = [PodKind.of(find_profile(name), max_loras=kind.engine.max_loras) for name in names]
    return tuple(kinds[at * len(kinds) // pods] for at in range(pods))


def _whole_prompts(kind: PodKind, pods: int) -> tuple[PodKind, ...]:
    """Return pods whose engines hardly chunk prompts: a step has room for the longest prompt, so
    that decoding requests wait for whole prompts.
    """
    engine = replace(kind.engine, max_num_batched_tokens=kind.profile.max_model_len_tokens)
    return (replace(kind, engine=engine),) * pods


ENGINES: Final[Mapping[str, Engines]] = MappingProxyType(
    {
        "slow prefill": _prefill_by(_SLOWER_BY),
        "fast prefill": _prefill_by(1 / _SLOWER_BY),
        "slow decode": _slower_decode,
        "half the cache": _half_the_cache,
        "half A100": _half_a100,
        "three kinds": _three_kinds,
        "whole prompts": _whole_prompts,
    }
)
"""Functions that replace the pods of a case, by name. They change the engine, constants of the
profile, or the whole profile; no table of linear layers overrides these constants.
"""

SCRAPES: Final[Mapping[str, ScrapeTrouble]] = MappingProxyType(
    {
        "late": ScrapeTrouble(from_s=0.0, to_s=_FOREVER_S, more_s=0.8),
        "none": ScrapeTrouble(from_s=0.0, to_s=_FOREVER_S, loss=1.0),
    }
)
"""Troubles with metrics scrapes, by name. With "late", pages arrive 0.8 s late, just before the
timeout. With "none", every scrape is lost, so that pickers know only a pod's first page, from when
it was idle.
"""


def _open(content: Content, rate_per_s: float, burstiness: float = 1.0) -> Workload:
    """Return a workload that sends requests endlessly at `rate_per_s`. If `content` has sessions,
    it is the rate at which sessions start.
    """
    stage = Stage(rate_per_s=rate_per_s, duration_s=_FOREVER_S)
    return Workload(content=content, load=OpenLoad(stages=(stage,), burstiness=burstiness))


def _lanes(content: Content, lanes: int) -> Workload:
    """Return a workload that sends requests endlessly and always has `lanes` of them in
    progress.
    """
    stage = Concurrency(lanes=lanes, requests=int(_FOREVER_S))
    return Workload(content=content, load=ClosedLoad(stages=(stage,)))


# Contents like those of published traces: means, tails and shared prefixes follow their statistics.
_MOONCAKE_CONVERSATION: Final = Conversations(
    conversations=0,
    shared_tokens=512,
    own=lognormal(7000, 13_000, 200, 100_000),
    turns=lognormal(3, 3, 1, 20),
    question=lognormal(1500, 3000, 20, 40_000),
    output=lognormal(343, 230, 10, 2000),
    think_s=lognormal(60, 60, 5, 480),
    context_tokens_max=_CONTEXT_TOKENS_MAX,
)
_MOONCAKE_SYNTHETIC: Final = Conversations(
    conversations=0,
    shared_tokens=0,
    own=lognormal(10_000, 13_000, 500, 100_000),
    turns=lognormal(4, 4, 1, 20),
    question=lognormal(2000, 2500, 20, 20_000),
    output=lognormal(149, 170, 2, 893),
    think_s=lognormal(30, 30, 2, 240),
    context_tokens_max=_CONTEXT_TOKENS_MAX,
)
_AZURE_CONVERSATION: Final = Lengths(
    prompt=lognormal(1155, 1100, 16, 14_050), output=lognormal(211, 160, 1, 1000)
)
_AZURE_CODE: Final = Lengths(
    prompt=lognormal(2048, 1900, 16, 7437), output=lognormal(28, 60, 1, 1899)
)


def _prefixes(
    groups: int, system_tokens: int, question_tokens: int = 300, output_tokens: int = 200
) -> SharedPrefix:
    return SharedPrefix(
        groups=groups,
        prompts_per_group=40,
        system_tokens=system_tokens,
        question=around(question_tokens),
        output=around(output_tokens),
    )


_USUAL: Final = _open(_prefixes(40, 3000, 500, 300), 20.0)
"""Workload of the cases that vary the number of pickers, the scrapes or the pods."""


def _unusual_at(rate_per_s: float) -> Workload:
    return _open(
        SharedPrefix(
            groups=90,
            prompts_per_group=25,
            system_tokens=5500,
            question=around(700),
            output=around(120),
            skew=0.8,
        ),
        rate_per_s,
    )


_UNUSUAL: Final = _unusual_at(20.0)
"""Workload of the hold-outs that vary the number of pickers, the scrapes or the pods."""
_MOONCAKE_LONGER: Final = replace(
    _MOONCAKE_CONVERSATION,
    own=lognormal(10_000, 12_000, 500, 90_000),
    turns=lognormal(5, 4, 1, 20),
    question=lognormal(800, 1200, 20, 20_000),
)
_TALKS: Final = Conversations(
    conversations=0,
    shared_tokens=1200,
    own=lognormal(900, 1200, 50, 8000),
    turns=lognormal(8, 5, 1, 25),
    question=lognormal(60, 60, 5, 800),
    output=lognormal(220, 200, 10, 1500),
    think_s=lognormal(12, 15, 1, 90),
)
"""Conversations of the cases `pods-24-further` and `gpus-further`."""
_MOONCAKE_HELD: Final = _open(_MOONCAKE_LONGER, 1.4)

_PUBLISHED: Final = (
    Case(
        name="mooncake-conversation",
        says="like Mooncake's conversations: long contexts, few turns",
        workload=_open(_MOONCAKE_CONVERSATION, 2.2),
        pods=8,
    ),
    Case(
        name="mooncake-synthetic",
        says="like Mooncake's synthetic trace: long contexts, two thirds shared",
        workload=_open(_MOONCAKE_SYNTHETIC, 2.0),
        pods=8,
    ),
    Case(
        name="azure-conversation",
        says="like Azure's conversations: nothing shared",
        workload=_open(_AZURE_CONVERSATION, 32.0),
    ),
    Case(
        name="azure-code",
        says="like Azure's code completion: nothing shared, in bursts",
        workload=_open(_AZURE_CODE, 35.0, burstiness=4.0),
    ),
)

_RATES_PER_S: Final = MappingProxyType(
    {
        "b2b": 8.0,
        "b2b-small": 35.0,
        "tiered": 3.5,
        "shared-prefix": 75.0,
        "ladder": 60.0,
        "zero-reuse": 30.0,
        "multi-turn": 5.0,
        "predicted-latency-a": 24.0,
        "predicted-latency-b": 6.5,
        "predicted-latency-c": 6.0,
        "predicted-latency-d": 3.6,
        "interactive-chat": 6.0,
        "chatbot": 120.0,
        "content": 13.0,
        "summarisation": 8.7,
        "multi-document": 1.6,
        "ray-prefix": 200.0,
        "prefix-repetition": 88.0,
        "agent-tree": 1.4,
        "hot-spot": 58.0,
        "lora-mix": 15.0,
        "bursts": 60.0,
    }
)
"""Request rate per second (of conversations: starts per second), by name of the standard
workload.
"""
_LANES: Final = MappingProxyType(
    {"code-generation": 16, "deep-research": 16, "rag": 30, "synthetic-data": 40, "reasoning": 40}
)
"""Number of concurrent requests, by name of the standard workload, for workloads whose clients wait
for answers.
"""


def _standard(name: str) -> Case:
    """Return the case of the standard workload `name`, at its rate in `_RATES_PER_S` or its
    concurrency in `_LANES`.
    """
    known = STANDARD[name]
    content = known.content
    if isinstance(content, Conversations):
        tokens_max = min(content.context_tokens_max, _CONTEXT_TOKENS_MAX)
        content = replace(content, context_tokens_max=tokens_max)
    if isinstance(known.load, OpenLoad):
        workload = _open(content, _RATES_PER_S[name], known.load.burstiness)
        says = f"`sim trace generate {name}` at {_RATES_PER_S[name]:g}/s"
    else:
        workload = _lanes(content, _LANES[name])
        says = f"`sim trace generate {name}`, {_LANES[name]} at a time"
    return Case(
        name=name,
        says=says,
        workload=replace(workload, adapters=known.adapters),
        max_loras=_ADAPTER_SLOTS if known.adapters.weights else 0,
    )


_POOLS: Final = (
    Case(
        name="set-below",
        says="half of one pod's cache is in use",
        workload=_open(_prefixes(13, 16_384), 18.0),
    ),
    Case(
        name="set-at",
        says="as much as one pod's cache is in use",
        workload=_open(_prefixes(26, 16_384), 18.0),
    ),
    Case(
        name="set-above",
        says="two and a half pods' caches are in use",
        workload=_open(_prefixes(66, 16_384), 18.0),
    ),
    Case(name="pickers-1", says="one picker", workload=_USUAL, profile=_SLOWER),
    Case(
        name="pickers-4",
        says="four pickers, blind to each other",
        workload=_USUAL,
        profile=_SLOWER,
        replicas=4,
    ),
    Case(
        name="scrape-50ms",
        says="scraped each 50 ms",
        workload=_USUAL,
        profile=_SLOWER,
        scrape_interval_s=0.05,
    ),
    Case(
        name="scrape-1s",
        says="scraped each second",
        workload=_USUAL,
        profile=_SLOWER,
        scrape_interval_s=1.0,
    ),
    Case(
        name="scrape-10s",
        says="scraped each 10 s",
        workload=_USUAL,
        profile=_SLOWER,
        scrape_interval_s=10.0,
    ),
    Case(
        name="slow-pod",
        says="one of four pods takes four times as long for a while",
        workload=_USUAL,
        profile=_SLOWER,
        happens="slow pod",
    ),
    Case(
        name="pod-churn",
        says="pods crash, leave, join and are replaced",
        workload=_USUAL,
        profile=_SLOWER,
        happens="churn",
    ),
)

_HOLD_OUTS: Final = tuple(
    replace(case, hold_out=True)
    for case in (
        Case(
            name="mooncake-held",
            says="as mooncake-conversation: longer, more turns, six pods",
            workload=_MOONCAKE_HELD,
            pods=6,
        ),
        Case(
            name="azure-held",
            says="as azure-conversation: longer prompts, in bursts, six pods",
            workload=_open(
                Lengths(
                    prompt=lognormal(1800, 1500, 32, 14_000), output=lognormal(150, 150, 1, 900)
                ),
                36.0,
                burstiness=2.0,
            ),
            pods=6,
        ),
        Case(
            name="b2b-held",
            says="as b2b: 60 prefixes of 9,000 tokens, 32B on eight pods",
            workload=_open(
                SharedPrefix(
                    groups=60,
                    prompts_per_group=12,
                    system_tokens=9000,
                    question=around(800),
                    output=around(400),
                ),
                20.0,
            ),
            profile=_SLOWER,
            pods=8,
        ),
        Case(
            name="chat-held",
            says="as interactive-chat: longer answers, longer conversations",
            workload=_open(
                Conversations(
                    conversations=0,
                    shared_tokens=2500,
                    own=lognormal(2000, 1500, 200, 9000),
                    turns=lognormal(7, 4, 1, 20),
                    question=lognormal(120, 100, 10, 1500),
                    output=lognormal(450, 250, 20, 1500),
                    think_s=lognormal(20, 20, 2, 120),
                ),
                2.9,
            ),
        ),
        Case(
            name="set-held",
            says="as set-above: one and a half times the caches of all pods",
            workload=_open(_prefixes(220, 12_000, 500, 150), 6.5),
        ),
        Case(
            name="lora-held",
            says="as lora-mix: twelve adapters, evenly, longer prefixes",
            workload=replace(
                _open(_prefixes(12, 2500), 12.0),
                adapters=Adapters(weights=tuple((f"adapter-{n}", 1.0) for n in range(12))),
            ),
            max_loras=_ADAPTER_SLOTS,
        ),
        Case(
            name="pickers-held",
            says="as pickers-4: three of them, skewed prefixes",
            workload=_UNUSUAL,
            profile=_SLOWER,
            replicas=3,
        ),
        Case(
            name="scrape-held",
            says="as scrape-10s: each 4 s, skewed prefixes",
            workload=_UNUSUAL,
            profile=_SLOWER,
            scrape_interval_s=4.0,
        ),
        Case(
            name="slow-held",
            says="as slow-pod: one of six, skewed prefixes",
            workload=_UNUSUAL,
            profile=_SLOWER,
            pods=6,
            happens="slow pod",
        ),
    )
)

_OTHER_THAN_ASSUMED: Final = tuple(
    replace(case, hold_out=True)
    for case in (
        Case(
            name="speed-told-held",
            says="as mooncake-held: pickers are told how fast pods prefill",
            workload=_MOONCAKE_HELD,
            pods=6,
            speed_told=True,
        ),
        Case(
            name="prefill-slow-held",
            says="prompts take twice as long as the profile says",
            workload=_unusual_at(10.0),
            profile=_SLOWER,
            engines="slow prefill",
        ),
        Case(
            name="prefill-fast-held",
            says="prompts take half as long as the profile says",
            workload=_unusual_at(28.0),
            profile=_SLOWER,
            engines="fast prefill",
        ),
        Case(
            name="decode-slow-held",
            says="answers take twice as long as the profile says",
            workload=_unusual_at(14.0),
            profile=_SLOWER,
            engines="slow decode",
        ),
        Case(
            name="kv-half-held",
            says="pages tell of twice the KV cache that there is, and it would hold all prefixes",
            workload=_open(_prefixes(100, 12_000, 500, 150), 9.0),
            engines="half the cache",
        ),
        Case(
            name="uneven-held",
            says="two of four pods have an A100 and prefill at a third of the others' speed",
            workload=_unusual_at(24.0),
            engines="half A100",
        ),
        Case(
            name="unchunked-held",
            says="long contexts, and no prompt is cut: answers wait for whole prompts",
            workload=_open(_MOONCAKE_LONGER, 4.0),
            pods=6,
            engines="whole prompts",
        ),
        Case(
            name="chunks-held",
            says="as scrape-held, scraped as usual: gateways show first tokens to pickers",
            workload=_UNUSUAL,
            profile=_SLOWER,
            response_chunks=True,
        ),
        Case(
            name="scrape-late-held",
            says="pages come 0.8 s after they were asked for",
            workload=_UNUSUAL,
            profile=_SLOWER,
            scrapes="late",
        ),
        Case(
            name="scrape-none-held",
            says="no page is answered",
            workload=_UNUSUAL,
            profile=_SLOWER,
            scrapes="none",
        ),
    )
)
"""Hold-outs in which the simulated engines or scrapes differ from what pickers assume."""

CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        case.name: replace(case, targets=_DOCUMENTS) if case.name in _OF_DOCUMENTS else case
        for case in chain(
            _PUBLISHED,
            (_standard(name) for name in STANDARD if name not in OVERLOADS),
            _POOLS,
            _HOLD_OUTS,
            _OTHER_THAN_ASSUMED,
        )
    }
)
"""Cases that run by default, by name, in the order of the leaderboard's table."""


FURTHER_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        case.name: replace(case, hold_out=True)
        for case in (
            Case(
                name="pods-2-further",
                says="two pods, skewed prefixes of 2,000 tokens",
                workload=_open(
                    SharedPrefix(
                        groups=15,
                        prompts_per_group=30,
                        system_tokens=2000,
                        question=around(400),
                        output=around(250),
                        skew=1.0,
                    ),
                    39.0,
                ),
                pods=2,
            ),
            Case(
                name="pods-24-further",
                says="24 pods, conversations with short questions",
                workload=_open(_TALKS, 70.0),
                pods=24,
            ),
            Case(
                name="pods-64-further",
                says="64 pods, 500 prefixes of 6,000 tokens",
                workload=_open(_prefixes(500, 6000, 900, 220), 450.0),
                pods=64,
            ),
            Case(
                name="gpus-further",
                says="two H100, two A100 and two RTX 4090; pickers believe all are alike",
                workload=_open(_TALKS, 5.0),
                pods=6,
                engines="three kinds",
            ),
            Case(
                name="agents-further",
                says="as agent-tree: longer branches, more tools, six pods",
                workload=_open(
                    AgentTree(
                        root_tokens=3500,
                        toolsets=20,
                        toolset_tokens=2500,
                        branch=lognormal(900, 900, 50, 6000),
                        turns=lognormal(9, 6, 1, 30),
                        tool_result=lognormal(700, 900, 30, 9000),
                        output=lognormal(160, 140, 10, 1500),
                    ),
                    4.5,
                ),
                pods=6,
                targets=_DOCUMENTS,
            ),
            Case(
                name="lengths-further",
                says="nothing shared, lengths over three decades, in bursts",
                workload=_open(
                    Lengths(
                        prompt=lognormal(2500, 6000, 16, 60_000),
                        output=lognormal(180, 400, 1, 4000),
                    ),
                    14.0,
                    burstiness=3.0,
                ),
                pods=4,
            ),
        )
    }
)
"""Cases, by name, that run only if `--cases` names them. No default of the scheduler was chosen
with their help.
"""


# The model of `_SLOWER` has a context of 40,960 tokens.
_LONG: Final = Lengths(
    prompt=lognormal(8_000, 8_000, 500, 38_000), output=lognormal(250, 150, 10, 1_000)
)
_DOCUMENT_CHATS: Final = Conversations(
    conversations=0,
    shared_tokens=1_000,
    own=lognormal(5_000, 9_000, 100, 30_000),
    turns=lognormal(4, 3, 1, 12),
    question=lognormal(150, 200, 10, 2_000),
    output=lognormal(250, 150, 10, 1_000),
    think_s=lognormal(10, 10, 1, 60),
    context_tokens_max=39_000,
)
"""Conversations that begin with a document: the first prompt is long, and later ones are mostly
cached.
"""

STAGED_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        case.name: replace(case, profile=_SLOWER, pods=8, targets=_DOCUMENTS)
        for case in (
            Case(
                name="split-long",
                says="long prompts, nothing shared, on 4 prefill and 4 decode pods",
                workload=_open(_LONG, 5.0),
                roles=((PREFILL, 4), (DECODE, 4)),
            ),
            Case(
                name="split-mixed",
                says="chats about documents, on 3 prefill and 5 decode pods",
                workload=_open(_DOCUMENT_CHATS, 3.0),
                roles=((PREFILL, 3), (DECODE, 5)),
            ),
            Case(
                name="split-slow-link",
                says="as split-long, with transfers over TCP at 25 Gbit/s",
                workload=_open(_LONG, 5.0),
                roles=((PREFILL, 4), (DECODE, 4)),
                link="tcp-25gbe",
            ),
        )
    }
)
"""Cases with prefill and decode pods, by name. They run only if `--cases` names them. A
configuration without stages sends whole requests to all their pods, and the prompts of a baseline
go to prefill pods by round robin.
"""


OVERLOAD_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        name: Case(
            name=name,
            says=says,
            workload=OVERLOADS[name],
            profile=_SLOWER,
            targets=_DOCUMENTS,
        )
        for name, says in (
            ("two-tenants", "two tenants at 10:1 in tokens and 1.5 times what the pods can serve"),
            ("chat-and-batch", "interactive requests beside more batch requests than fit"),
            ("one-burst", "ten times the usual rate for 5 s, after 20 s"),
        )
    }
)
"""Cases that overload the pods, by name. They run only if `--cases` names them. Such a case needs
`--requests 2000` or more, because queues grow with time.
"""


class Ladder(Struct, frozen=True, kw_only=True):
    """Cases that differ in one number, so that a chart can show the results over this number."""

    title: str
    unit: str = ""
    steps: tuple[tuple[float, str], ...]
    """Cases of the ladder as (the number that differs, name of the case), in ascending order."""


LADDERS: Final = (
    Ladder(
        title="time between scrapes",
        unit="s",
        steps=((0.05, "scrape-50ms"), (0.2, "pickers-1"), (1.0, "scrape-1s"), (10.0, "scrape-10s")),
    ),
    Ladder(
        title="working set",
        unit="pods' caches",
        steps=((0.5, "set-below"), (1.0, "set-at"), (2.5, "set-above")),
    ),
    Ladder(title="pickers, blind", steps=((1.0, "pickers-1"), (4.0, "pickers-4"))),
)
