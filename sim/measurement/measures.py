"""What a run has shown, in numbers: one ruler for replay, compare and sweep."""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import UNSET, Struct, UnsetType

from epp.core.decision.failures import FailingPlugin
from epp.core.types import Seconds
from sim.cluster.simulated_request import Failure, Fate, SimulatedRequest
from sim.measurement.summaries import (
    ComparedRun,
    Distribution,
    Goodput,
    Imbalance,
    PartRequests,
    PartSummary,
    PodLoadSummary,
    Prediction,
    Requests,
    RunSummary,
    Spread,
    TokenGapSummary,
    WindowSummary,
)
from sim.measurement.token_gaps import Gaps, TokenGaps

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

COLUMNS: Final = (
    "arrived_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "queue_s",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
)
"""Of `Series`."""

PERCENTILES: Final = (50, 90, 95, 99)
WARM_UP_S_MAX: Final[Seconds] = 300.0
"""Half of the reuse in the published traces comes within 123 s, nine tenths within 480 s."""
WARM_UP_SHARE: Final = 0.1
"""Of the arrivals; what is shorter than 600 s is too short to lose any."""
WARM_UP_FROM_S: Final[Seconds] = 600.0
OUTPUT_WEIGHT: Final = 10.0
"""Prompt tokens that take a pod as long as one output token, roughly, on the built-in profiles with a
full batch. It only decides which part of the traffic counts as the busiest."""
_TOKENS_SHARE_MIN: Final = 0.1
"""Of all output tokens: with fewer before the last arrival there is no steady part."""
_DIGEST_ROW: Final = struct.Struct("<qiidddqq")
_FATES: Final = tuple(Fate)


class Targets(Struct, frozen=True, kw_only=True):
    """A request is good if its first token came in `ttft_s` and each later one in `tpot_s`.

    The definition of `goodput` in kubernetes-sigs/inference-perf.
    """

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.05


class Window(Struct, frozen=True, kw_only=True):
    """The steady part of a run, from which throughput and the gaps between tokens are taken.

    Caches start cold, and after the last arrival pods run empty: neither is how a pool serves.
    Latencies, hits and goodput are of the requests that arrive after the warm-up.
    """

    warm_up_s: Seconds
    """Before this nothing is counted but how requests ended."""
    start_s: Seconds
    end_s: Seconds
    """The last arrival, or the end of a run that had hardly begun to answer by then."""
    drain_s: Seconds
    """From there to the last answer."""


class Series:
    """Completed requests of one run, a column each, in the order in which they ended.

    Columns are float64[n] in seconds and tokens. Where requests are left out a column is made when it is asked for
    and not kept: of a million requests all eight would be 64 MB.
    """

    __slots__ = ("_columns", "_keep")

    def __init__(self, columns: Mapping[str, Floats], keep: Bools | None = None) -> None:
        """`columns` of `COLUMNS`, equally long; `keep`: bool of each request, None: all."""
        self._columns = columns
        self._keep = keep

    def __len__(self) -> int:
        if self._keep is not None:
            return int(np.count_nonzero(self._keep))
        return len(self._columns[COLUMNS[0]])

    def __reduce__(self) -> tuple[type["Series"], tuple[dict[str, Floats]]]:
        # To another process goes what was asked for.
        return Series, ({name: self._column(name) for name in COLUMNS},)

    @property
    def arrived_s(self) -> Floats:
        return self._column("arrived_s")

    @property
    def ttft_s(self) -> Floats:
        return self._column("ttft_s")

    @property
    def tpot_s(self) -> Floats:
        """NaN for an answer of one token."""
        return self._column("tpot_s")

    @property
    def e2e_s(self) -> Floats:
        return self._column("e2e_s")

    @property
    def queue_s(self) -> Floats:
        return self._column("queue_s")

    @property
    def prompt_tokens(self) -> Floats:
        return self._column("prompt_tokens")

    @property
    def cached_tokens(self) -> Floats:
        return self._column("cached_tokens")

    @property
    def output_tokens(self) -> Floats:
        return self._column("output_tokens")

    def since(self, start_s: Seconds, end_s: Seconds = math.inf) -> "Series":
        """Return the requests that arrived at `start_s` or later, and before `end_s`."""
        arrived_s = self._columns["arrived_s"]
        keep = arrived_s >= start_s
        if end_s < math.inf:
            keep &= arrived_s < end_s
        return Series(self._columns, keep if self._keep is None else keep & self._keep)

    def _column(self, name: str) -> Floats:
        column = self._columns[name]
        return column if self._keep is None else column[self._keep]


