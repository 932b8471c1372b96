"""What runs, comparisons, sweeps, tunings and leaderboards have shown: what is in their summary.json.

Fields are keys and stand in the order of the file. `UNSET` is a key that is not there; None is null,
where there is nothing to tell. `as_json` writes all of them, `read_run` reads the file of a run back.
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
"""What was run, name -> value: `report.condition_rows` has it for people."""
Values: TypeAlias = Mapping[str, float | str | None]
"""What was varied, name -> value; None: what the search does not know."""


class Summary(Struct, frozen=True, kw_only=True):
    """Part of a file."""

    INLINED: ClassVar[frozenset[str]] = frozenset()
    """Fields whose own fields stand in their place."""


class Requests(Summary, frozen=True, kw_only=True):
    """How many were sent, and how they ended."""

    sent: int
    complete: int
    refused: int
    failed: int
    aborted: int

    @property
    def ended(self) -> dict[str, int]:
        """By fate."""
        return {name: getattr(self, name) for name in self.__struct_fields__[1:]}

    @property
    def share_lost(self) -> float:
        """Share of them that is not complete; 0 if there are none."""
        return 1 - self.complete / self.sent if self.sent else 0.0


class Distribution(Summary, frozen=True, kw_only=True):
    """Mean and percentiles."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class WindowSummary(Summary, frozen=True, kw_only=True):
    """As `measures.Window`."""

    warm_up_s: float
    start_s: float
    end_s: float
    drain_s: float


class TokenGapSummary(Summary, frozen=True, kw_only=True):
    """Of the times between two tokens, seconds; of all tokens, not of requests."""

    mean: float | None
    p50: float | None
    p99: float | None
    stall_share: float | None


class Goodput(Summary, frozen=True, kw_only=True):
    """How much of what was sent came in time."""

    ttft_target_s: float
    tpot_target_s: float
    share: float | None
    requests_per_s: float | None


class PartSummary(Summary, frozen=True, kw_only=True):
    """The busiest part of a run: the requests that arrived in it."""

    start_s: float
    end_s: float
    requests: "PartRequests"
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: TokenGapSummary
    e2e_s: Distribution
    goodput: Goodput


class PartRequests(Summary, frozen=True, kw_only=True):
    """How many requests arrived in a part of a run, and how many of them were completed."""

    sent: int
    complete: int

    @property
    def share_lost(self) -> float:
        """Share of the requests that were not completed; 0 if there are none."""
        return 1 - self.complete / self.sent if self.sent else 0.0


class Spread(Summary, frozen=True, kw_only=True):
    """How unequal the loads of the pods are: 1 is equal for max/mean and Jain's index."""

    max_over_mean: float | None
    cv: float | None
    jain: float | None


class Imbalance(Summary, frozen=True, kw_only=True):
    """What pods have had."""

    requests: Spread
    uncached_tokens: Spread


class Prediction(Summary, frozen=True, kw_only=True):
    """The picker's estimates of caches, a request; null for a policy that estimates nothing."""

    bias_tokens: float | None
    mean_absolute_error_tokens: float | None


