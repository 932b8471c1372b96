"""The contents of summary.json for runs, comparisons, sweeps, tunings, sizings and leaderboards.

Fields are keys, in the order of the file. A key with the value `UNSET` is left out; None is null
and means that there is no value. `as_json` writes all summaries, `read_run` reads that of a run.
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
"""Conditions of a run, value by name. `report.condition_rows` shows them to people."""
Values: TypeAlias = Mapping[str, float | str | None]
"""Values of the varied parameters by name; None if the search does not know a value."""


class Summary(Struct, frozen=True, kw_only=True):
    """Part of a summary.json."""

    INLINED: ClassVar[frozenset[str]] = frozenset()
    """Names of fields whose own fields replace them in the file."""


class CommandSummary(Summary, frozen=True, kw_only=True):
    """The summary of one command: a whole summary.json."""

    schema: int = SCHEMA
    complete: bool
    """True if everything that the command was to do has been done."""


class SeedsSummary(CommandSummary, frozen=True, kw_only=True):
    """The summary of a command that repeats runs with other seeds."""

    first_seed: int
    seeds: int


class SearchSummary(CommandSummary, frozen=True, kw_only=True):
    """The summary of a search over repeated runs, with the version of Homing that made it."""

    version: str
    first_seed: int
    seeds: int
    varied: str
    generated: bool


class SentRequests(Summary, frozen=True, kw_only=True):
    """The number of requests that were sent, and of those that were completed."""

    sent: int
    complete: int

    @property
    def share_lost(self) -> float:
        """Share of the requests that were not completed; 0 if there are none."""
        return 1 - self.complete / self.sent if self.sent else 0.0


class Requests(SentRequests, frozen=True, kw_only=True):
    """The number of requests that were sent, and how they ended."""

    refused: int
    failed: int
    aborted: int

    @property
    def ended(self) -> dict[str, int]:
        """Number of requests by fate."""
        return {name: getattr(self, name) for name in self.__struct_fields__[1:]}


class Distribution(Summary, frozen=True, kw_only=True):
    """Mean and percentiles of one figure over requests; None each if no request has it."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class WindowSummary(Summary, frozen=True, kw_only=True):
    """The steady part of a run, as `measures.Window` defines it."""

    warm_up_s: float
    start_s: float
    end_s: float
    drain_s: float


class TokenGapSummary(Summary, frozen=True, kw_only=True):
    """Statistics of the seconds between two tokens, over all tokens instead of requests."""

    mean: float | None
    p50: float | None
    p99: float | None
    stall_share: float | None


class Goodput(Summary, frozen=True, kw_only=True):
    """The share of the sent requests that met their latency targets, and their rate."""

    ttft_target_s: float
    tpot_target_s: float
    share: float | None
    requests_per_s: float | None


class PartSummary(Summary, frozen=True, kw_only=True):
    """The busiest part of a run: the requests that arrived in it."""

    start_s: float
    end_s: float
    requests: SentRequests
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: TokenGapSummary
    e2e_s: Distribution
    goodput: Goodput


class Spread(Summary, frozen=True, kw_only=True):
    """Three measures of how unequal the loads of the pods are; 1 means equal for max/mean and
    Jain's index.
    """

    max_over_mean: float | None
    cv: float | None
    jain: float | None


class Imbalance(Summary, frozen=True, kw_only=True):
    """The inequality of the pods' loads, by requests and by uncached tokens."""

    requests: Spread
    uncached_tokens: Spread


class Prediction(Summary, frozen=True, kw_only=True):
    """The error of the picker's cache estimates per request; null for a policy that estimates
    nothing.
    """

    bias_tokens: float | None
    mean_absolute_error_tokens: float | None


