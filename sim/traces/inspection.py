"""Properties of a trace: lengths, bursts, reuse, possible hit rates and the gain of routing.

The trace is read once. Memory holds eight bytes for each request, about 250 bytes for each distinct
part of a prompt, the names of sessions, and caches no larger than the pool's.

Hit ratios are shares of all prompt tokens:

- *One cache*: an unlimited cache for all requests. No run can exceed its hit ratio. All other
  ratios are those of simple placements, and a scheduler may do better.
- *Per pod*: unlimited caches, with requests placed at random, by round robin, or by affinity.
  Affinity uses the hash of the first part of a prompt that not too many prompts share. This is our
  rule of thumb and looks at no cache.
- *At this capacity*: caches of the pods' real size with least-recently-used eviction, for the same
  placements and for one cache of the pool's total size. A partial last block takes the room of a
  whole one. Answers take room only if a later prompt contains them.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.profiles import Profile, StepWork
from sim.traces.arrival import Arrival
from sim.traces.hits import Hits

_GAPS_MAX = 1_000_000
_WINDOW_S = 10.0
_DECODE_BATCH = 64
"""Number of requests in a decode batch, assumed by the estimate of decode time."""
_NO_SHARING = 0.05
_NEAR = 0.05
"""Difference below which two hit ratios count as equal."""
_MOSTLY = 0.6
_SATURATED = 0.9
_IDLE = 0.3


class Pool(Struct, frozen=True, kw_only=True):
    """The pool of pods for which a trace is inspected."""

    pods: int
    profile: Profile
    kv_tokens: int
    """KV-cache size of each pod in tokens."""


class Quantiles(Struct, frozen=True, kw_only=True):
    """Mean, quantiles and maximum of a quantity in tokens or seconds; all are 0 if there are no
    values.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class PodCeilings(Struct, frozen=True, kw_only=True):
    """Token hit ratios under three placements of requests, if each pod has its own cache.

    They are estimates and no upper bounds.
    """

    random: float
    round_robin: float
    affinity: float


class Reuse(Struct, frozen=True, kw_only=True):
    """Statistics of how often and when the trace uses the same part of a prompt. A part is a block
    of the trace, or an answer that a later prompt contains.
    """

    references: int
    distinct: int
    used_once: float
    """Share of the distinct parts that the trace uses only once, from 0 to 1."""
    distinct_first: int
    """Number of distinct first parts of prompts. If they are few, most prompts begin with the same
    text.
    """
    gap_s: Quantiles
    """Seconds between two consecutive uses of the same part of a prompt."""
    live_tokens_max: int
    """Working set of the trace: maximum over time of the tokens in parts that were used before and
    will be used again.
    """


class Ceilings(Struct, frozen=True, kw_only=True):
    """Token hit ratios of the trace; the docstring of this module explains them."""

    one_cache: float
    """Hit ratio of one unlimited cache. No run exceeds it; a run may exceed all other ratios of
    this class.
    """
    per_pod: PodCeilings
    one_cache_at_capacity: float
    """Hit ratio of one cache with the size of all pods' caches together."""
    per_pod_at_capacity: PodCeilings
    affinity_load_max_over_mean: float
    """Requests of the busiest pod divided by the mean number of requests per pod, under placement
    by affinity.
    """


class Place(Struct, frozen=True, kw_only=True):
    """Estimates that classify the trace for a pool: its working set, GPU time and load."""

    regime: str
    """Size of the working set relative to the pool: no-sharing, fits-a-pod, fits-the-pool or
    exceeds-the-pool.
    """
    working_set_over_pod: float
    working_set_over_pool: float
    prefill_share: float
    """Share of prefill in the GPU time of all requests, from 0 to 1, under placement by affinity.
    """
    utilisation: float
    """GPU time that the trace needs divided by GPU time of the pool during the trace; above 1 the
    pool is overloaded.
    """
    sentences: tuple[str, ...]


class Inspection(Struct, frozen=True, kw_only=True):
    """All results of `sim trace inspect` for one trace and pool."""

    requests: int
    duration_s: Seconds
    rate_per_s: float
    waiting_for_answers: int
    """Number of requests that wait for the answer of an earlier request; their arrival times do not
    include that wait.
    """
    models: int
    adapters: int
    sessions: int
    gap_cv: float
    """Coefficient of variation of the gaps between arrivals; it is 1 for Poisson arrivals."""
    peak_over_mean: float
    """Arrival rate of the busiest 10 s divided by the mean arrival rate; 1 for traces below 10 s.
    """
    prompt_tokens: Quantiles
    output_tokens: Quantiles
    prompt_tokens_total: int
    output_tokens_total: int
    reuse: Reuse
    ceilings: Ceilings
    place: Place