class PodLoadSummary(Summary, frozen=True, kw_only=True):
    """What one pod has completed."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None


class PoolSummary(Summary, frozen=True, kw_only=True):
    """How many pods there were."""

    autoscaled: bool
    pods_min: int
    pods_max: int
    pods_mean: float | None
    pod_hours: float | None


class PeerSummary(Summary, frozen=True, kw_only=True):
    """What pickers told each other, and what became of it."""

    frames: int
    bytes: int
    frames_lost: int
    records_applied: int
    records_unknown_chain: int
    records_unknown_endpoint: int
    frames_dropped: int


class Resampled(Summary, frozen=True, kw_only=True):
    """Of what a recorded trace was resampled."""

    blocks: int
    cut: str
    """In words."""


class Traffic(Summary, frozen=True, kw_only=True):
    """Where the requests of one repetition came from."""

    generated: bool
    resampled: Resampled | None


class RunSummary(Summary, frozen=True, kw_only=True):
    """One run."""

    bad_lines: int | UnsetType = UNSET
    requests_per_s: float | UnsetType | None = UNSET
    traffic: Traffic | UnsetType = UNSET
    """This and the rate only of runs that are repeated."""
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
    """Only of runs that are to tell it."""
    imbalance: Imbalance
    prediction: Prediction
    metrics_age_s: float | None
    preemptions: int
    pods: dict[str, PodLoadSummary]
    pool: PoolSummary | UnsetType = UNSET
    """Only of whole runs."""
    tier_hit_tokens: dict[str, int] | UnsetType = UNSET
    """By tier, prompt tokens found there, warm-up and all; only where pods have another than the GPU's."""
    peers: PeerSummary | UnsetType = UNSET
    """Only where pickers tell each other something."""
    retries: int | UnsetType = UNSET
    rescheduled: int | UnsetType = UNSET
    """This and retries only where there may be some."""


class KeptRun(Summary, frozen=True, kw_only=True):
    """What a tuning or a sizing keeps of a run: what runs are compared by and reports tell."""

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
    """Only of runs that are to tell it."""
    digest: str
    pool: PoolSummary | UnsetType = UNSET
    """Only of whole runs."""


ComparedRun: TypeAlias = RunSummary | KeptRun


class NamedRun(Summary, frozen=True, kw_only=True):
    """One of several runs."""

    INLINED: ClassVar[frozenset[str]] = frozenset({"run"})

    rate: float | UnsetType = UNSET
    """Only of a sweep."""
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
    """One pod over time, a value a sample; a pod that joined late begins with zeros."""

    running: list[int]
    waiting: list[int]
    kv_cache_usage: list[float]
    hit_rate: list[float]
    """Of all that the pod has completed so far."""


class TimelineSummary(Summary, frozen=True, kw_only=True):
    """Columns: the samples of a run."""

    time_s: list[float]
    pod_count: list[int]
    """Of pods that start, serve, drain or restart."""
    pods: dict[str, PodSamples]


class Ceilings(Summary, frozen=True, kw_only=True):
    """The hit rates that the requests of a run allow at most."""

    one_cache: float
    affinity: float
    affinity_at_capacity: float
    random_at_capacity: float


class ReplaySummary(Summary, frozen=True, kw_only=True):
    """`sim replay`."""

    INLINED: ClassVar[frozenset[str]] = frozenset({"run"})

    schema: int = SCHEMA
    complete: bool
    seed: int
    config: str
    conditions: Conditions
    run: RunSummary
    assumptions: list[AssumptionSummary]
    timeline: TimelineSummary
    ceilings: Ceilings | UnsetType | None = UNSET


class EstimateSummary(Summary, frozen=True, kw_only=True):
    """A figure and its 95 % interval."""

    value: float | None
    low: float | None
    high: float | None


class DifferenceSummary(Summary, frozen=True, kw_only=True):
    """A figure less the same figure of the reference, its 95 % interval, and what follows."""

    reference: float | UnsetType | None = UNSET
    """The figure of the reference, where it is not told beside."""
    value: float | None
    low: float | None
    high: float | None
    relative: float | None
    significant: bool
    verdict: str

    @property
    def known_reference(self) -> float | None:
        """The figure of the reference, if it is told."""
        return None if self.reference is UNSET else self.reference


class ComparedConfig(Summary, frozen=True, kw_only=True):
    """A configuration, by its name, over all its runs."""

    requests: Requests
    figures: dict[str, EstimateSummary]
    difference: dict[str, DifferenceSummary]
    """From the first configuration."""


class ComparisonSummary(Summary, frozen=True, kw_only=True):
    """`sim compare`."""

    schema: int = SCHEMA
    complete: bool
    first_seed: int
    seeds: int
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    varied: str
    generated: bool
    configs: dict[str, ComparedConfig]
    runs: list[NamedRun]


