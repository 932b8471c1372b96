"""One run of the simulator: from a trace, a policy, a cluster and a seed to measurements."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, tee
from pathlib import Path
from typing import Any, Final

from msgspec import UNSET, Struct, field
from msgspec.structs import replace

from epp.configuration.document import ConfigError
from epp.core.decision.settings import SchedulerSettings
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds
from sim.cluster.arrivals import grid_s, prepared_arrivals
from sim.cluster.autoscaler import Autoscaler
from sim.cluster.check import checker
from sim.cluster.cluster import Cluster
from sim.cluster.faults import draw_faults
from sim.cluster.incidents import Configure, play
from sim.cluster.policies import PolicySource
from sim.cluster.prefill_rules import RoundRobinPrefill, decodes
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_request import SimulatedRequest
from sim.engine.profiles import estimate_warnings
from sim.experiments.scenario_file import Scenario
from sim.measurement.measures import Measures, Targets, rounded
from sim.measurement.stage_measures import StageMeasures
from sim.measurement.summaries import Ceilings, PeerSummary, PoolSummary, RunSummary
from sim.measurement.timeline import Timeline
from sim.traces.arrival import Arrival, TraceError
from sim.traces.formats import open_trace
from sim.traces.held import HeldTrace
from sim.traces.hits import AFFINITY, RANDOM, Hits
from sim.traces.plausibility import warnings_of
from sim.traces.prompts import (
    PICKER_BLOCK_TOKENS,
    PromptHashes,
    request_of,
    request_through_bytes,
)
from sim.traces.reading import ReadOptions, Trace
from sim.traces.variation import varied

GARBAGE_THRESHOLDS: Final = (50_000, 20, 20)
"""Thresholds of Python's garbage collector during a run (arguments of `gc.set_threshold`). A run
creates hardly any reference cycles, and with the default thresholds collections take an eighth of
its time.
"""

SPAN_S_MAX: Final = 366 * 86_400.0
"""Maximum time in seconds of an arrival after the start of a run, and maximum think time. A longer
span means that a clock was set during the recording, and a float would lose microseconds.
"""


class RunSettings(Struct, frozen=True, kw_only=True):
    """All parameters of a simulation run; they can be sent to another process."""

    trace: str
    policy: PolicySource
    cluster: ClusterSettings
    seed: int = 1
    repetition: int = 0
    """Number of the repetition. 0 replays the trace unchanged; others replay similar traffic that
    `seed` determines: resampled blocks of a recording, or a generated trace with other random
    draws.
    """
    read: ReadOptions = field(default_factory=ReadOptions)
    requests_from: int = 0
    """Number of requests of the trace that are skipped. If it is above 0, the request after them
    arrives at 0 s.
    """
    requests_max: int | None = None
    """Maximum number of requests replayed, not counting skipped ones, or None for all."""
    jitter_s: Seconds | None = None
    """Width in seconds of the random spread of arrival times; None for the resolution of the
    trace's clock if `grid_s` finds it coarse, else 0.
    """
    speed: float = 1.0
    through_bytes: bool = False
    """True if the production parser reads and hashes request bodies; False to use hashes that the
    simulator computes from the trace.
    """
    fault_gap_s: Seconds | None = None
    """Mean time in seconds between two random faults of pods, or None for no faults."""
    scenario: Scenario | None = None
    """Scenario with events at given times, or None. The scenario's pods and scrape troubles must
    already be in `cluster`.
    """
    targets: Targets = field(default_factory=Targets)
    warm_up_s: Seconds | None = None
    """Time in seconds at the start of the run whose requests are excluded from latencies, tokens
    and rates; counts of requests include them. None for the default of `Measures`, which depends on
    the span of the arrivals.
    """
    busiest_s: Seconds | None = None
    """Length in seconds of the busiest period, which the summary reports separately. None for no
    such period.
    """
    check: bool = False
    """True to check the simulator's invariants after every event, which is slow."""