class PodLoadSummary(Summary, frozen=True, kw_only=True):
    """The requests and tokens that one pod completed."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None


class PoolSummary(Summary, frozen=True, kw_only=True):
    """The number of pods over a run."""

    autoscaled: bool
    pods_min: int
    pods_max: int
    pods_mean: float | None
    pod_hours: float | None


class PeerSummary(Summary, frozen=True, kw_only=True):
    """The exchange between pickers: frames that were sent, and records that were applied or
    discarded.
    """

    frames: int
    bytes: int
    frames_lost: int
    records_applied: int
    records_unknown_chain: int
    records_unknown_endpoint: int
    frames_dropped: int


class Resampled(Summary, frozen=True, kw_only=True):
    """The blocks of a recorded trace from which a repetition was resampled."""

    blocks: int
    cut: str
    """Blocks in words."""


class Traffic(Summary, frozen=True, kw_only=True):
    """The source of the requests of one repetition."""

    generated: bool
    resampled: Resampled | None


class RunSummary(Summary, frozen=True, kw_only=True):
    """The result of one run."""

    bad_lines: int | UnsetType = UNSET
    requests_per_s: float | UnsetType | None = UNSET
    traffic: Traffic | UnsetType = UNSET
    """Source of the requests. This key and the rate exist only for repeated runs."""
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
    """Busiest part of the run. Only in runs that were asked to report it."""
    imbalance: Imbalance
    prediction: Prediction
    metrics_age_s: float | None
    preemptions: int
    pods: dict[str, PodLoadSummary]
    pool: PoolSummary | UnsetType = UNSET
    """Number of pods. Only in whole runs."""
    tier_hit_tokens: dict[str, int] | UnsetType = UNSET
    """Prompt tokens found in each cache tier, warm-up included. Only if pods have a tier besides
    the GPU's cache."""
    peers: PeerSummary | UnsetType = UNSET
    """Exchange between pickers. Only if pickers share decisions."""
    retries: int | UnsetType = UNSET
    rescheduled: int | UnsetType = UNSET
    """Requests that another pod than the first named one served. This key and `retries` exist only
    if retries are possible."""


class KeptRun(Summary, frozen=True, kw_only=True):
    """The part of a run that a tuning or a sizing stores for comparisons and reports."""

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
    """Busiest part of the run. Only in runs that were asked to report it."""
    digest: str
    pool: PoolSummary | UnsetType = UNSET
    """Number of pods. Only in whole runs."""


ComparedRun: TypeAlias = RunSummary | KeptRun


class NamedRun(Summary, frozen=True, kw_only=True):
    """One of several runs, with its configuration and seed."""

    INLINED: ClassVar[frozenset[str]] = frozenset({"run"})

    rate: float | UnsetType = UNSET
    """Request rate. Only in a sweep."""
    config: str
    seed: int
    run: ComparedRun


class AssumptionSummary(Summary, frozen=True, kw_only=True):
    """A constant that comes from one set-up, with its value in every profile of the run."""

    constant: str
    says: str
    unit: str
    values: dict[str, float]
    low: float
    high: float
    source: str


class PodSamples(Summary, frozen=True, kw_only=True):
    """The samples of one pod over time. A pod that joined late has zeros before that."""

    running: list[int]
    waiting: list[int]
    kv_cache_usage: list[float]
    hit_rate: list[float]
    """Hit rate over everything that the pod has completed so far."""


class TimelineSummary(Summary, frozen=True, kw_only=True):
    """The samples of a run, in columns."""

    time_s: list[float]
    pod_count: list[int]
    """Number of pods that start, serve, drain or restart."""
    pods: dict[str, PodSamples]


class Ceilings(Summary, frozen=True, kw_only=True):
    """Upper limits and estimates of the hit rate for the requests of a run."""

    one_cache: float
    affinity: float
    affinity_at_capacity: float
    random_at_capacity: float


class ReplaySummary(CommandSummary, frozen=True, kw_only=True):
    """The summary of `sim replay`."""

    INLINED: ClassVar[frozenset[str]] = frozenset({"run"})

    seed: int
    config: str
    conditions: Conditions
    run: RunSummary
    assumptions: list[AssumptionSummary]
    timeline: TimelineSummary
    ceilings: Ceilings | UnsetType | None = UNSET


class EstimateSummary(Summary, frozen=True, kw_only=True):
    """A figure with its 95 % confidence interval."""

    value: float | None
    low: float | None
    high: float | None


class DifferenceSummary(Summary, frozen=True, kw_only=True):
    """A figure minus the same figure of the reference, with its 95 % confidence interval and
    verdict.
    """

    reference: float | UnsetType | None = UNSET
    """Figure of the reference, if the summary does not contain it elsewhere."""
    value: float | None
    low: float | None
    high: float | None
    relative: float | None
    significant: bool
    verdict: str

    @property
    def known_reference(self) -> float | None:
        """Figure of the reference, or None if it is not part of this summary."""
        return None if self.reference is UNSET else self.reference