def mean(values: Floats) -> float:
    """NaN-free mean; NaN if there is nothing to average."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def percentile(values: Floats, rank: float) -> float:
    """Of what is known, with linear interpolation; NaN if nothing is."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, rank)) if len(known) else math.nan


def spread(loads: Sequence[float]) -> Spread:
    """How unequal the loads of the pods are."""
    values = np.array(loads, dtype=np.float64)
    average = float(values.mean()) if len(values) else 0.0
    if not average:
        return Spread(max_over_mean=None, cv=None, jain=None)
    return Spread(
        max_over_mean=rounded(float(values.max()) / average),
        cv=rounded(float(values.std()) / average),
        jain=rounded(float(values.sum() ** 2 / (len(values) * (values**2).sum()))),
    )


class PodLoad(Struct):
    """What one pod was given and what it found in its cache."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Measures:
    """Takes each request as it ends. Memory: 64 bytes a completed request."""

    def __init__(
        self,
        targets: Targets,
        *,
        predicting: bool = True,
        by_session: bool = False,
        warm_up_s: Seconds | None = None,
        busiest_s: Seconds | None = None,
    ) -> None:
        """`predicting`: the policy estimates caches. `by_session`: it goes by sessions alone.

        `warm_up_s` is left out; None: by how long requests arrive, as the constants above say.
        `busiest_s` is the length of the busiest part; None if the summary needs none.
        """
        self.targets = targets
        self.gaps = TokenGaps()
        """To be told of every step of every pod."""
        self._warm_up_s = warm_up_s
        self._latest_s = 0.0
        self._busiest_s = busiest_s
        self._lost_at_s = array("d")
        """When those arrived that were not completed."""
        self._lost_work = array("d")
        """What each of them asked for, as `_work`."""
        self._too_long: dict[str, int] = {}
        """What nothing could serve, by why, in words."""
        self._predicting = predicting
        self._by_session = by_session
        self._with_session = 0
        self.failing_plugins: list[FailingPlugin] = []
        """Of every replica, once the run is over."""
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        self.refusals: dict[str, int] = {}
        """By reason, as `failures`."""
        self.failures: dict[str, int] = {}
        self.pods: dict[str, PodLoad] = {}
        self.preemptions = 0
        self._columns = {name: array("d") for name in COLUMNS}
        self._digest = xxhash.xxh64()
        self._predicted = 0
        self._prediction_error = 0
        self._age_s_sum = 0.0
        self._ages = 0

    def add(self, request: SimulatedRequest) -> None:
        """Count one request that has ended."""
        fate, engine = request.fate, request.engine
        assert fate is not None
        assert request.ended_at is not None
        self.fates[fate] += 1
        if request.refusal is not None:
            reason = request.refusal.reason.value
            self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if fate is Fate.FAILED and request.failure is not None:
            failure = request.failure.value
            self.failures[failure] = self.failures.get(failure, 0) + 1
        cached = engine.cached_tokens if engine else 0
        ttft_s = math.nan if request.first_token_at is None else ttft_of(request)
        pod = -1 if request.pod is None else request.pod.number
        self._digest.update(
            _DIGEST_ROW.pack(
                request.arrival.index,
                pod,
                _FATES.index(fate),
                request.arrived_at,
                ttft_s,
                request.ended_at,
                cached,
                request.predicted_cached_tokens,
            )
        )
        self._with_session += bool(request.arrival.session)
        self._latest_s = max(self._latest_s, request.arrived_at)
        self._count_age(request)
        if fate is Fate.COMPLETE and engine is not None and request.pod is not None:
            self._count_complete(request, ttft_s, cached)
            return
        self._lost_at_s.append(request.arrived_at)
        arrival = request.arrival
        self._lost_work.append(arrival.prompt_tokens + OUTPUT_WEIGHT * arrival.output_tokens)
        if fate is Fate.FAILED:
            self._count_too_long(request)

    def series(self) -> Series:
        """The columns of what was completed."""
        columns = self._columns
        # An empty buffer is none to numpy.
        read = np.frombuffer if columns["ttft_s"] else np.array
        return Series({name: read(values) for name, values in columns.items()})

    def steady_series(self) -> Series:
        """Without those that arrived during the warm-up."""
        warm_up_s = self.warm_up_s
        return self.series().since(warm_up_s) if warm_up_s > 0.0 else self.series()

    @property
    def warm_up_s(self) -> Seconds:
        """The one in effect."""
        if self._warm_up_s is not None:
            return self._warm_up_s
        if self._latest_s < WARM_UP_FROM_S:
            return 0.0
        return min(WARM_UP_S_MAX, WARM_UP_SHARE * self._latest_s)

    def window(self) -> tuple[Window, Gaps]:
        """The steady part, and what pods gave out in it."""
        series = self.series()
        ended_s = float((series.arrived_s + series.e2e_s).max()) if len(series) else 0.0
        steady, whole = self.gaps.within(self.warm_up_s, self._latest_s), self.gaps.whole()
        if steady.output_tokens < _TOKENS_SHARE_MIN * whole.output_tokens:
            window = Window(warm_up_s=self.warm_up_s, start_s=0.0, end_s=ended_s, drain_s=0.0)
            return window, whole
        return Window(
            warm_up_s=self.warm_up_s,
            start_s=self.warm_up_s,
            end_s=self._latest_s,
            drain_s=max(0.0, ended_s - self._latest_s),
        ), steady

    @property
    def digest(self) -> str:
        """Of everything that happened to every request, in order: equal only for equal runs."""
        return self._digest.hexdigest()

    def summary(self) -> RunSummary:
        """The numbers."""
        everything, series = self.series(), self.steady_series()
        window, gaps = self.window()
        prompt_tokens, cached_tokens = series.prompt_tokens.sum(), series.cached_tokens.sum()
        span_s = float((everything.arrived_s + everything.e2e_s).max()) if len(everything) else 0.0
        length_s = window.end_s - window.start_s or math.nan
        completed = max(1, len(everything))
        sent = sum(self.fates.values())
        loads = list(self.pods.values())
        bias_tokens = self._predicted - everything.cached_tokens.sum()
        predicted = (bias_tokens, self._prediction_error)
        bias, error = (
            rounded(tokens / completed) if self._predicting else None for tokens in predicted
        )
        return RunSummary(
            digest=self.digest,
            warnings=self._warnings(sent),
            requests=Requests(
                sent=sent, **{fate.value: count for fate, count in self.fates.items()}
            ),
            refusals=self.refusals,
            failures=self.failures,
            duration_s=rounded(span_s),
            window=WindowSummary(
                **{name: six_digits(getattr(window, name)) for name in Window.__struct_fields__}
            ),
            ttft_s=distribution(series.ttft_s),
            tpot_s=distribution(series.tpot_s),
            itl_s=_gaps(gaps),
            e2e_s=distribution(series.e2e_s),
            queue_s=distribution(series.queue_s),
            prompt_tokens=int(prompt_tokens),
            cached_tokens=int(cached_tokens),
            output_tokens=int(series.output_tokens.sum()),
            hit_rate=rounded(cached_tokens / prompt_tokens) if prompt_tokens else None,
            input_tokens_per_s=rounded(_input_tokens(everything, window) / length_s),
            output_tokens_per_s=rounded(gaps.output_tokens / (gaps.duration_s or math.nan)),
            goodput=self._goodput(series, window),
            busiest=self._busiest(),
            imbalance=Imbalance(
                requests=spread([load.requests for load in loads]),
                uncached_tokens=spread([load.prompt_tokens - load.cached_tokens for load in loads]),
            ),
            prediction=Prediction(bias_tokens=bias, mean_absolute_error_tokens=error),
            metrics_age_s=rounded(self._age_s_sum / self._ages) if self._ages else None,
            preemptions=self.preemptions,
            pods={name: _load(load) for name, load in self.pods.items()},
        )

    def _warnings(self, sent: int) -> list[str]:
        """What would mislead whoever reads the other numbers: sentences."""
        failures: dict[str, int] = {}
        did: dict[str, str] = {}
        for failing in self.failing_plugins:
            failures[failing.name] = failures.get(failing.name, 0) + failing.failures
            did[failing.name] = failing.what
        warnings = [
            f"{count:,} of {sent:,} requests ({count / sent:.1%}) are longer than {limit} and "
            "failed at once: latencies and throughput do not count them."
            for limit, count in self._too_long.items()
        ]
        warnings += [
            f"{name} failed {'once' if count == 1 else f'{count:,} times'}, "
            f"requests were routed without it: {did[name]}."
            for name, count in failures.items()
        ]
        if self._by_session and sent and not self._with_session:
            warnings.append("No request named a session: session affinity chose at random.")
        return warnings

    def _count_complete(self, request: SimulatedRequest, ttft_s: Seconds, cached: int) -> None:
        engine, pod, arrival = request.engine, request.pod, request.arrival
        assert engine is not None
        assert pod is not None
        assert request.ended_at is not None
        columns = self._columns
        columns["arrived_s"].append(request.arrived_at)
        columns["ttft_s"].append(ttft_s)
        columns["tpot_s"].append(tpot_of(request))
        columns["e2e_s"].append(request.ended_at - request.arrived_at)
        columns["queue_s"].append(queue_of(request))
        columns["prompt_tokens"].append(arrival.prompt_tokens)
        columns["cached_tokens"].append(cached)
        columns["output_tokens"].append(arrival.output_tokens)
        self.preemptions += engine.preemptions
        self._predicted += request.predicted_cached_tokens
        self._prediction_error += abs(request.predicted_cached_tokens - cached)
        load = self.pods.get(pod.name)
        if load is None:
            load = self.pods[pod.name] = PodLoad()
        load.requests += 1
        load.prompt_tokens += arrival.prompt_tokens
        load.cached_tokens += cached
        load.output_tokens += arrival.output_tokens

    def _count_age(self, request: SimulatedRequest) -> None:
        """How old what the picker knew of the chosen pod was when it chose."""
        if request.metrics_age_s < math.inf:
            self._age_s_sum += request.metrics_age_s
            self._ages += 1

    def _count_too_long(self, request: SimulatedRequest) -> None:
        """Name what limits: the profile, and by how many tokens."""
        if request.pod is None:
            return
        kind = request.pod.kind
        limits = {
            Failure.CONTEXT: f"the context of {kind.profile.name} "
            f"({kind.profile.max_model_len_tokens:,} tokens)",
            Failure.KV_CACHE: f"the KV cache of {kind.profile.name} "
            f"({kind.request_tokens_max:,} tokens)",
        }
        if request.failure in limits:
            limit = limits[request.failure]
            self._too_long[limit] = self._too_long.get(limit, 0) + 1

    def _busiest(self) -> PartSummary | UnsetType:
        """Return the part after the warm-up in which requests arrived that asked for most work."""
        if self._busiest_s is None:
            return UNSET
        series = self.steady_series()
        computed = (
            series.prompt_tokens - series.cached_tokens + OUTPUT_WEIGHT * series.output_tokens
        )
        lost_at_s = np.array(self._lost_at_s)
        lost_work = np.array(self._lost_work)[lost_at_s >= self.warm_up_s]
        lost_at_s = lost_at_s[lost_at_s >= self.warm_up_s]
        start_s = busiest_from_s(
            np.concatenate((series.arrived_s, lost_at_s)),
            np.concatenate((computed, lost_work)),
            self._busiest_s,
        )
        end_s = start_s + self._busiest_s
        part = series.since(start_s, end_s)
        lost = int(np.count_nonzero((lost_at_s >= start_s) & (lost_at_s < end_s)))
        return PartSummary(
            start_s=six_digits(start_s),
            end_s=six_digits(end_s),
            requests=PartRequests(sent=len(part) + lost, complete=len(part)),
            ttft_s=distribution(part.ttft_s),
            tpot_s=distribution(part.tpot_s),
            itl_s=_gaps(self.gaps.around(start_s, end_s)),
            e2e_s=distribution(part.e2e_s),
            goodput=self._goodput_of(part, lost, self._busiest_s),
        )

    def _goodput(self, series: Series, window: Window) -> Goodput:
        """Of all requests that were sent after the warm-up: who was not answered was not served."""
        lost = sum(1 for at_s in self._lost_at_s if at_s >= window.warm_up_s)
        return self._goodput_of(series, lost, window.end_s - window.start_s)

    def _goodput_of(self, series: Series, lost: int, length_s: Seconds) -> Goodput:
        """Return the goodput of `series` and of `lost` requests besides, over `length_s`."""
        in_time = series.ttft_s <= self.targets.ttft_s
        # An answer of one token has no second one that could be late.
        fast = ~(series.tpot_s > self.targets.tpot_s)
        good = int(np.count_nonzero(in_time & fast))
        sent = len(series) + lost
        return Goodput(
            ttft_target_s=self.targets.ttft_s,
            tpot_target_s=self.targets.tpot_s,
            share=rounded(good / sent) if sent else None,
            requests_per_s=rounded(good / length_s) if length_s else None,
        )


def _input_tokens(series: Series, window: Window) -> float:
    """Prompt tokens of the requests whose first token came in the window."""
    first_s = series.arrived_s + series.ttft_s
    inside = (first_s >= window.start_s) & (first_s <= window.end_s)
    return float(series.prompt_tokens[inside].sum())


def figures_of(summary: ComparedRun) -> dict[str, float]:
    """What runs are compared by; NaN: this run does not have it.

    Pod-hours are of a whole run, and its choice only under an autoscaler.
    """
    told = {
        "ttft_mean_s": summary.ttft_s.mean,
        "ttft_p50_s": summary.ttft_s.p50,
        "ttft_p90_s": summary.ttft_s.p90,
        "ttft_p99_s": summary.ttft_s.p99,
        "tpot_mean_s": summary.tpot_s.mean,
        "itl_mean_s": summary.itl_s.mean,
        "itl_p99_s": summary.itl_s.p99,
        "stall_share": summary.itl_s.stall_share,
        "e2e_mean_s": summary.e2e_s.mean,
        "hit_rate": summary.hit_rate,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "goodput": summary.goodput.share,
    }
    pool = summary.pool if isinstance(summary, RunSummary) else UNSET
    if pool is not UNSET and pool.autoscaled:
        told["pod_hours"] = pool.pod_hours
    return {name: math.nan if value is None else value for name, value in told.items()}


def ttft_of(request: SimulatedRequest) -> Seconds:
    """Time to first token as the client sees it: the way back takes as long as the way there."""
    if request.first_token_at is None or request.routed_at is None:
        return math.nan
    network_s = request.routed_at - request.arrived_at
    return request.first_token_at + network_s - request.arrived_at


def tpot_of(request: SimulatedRequest) -> Seconds:
    """Mean time of each output token after the first; NaN if there was no other."""
    first, last = request.first_token_at, request.finished_at
    if first is None or last is None or request.arrival.output_tokens < 2:
        return math.nan
    return (last - first) / (request.arrival.output_tokens - 1)


def queue_of(request: SimulatedRequest) -> Seconds:
    """From the engine's queue to the first step; NaN if it never got there."""
    engine = request.engine
    if engine is None or engine.scheduled_at is None or request.submitted_at is None:
        return math.nan
    return engine.scheduled_at - request.submitted_at


