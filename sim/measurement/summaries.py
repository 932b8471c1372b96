"""The contents of summary.json of commands of `sim`: replay, compare, sweep, tune, size, leaderboard,
replicas and drive.

Field names are keys, in the order of the file. A field with the value `UNSET` is left out; None is
written as null and means that there is no value. `as_json` writes all summaries, `read_run` reads
that of a run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from epp.core.expectation import misfit
from sim.output import OutputError

SCHEMA: Final = 1

Conditions: TypeAlias = dict[str, Any]
"""Conditions of a run (trace, pods, policy and so on), value by name. `report.condition_rows`
formats them for reports.
"""
Values: TypeAlias = Mapping[str, float | str | None]
"""Values of the varied weights, parameters and plug-in types of a configuration, by name of the
dimension; None if the value is not in the search space.
"""


class Summary(Struct, frozen=True, kw_only=True):
    """An object in a summary.json."""

    INLINED: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that are not written as nested objects: their own fields are written in their
    place.
    """


class CommandSummary(Summary, frozen=True, kw_only=True):
    """The whole summary.json of one command."""

    schema: int = SCHEMA
    complete: bool
    """True if the command finished all its work, False if it was interrupted."""


class SeedsSummary(CommandSummary, frozen=True, kw_only=True):
    """The summary.json of a command that repeats runs with several seeds."""

    first_seed: int
    seeds: int


class SearchSummary(CommandSummary, frozen=True, kw_only=True):
    """The summary.json of a search over repeated runs, with the version of Homing that wrote it."""

    version: str
    first_seed: int
    seeds: int
    varied: str
    generated: bool


class SentRequests(Summary, frozen=True, kw_only=True):
    """Number of requests that were sent, and of those that were completed."""

    sent: int
    complete: int

    @property
    def share_lost(self) -> float:
        """Share of the sent requests that were not completed; 0 if none were sent."""
        return 1 - self.complete / self.sent if self.sent else 0.0


class Requests(SentRequests, frozen=True, kw_only=True):
    """Number of requests that were sent, and how many of them ended in each way."""

    refused: int
    failed: int
    aborted: int

    @property
    def ended(self) -> dict[str, int]:
        """Number of requests by the way in which they ended, with the names of the fields."""
        return {name: getattr(self, name) for name in self.__struct_fields__[1:]}


class Distribution(Summary, frozen=True, kw_only=True):
    """Mean and percentiles of one figure over requests; all are None if no request has the figure."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class WindowSummary(Summary, frozen=True, kw_only=True):
    """The steady part of a run in seconds, as `measures.Window` defines it."""

    warm_up_s: float
    start_s: float
    end_s: float
    drain_s: float


class TokenGapSummary(Summary, frozen=True, kw_only=True):
    """Statistics of the seconds between two consecutive tokens of an answer, over all tokens in the
    measured part of a run; `stall_share` is the share of gaps above three medians.
    """

    mean: float | None
    p50: float | None
    p99: float | None
    stall_share: float | None


class Goodput(Summary, frozen=True, kw_only=True):
    """Share of the requests sent after the warm-up (or in the busiest part) that met both latency
    targets, and their number per second.
    """

    ttft_target_s: float
    tpot_target_s: float
    share: float | None
    requests_per_s: float | None


class PartSummary(Summary, frozen=True, kw_only=True):
    """Figures of the requests that arrived in the busiest part of a run. `itl_s` covers the tokens
    that all requests got in that part.
    """

    start_s: float
    end_s: float
    requests: SentRequests
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: TokenGapSummary
    e2e_s: Distribution
    goodput: Goodput


class Spread(Summary, frozen=True, kw_only=True):
    """Three measures of how unequally loads are distributed over pods; max/mean and Jain's index
    are 1 for equal loads.
    """

    max_over_mean: float | None
    cv: float | None
    jain: float | None


class Imbalance(Summary, frozen=True, kw_only=True):
    """The inequality of the pods' loads over the whole run, by number of completed requests and by
    their uncached prompt tokens. All pods that may complete a request are included, so pods that only
    prefill are not.
    """

    requests: Spread
    uncached_tokens: Spread


class Prediction(Summary, frozen=True, kw_only=True):
    """Error of the picker's estimates of cached prompt tokens, per completed request, warm-up
    included; None for a policy without such estimates.
    """

    bias_tokens: float | None
    mean_absolute_error_tokens: float | None


class PodLoadSummary(Summary, frozen=True, kw_only=True):
    """Number of requests (or legs) that one pod completed, and their tokens. `cached_tokens`
    includes prompt tokens that another pod sent.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None