def inspect(arrivals: Iterable[Arrival], pool: Pool, seed: int = 1) -> Inspection:
    """Read the trace to its end and return its statistics for `pool`.

    `seed` decides the random placement. Raises `ValueError` if the trace has no requests.
    """
    hits = Hits(pods=pool.pods, kv_tokens=pool.kv_tokens, seed=seed)
    uses = _Uses(seed)
    timing = _Timing()
    prompts, outputs = array("I"), array("I")
    names: dict[str, set[str]] = {"model": set(), "adapter": set(), "session": set()}
    waiting = 0
    for arrival in arrivals:
        prompts.append(arrival.prompt_tokens)
        outputs.append(arrival.output_tokens)
        timing.add(arrival.time_s)
        uses.add(arrival, hits.add(arrival))
        waiting += arrival.after is not None
        for kind, seen in names.items():
            seen.add(getattr(arrival, kind))
    if not prompts:
        raise ValueError("The trace has no requests.")
    requests = len(prompts)
    lengths = np.frombuffer(prompts, np.uint32)
    answers = np.frombuffer(outputs, np.uint32)
    prompt_tokens_total = int(lengths.sum(dtype=np.int64))
    reuse = uses.reuse(hits)
    ceilings = _ceilings(hits, prompt_tokens_total)
    work = _Work(
        requests=requests,
        duration_s=timing.latest_s,
        prompt_tokens=prompt_tokens_total,
        output_tokens=int(answers.sum(dtype=np.int64)),
        waiting=waiting,
    )
    return Inspection(
        requests=requests,
        duration_s=timing.latest_s,
        rate_per_s=requests / timing.latest_s if timing.latest_s else math.inf,
        waiting_for_answers=waiting,
        models=len(names["model"] - {""}),
        adapters=len(names["adapter"] - {""}),
        sessions=len(names["session"] - {""}),
        gap_cv=timing.gap_cv(),
        peak_over_mean=timing.peak_over_mean(),
        prompt_tokens=quantiles(lengths),
        output_tokens=quantiles(answers),
        prompt_tokens_total=work.prompt_tokens,
        output_tokens_total=work.output_tokens,
        reuse=reuse,
        ceilings=ceilings,
        place=_place(work, reuse, ceilings, pool),
    )


def quantiles(values: npt.NDArray[Any]) -> Quantiles:
    """Return mean, maximum and quantiles by nearest rank; all are 0 if there are no values."""
    if not len(values):
        return Quantiles(mean=0, p50=0, p90=0, p99=0, max=0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99), method="inverted_cdf").tolist()
    mean = float(np.mean(values, dtype=np.float64))
    return Quantiles(mean=mean, p50=p50, p90=p90, p99=p99, max=float(values.max()))


