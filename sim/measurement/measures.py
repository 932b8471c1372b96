"""Measurement of a run: results of each request, and figures over requests and pods."""

import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import UNSET, Struct, UnsetType

from epp.core.failures import FailingPlugin
from epp.core.types import Seconds
from sim.cluster.simulated_request import Failure, Fate, SimulatedRequest
from sim.measurement.summaries import (
    ComparedRun,
    Distribution,
    Goodput,
    Imbalance,
    PartSummary,
    PodLoadSummary,
    Prediction,
    Requests,
    RunSummary,
    SentRequests,
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
"""Names of the columns of `Series`, the results of each completed request."""

PERCENTILES: Final = (50, 90, 95, 99)
WARM_UP_S_MAX: Final[Seconds] = 300.0
"""Maximum length of the default warm-up in seconds. In the published traces half of the reuse comes
within 123 s and nine tenths within 480 s.
"""
WARM_UP_SHARE: Final = 0.1
"""Length of the default warm-up as a share of the time over which requests arrive. If that is less
than 600 s, there is no warm-up by default.
"""
WARM_UP_FROM_S: Final[Seconds] = 600.0
OUTPUT_WEIGHT: Final = 10.0
"""Number of prompt tokens that take a pod about as long as one output token, on the built-in
profiles with a full batch. It only decides which part of the traffic is the busiest.
"""
_TOKENS_SHARE_MIN: Final = 0.1
"""Minimum share of the output tokens that must be generated between warm-up and last arrival. With
less, the whole run is measured instead of a steady part.
"""
_DIGEST_ROW: Final = struct.Struct("<qiidddqq")
_FATES: Final = tuple(Fate)


class Targets(Struct, frozen=True, kw_only=True):
    """Latency targets of a request that counts as good: `ttft_s` until the first token, and at most
    `tpot_s` on average for each later token.

    The definition is that of `goodput` in kubernetes-sigs/inference-perf.
    """

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.05


class Window(Struct, frozen=True, kw_only=True):
    """The steady part of a run, in which throughput and the gaps between tokens are measured.

    Caches are cold at the start, and pods run empty after the last arrival. Neither shows how a
    pool serves under load. Latencies, hits and goodput cover all requests that arrive after the
    warm-up.
    """

    warm_up_s: Seconds
    """Length of the warm-up in seconds. Latencies, hits and goodput exclude the requests that arrive in it.
    """
    start_s: Seconds
    end_s: Seconds
    """End of the steady part: the time of the last arrival, or the end of the run if it has no
    steady part.
    """
    drain_s: Seconds
    """Time in seconds from the last arrival to the end of the last answer; 0 if the run has no
    steady part.
    """


class Series:
    """The results of the completed requests of one run in columns, in the order in which requests
    ended.

    A column is float64[n], in seconds or tokens. If `keep` selects some requests, each access
    computes the column again, because storing all eight columns of a million requests would need 64
    MB.
    """

    __slots__ = ("_columns", "_keep")

    def __init__(self, columns: Mapping[str, Floats], keep: Bools | None = None) -> None:
        """Wrap `columns`, arrays of equal length with the names in `COLUMNS`.

        `keep` is bool[n] and selects requests; None selects all.
        """
        self._columns = columns
        self._keep = keep

    def __len__(self) -> int:
        if self._keep is not None:
            return int(np.count_nonzero(self._keep))
        return len(self._columns[COLUMNS[0]])

    def __reduce__(self) -> tuple[type["Series"], tuple[dict[str, Floats]]]:
        # Another process receives only the selected requests.
        return Series, ({name: self._column(name) for name in COLUMNS},)

    @property
    def arrived_s(self) -> Floats:
        return self._column("arrived_s")

    @property
    def ttft_s(self) -> Floats:
        return self._column("ttft_s")

    @property
    def tpot_s(self) -> Floats:
        """Mean time in seconds per output token after the first, for each request; NaN for an
        answer of one token.
        """
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
        """Return the results of the requests that arrived at `start_s` or later and before `end_s`."""
        arrived_s = self._columns["arrived_s"]
        keep = arrived_s >= start_s
        if end_s < math.inf:
            keep &= arrived_s < end_s
        return Series(self._columns, keep if self._keep is None else keep & self._keep)

    def _column(self, name: str) -> Floats:
        column = self._columns[name]
        return column if self._keep is None else column[self._keep]


def mean(values: Floats) -> float:
    """Return the mean of all values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def percentile(values: Floats, rank: float) -> float:
    """Return a percentile of all values that are not NaN, linearly interpolated; NaN if there are
    none.
    """
    known = values[~np.isnan(values)]
    return float(np.percentile(known, rank)) if len(known) else math.nan


def spread(loads: Sequence[float]) -> Spread:
    """Return three measures of how unequally `loads` are distributed over pods; all are None if the
    mean load is 0.
    """
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
    """Number of requests (or legs) that one pod completed, their tokens, and the prompt tokens that
    the pod did not compute, because its cache had them or another pod sent them.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Measures:
    """A collector of the measurements of one run.

    Each request is added when it ends; a completed one takes 64 bytes.
    """

    def __init__(
        self,
        targets: Targets,
        *,
        predicting: bool = True,
        by_session: bool = False,
        warm_up_s: Seconds | None = None,
        busiest_s: Seconds | None = None,
    ) -> None:
        """Create a collector without requests.

        `predicting` is True if the policy estimates which prompt tokens pods have cached,
        `by_session` if it routes by session alone. `warm_up_s` is the time at the start that
        figures exclude; None for the default (`WARM_UP_SHARE`, `WARM_UP_S_MAX`). `busiest_s` is the
        length of the busiest part in the summary; None for a summary without that part.
        """
        self.targets = targets
        self.gaps = TokenGaps()
        """Gaps between tokens of all pods. The caller adds every step of every pod."""
        self._warm_up_s = warm_up_s
        self._latest_s = 0.0
        self._busiest_s = busiest_s
        self._lost_at_s = array("d")
        """Arrival times in seconds of the requests that were not completed."""
        self._lost_work = array("d")
        """Work of each request that was not completed, in prompt tokens (an output token counts
        `OUTPUT_WEIGHT`).
        """
        self._too_long: dict[str, int] = {}
        """Number of requests that failed because they exceed a limit of the pod to which they were
        sent, its context or its KV cache, by the limit in words.
        """
        self._predicting = predicting
        self._by_session = by_session
        self._with_session = 0
        self.failing_plugins: list[FailingPlugin] = []
        """Plugins that raised errors or returned invalid values during the run, of every picker; set
        at the end of the run.
        """
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        self.refusals: dict[str, int] = {}
        """Number of requests that the picker refused or evicted, by reason, warm-up included.
        `failures` counts the failed requests, by reason.
        """
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
        """Add the times, tokens and result of `request`, which has ended, to the figures of the
        run.
        """
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
        cached = request.cached_tokens
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
        """Return the results of all completed requests of the run."""
        columns = self._columns
        # numpy rejects an empty buffer.
        read = np.frombuffer if columns["ttft_s"] else np.array
        return Series({name: read(values) for name, values in columns.items()})

    def steady_series(self) -> Series:
        """Return the results of the completed requests that arrived after the warm-up."""
        warm_up_s = self.warm_up_s
        return self.series().since(warm_up_s) if warm_up_s > 0.0 else self.series()

    @property
    def warm_up_s(self) -> Seconds:
        """Length of the warm-up in seconds: the configured one, or else the default for the time
        over which requests arrived.
        """
        if self._warm_up_s is not None:
            return self._warm_up_s
        if self._latest_s < WARM_UP_FROM_S:
            return 0.0
        return min(WARM_UP_S_MAX, WARM_UP_SHARE * self._latest_s)

    def window(self) -> tuple[Window, Gaps]:
        """Return the bounds of the steady part of the run, and the gaps between tokens in it.

        The whole run counts as steady if that part has too few tokens.
        """
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
        """Hash of the routing and results of every request, in the order in which they ended.

        Runs with different results have different digests.
        """
        return self._digest.hexdigest()

    def summary(self, pods: Iterable[str] = ()) -> RunSummary:
        """Return all figures of the run. A pod whose name is in `pods` counts even if it completed
        no request.
        """
        of_pods = self.pods | {name: PodLoad() for name in pods if name not in self.pods}
        everything, series = self.series(), self.steady_series()
        window, gaps = self.window()
        prompt_tokens, cached_tokens = series.prompt_tokens.sum(), series.cached_tokens.sum()
        span_s = float((everything.arrived_s + everything.e2e_s).max()) if len(everything) else 0.0
        length_s = window.end_s - window.start_s or math.nan
        completed = max(1, len(everything))
        sent = sum(self.fates.values())
        loads = of_pods.values()
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
            pods={name: pod_load(load) for name, load in of_pods.items()},
        )

    def _warnings(self, sent: int) -> list[str]:
        """Return sentences about problems of the run that make its figures misleading."""
        failures: dict[str, int] = {}
        did: dict[str, str] = {}
        for failing in self.failing_plugins:
            failures[failing.name] = failures.get(failing.name, 0) + failing.failures
            did[failing.name] = failing.what
        warnings = [
            f"{count:,} of {sent:,} requests ({count / sent:.1%}) exceed {limit} and "
            "failed at once. Latencies and throughput do not include these requests."
            for limit, count in self._too_long.items()
        ]
        warnings += [
            f"{name} failed {'once' if count == 1 else f'{count:,} times'}. "
            f"The picker routed requests without this plug-in: {did[name]}."
            for name, count in failures.items()
        ]
        if self._by_session and sent and not self._with_session:
            warnings.append("No request has a session, so session affinity chose pods at random.")
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
        if request.handover is None:
            load.cached_tokens += cached
        else:
            # The pod computed neither what its cache had nor what it received.
            load.cached_tokens += engine.cached_tokens + engine.fetched_tokens
        load.output_tokens += arrival.output_tokens

    def _count_age(self, request: SimulatedRequest) -> None:
        """Add the age of the chosen pod's metrics at the time of the routing decision to the mean;
        do nothing if the age is unknown.
        """
        if request.metrics_age_s < math.inf:
            self._age_s_sum += request.metrics_age_s
            self._ages += 1

    def _count_too_long(self, request: SimulatedRequest) -> None:
        """Count a failed request that exceeds the context or the KV cache of its pod.

        Do nothing if it failed for another reason.
        """
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
        """Return the figures of the part after the warm-up whose requests have the most work; UNSET
        if the summary needs no such part.
        """
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
            requests=SentRequests(sent=len(part) + lost, complete=len(part)),
            ttft_s=distribution(part.ttft_s),
            tpot_s=distribution(part.tpot_s),
            itl_s=_gaps(self.gaps.around(start_s, end_s)),
            e2e_s=distribution(part.e2e_s),
            goodput=self._goodput_of(part, lost, self._busiest_s),
        )

    def _goodput(self, series: Series, window: Window) -> Goodput:
        """Return the goodput over all requests that arrived after the warm-up.

        A request without an answer is not good.
        """
        lost = sum(1 for at_s in self._lost_at_s if at_s >= window.warm_up_s)
        return self._goodput_of(series, lost, window.end_s - window.start_s)

    def _goodput_of(self, series: Series, lost: int, length_s: Seconds) -> Goodput:
        """Return the goodput of the completed requests in `series` plus `lost` uncompleted ones;
        its rate is over `length_s` seconds.
        """
        in_time = series.ttft_s <= self.targets.ttft_s
        # An answer of one token has no later token that could miss the target.
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
    """Return the number of prompt tokens of the completed requests in `series` whose first token
    came in the steady part of the run (`window`).
    """
    first_s = series.arrived_s + series.ttft_s
    inside = (first_s >= window.start_s) & (first_s <= window.end_s)
    return float(series.prompt_tokens[inside].sum())