def distribution(values: Floats) -> Distribution:
    """Of what is known; null if nothing is."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Distribution(mean=None, p50=None, p90=None, p95=None, p99=None)
    p50, p90, p95, p99 = map(rounded, np.percentile(known, PERCENTILES))
    return Distribution(mean=rounded(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def rounded(value: float) -> float | None:
    """`six_digits`; None for NaN."""
    return None if math.isnan(value) else six_digits(value)


def six_digits(value: float) -> float:
    """Significant ones: what is told is read by people too."""
    return float(f"{float(value):.6g}")


def busiest_from_s(times_s: Floats, work: Floats, length_s: Seconds) -> Seconds:
    """Return where the stretch of `length_s` with the most work begins; 0 if nothing arrives.

    `times_s` and `work` are float64[n], the arrival of each request in seconds and its work in any
    unit. Stretches begin with a request; of several equals the first is taken.
    """
    if not len(times_s):
        return 0.0
    order = np.argsort(times_s, kind="stable")
    times_s = times_s[order]
    before = np.concatenate(([0.0], np.cumsum(work[order])))
    ends = np.searchsorted(times_s, times_s + length_s, side="left")
    inside = before[ends] - before[:-1]
    return float(times_s[int(np.argmax(inside))])


def _gaps(gaps: Gaps) -> TokenGapSummary:
    return TokenGapSummary(
        mean=rounded(gaps.mean_s),
        p50=rounded(gaps.p50_s),
        p99=rounded(gaps.p99_s),
        stall_share=rounded(gaps.stall_share),
    )


def _load(load: PodLoad) -> PodLoadSummary:
    rate = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else math.nan
    return PodLoadSummary(
        requests=load.requests,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
        hit_rate=rounded(rate),
    )