class StageSummary(Summary, frozen=True, kw_only=True):
    """The stages of a run in which several pods can serve a request: routes, legs and KV transfers.

    Times are of completed requests with a prefill leg that arrived after the warm-up. The four
    times of a request add up to its TTFT. If both legs were sent at once, the first ones overlap, so
    that `other_s` may be negative.
    """

    routes: dict[str, int]
    """Number of placed requests by route, such as `prefill-decode`."""
    refusals: dict[str, int]
    """Number of refused requests by the stage that had no pod, or only saturated ones."""
    prefill_legs: int
    """Number of prefill legs that were completed, warm-up included."""
    prefill_s: Distribution
    """Seconds from the arrival of the request at the picker to the end of the prefill leg."""
    reservation_s: Distribution
    """Seconds from the arrival of the decode leg at its engine to the reservation of its KV blocks.
    """
    transfer_s: Distribution
    """Seconds from the reservation of the decode leg's KV blocks to the end of the KV transfer."""
    other_s: Distribution
    """TTFT minus the times of prefill, reservation and transfer, in seconds: front ends, messages and
    the first decode step.
    """
    transfers: int
    transferred_tokens: int
    """Number of prompt tokens whose KV blocks were transferred."""
    transferred_bytes: int
    leases_expired: int
    """Number of prefill legs whose KV blocks no decode engine read before their lease ended."""
    prefill_pods: dict[str, PodLoadSummary]
    """Load of each pod by prefill legs; `pods` of the run has decode legs and whole requests."""


class PoolSummary(Summary, frozen=True, kw_only=True):
    """Minimum, maximum and mean number of pods over a run, and the pod-hours."""

    autoscaled: bool
    pods_min: int
    pods_max: int
    pods_mean: float | None
    pod_hours: float | None


class PeerSummary(Summary, frozen=True, kw_only=True):
    """Traffic between the pickers of a run: frames that were sent, lost or dropped, and records
    that were applied or discarded.
    """

    frames: int
    bytes: int
    frames_lost: int
    records_applied: int
    records_unknown_chain: int
    records_unknown_endpoint: int
    frames_dropped: int


class Resampled(Summary, frozen=True, kw_only=True):
    """The number and the length of the blocks into which a recorded trace was cut, from which the
    requests of a repetition were resampled.
    """

    blocks: int
    cut: str
    """Number and length of the blocks in words, for example "30 blocks of 120 s"."""


class Traffic(Summary, frozen=True, kw_only=True):
    """The origin of the requests of one repetition: a new random draw (`generated`), a resample of a
    recording, or the trace itself (neither).
    """

    generated: bool
    resampled: Resampled | None