class SweepPoint(Summary, frozen=True, kw_only=True):
    """One configuration at one rate, over the seeds under which it has run."""

    rate: float
    config: str
    seeds: int
    varied: str
    requests: Requests
    requests_per_s: float | None
    bad_lines: int
    goodput: Goodput
    figures: dict[str, EstimateSummary]


class SweepSummary(Summary, frozen=True, kw_only=True):
    """`sim sweep`."""

    schema: int = SCHEMA
    complete: bool
    first_seed: int
    seeds: int
    varied: str
    generated: bool
    trace_rate: float
    waits: bool
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    points: list[SweepPoint]
    runs: list[NamedRun]


class Range(Summary, frozen=True, kw_only=True):
    """Of a figure, over seeds."""

    mean: float | None
    low: float | None
    high: float | None


class ReplicasRow(Summary, frozen=True, kw_only=True):
    """A workload under so many pickers, which share something."""

    workload: str
    replicas: int
    sharing: str
    assignment: str
    seeds: int
    hit_rate: Range
    ttft_mean_s: Range
    ttft_p90_s: Range
    busiest_pod_over_mean: Range


class ReplicasSummary(Summary, frozen=True, kw_only=True):
    """`sim replicas`."""

    schema: int = SCHEMA
    complete: bool
    first_seed: int
    seeds: int
    pods: int
    rows: list[ReplicasRow]


class TunedTrace(Summary, frozen=True, kw_only=True):
    """A trace, and how many of its requests were for what."""

    name: str
    sha256: str
    requests: int
    tuning: int
    hold_out: int


class DimensionSummary(Summary, frozen=True, kw_only=True):
    """What was varied, between what, and what the present configuration has."""

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
    """Of each objective, of each share of the half that it ran on."""
    cost: float | None
    """As one number, by which the search goes; None: it was not run."""


class JudgedSummary(Summary, frozen=True, kw_only=True):
    """A trial against the present configuration, with every seed."""

    trial: int | UnsetType = UNSET
    """On the half for tuning; else it is the chosen one."""
    load: float | UnsetType = UNSET
    """On the half that is held out: times that of the trace."""
    differences: dict[str, DifferenceSummary]
    guards: dict[str, DifferenceSummary]
    """Of what nobody asked to be better."""
    present_requests: Requests
    requests: Requests
    loses_more: bool
    worse: list[str]
    stopped_by: list[str]
    """Guards, by measure, that it is worse in than is allowed."""


class PowerSummary(Summary, frozen=True, kw_only=True):
    """What a tuning could confirm at best."""

    lacking: str
    """Why it can confirm nothing; "": it can."""
    requests: int
    seeds: int
    gains: dict[str, float]
    """By measure the smallest gain, as a share of the figure, that four of five tunings confirm."""
    wanted: float
    """For which follows what would be needed, of measures in which less is not confirmed."""
    requests_needed: dict[str, int]
    seeds_needed: dict[str, int]
    """With as many requests as there are; not of a measure where more seeds are not enough."""


class TuneSummary(Summary, frozen=True, kw_only=True):
    """`sim tune`."""

    schema: int = SCHEMA
    complete: bool
    version: str
    first_seed: int
    seeds: int
    varied: str
    generated: bool
    config: str
    config_hash: str | None
    tuned_name: str
    trace: TunedTrace
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    objective: list[str]
    tolerance: float
    guards: dict[str, float]
    """By measure the share of it that may be lost."""
    power: PowerSummary | None
    """None: stopped before it was known, or nothing could be drawn to see it from."""
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
    """A figure over repeated runs, and the bound that it is to keep."""

    name: str
    busiest: bool = False
    """The figure is of the busiest part of the traffic, else of all of it."""
    limit: float
    figure: EstimateSummary
    sure: float | None
    """What one more repetition keeps 19 times out of 20; None: there are too few repetitions."""
    used: float | None
    """Of what the bound allows, by `sure`, and by the figure where nothing is sure."""
    kept: bool
    """By `sure`."""
    kept_by_figure: bool