class Run:
    """One simulation run. Each of `listeners` is called with a request when it ends, and `decided`
    when it is routed, at each attempt of its client.
    """

    def __init__(
        self,
        settings: RunSettings,
        listeners: Iterable[Callable[[SimulatedRequest], None]] = (),
        decided: Callable[[SimulatedRequest], None] | None = None,
        held: HeldTrace | None = None,
    ) -> None:
        """Open the trace and build the cluster. Raises `TraceError`, `OSError` and `ConfigError`.

        `held` is the trace of `settings` if it is already in memory, or None to read it from its
        file.
        """
        self.settings = settings
        """The given settings of the run, with `jitter_s` replaced by the jitter that is in effect.
        """
        self.stopped = False
        self._held = held
        self.trace: Trace = held or open_trace(Path(settings.trace), settings.read)
        cluster = settings.cluster
        open_policy = cluster.opener(settings.policy)
        scheduler = open_policy(0).settings
        scenario = settings.scenario or Scenario(file="")
        configured = [scheduler, *_configured(scenario, cluster)]
        told = _event_block_tokens(configured, cluster) if cluster.kv_events else ()
        self.measures = Measures(
            settings.targets,
            predicting=scheduler is not None and bool(scheduler.prefix),
            by_session=settings.policy.by_session,
            warm_up_s=settings.warm_up_s,
            busiest_s=settings.busiest_s,
        )
        self.stages = None if cluster.kv_transfer is None else StageMeasures()
        """Measurements of the stages of requests; None if no pod has a role."""
        added = () if self.stages is None else (self.stages.add,)
        self._listeners = (self.measures.add, *added, *listeners)
        arrivals = self._arrivals()
        arrivals = _refusing_ages(arrivals, settings)
        if settings.through_bytes:
            arrivals = refusing_odd_blocks(arrivals, settings.trace)
        if not any(kind.engine.max_loras for kind in settings.cluster.pods):
            arrivals = _refusing_adapters(arrivals, settings.trace)
        gap_s = settings.fault_gap_s
        self.cluster = Cluster(
            settings.cluster,
            open_policy,
            (
                _parsed(settings.trace, told)
                if settings.through_bytes
                else _hashed(configured, told)
            ),
            arrivals,
            seed=settings.seed,
            ended=self._ended,
            stepped=self.measures.gaps.add,
            decided=decided,
            prefill_rule=None
            if cluster.kv_transfer is None or settings.policy.text
            else RoundRobinPrefill(),
            faults=() if gap_s is None else draw_faults(settings.seed, mean_gap_s=gap_s),
        )
        if self.cluster.clients.done:
            raise self.trace.without_requests()
        play(scenario.incidents, self.cluster)
        for autoscaler in scenario.autoscalers:
            Autoscaler(autoscaler, self.cluster)
        self.timeline = Timeline(self.cluster, self.measures.pods)

    def ceilings(
        self, watched: Callable[[Iterator[Arrival]], Iterator[Arrival]] = iter
    ) -> Ceilings | None:
        """Return the shares of the run's prompt tokens that prompt caches would hit: one unlimited
        cache, and the pods' caches if requests were placed at random or by affinity. All pods count
        as pods of the first kind. The method takes one more pass over the trace.

        `watched` receives the arrivals and must yield them again; it can show progress. None if
        `stop` is called during the pass.
        """
        pods = self.settings.cluster.pods
        hits = Hits(
            pods=len(pods),
            kv_tokens=pods[0].engine.kv_tokens * pods[0].ranks,
            seed=self.settings.seed,
            placements=(RANDOM, AFFINITY),
            together=False,
        )
        prompt_tokens = 0
        for arrival in watched(self._arrivals()):
            if self.stopped:
                return None
            hits.add(arrival)
            prompt_tokens += arrival.prompt_tokens
        affinity, random = hits.placements[AFFINITY], hits.placements[RANDOM]
        return Ceilings(
            one_cache=hits.one_cache_tokens / prompt_tokens,
            affinity=affinity.hit_tokens / prompt_tokens,
            affinity_at_capacity=affinity.lru_hit_tokens / prompt_tokens,
            random_at_capacity=random.lru_hit_tokens / prompt_tokens,
        )

    def _arrivals(self) -> Iterator[Arrival]:
        settings = self.settings
        requests_max, jitter_s = settings.requests_max, settings.jitter_s
        if jitter_s is None and settings.repetition:
            # The resolution is that of the original trace, because the joints of resampled blocks
            # would hide it.
            jitter_s = grid_s(islice(self.trace, requests_max))
        self.variation = varied(
            self.trace,
            settings.repetition,
            seed=settings.seed,
            requests_max=requests_max,
            requests_from=settings.requests_from,
        )
        arrivals = self.variation.arrivals
        if jitter_s is None:
            looked_at, arrivals = tee(arrivals)
            jitter_s = grid_s(looked_at)
        self.settings = replace(settings, jitter_s=jitter_s)
        return prepared_arrivals(
            arrivals,
            seed=settings.seed,
            jitter_s=jitter_s,
            speed=settings.speed,
            rates=settings.scenario.rates if settings.scenario else (),
        )

    def run(self) -> None:
        """Simulate until the last request has ended, or until `stop` is called. Then add the
        plugins that raised errors or returned invalid values to `measures`.
        """
        if self.stopped:
            return
        thresholds = gc.get_threshold()
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        try:
            self.cluster.run(checker(self.cluster) if self.settings.check else None)
        finally:
            gc.set_threshold(*thresholds)
            for policy in self.cluster.pickers.policies:
                self.measures.failing_plugins += policy.failing_plugins()

    def summary(self) -> RunSummary:
        """Return the summary of the run: measurements, warnings, size of the pool, and messages
        between pickers if they exchange any.

        Hits by cache tier, retries, rescheduled requests and evictions are included only if the
        settings make them possible.
        """
        settings, cluster = self.settings.cluster, self.cluster
        scenario, pods = self.settings.scenario, cluster.pods.count.totals()
        peers = cluster.pickers.peering.summary()
        tiers = cluster.pods.tier_tokens()
        measured = self.measures.summary(
            pod.name for pod in cluster.pods if decodes(pod.kind.labels)
        )
        of_trace = warnings_of(self.trace) if self._held is None else self._held.warnings
        return replace(
            measured,
            warnings=[
                *estimate_warnings(kind.profile for kind in settings.pods),
                *measured.warnings,
                *of_trace,
            ],
            bad_lines=self.trace.bad_lines,
            pool=PoolSummary(
                autoscaled=scenario is not None and bool(scenario.autoscalers),
                pods_min=pods.pods_min,
                pods_max=pods.pods_max,
                pods_mean=rounded(pods.pods_mean),
                pod_hours=rounded(pods.pod_hours),
            ),
            tier_hit_tokens=UNSET
            if tiers is None
            else {tier: int(tokens) for tier, tokens in tiers.items()},
            stages=UNSET
            if self.stages is None
            else self.stages.summary(cluster.gateway.handovers.totals, self.measures.warm_up_s),
            peers=UNSET if peers is None else PeerSummary(**peers),
            retries=cluster.clients.retried if settings.clients.retries else UNSET,
            rescheduled=cluster.gateway.rescheduled if settings.fallback_endpoints_max else UNSET,
            evicted=cluster.gateway.evicted if cluster.pickers.evict else UNSET,
        )

    def stop(self) -> None:
        """Let `run` return after the current event, so that the measurements are consistent, and
        let `ceilings` return None.

        An exception would interrupt an event in the middle and leave an inconsistent state.
        """
        self.stopped = True
        self.cluster.loop.stop()

    def _ended(self, request: SimulatedRequest) -> None:
        for listener in self._listeners:
            listener(request)


