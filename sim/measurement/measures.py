"""What a run has shown, in numbers: one ruler for replay, compare and sweep."""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from epp.core.decision.failures import FailingPlugin
from epp.core.types import Seconds
from sim.cluster.cluster import Fate, SimulatedRequest

Floats = npt.NDArray[np.float64]

SCHEMA: Final = 1
PERCENTILES: Final = (50, 90, 95, 99)
_DIGEST_ROW: Final = struct.Struct("<qiidddqq")
_FATES: Final = tuple(Fate)


class Targets(Struct, frozen=True, kw_only=True):
    """A request is good if its first token came in `ttft_s` and each later one in `tpot_s`.

    The definition of `goodput` in kubernetes-sigs/inference-perf.
    """

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.05


class Series(Struct, frozen=True, kw_only=True):
    """Completed requests of one run, a column each, in the order in which they ended."""

    arrived_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    """NaN for an answer of one token."""
    e2e_s: Floats
    queue_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.arrived_s)

    def take(self, keep: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> "Series":
        """Those at `keep`: a mask or positions."""
        return Series(**{name: getattr(self, name)[keep] for name in self.__struct_fields__})


def mean(values: Floats) -> float:
    """NaN-free mean; NaN if there is nothing to average."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def percentile(values: Floats, rank: float) -> float:
    """Of what is known, with linear interpolation; NaN if nothing is."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, rank)) if len(known) else math.nan


def spread(loads: Sequence[float]) -> dict[str, float | None]:
    """How unequal the loads of the pods are: 1 is equal for max/mean and Jain's index."""
    values = np.array(loads, dtype=np.float64)
    average = float(values.mean()) if len(values) else 0.0
    if not average:
        return {"max_over_mean": None, "cv": None, "jain": None}
    return {
        "max_over_mean": rounded(float(values.max()) / average),
        "cv": rounded(float(values.std()) / average),
        "jain": rounded(float(values.sum() ** 2 / (len(values) * (values**2).sum()))),
    }


class PodLoad(Struct):
    """What one pod was given and what it found in its cache."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Measures:
    """Takes each request as it ends. Memory: 64 bytes a completed request."""

    def __init__(
        self, targets: Targets, *, predicting: bool = True, by_session: bool = False
    ) -> None:
        """`predicting`: the policy estimates caches. `by_session`: it goes by sessions alone."""
        self.targets = targets
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
        self._columns = {name: array("d") for name in Series.__struct_fields__}
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
        self._count_age(request)
        if fate is Fate.COMPLETE and engine is not None and request.pod is not None:
            self._count_complete(request, ttft_s, cached)

    def series(self) -> Series:
        """The columns of what was completed."""
        return Series(
            **{name: np.frombuffer(values) for name, values in self._columns.items()}
            if self._columns["ttft_s"]
            else dict.fromkeys(self._columns, np.empty(0))
        )

    @property
    def digest(self) -> str:
        """Of everything that happened to every request, in order: equal only for equal runs."""
        return self._digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """The numbers as JSON; null where there is nothing to tell."""
        series = self.series()
        prompt_tokens, cached_tokens = series.prompt_tokens.sum(), series.cached_tokens.sum()
        span_s = float((series.arrived_s + series.e2e_s).max()) if len(series) else 0.0
        completed = max(1, len(series))
        sent = sum(self.fates.values())
        loads = list(self.pods.values())
        predicted = (self._predicted - cached_tokens, self._prediction_error)
        bias, error = (
            rounded(tokens / completed) if self._predicting else None for tokens in predicted
        )
        return {
            "digest": self.digest,
            "warnings": self._warnings(sent),
            "requests": {"sent": sent} | {fate.value: count for fate, count in self.fates.items()},
            "refusals": self.refusals,
            "failures": self.failures,
            "duration_s": rounded(span_s),
            "ttft_s": distribution(series.ttft_s),
            "tpot_s": distribution(series.tpot_s),
            "e2e_s": distribution(series.e2e_s),
            "queue_s": distribution(series.queue_s),
            "prompt_tokens": int(prompt_tokens),
            "cached_tokens": int(cached_tokens),
            "output_tokens": int(series.output_tokens.sum()),
            "hit_rate": rounded(cached_tokens / prompt_tokens) if prompt_tokens else None,
            "input_tokens_per_s": rounded(prompt_tokens / span_s) if span_s else None,
            "output_tokens_per_s": (
                rounded(series.output_tokens.sum() / span_s) if span_s else None
            ),
            "goodput": self._goodput(series, sent, span_s),
            "imbalance": {
                "requests": spread([load.requests for load in loads]),
                "uncached_tokens": spread(
                    [load.prompt_tokens - load.cached_tokens for load in loads]
                ),
            },
            "prediction": {"bias_tokens": bias, "mean_absolute_error_tokens": error},
            "metrics_age_s": rounded(self._age_s_sum / self._ages) if self._ages else None,
            "preemptions": self.preemptions,
            "pods": {name: _load(self.pods[name]) for name in self.pods},
        }

    def _warnings(self, sent: int) -> list[str]:
        """What would mislead whoever reads the other numbers: sentences."""
        failures: dict[str, int] = {}
        did: dict[str, str] = {}
        for failing in self.failing_plugins:
            failures[failing.name] = failures.get(failing.name, 0) + failing.failures
            did[failing.name] = failing.what
        warnings = [
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

    def _goodput(self, series: Series, sent: int, span_s: Seconds) -> dict[str, float | None]:
        in_time = series.ttft_s <= self.targets.ttft_s
        # An answer of one token has no second one that could be late.
        fast = ~(series.tpot_s > self.targets.tpot_s)
        good = int(np.count_nonzero(in_time & fast))
        return {
            "ttft_target_s": self.targets.ttft_s,
            "tpot_target_s": self.targets.tpot_s,
            "share": rounded(good / sent) if sent else None,
            "requests_per_s": rounded(good / span_s) if span_s else None,
        }


def figures_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """What runs are compared by, from `Measures.summary`; NaN: this run does not have it."""
    ttft_s = summary["ttft_s"]
    told = {
        "ttft_mean_s": ttft_s["mean"],
        "ttft_p50_s": ttft_s["p50"],
        "ttft_p90_s": ttft_s["p90"],
        "ttft_p99_s": ttft_s["p99"],
        "tpot_mean_s": summary["tpot_s"]["mean"],
        "e2e_mean_s": summary["e2e_s"]["mean"],
        "hit_rate": summary["hit_rate"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "goodput": summary["goodput"]["share"],
    }
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


def distribution(values: Floats) -> dict[str, float | None]:
    """Mean and percentiles."""
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(("mean", *(f"p{rank}" for rank in PERCENTILES)))
    found = np.percentile(known, PERCENTILES)
    ranks = {f"p{rank}": rounded(value) for rank, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": rounded(known.mean())} | ranks


def rounded(value: float) -> float | None:
    """Six significant digits: what is told is read by people too. None for NaN."""
    number = float(value)
    return None if math.isnan(number) else float(f"{number:.6g}")


def _load(load: PodLoad) -> Mapping[str, float | None]:
    rate = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else math.nan
    return {
        "requests": load.requests,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "output_tokens": load.output_tokens,
        "hit_rate": rounded(rate),
    }