class CountSummary(Summary, frozen=True, kw_only=True):
    """A number of pods that was tried."""

    pods: int
    runs: int
    """Fewer than all where the first has decided."""
    kept: bool | None
    """None: it was stopped before that was known."""
    cost_per_hour: float | None
    used: float | None
    """Of the bound that is nearest to being broken, or furthest beyond."""
    bounds: list[BoundSummary]


class EveryCountSummary(Summary, frozen=True, kw_only=True):
    """What running every number of pods finds, to hold a search to it."""

    pods: int | None
    runs: int
    counts: list[CountSummary]


class SizedSummary(Summary, frozen=True, kw_only=True):
    """What one profile under one strategy needs."""

    profile: str
    config: str
    price_per_hour: float | None
    """Of a pod; None: it was not told."""
    pods: int | None
    """The smallest number that keeps the bounds; None: none up to the highest does."""
    pods_perhaps: int | None
    """A smaller one of which the figures keep the bounds, but not surely."""
    used: float | None
    """Of what the bounds allow, with these pods."""
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    """Prompt and output tokens."""
    cost_per_million_output_tokens: float | None
    on_front: bool
    """No other option is cheaper and needs no more of what its bounds allow."""
    counts: list[CountSummary]
    """That were tried, ascending."""
    runs: int
    every_count: EveryCountSummary | UnsetType = UNSET
    """Only where that was asked for."""


class HeadroomSummary(Summary, frozen=True, kw_only=True):
    """What the chosen option needs if something is worse than the trace."""

    case: str
    says: str
    pods: int | None
    cost_per_hour: float | None
    counts: list[CountSummary]


class DemandSummary(Summary, frozen=True, kw_only=True):
    """A stretch of the trace."""

    start_s: float
    end_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    of_busiest: float
    """Its work as a share of that of the busiest stretch of this length."""


class AutoscalingSummary(Summary, frozen=True, kw_only=True):
    """The chosen option under a HorizontalPodAutoscaler with the target that was found."""

    metric: str
    target: float
    pods_min: int
    pods_max: int
    startup_s: float
    whole_trace: bool
    """Else it is the stretch that was sized for."""
    runs: int
    varied: str
    pods_mean: float | None
    pods_highest: int | None
    pod_hours: float | None
    fixed_pod_hours: float | None
    """Of as many pods as were found, over the same time."""
    kept: bool | None
    """None: of so few runs it cannot be told."""
    bounds: list[BoundSummary]


class WarmUpSummary(Summary, frozen=True, kw_only=True):
    """What a sizing excludes at the beginning, and its busiest part, in seconds of the trace."""

    seconds: float
    """The same part of the trace at every load."""
    needed_s: float
    """How long caches need to fill."""
    given: bool
    """By --warm-up; else it was chosen."""
    share_excluded: float
    """Of the requests of the trace as it is, if answers take no time."""
    busiest_s: float
    """Length of the busiest part."""
    busiest_from_s: float
    """Where it begins in the trace as it is."""
    busiest_excluded: bool
    warning: str
    """"" if at most a quarter of the requests is excluded, and not the busiest part."""


class SizeSummary(Summary, frozen=True, kw_only=True):
    """`sim size`."""

    schema: int = SCHEMA
    complete: bool
    version: str
    first_seed: int
    seeds: int
    varied: str
    generated: bool
    conditions: Conditions
    assumptions: list[AssumptionSummary]
    pods_max: int
    bounds: list[str]
    trace: DemandSummary
    sized_for: DemandSummary
    """The stretch that was replayed: all of a short trace, else the busiest of a long one."""
    over_time: list[DemandSummary]
    warm_up: WarmUpSummary
    options: list[SizedSummary]
    chosen: int | None
    """Position among `options`."""
    why_none: str
    headroom: list[HeadroomSummary]
    autoscaling: AutoscalingSummary | None
    runs: list[NamedRun]
    """Of the chosen option, with as many pods as it needs."""