class RunSummary(Summary, frozen=True, kw_only=True):
    """All figures of one run."""

    bad_lines: int | UnsetType = UNSET
    requests_per_s: float | UnsetType | None = UNSET
    traffic: Traffic | UnsetType = UNSET
    """The origin of the requests of the run. `traffic` and `requests_per_s` are set except in `sim
    replay`.
    """
    digest: str
    warnings: list[str]
    requests: Requests
    refusals: dict[str, int]
    failures: dict[str, int]
    duration_s: float | None
    window: WindowSummary
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: TokenGapSummary
    e2e_s: Distribution
    queue_s: Distribution
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    goodput: Goodput
    busiest: PartSummary | UnsetType = UNSET
    """Figures of the busiest part of the run; set only if `RunSettings.busiest_s` is set."""
    imbalance: Imbalance
    prediction: Prediction
    metrics_age_s: float | None
    preemptions: int
    pods: dict[str, PodLoadSummary]
    pool: PoolSummary | UnsetType = UNSET
    """Number of pods over the run, and pod-hours; `Run.summary` always sets it."""
    tier_hit_tokens: dict[str, int] | UnsetType = UNSET
    """Number of prompt tokens that each cache tier hit, warm-up included; set only if pods have a
    tier besides the GPU's cache.
    """
    peers: PeerSummary | UnsetType = UNSET
    """Traffic between pickers; set only if pickers share decisions."""
    stages: StageSummary | UnsetType = UNSET
    """Figures of routes, prefill legs and KV transfers of the run; set only if pods have roles."""
    retries: int | UnsetType = UNSET
    """Number of times that a client sent a request again; set only if clients retry."""
    rescheduled: int | UnsetType = UNSET
    """Number of times that a fallback endpoint accepted a request, because the pods that the picker
    named before it did not; set only if pickers name fallback endpoints.
    """
    evicted: int | UnsetType = UNSET
    """Number of times that a picker evicted a request, also if the client sent it again; set only if
    the configuration allows evictions.
    """


class KeptRun(Summary, frozen=True, kw_only=True):
    """The figures of a run that `sim tune` and `sim size` store for comparisons and reports."""

    requests: Requests
    traffic: Traffic
    window: WindowSummary
    warnings: list[str]
    bad_lines: int
    requests_per_s: float | None
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: TokenGapSummary
    e2e_s: Distribution
    hit_rate: float | None
    output_tokens_per_s: float | None
    goodput: Goodput
    busiest: PartSummary | UnsetType = UNSET
    """Figures of the busiest part of the run; set only if `RunSettings.busiest_s` is set."""
    digest: str
    pool: PoolSummary | UnsetType = UNSET
    """Number of pods over the run, and pod-hours; `Run.summary` always sets it."""


ComparedRun: TypeAlias = RunSummary | KeptRun


class NamedRun(Summary, frozen=True, kw_only=True):
    """One of several runs of a command, with its configuration and seed."""

    INLINED: ClassVar[frozenset[str]] = frozenset({"run"})

    rate: float | UnsetType = UNSET
    """Request rate of the run per second; set only in a sweep."""
    config: str
    seed: int
    run: ComparedRun


class AssumptionSummary(Summary, frozen=True, kw_only=True):
    """A constant of the model that was measured or assumed for one set-up, with its value in each
    profile of the run.
    """

    constant: str
    says: str
    unit: str
    values: dict[str, float]
    low: float
    high: float
    source: str


class PodSamples(Summary, frozen=True, kw_only=True):
    """State of one pod at each sample time. Samples before the pod joined, or while it does not
    run, are 0; a hit rate remains.
    """

    running: list[int]
    waiting: list[int]
    kv_cache_usage: list[float]
    hit_rate: list[float]
    """Hit rate at each sample time, over all requests that the pod had completed until then."""


class TimelineSummary(Summary, frozen=True, kw_only=True):
    """State of the pool and of each pod at regular times of a run, in columns."""

    time_s: list[float]
    pod_count: list[int]
    """Number of pods at each sample time: those that start, serve, drain or restart."""
    pods: dict[str, PodSamples]


class Ceilings(Summary, frozen=True, kw_only=True):
    """Upper limit and estimates of the token hit rate that caches can reach for the requests of a
    run.
    """

    one_cache: float
    affinity: float
    affinity_at_capacity: float
    random_at_capacity: float


class ReplaySummary(CommandSummary, frozen=True, kw_only=True):
    """The summary.json of `sim replay`."""

    INLINED: ClassVar[frozenset[str]] = frozenset({"run"})

    seed: int
    config: str
    conditions: Conditions
    run: RunSummary
    assumptions: list[AssumptionSummary]
    timeline: TimelineSummary
    ceilings: Ceilings | UnsetType | None = UNSET