def figures_of(summary: ComparedRun) -> dict[str, float]:
    """Return the figures by which runs are compared, by name; NaN if the run does not have a
    figure.

    Pod-hours are included only for a `RunSummary` of a run with an autoscaler, because otherwise
    the number of pods is fixed.
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
    """Return the time in seconds from the first sending of a request to the client's first token;
    NaN if there was none.

    The network delay of the answer is assumed to equal that of the request.
    """
    if request.first_token_at is None or request.routed_at is None:
        return math.nan
    network_s = request.routed_at - request.sent_at
    return request.first_token_at + network_s - request.arrived_at


def tpot_of(request: SimulatedRequest) -> Seconds:
    """Return the mean time in seconds of each output token after the first; NaN if the answer has
    fewer than two tokens or did not end.
    """
    first, last = request.first_token_at, request.finished_at
    if first is None or last is None or request.arrival.output_tokens < 2:
        return math.nan
    return (last - first) / (request.arrival.output_tokens - 1)


def queue_of(request: SimulatedRequest) -> Seconds:
    """Return the time in seconds that a request waited in the queue of its engine; NaN if the
    engine never ran it.
    """
    engine = request.engine
    if engine is None or engine.scheduled_at is None or request.submitted_at is None:
        return math.nan
    return engine.scheduled_at - request.submitted_at


def distribution(values: Floats) -> Distribution:
    """Return mean and percentiles of all values that are not NaN; None each if there are none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Distribution(mean=None, p50=None, p90=None, p95=None, p99=None)
    p50, p90, p95, p99 = map(rounded, np.percentile(known, PERCENTILES))
    return Distribution(mean=rounded(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def rounded(value: float) -> float | None:
    """Return `value` with six significant digits; None for NaN."""
    return None if math.isnan(value) else six_digits(value)


def six_digits(value: float) -> float:
    """Return `value` with six significant digits, because people also read summaries."""
    return float(f"{float(value):.6g}")


def busiest_from_s(times_s: Floats, work: Floats, length_s: Seconds) -> Seconds:
    """Return the start of the period of `length_s` seconds whose requests have the most work; 0 if
    there are no requests.

    `times_s` and `work` are float64[n]: the arrival of each request in seconds, and its work in any
    unit. A period begins with an arrival. The earliest of several equal periods is returned.
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


def pod_load(load: PodLoad) -> PodLoadSummary:
    """Return the load of one pod in the form of summary.json."""
    rate = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else math.nan
    return PodLoadSummary(
        requests=load.requests,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
        hit_rate=rounded(rate),
    )