RepeatedSummary: TypeAlias = ComparisonSummary | SweepSummary | TuneSummary | SizeSummary
"""Of runs that differ in seeds."""


class Behind(Summary, frozen=True, kw_only=True):
    """How far a strategy is behind the best of its case in one figure."""

    times: float | None
    """As bad as the best: how many times as long it takes, or as little it gives. Below 1 only who is
    not in the running."""
    best: bool
    """Of equals all."""
    within: bool | None
    """Its interval holds the best; None: there is too little to tell from."""


class StandingSummary(Summary, frozen=True, kw_only=True):
    """A strategy in a case."""

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
    """One figure of a strategy over cases."""

    times_the_best: float | None
    level: int
    cases: int
    worst: str | None
    worst_times: float | None


class ScopeTotal(Summary, frozen=True, kw_only=True):
    """A strategy over the cases of one scope."""

    cases: int
    out: int
    """Of `cases`: in which it is not in the running."""
    figures: dict[str, Total]
    goodput: float | None
    """The share of the requests within the targets of their case, as the mean over the cases."""


class TotalSummary(Summary, frozen=True, kw_only=True):
    """A strategy all in all: scope -> what it is over the cases of that; `ranking.SCOPES`."""

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
    """What is not as the profile says."""
    scrapes: str | None
    """What is wrong with them."""
    response_chunks: bool
    """Pickers see first tokens."""
    prefill_tokens_per_s: list[float]
    """What pods do, each speed once."""
    believed_prefill_tokens_per_s: float
    """By pickers of which the configuration says nothing."""
    ttft_target_s: float
    """A request within both targets is goodput."""
    tpot_target_s: float
    """For each later token."""


class StrategySummary(Summary, frozen=True, kw_only=True):
    """A strategy of a leaderboard."""

    name: str
    idea: str | None
    omissions: str | None
    """What the original does that this does not."""
    config_hash: str | None


class LadderSummary(Summary, frozen=True, kw_only=True):
    """Cases that differ by one number."""

    title: str
    unit: str
    steps: list[tuple[float, str]]
    """The number, and the case."""


class FailedCell(Summary, frozen=True, kw_only=True):
    """What could not be run."""

    case: str
    strategy: str
    seed: int
    problem: str


class LeaderboardSummary(Summary, frozen=True, kw_only=True):
    """`sim leaderboard`."""

    schema: int = SCHEMA
    complete: bool
    first_seed: int
    seeds: int
    requests: int
    cells: int
    cases: list[CaseSummary]
    strategies: list[StrategySummary]
    ladders: list[LadderSummary]
    totals: list[TotalSummary]
    rows: list[StandingSummary]
    failed: list[FailedCell]


class AnswerGaps(Summary, frozen=True, kw_only=True):
    """Of the times between two chunks of an answer, seconds."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class GroupSummary(Summary, frozen=True, kw_only=True):
    """Real requests of one pod or one model."""

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
    """What became of the requests of a drive."""

    sent: int
    whole: int
    errors: int
    not_sent: int
    unfit: int
    cut: int


class DriveSummary(Summary, frozen=True, kw_only=True):
    """`sim drive`."""

    schema: int = SCHEMA
    complete: bool
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
    """summary.json. The same summary gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(_plain(summary)), indent=1) + b"\n"


def read_run(path: Path) -> RunSummary:
    """The run in a summary.json of `sim replay`. Raises `OutputError` and `OSError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)
    except msgspec.DecodeError as problem:
        place = f"{path}: expected the summary of `sim replay` as this release writes it"
        raise OutputError(misfit(place, problem, RunSummary)) from problem


def _plain(value: Any) -> Any:
    """With what is inlined in its place."""
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