class EstimateSummary(Summary, frozen=True, kw_only=True):
    """A figure of a configuration with its 95 % confidence interval; the ends are None if there is
    too little data.
    """

    value: float | None
    low: float | None
    high: float | None


class DifferenceSummary(Summary, frozen=True, kw_only=True):
    """A figure of a configuration minus that of the reference configuration, with its 95 %
    confidence interval and verdict.
    """

    reference: float | UnsetType | None = UNSET
    """The figure of the reference configuration, if the summary does not contain it elsewhere."""
    value: float | None
    low: float | None
    high: float | None
    relative: float | None
    significant: bool
    verdict: str

    @property
    def known_reference(self) -> float | None:
        """The figure of the reference configuration, or None if it is unknown or not part of this
        summary.
        """
        return None if self.reference is UNSET else self.reference


class ComparedConfig(Summary, frozen=True, kw_only=True):
    """The figures of one configuration over all its runs in a comparison."""

    requests: Requests
    figures: dict[str, EstimateSummary]
    difference: dict[str, DifferenceSummary]
    """Difference from the first configuration of the comparison, by measure; empty for the first
    one.
    """


class ComparisonSummary(SeedsSummary, frozen=True, kw_only=True):
    """The summary.json of `sim compare`."""

    conditions: Conditions
    assumptions: list[AssumptionSummary]
    varied: str
    generated: bool
    configs: dict[str, ComparedConfig]
    runs: list[NamedRun]


class SweepPoint(Summary, frozen=True, kw_only=True):
    """The figures of one configuration at one request rate, over the seeds that were run. `goodput` and
    `bad_lines` are those of the first seed.
    """

    rate: float
    config: str
    seeds: int
    varied: str
    requests: Requests
    requests_per_s: float | None
    bad_lines: int
    goodput: Goodput
    figures: dict[str, EstimateSummary]


class SweepSummary(SeedsSummary, frozen=True, kw_only=True):
    """The summary.json of `sim sweep`."""

    varied: str
    generated: bool
    trace_rate: float
    waits: bool
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    points: list[SweepPoint]
    runs: list[NamedRun]


class Range(Summary, frozen=True, kw_only=True):
    """Mean, lowest and highest value of a figure over seeds."""

    mean: float | None
    low: float | None
    high: float | None


class ReplicasRow(Summary, frozen=True, kw_only=True):
    """Figures of a workload with a number of pickers, by what the pickers share and how requests
    are assigned to them.
    """

    workload: str
    replicas: int
    sharing: str
    assignment: str
    seeds: int
    hit_rate: Range
    ttft_mean_s: Range
    ttft_p90_s: Range
    busiest_pod_over_mean: Range


class ReplicasSummary(SeedsSummary, frozen=True, kw_only=True):
    """The summary.json of `sim replicas`."""

    pods: int
    rows: list[ReplicasRow]


class TunedTrace(Summary, frozen=True, kw_only=True):
    """The trace of a tuning, and how many of its requests are used for tuning and for the hold-out."""

    name: str
    sha256: str
    requests: int
    tuning: int
    hold_out: int


class DimensionSummary(Summary, frozen=True, kw_only=True):
    """A weight, parameter or plug-in type that a tuning varies: its range or choices, and its value
    in the present configuration (None if that is unknown or outside of them).
    """

    name: str
    span: str
    present: float | str | None


class TrialSummary(Summary, frozen=True, kw_only=True):
    """A configuration that a tuning tried."""

    trial: int
    hash: str | None
    refused: str
    values: Values
    costs: list[list[float]]
    """Costs of the trial by objective, one list for each share of the tuning half on which it ran."""
    cost: float | None
    """Cost of the trial as one number, which guides the search; None if the trial did not run."""