def jitter_in_effect_s(settings: RunSettings) -> Seconds:
    """Return the width in seconds of the random spread of a run's arrivals. If the settings do not
    define it, it is determined from the beginning of the trace. Raises what reading the trace
    raises.
    """
    if settings.jitter_s is not None:
        return settings.jitter_s
    trace = open_trace(Path(settings.trace), settings.read)
    return grid_s(islice(trace, settings.requests_max))


def _configured(scenario: Scenario, cluster: ClusterSettings) -> Iterator[SchedulerSettings | None]:
    """Yield the scheduler settings of each configuration that the scenario's events give to pickers
    during the run; None for a baseline.
    """
    for incident in scenario.incidents:
        if isinstance(incident, Configure):
            yield cluster.opener(incident.policy)(0).settings


def _indexes(configured: Iterable[SchedulerSettings | None]) -> list[Any]:
    """Return all prefix indexes of the given scheduler settings, where None stands for a baseline
    without indexes.
    """
    return [index for settings in configured if settings for index in settings.indexes.values()]


def _event_block_tokens(
    configured: Iterable[SchedulerSettings | None], cluster: ClusterSettings
) -> tuple[int, ...]:
    """Return the block sizes in tokens of the indexes that receive KV-cache events, in ascending
    order. Raises `ConfigError` if a block size is not a multiple of the engines' block size.
    """
    hearing = (index for index in _indexes(configured) if index.abilities.hears_engines)
    sizes = sorted({index.block_tokens for index in hearing})
    of_engines = {kind.engine.block_size_tokens for kind in cluster.pods}
    for size in sizes:
        for block_tokens in of_engines:
            if size % block_tokens:
                problem = (
                    f"blockSizeTokens is {size}, expected a multiple of {block_tokens}: simulated "
                    "engines report blocks of this size"
                )
                raise ConfigError([problem])
    return tuple(sizes)