class ComparedConfig(Summary, frozen=True, kw_only=True):
    """The figures of a configuration over all its runs."""

    requests: Requests
    figures: dict[str, EstimateSummary]
    difference: dict[str, DifferenceSummary]
    """Difference from the first configuration, by measure."""


class ComparisonSummary(SeedsSummary, frozen=True, kw_only=True):
    """The summary of `sim compare`."""

    conditions: Conditions
    assumptions: list[AssumptionSummary]
    varied: str
    generated: bool
    configs: dict[str, ComparedConfig]
    runs: list[NamedRun]


class SweepPoint(Summary, frozen=True, kw_only=True):
    """One configuration at one rate, over the seeds that have run."""

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
    """The summary of `sim sweep`."""

    varied: str
    generated: bool
    trace_rate: float
    waits: bool
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    points: list[SweepPoint]
    runs: list[NamedRun]


class Range(Summary, frozen=True, kw_only=True):
    """The mean and the range of a figure over seeds."""

    mean: float | None
    low: float | None
    high: float | None


class ReplicasRow(Summary, frozen=True, kw_only=True):
    """A workload with a number of pickers and what they share."""

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
    """The summary of `sim replicas`."""

    pods: int
    rows: list[ReplicasRow]


class TunedTrace(Summary, frozen=True, kw_only=True):
    """A trace, and the numbers of its requests for tuning and for the hold-out."""

    name: str
    sha256: str
    requests: int
    tuning: int
    hold_out: int


class DimensionSummary(Summary, frozen=True, kw_only=True):
    """A varied parameter, its span, and its value in the present configuration."""

    name: str
    span: str
    present: float | str | None


class TrialSummary(Summary, frozen=True, kw_only=True):
    """A configuration that was tried."""

    trial: int
    hash: str | None
    refused: str
    values: Values
    costs: list[list[float]]
    """Cost by objective, for each share of the tuning half that the trial ran on."""
    cost: float | None
    """Cost as one number, which guides the search; None if the trial did not run."""


class JudgedSummary(Summary, frozen=True, kw_only=True):
    """The comparison of a trial with the present configuration, over all seeds."""

    trial: int | UnsetType = UNSET
    """Number of the trial, on the tuning half. If the key is missing, the trial is the chosen one.
    """
    load: float | UnsetType = UNSET
    """Load on the hold-out half, as a multiple of the trace's load."""
    differences: dict[str, DifferenceSummary]
    guards: dict[str, DifferenceSummary]
    """Differences in measures that are not objectives, by measure."""
    present_requests: Requests
    requests: Requests
    loses_more: bool
    worse: list[str]
    stopped_by: list[str]
    """Guards, by measure, that got worse by more than allowed."""


class PowerSummary(Summary, frozen=True, kw_only=True):
    """The smallest gains that a tuning could confirm."""

    lacking: str
    """Reason why the tuning can confirm nothing, or "" if it can."""
    requests: int
    seeds: int
    gains: dict[str, float]
    """Smallest gain that four of five tunings confirm, as a share of the figure, by measure."""
    wanted: float
    """Gain for which `requests_needed` and `seeds_needed` are computed. They list measures in which
    it is not confirmed."""
    requests_needed: dict[str, int]
    seeds_needed: dict[str, int]
    """Seeds needed with the present number of requests. Measures for which more seeds cannot
    suffice are missing."""


class TuneSummary(SearchSummary, frozen=True, kw_only=True):
    """The summary of `sim tune`."""

    config: str
    config_hash: str | None
    tuned_name: str
    trace: TunedTrace
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    objective: list[str]
    tolerance: float
    guards: dict[str, float]
    """Share of each measure that the tuning may lose."""
    power: PowerSummary | None
    """Smallest confirmable gains; None if the tuning stopped before, or if no traffic could be
    drawn to estimate them."""
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
    """A figure over repeated runs, and the bound that it must keep."""

    name: str
    busiest: bool = False
    """True if the figure covers the busiest part of the traffic, False if it covers all of it."""
    limit: float
    figure: EstimateSummary
    sure: float | None
    """Limit that one more repetition keeps 19 times out of 20; None if there are too few
    repetitions."""
    used: float | None
    """Used share of the bound, computed from `sure`, or from the figure if `sure` is None."""
    kept: bool
    """True if `sure` is within the bound."""
    kept_by_figure: bool