class JudgedSummary(Summary, frozen=True, kw_only=True):
    """The comparison of a tuned configuration with the present one, over all seeds."""

    trial: int | UnsetType = UNSET
    """Number of the compared trial on the tuning half; not set if the chosen trial is compared on
    the hold-out half.
    """
    load: float | UnsetType = UNSET
    """Load on the hold-out half, as a multiple of the trace's load; not set on the tuning half."""
    differences: dict[str, DifferenceSummary]
    guards: dict[str, DifferenceSummary]
    """Differences in measures that are not objectives and must not get worse, by measure."""
    present_requests: Requests
    requests: Requests
    loses_more: bool
    worse: list[str]
    stopped_by: list[str]
    """Names of the guard measures that got significantly worse, by more than is allowed."""


class PowerSummary(Summary, frozen=True, kw_only=True):
    """The smallest gains that a tuning on this trace could confirm."""

    lacking: str
    """Reason why the tuning cannot confirm any gain, or "" if it can."""
    requests: int
    seeds: int
    gains: dict[str, float]
    """Smallest gain that four of five tunings confirm, as a share of the present figure, by
    measure.
    """
    wanted: float
    """Gain for which `requests_needed` and `seeds_needed` are computed, as a share of the present
    figure. The two list only measures in which this gain cannot be confirmed now.
    """
    requests_needed: dict[str, int]
    seeds_needed: dict[str, int]
    """Number of seeds that would confirm the gain `wanted` with the present number of requests, by
    measure. Measures for which up to 30 seeds would not suffice are missing.
    """


class TuneSummary(SearchSummary, frozen=True, kw_only=True):
    """The summary.json of `sim tune`."""

    config: str
    config_hash: str | None
    tuned_name: str
    trace: TunedTrace
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    objective: list[str]
    tolerance: float
    guards: dict[str, float]
    """Maximum loss that the tuning allows in measures that are not objectives, as a share, by
    measure.
    """
    power: PowerSummary | None
    """The smallest gains that could be confirmed; None if the tuning stopped before they were
    computed, or if no valid random configuration differs from the present one.
    """
    higher_is_better: list[str]
    rungs: list[float]
    space: list[DimensionSummary]
    trials: list[TrialSummary]
    front: list[int]
    finalists: list[JudgedSummary]
    chosen: TrialSummary | None
    best_so_far: TrialSummary | None
    hold_out: list[JudgedSummary]
    beats: bool
    runs: list[NamedRun]


class BoundSummary(Summary, frozen=True, kw_only=True):
    """An SLO bound, its figure over repeated runs, and whether the bound is met."""

    name: str
    busiest: bool = False
    """True if the figure covers only the busiest part of the traffic, False if it covers all
    traffic.
    """
    limit: float
    figure: EstimateSummary
    sure: float | None
    """Limit of the figure within which one more repetition would stay 19 times out of 20; None if
    there is too little data, or if a run does not have the figure.
    """
    used: float | None
    """Share of the bound that `sure` uses (1 is at the limit); of a lower bound, the share of the
    permitted shortfall. The share that the figure uses if `sure` is None.
    """
    kept: bool
    """True if `sure` is within the bound; False if it is not, or is None."""
    kept_by_figure: bool


class CountSummary(Summary, frozen=True, kw_only=True):
    """The result of a sizing for one number of pods."""

    pods: int
    runs: int
    """Number of repetitions that were run. It is smaller than the number of seeds if the first runs
    already broke a bound, or if the sizing was interrupted.
    """
    kept: bool | None
    """True if all SLO bounds are met with this number of pods; None if the search stopped before
    that was known.
    """
    cost_per_hour: float | None
    used: float | None
    """Highest share that the 95 % limits of the figures (the figures, with too few runs) use of any
    SLO bound (1 is exactly at the bound); None if the share of a bound is unknown.
    """
    bounds: list[BoundSummary]


class EveryCountSummary(Summary, frozen=True, kw_only=True):
    """The results of running every number of pods, to verify the search of a sizing."""

    pods: int | None
    runs: int
    counts: list[CountSummary]