class _Timing:
    """Statistics of the gaps between arrivals in a trace, and of the busiest window of 10 s."""

    def __init__(self) -> None:
        self.latest_s: Seconds = 0.0
        self._count = 0
        self._gap_squares = 0.0
        self._window = 0
        self._in_window = 0
        self._busiest = 0

    def add(self, time_s: Seconds) -> None:
        gap_s = time_s - self.latest_s
        self._gap_squares += gap_s * gap_s
        self._count += 1
        self.latest_s = time_s
        window = int(time_s // _WINDOW_S)
        self._in_window = self._in_window + 1 if window == self._window else 1
        self._window = window
        self._busiest = max(self._busiest, self._in_window)

    def gap_cv(self) -> float:
        gaps = self._count - 1
        if gaps < 1 or not self.latest_s:
            return 0.0
        mean_s = self.latest_s / gaps
        return math.sqrt(max(0.0, self._gap_squares / gaps - mean_s * mean_s)) / mean_s

    def peak_over_mean(self) -> float:
        windows = self.latest_s / _WINDOW_S
        return self._busiest * windows / self._count if windows >= 1 else 1.0


class _Uses:
    """First and last time at which the trace used each distinct part, and the gaps between uses."""

    def __init__(self, seed: int) -> None:
        self._random = Random(f"{seed}:gaps")
        self._first_s, self._last_s = array("d"), array("d")
        self._first_parts: set[int] = set()
        self._references = 0
        self._gaps_s, self._gaps_seen = array("f"), 0

    def add(self, arrival: Arrival, slots: Sequence[int]) -> None:
        """Record the uses of the parts of an arrival. `slots` are the numbers of the parts from
        `Hits.add`.
        """
        answers = arrival.answer is not None
        self._references += len(slots) - answers
        self._first_parts.update(slots[: min(1, len(slots) - answers)])
        now = arrival.time_s
        for slot in slots:
            while slot >= len(self._last_s):
                self._first_s.append(now)
                self._last_s.append(math.nan)
            before_s = self._last_s[slot]
            if before_s == before_s:  # noqa: PLR0124  NaN: never
                self._gap(now - before_s)
            self._last_s[slot] = now

    def _gap(self, gap_s: Seconds) -> None:
        """Record the time between two uses of a part.

        Above a million gaps, a random sample is kept (reservoir sampling).
        """
        self._gaps_seen += 1
        if len(self._gaps_s) < _GAPS_MAX:
            self._gaps_s.append(gap_s)
        elif (at := self._random.randrange(self._gaps_seen)) < _GAPS_MAX:
            self._gaps_s[at] = gap_s

    def reuse(self, hits: Hits) -> Reuse:
        uses = np.frombuffer(hits.uses, np.uint32)
        again = uses > 1
        tokens = np.frombuffer(hits.tokens, np.uint32)[again].astype(np.int64)
        moments = np.concatenate(
            (np.frombuffer(self._first_s)[again], np.frombuffer(self._last_s)[again])
        )
        order = np.argsort(moments, kind="stable")
        live = np.cumsum(np.concatenate((tokens, -tokens))[order])
        return Reuse(
            references=self._references,
            distinct=len(uses),
            used_once=float(np.mean(~again)) if len(uses) else 0.0,
            distinct_first=len(self._first_parts),
            gap_s=quantiles(np.frombuffer(self._gaps_s, np.float32)),
            live_tokens_max=int(live.max(initial=0)),
        )


def _ceilings(hits: Hits, prompt_tokens: int) -> Ceilings:
    placements = hits.placements
    return Ceilings(
        one_cache=hits.one_cache_tokens / prompt_tokens,
        per_pod=PodCeilings(
            **{name: at.hit_tokens / prompt_tokens for name, at in placements.items()}
        ),
        one_cache_at_capacity=hits.together_tokens / prompt_tokens,
        per_pod_at_capacity=PodCeilings(
            **{name: at.lru_hit_tokens / prompt_tokens for name, at in placements.items()}
        ),
        affinity_load_max_over_mean=max(hits.load) * len(hits.load) / hits.requests,
    )


class _Work(Struct, frozen=True, kw_only=True):
    requests: int
    duration_s: Seconds
    prompt_tokens: int
    output_tokens: int
    waiting: int


def _place(work: _Work, reuse: Reuse, ceilings: Ceilings, pool: Pool) -> Place:
    hit = ceilings.per_pod_at_capacity.affinity
    prefill_s, decode_s = _gpu_s(work, hit, pool.profile)
    available_s = work.duration_s * pool.pods
    prefill_share = prefill_s / (prefill_s + decode_s)
    utilisation = (prefill_s + decode_s) / available_s if available_s else math.inf
    over_pod = reuse.live_tokens_max / pool.kv_tokens
    shares = ceilings.one_cache >= _NO_SHARING
    regime = _regime(over_pod, pool) if shares else "no-sharing"
    return Place(
        regime=regime,
        working_set_over_pod=over_pod,
        working_set_over_pool=over_pod / pool.pods,
        prefill_share=prefill_share,
        utilisation=utilisation,
        sentences=(
            _sharing_sentence(regime, reuse, ceilings, over_pod, pool),
            _prefill_sentence(prefill_share, shares=shares),
            *_load_sentences(work, utilisation, ceilings),
        ),
    )


def _regime(over_pod: float, pool: Pool) -> str:
    if over_pod <= 1:
        return "fits-a-pod"
    return "fits-the-pool" if over_pod <= pool.pods else "exceeds-the-pool"


def _sharing_sentence(
    regime: str, reuse: Reuse, ceilings: Ceilings, over_pod: float, pool: Pool
) -> str:
    """Return the sentence that compares the working set with the cache sizes, and gives conclusion
    and hit ratios.
    """
    best, pods = ceilings.one_cache, f"{pool.pods} pods"
    if not reuse.references:
        return "The trace does not say what prompts share: it can compare load policies only."
    if regime == "no-sharing":
        return (
            f"Prompts share almost nothing ({best:.1%} at most): route by load; a prefix policy "
            "can only unbalance the load."
        )
    size = {
        "fits-a-pod": "fits into each pod's cache",
        "fits-the-pool": f"fits into the cache of {pods} together, not of one",
        "exceeds-the-pool": (
            f"is larger than the cache of {pods} together ({over_pod / pool.pods:.2f} times)"
        ),
    }[regime]
    at_capacity = ceilings.per_pod_at_capacity
    return (
        f"The working set {size}: {_conclusion(regime, ceilings)} ({at_capacity.random:.1%} hit at "
        f"random, {at_capacity.affinity:.1%} by affinity, {best:.1%} at most)."
    )


def _conclusion(regime: str, ceilings: Ceilings) -> str:
    """Return the effect of routing and of cache size on the hit ratio, as part of a sentence."""
    affinity = ceilings.per_pod_at_capacity.affinity
    chance = ceilings.per_pod_at_capacity.random
    room_pays = ceilings.per_pod.affinity - affinity >= _NEAR
    if affinity - chance >= _NEAR:
        if room_pays:
            return "prefix routing pays, and so would larger caches"
        if regime == "fits-a-pod":
            return "prefix routing still pays, because a pod hits only what it has processed before"
        return "prefix routing pays"
    if chance - affinity >= _NEAR:
        return "routing by a hash of the prefix hits less than random routing"
    if ceilings.one_cache - min(affinity, chance) < _NEAR:
        return "any routing comes near the best hit rate"
    if room_pays:
        return "the cache size decides the hit ratio"
    return "routing by a hash of the prefix gains little"


def _prefill_sentence(prefill_share: float, *, shares: bool) -> str:
    where, gain = "Prefill and decode take about the same GPU time", "add some throughput"
    if prefill_share >= _MOSTLY:
        where, gain = "Most GPU time is prefill", "raise throughput"
    elif prefill_share <= 1 - _MOSTLY:
        where, gain = "Most GPU time is decode", "shorten TTFT more than they add throughput"
    return f"{where}: cache hits {gain}." if shares else f"{where}."


def _load_sentences(work: _Work, utilisation: float, ceilings: Ceilings) -> list[str]:
    """Return the sentence about the load of the pool, as a list of at most one."""
    at_capacity = ceilings.per_pod_at_capacity
    if utilisation < _IDLE:
        if at_capacity.affinity - at_capacity.random >= _NEAR:
            return [
                "The pool is lightly loaded: policies differ in cache hits, hardly in queueing."
            ]
        return ["The pool is lightly loaded: differences between policies will be small."]
    if 2 * work.waiting > work.requests:
        return ["Most requests wait for an answer: the load adapts to what the pool can serve."]
    if not work.duration_s:
        return ["All requests arrive at one instant: their load cannot be determined."]
    if utilisation > _SATURATED:
        return ["The pool is at or past saturation: queues decide TTFT."]
    return []


def _gpu_s(work: _Work, hit: float, profile: Profile) -> tuple[Seconds, Seconds]:
    """Return estimates of the GPU time in seconds of (prefill, decode) for all requests.

    All prompts are assumed to have the mean length, prefill to run in full chunks, and decode in
    batches of 64.
    """
    context = work.prompt_tokens / work.requests
    new = max(1.0, context * (1 - hit))
    chunk = profile.max_num_batched_tokens
    pairs = chunk * (context - new / 2)
    prefill = StepWork(tokens=chunk, prefills=1, attention_pairs=pairs)
    prefill_s = profile.step_s(prefill) * new * work.requests / chunk
    held = round(_DECODE_BATCH * (context + work.output_tokens / work.requests / 2))
    decode = StepWork(tokens=_DECODE_BATCH, decodes=_DECODE_BATCH, decode_context_tokens=held)
    return prefill_s, profile.step_s(decode) * work.output_tokens / _DECODE_BATCH