class CountSummary(Summary, frozen=True, kw_only=True):
    """The result for one number of pods."""

    pods: int
    runs: int
    """Number of repetitions. Fewer than all if the first ones have decided."""
    kept: bool | None
    """True if all bounds are kept; None if the search stopped before that was known."""
    cost_per_hour: float | None
    used: float | None
    """Used share of the bound that is nearest to its limit, or furthest beyond it."""
    bounds: list[BoundSummary]


class EveryCountSummary(Summary, frozen=True, kw_only=True):
    """The result of running every number of pods, to verify a search."""

    pods: int | None
    runs: int
    counts: list[CountSummary]


class SizedSummary(Summary, frozen=True, kw_only=True):
    """The number of pods that one profile needs under one strategy."""

    profile: str
    config: str
    price_per_hour: float | None
    """Price of one pod; None if it is not known."""
    pods: int | None
    """Smallest number of pods that keeps the bounds; None if no number up to the maximum does."""
    pods_perhaps: int | None
    """A smaller number whose figures keep the bounds while their 95 % limits do not; None if there
    is none."""
    used: float | None
    """Used share of the bounds with this number of pods."""
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    """Cost per million prompt and output tokens."""
    cost_per_million_output_tokens: float | None
    on_front: bool
    """True if no other option is cheaper and uses no more of its bounds."""
    counts: list[CountSummary]
    """Results of the numbers of pods that were tried, ascending."""
    runs: int
    every_count: EveryCountSummary | UnsetType = UNSET
    """Result of running every number of pods. Only on request."""


class HeadroomSummary(Summary, frozen=True, kw_only=True):
    """The number of pods that the chosen option needs in a case that is worse than the trace."""

    case: str
    says: str
    pods: int | None
    cost_per_hour: float | None
    counts: list[CountSummary]


class DemandSummary(Summary, frozen=True, kw_only=True):
    """The requests and tokens in a stretch of the trace."""

    start_s: float
    end_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    of_busiest: float
    """Work as a share of the work in the busiest stretch of this length."""


class AutoscalingSummary(Summary, frozen=True, kw_only=True):
    """The chosen option under a HorizontalPodAutoscaler with the target that was determined."""

    metric: str
    target: float
    pods_min: int
    pods_max: int
    startup_s: float
    whole_trace: bool
    """True if the whole trace was replayed, False if only the stretch that was sized for."""
    runs: int
    varied: str
    pods_mean: float | None
    pods_highest: int | None
    pod_hours: float | None
    fixed_pod_hours: float | None
    """Pod-hours of the determined fixed number of pods over the same time."""
    kept: bool | None
    """True if all bounds are kept; None if there are too few runs to decide."""
    bounds: list[BoundSummary]


class WarmUpSummary(Summary, frozen=True, kw_only=True):
    """The warm-up that a sizing excludes, and the busiest part of the traffic, in seconds of the
    trace.
    """

    seconds: float
    """Length of the warm-up: the same part of the trace at every load."""
    needed_s: float
    """Time that caches need to fill."""
    given: bool
    """True if `--warm-up` set it, False if it was chosen."""
    share_excluded: float
    """Share of the requests that it excludes in the unchanged trace, if answers take no time."""
    busiest_s: float
    """Length of the busiest part."""
    busiest_from_s: float
    """Start of the busiest part in the unchanged trace."""
    busiest_excluded: bool
    warning: str
    """Warning, or "" if at most a quarter of the requests is excluded and the busiest part is not.
    """


class SizeSummary(SearchSummary, frozen=True, kw_only=True):
    """The summary of `sim size`."""

    conditions: Conditions
    assumptions: list[AssumptionSummary]
    pods_max: int
    bounds: list[str]
    trace: DemandSummary
    sized_for: DemandSummary
    """Stretch that was replayed: a short trace as a whole, or the busiest part of a long one."""
    over_time: list[DemandSummary]
    warm_up: WarmUpSummary
    options: list[SizedSummary]
    chosen: int | None
    """Position among `options`, or None if no option keeps the bounds."""
    why_none: str
    headroom: list[HeadroomSummary]
    autoscaling: AutoscalingSummary | None
    runs: list[NamedRun]
    """Runs of the chosen option with the number of pods that it needs."""