class SizedSummary(Summary, frozen=True, kw_only=True):
    """The number of pods that one engine profile needs under one routing strategy."""

    profile: str
    config: str
    price_per_hour: float | None
    """Price of one pod per hour; None if it is not known."""
    pods: int | None
    """Smallest number of pods that meets all SLO bounds, as the next larger number does; None if no
    number up to the maximum does, or if none was found before an interruption.
    """
    pods_perhaps: int | None
    """Smallest number of pods below `pods` (any number if `pods` is None) that was run with every
    seed and whose figures are within the bounds while their 95 % limits are not; None if there is
    none.
    """
    used: float | None
    """Highest share that the 95 % limits of the figures with `pods` pods use of any SLO bound (1 is
    exactly at the bound); None if `pods` is None or a share is unknown.
    """
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    """Cost of serving a million tokens, prompt and output tokens together; None if it is unknown.
    """
    cost_per_million_output_tokens: float | None
    on_front: bool
    """True if the option is on the Pareto front: no other option is better in cost or in the used
    share of the bounds and no worse in the other. False if cost or share is unknown.
    """
    counts: list[CountSummary]
    """Results of all numbers of pods that were tried, in ascending order."""
    runs: int
    prefill_share: float | UnsetType = UNSET
    """Share of the pods that shall prefill and not decode, before it is rounded to whole pods; set only
    if the pool is split.
    """
    prefill_pods: int | UnsetType | None = UNSET
    """Number of prefill pods among `pods`, or None if `pods` is None; set only if the pool is
    split.
    """
    every_count: EveryCountSummary | UnsetType = UNSET
    """Results of running every number of pods; set only if the user requested them."""


class HeadroomSummary(Summary, frozen=True, kw_only=True):
    """The number of pods that the chosen option of a sizing needs in a case that is worse than the
    trace.
    """

    case: str
    says: str
    pods: int | None
    cost_per_hour: float | None
    counts: list[CountSummary]


class LoadSummary(Summary, frozen=True, kw_only=True):
    """One run of a sizing that compares a split pool with one that is not split, at one load."""

    option: int
    """Position of the option in `SizeSummary.options`."""
    pods: int
    load: float
    """Request rate as a multiple of that of the trace."""
    used: float | None
    """Highest share that the figures use of any SLO bound (1 is exactly at the bound); None if the
    share of a bound is unknown.
    """
    ttft_p90_s: float | None
    itl_mean_s: float | None
    e2e_mean_s: float | None


class DemandSummary(Summary, frozen=True, kw_only=True):
    """Number of requests and tokens in a period of the trace."""

    start_s: float
    end_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    of_busiest: float
    """Work in this period as a share of the work in the busiest period of the same length."""


class AutoscalingSummary(Summary, frozen=True, kw_only=True):
    """The result of running the chosen option of a sizing under a HorizontalPodAutoscaler. The numbers
    of pods and the pod-hours are those of the first repetition.
    """

    metric: str
    target: float
    pods_min: int
    pods_max: int
    startup_s: float
    runs: int
    varied: str
    pods_mean: float | None
    pods_highest: int | None
    pod_hours: float | None
    fixed_pod_hours: float | None
    """Pod-hours of the fixed number of pods from the sizing, over the same time."""
    kept: bool | None
    """True if all SLO bounds are met with autoscaling; None if there are too few runs to decide."""
    bounds: list[BoundSummary]


class WarmUpSummary(Summary, frozen=True, kw_only=True):
    """The warm-up that a sizing excludes from its figures, and the busiest part of the traffic, in
    seconds of the trace.
    """

    seconds: float
    """Length of the excluded warm-up in seconds of the trace; it is the same part of the trace at
    every load.
    """
    needed_s: float
    """Time in seconds of the trace after which at most 5 % of all prompt tokens miss a cache
    because it was empty at the start.
    """
    given: bool
    """True if the user set the warm-up with `--warm-up`, False if it was chosen automatically."""
    share_excluded: float
    """Share of the requests of the unchanged trace that arrive in the warm-up, if answers take no
    time.
    """
    busiest_s: float
    """Length in seconds of the busiest part of the unchanged trace."""
    busiest_from_s: float
    """Start of the busiest part, in seconds of the unchanged trace after the first request of the
    period that is sized for.
    """
    busiest_excluded: bool
    warning: str
    """Warning, or "" if the warm-up excludes at most a quarter of the requests and not the busiest
    part.
    """