def _hashed(
    configured: Iterable[SchedulerSettings | None], told: Sequence[int]
) -> Callable[[Arrival, PromptHashes], InferenceRequest]:
    """Return a function that makes an `InferenceRequest` of an arrival, with hashes for the block
    sizes of the indexes in `configured` that count blocks, and with token hashes for the block
    sizes in `told`.
    """
    counting = (index for index in _indexes(configured) if index.abilities.counts_blocks)
    sizes = tuple(sorted({index.block_tokens for index in counting}))

    def request(arrival: Arrival, hashes: PromptHashes) -> InferenceRequest:
        return request_of(arrival, sizes, hashes, told_block_tokens=told)

    return request


def _parsed(path: str, told: Sequence[int]) -> Callable[[Arrival, PromptHashes], InferenceRequest]:
    def request(arrival: Arrival, hashes: PromptHashes) -> InferenceRequest:
        try:
            parsed = request_through_bytes(arrival)
        except ValueError as problem:
            raise TraceError(path, 0, "", str(problem)) from problem
        # The token hashes are those of the trace, independent of the text.
        chains = {size: (hashes.picker_chain(size),) for size in told}
        return replace(parsed, token_chains=chains)

    return request


def _refusing_ages(arrivals: Iterable[Arrival], settings: RunSettings) -> Iterator[Arrival]:
    """Yield the arrivals unchanged. Raises `TraceError` at an arrival whose time, or think
    time, exceeds `SPAN_S_MAX`.
    """
    for arrival in arrivals:
        wait_s = max(arrival.time_s, arrival.think_s)
        if wait_s > SPAN_S_MAX:
            raise TraceError(
                settings.trace,
                0,
                f"request {arrival.index}",
                f"Expected an arrival time and a think time of at most {SPAN_S_MAX / 86_400:.0f} days, got "
                f"{wait_s / 86_400:,.0f} days (--speed {settings.speed:g})",
            )
        yield arrival


def _refusing_adapters(arrivals: Iterable[Arrival], path: str) -> Iterator[Arrival]:
    """Yield the arrivals unchanged. Raises `TraceError` at an arrival for a LoRA adapter, because
    no pod has adapter slots.
    """
    for arrival in arrivals:
        if arrival.adapter:
            raise TraceError(
                path,
                0,
                f"request {arrival.index}",
                f"Expected pods with adapter slots (max_loras) for {arrival.adapter!r}, got none",
            )
        yield arrival


def refusing_odd_blocks(arrivals: Iterable[Arrival], path: str) -> Iterator[Arrival]:
    """Yield the arrivals unchanged. Raises `TraceError` at an arrival whose block size neither
    divides the picker's block size nor is a multiple of it, because different blocks could then
    give the same text.

    Prompts that consist of stretches may have stretches of any length: the stretch's id fits into
    its first token, or rendering the text raises an error.
    """
    for arrival in arrivals:
        tokens = arrival.block_tokens
        if tokens and tokens % PICKER_BLOCK_TOKENS and PICKER_BLOCK_TOKENS % tokens:
            raise TraceError(
                path,
                0,
                f"request {arrival.index}",
                f"Expected blocks of a multiple or a divisor of {PICKER_BLOCK_TOKENS} tokens "
                f"for --through bytes, got {tokens}",
            )
        yield arrival