RepeatedSummary: TypeAlias = ComparisonSummary | SweepSummary | TuneSummary | SizeSummary
"""Summaries of runs that differ in seeds."""


class Behind(Summary, frozen=True, kw_only=True):
    """The distance of a strategy from the best of its case in one figure."""

    times: float | None
    """Ratio to the best: how many times as long it takes, or as little it achieves. Only an
    ineligible strategy can be below 1."""
    best: bool
    """True if it is the best. All equally good strategies are."""
    within: bool | None
    """True if its interval contains the best; None if there is too little data for an interval."""


class StandingSummary(Summary, frozen=True, kw_only=True):
    """The result of a strategy in one case."""

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
    """One figure of a strategy over several cases."""

    times_the_best: float | None
    level: int
    cases: int
    worst: str | None
    worst_times: float | None


class ScopeTotal(Summary, frozen=True, kw_only=True):
    """A strategy over the cases of one scope."""

    cases: int
    out: int
    """Number of cases among `cases` in which the strategy is not eligible."""
    figures: dict[str, Total]
    goodput: float | None
    """Mean over the cases of the share of requests within the case's targets."""


class TotalSummary(Summary, frozen=True, kw_only=True):
    """A strategy's totals over the cases of each scope; `ranking.SCOPES` lists the scopes."""

    strategy: str
    over: dict[str, ScopeTotal]


class CaseSummary(Summary, frozen=True, kw_only=True):
    """A case of a leaderboard."""

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
    """Engine features that differ from the profile, in words."""
    scrapes: str | None
    """Faults of the scrapes, in words."""
    response_chunks: bool
    """True if pickers see the first token of an answer."""
    prefill_tokens_per_s: list[float]
    """Prefill speeds of the pods, each distinct speed once."""
    believed_prefill_tokens_per_s: float
    """Prefill speed that pickers assume if the configuration does not set it."""
    ttft_target_s: float
    """TTFT target. A request within both targets counts as goodput."""
    tpot_target_s: float
    """Target for the mean time of each later token."""


class StrategySummary(Summary, frozen=True, kw_only=True):
    """A strategy of a leaderboard."""

    name: str
    idea: str | None
    omissions: str | None
    """Features of the original that this copy leaves out."""
    config_hash: str | None


class LadderSummary(Summary, frozen=True, kw_only=True):
    """A group of cases that differ in one number."""

    title: str
    unit: str
    steps: list[tuple[float, str]]
    """Value of the number, and name of the case."""


class FailedCell(Summary, frozen=True, kw_only=True):
    """A cell of the leaderboard that could not be run."""

    case: str
    strategy: str
    seed: int
    problem: str


class LeaderboardSummary(SeedsSummary, frozen=True, kw_only=True):
    """The summary of `sim leaderboard`."""

    requests: int
    cells: int
    cases: list[CaseSummary]
    strategies: list[StrategySummary]
    ladders: list[LadderSummary]
    totals: list[TotalSummary]
    rows: list[StandingSummary]
    failed: list[FailedCell]


class AnswerGaps(Summary, frozen=True, kw_only=True):
    """Statistics of the times between two chunks of an answer, in seconds."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class GroupSummary(Summary, frozen=True, kw_only=True):
    """The results of real requests, of one pod or one model."""

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
    """The number of requests of a drive by result."""

    sent: int
    whole: int
    errors: int
    not_sent: int
    unfit: int
    cut: int


class DriveSummary(CommandSummary, frozen=True, kw_only=True):
    """The summary of `sim drive`."""

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
    """Return the content of summary.json. Equal summaries give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(_plain(summary)), indent=1) + b"\n"


def read_run(path: Path) -> RunSummary:
    """Return the run in a summary.json of `sim replay`. Raises `OutputError` and `OSError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)
    except msgspec.DecodeError as problem:
        place = f"{path}: expected the summary of `sim replay` as this release writes it"
        raise OutputError(misfit(place, problem, RunSummary)) from problem


def _plain(value: Any) -> Any:
    """Return `value` as plain data, with inlined fields in place of their parents."""
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