class SizeSummary(SearchSummary, frozen=True, kw_only=True):
    """The summary.json of `sim size`."""

    conditions: Conditions
    assumptions: list[AssumptionSummary]
    pods_max: int
    bounds: list[str]
    trace: DemandSummary
    sized_for: DemandSummary
    """Period that was replayed to find the numbers of pods: the whole of a short trace, or the busiest
    period of a long one. Runs with an autoscaler replay the whole trace.
    """
    over_time: list[DemandSummary]
    warm_up: WarmUpSummary
    options: list[SizedSummary]
    chosen: int | None
    """Position of the chosen option in `options`, or None if there is none: `why_none` has the
    reason, or the search is incomplete.
    """
    why_none: str
    headroom: list[HeadroomSummary]
    loads: list[LoadSummary] | UnsetType = UNSET
    """Runs of the best pool without and with a split at several loads; set only with a split."""
    autoscaling: AutoscalingSummary | None
    runs: list[NamedRun]
    """Runs of the chosen option with the number of pods that it needs; empty if no option is
    chosen.
    """


RepeatedSummary: TypeAlias = ComparisonSummary | SweepSummary | TuneSummary | SizeSummary
"""Summaries of commands whose runs are repeated with several seeds."""


class Behind(Summary, frozen=True, kw_only=True):
    """The distance of a strategy from the best strategy of a case in one measure."""

    times: float | None
    """The ratio of the strategy's time to the best, or the inverse ratio for throughputs and shares:
    2 is twice as bad as the best. Only a strategy that is not eligible can be below 1. None if there is no
    ratio."""
    best: bool
    """True if the strategy is eligible and has the best value of the measure among all eligible ones;
    several strategies can have it.
    """
    within: bool | None
    """True if the confidence interval of the strategy's difference from the best one contains 0;
    None if there is too little data for an interval.
    """


class StandingSummary(Summary, frozen=True, kw_only=True):
    """The result of one strategy in one case of a leaderboard."""

    case: str
    strategy: str
    seeds: int
    varied: str
    lacking: str
    requests: Requests
    in_the_running: bool
    figures: dict[str, EstimateSummary]
    behind: dict[str, Behind]
    warnings: list[str]


class Total(Summary, frozen=True, kw_only=True):
    """The totals of one measure of a strategy over several cases: the geometric mean of the ratios to
    the best, and the case with the worst ratio.
    """

    times_the_best: float | None
    level: int
    cases: int
    worst: str | None
    worst_times: float | None


class ScopeTotal(Summary, frozen=True, kw_only=True):
    """The totals of a strategy over the cases of one scope of the leaderboard."""

    cases: int
    out: int
    """Number of cases among `cases` in which the strategy is not eligible, because it loses too
    many requests.
    """
    figures: dict[str, Total]
    goodput: float | None
    """Mean over the cases of the share of requests within the latency targets of the case."""


class TotalSummary(Summary, frozen=True, kw_only=True):
    """The totals of a strategy over the cases of each scope; `ranking.SCOPES` lists the scopes."""

    strategy: str
    over: dict[str, ScopeTotal]


class CaseSummary(Summary, frozen=True, kw_only=True):
    """A case of a leaderboard: a workload with its pool and conditions."""

    name: str
    says: str
    hold_out: bool
    trace: str | None
    profile: str
    pods: int
    max_loras: int
    replicas: int
    scrape_interval_s: float
    happens: str | None
    engines: str | None
    """Name of the way in which pods of this case differ from their profile, such as "slow prefill";
    None if they do not differ.
    """
    scrapes: str | None
    """Name of the trouble with metrics scrapes in this case, such as "late"; None if there is none."""
    response_chunks: bool
    """True if pickers observe when an answer's first token arrives."""
    prefill_tokens_per_s: list[float]
    """Prefill speeds of the pods in tokens per second, each distinct speed once."""
    believed_prefill_tokens_per_s: float
    """Prefill speed in tokens per second that pickers assume unless the configuration sets one."""
    ttft_target_s: float
    """Latency target for the first token in seconds. A request within both targets counts as
    goodput.
    """
    tpot_target_s: float
    """Latency target for the mean time of each later token in seconds."""


class StrategySummary(Summary, frozen=True, kw_only=True):
    """A routing strategy of a leaderboard."""

    name: str
    idea: str | None
    omissions: str | None
    """Features of the original strategy that this implementation leaves out; None if it is not a
    copy.
    """
    config_hash: str | None


class LadderSummary(Summary, frozen=True, kw_only=True):
    """A group of leaderboard cases that differ in one number, such as the request rate."""

    title: str
    unit: str
    steps: list[tuple[float, str]]
    """Pairs of (value of the number, name of the case)."""


class FailedCell(Summary, frozen=True, kw_only=True):
    """A run of one strategy in one leaderboard case with one seed that failed."""

    case: str
    strategy: str
    seed: int
    problem: str


class LeaderboardSummary(SeedsSummary, frozen=True, kw_only=True):
    """The summary.json of `sim leaderboard`."""

    requests: int
    cells: int
    cases: list[CaseSummary]
    strategies: list[StrategySummary]
    ladders: list[LadderSummary]
    totals: list[TotalSummary]
    rows: list[StandingSummary]
    failed: list[FailedCell]


class AnswerGaps(Summary, frozen=True, kw_only=True):
    """Statistics of the seconds between two consecutive chunks of an answer in a run of `sim drive`."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class GroupSummary(Summary, frozen=True, kw_only=True):
    """Figures of the requests that `sim drive` sent to one pod or one model."""

    requests: int
    errors: int
    ttft_s: Distribution
    itl_s: AnswerGaps
    e2e_s: Distribution
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None


class DrivenRequests(Summary, frozen=True, kw_only=True):
    """Number of requests of `sim drive` by result."""

    sent: int
    whole: int
    errors: int
    not_sent: int
    unfit: int
    cut: int


class DriveSummary(CommandSummary, frozen=True, kw_only=True):
    """The summary.json of `sim drive`."""

    conditions: Conditions
    took_s: float | None
    requests: DrivenRequests
    errors: dict[str, int]
    late_s: Distribution
    output_tokens_per_s: float | None
    ttft_s: Distribution
    itl_s: AnswerGaps
    e2e_s: Distribution
    hit_rate: float | None
    pods: dict[str, GroupSummary]
    models: dict[str, GroupSummary]


def as_json(summary: Summary | dict[str, Any]) -> bytes:
    """Return the bytes of summary.json. Equal summaries give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(_plain(summary)), indent=1) + b"\n"


def read_run(path: Path) -> RunSummary:
    """Return the figures of a run from a summary.json of `sim replay`.

    Raises `OSError`, and `OutputError` if the file has another form.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)
    except msgspec.DecodeError as problem:
        place = f"{path}: expected the summary of `sim replay` as this release writes it"
        raise OutputError(misfit(place, problem, RunSummary)) from problem


def _plain(value: Any) -> Any:
    """Return a summary as plain JSON values. Fields named in `INLINED` are replaced by their own
    fields.
    """
    match value:
        case Summary():
            told: dict[str, Any] = {}
            for name in value.__struct_fields__:
                item = getattr(value, name)
                if item is UNSET:
                    continue
                plain = _plain(item)
                told |= plain if name in value.INLINED else {name: plain}
            return told
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value
