"""The accuracy of predicted cache hits, compared with what the engines count.

Engines count the prompt tokens that they looked up in their prefix cache, and those that they
found. The picker counts, with each decision, the tokens that it sends and those that it predicts to
be cached. Both are compared over *windows* of an endpoint, which end with a scrape. No response is
read for this.

**Shares, not sums.** Our token counts may be estimates. Each picker sees only its own requests,
while an engine counts all. So shares of tokens are compared. They describe the same requests as far
as all of the engine's requests are ours or those of peers, which spread like ours. The engine's own
count of requests shows how many others there are. The others may have found everything or nothing,
which gives a range for our share. The error is the distance of the prediction from that range.

**Counters are not trusted.** A window does not count if a counter falls, or stands still while
requests are sent. It does not count either if more tokens were found than looked up. The endpoint's
verdict says so.

**Old results are not shown.** An endpoint with too few requests is not compared until it gets more.

**Bytes per token** of a model follow from the same windows: our bytes per prompt divided by the
engine's tokens per request. Both are means, so requests of others matter only if they are longer or
shorter. An image counts with the few bytes that are kept of it, because these are its size in an
index.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from math import isnan
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field

from epp.core.knowledge.candidates import Candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, EndpointMetrics, Seconds

WINDOW_REQUESTS_MIN: Final = 32
"""Number of this picker's requests to an endpoint, each prompt of a request counted, after which a
window of the comparison may end before `WINDOW_S_MAX`.
"""
WINDOW_S_MIN: Final[Seconds] = 20.0
"""Shortest duration in seconds of a window in which predicted and counted cache hits are compared.
It is not 0, because an engine looks up the last requests of a window after its end.
"""
WINDOW_S_MAX: Final[Seconds] = 300.0
"""Longest duration in seconds of a window in which predicted and counted cache hits are compared.
Such a window counts if it has `FEW_REQUESTS_MIN` requests.
"""
FEW_REQUESTS_MIN: Final = 8
"""Minimum number of this picker's requests to an endpoint in a window of `WINDOW_S_MAX`. With
fewer, the earlier results of the endpoint are dropped.
"""
KEPT_SHARE: Final = 0.5
"""Weight of the sums of each window relative to those of the following window, which has weight 1.
"""
ALL_KNOWN_SHARE: Final = 0.95
"""Share of an engine's requests that this picker and its peers must have sent together before the
engine counts as having no other clients. It is below 1, because the two counts are never of the
same time.
"""
BYTES_PER_TOKEN_MIN: Final = 1.0
BYTES_PER_TOKEN_MAX: Final = 16.0
EVIDENCE_TOKENS_MIN: Final = 16_384
"""Minimum number of measured tokens before the bytes per token of a model count as known."""
MODELS_MAX: Final = 64
"""Maximum number of models whose bytes per token are stored; above it, the model that was updated
longest ago is dropped.
"""
MODEL_CHARACTERS_MAX: Final = 256
"""Maximum length in characters of a model name whose bytes per token are measured, because clients
choose the names.
"""
ERROR_BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Upper bounds of the buckets of the histogram of errors of predicted cache hits. Errors are shares
of tokens, so none exceeds 1.0.
"""
NO_INDEXES: Final[Mapping[str, int]] = MappingProxyType({})


class Verdict(StrEnum):
    """The result of the last window in which an endpoint's predicted cache hits were compared with
    those that its engine counted.
    """

    WAITING = "waiting"
    """No window of the endpoint's comparison has ended yet, or the last one had too few requests.
    """
    MEASURED = "measured"
    UNTOLD = "untold"
    """The endpoint's metrics page has no counters of prefix-cache look-ups and hits."""
    STILL = "still"
    """The engine's counters of look-ups and hits did not change although requests were sent."""
    FELL = "fell"
    """A counter of the engine was lower than before, although the engine did not restart."""
    IMPOSSIBLE = "impossible"
    """The engine counted more tokens as found in the prefix cache than as looked up, or infinitely
    many as looked up.
    """


class Side(StrEnum):
    """The direction of an error of predicted cache hits: the prediction was too high or too low."""

    OVER = "over"
    UNDER = "under"


class Expected(Struct, frozen=True, kw_only=True, gc=False):
    """The cache hit that a decision predicts for the request at the chosen endpoint."""

    prompt_tokens: int
    """Number of prompt tokens of the request; 0 if the prompt is unknown."""
    predicted_tokens: int
    """Number of prompt tokens that the endpoint is predicted to have cached."""
    prompt_bytes: int
    prompts: int = 1
    """Number of prompts in the request. The engine counts each of them as a request."""
    indexes: Mapping[str, int] = NO_INDEXES
    """Predicted number of cached tokens by each index of the joint match except the first, had it
    been used alone, by name of the index. It is empty if one index makes the prediction, or if
    the request was served by another endpoint than the chosen one.
    """


def expected_hit(
    request: InferenceRequest,
    cached_tokens: int,
    candidates: Candidates,
    position: int,
    others: Sequence[str],
) -> Expected:
    """Return the cache hit that the decision predicts for `request`: its chosen candidate, at
    `position`, is estimated to have `cached_tokens` cached.

    `others` are the names of the indexes whose own predictions are compared in addition.
    """
    indexes = NO_INDEXES
    if others:
        known = {name: candidates.affinity(name) for name in others}
        indexes = {
            name: request.prompt_tokens * one.matched.item(position) // max(1, one.total)
            for name, one in known.items()
        }
    return Expected(
        prompt_tokens=request.prompt_tokens,
        predicted_tokens=cached_tokens,
        prompt_bytes=request.prompt_bytes or request.prompt_tokens * BYTES_PER_TOKEN,
        prompts=request.prompt_count,
        indexes=indexes,
    )


class HitComparison(Struct, frozen=True, kw_only=True):
    """The predicted and the counted cache hits of one endpoint over its last windows, each with
    half the weight of the next.
    """

    predicted: float
    """Predicted share of cached tokens among the prompt tokens that were sent to the endpoint, 0 to
    1.
    """
    engine: float
    """Share of tokens found in the cache among the prompt tokens that the engine looked up for all
    its clients, 0 to 1.
    """
    low: float
    high: float
    """`low` and `high` are the bounds of the share of found tokens among this picker's requests
    alone.
    """
    known_share: float
    """Share of the engine's requests that this picker sent or peers reported, 0 to 1; 0 if the
    engine does not count requests.
    """
    tiers: Mapping[str, float] = field(default_factory=dict)
    """Share of the looked-up prompt tokens that the engine found in each tier; empty if it does not
    report tiers.
    """
    indexes: Mapping[str, float] = field(default_factory=dict)
    """Predicted share, like `predicted`, by each index of the joint match except the first, had it
    been used alone, by name of the index.
    """

    @property
    def error(self) -> float:
        """Return the distance of the predicted share of cached tokens from the range of the counted
        share.

        It is above 0 if the prediction was too high, below 0 if it was too low, and 0 if it lies
        within the range.
        """
        if self.predicted > self.high:
            return self.predicted - self.high
        return min(0.0, self.predicted - self.low)


class Correction(Struct, frozen=True, kw_only=True):
    """The error of the predictions of cache hits for one endpoint over its last windows, with which
    the index that predicts them corrects itself.
    """

    slot: int
    error: float
    """Distance of the predicted share of cached tokens at the endpoint from the range of the
    counted share (`HitComparison.error`): above 0 if the prediction was too high.
    """
    bytes_per_token: float
    """Average bytes per token of all prompts sent to the pool, or `BYTES_PER_TOKEN` if unknown."""


class ErrorHistogram:
    """A histogram of the errors of predicted cache hits: at the end of each window, one error over
    the endpoint's last windows.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(ERROR_BOUNDS) + 1)
        """Number of errors in each bucket of `ERROR_BOUNDS`. One more number at the end is for
        errors above all bounds.
        """
        self.total = 0.0

    def observe(self, error: float) -> None:
        """Count one error of predicted cache hits, a share of tokens from 0 to 1."""
        at = sum(error > bound for bound in ERROR_BOUNDS)
        self.counts[at] += 1
        self.total += error


class _Sums(Struct, kw_only=True):
    """The sums of requests and tokens at one endpoint in one window of the comparison, or in
    several windows with their weights.
    """

    known_requests: float = 0.0
    prompt_tokens: float = 0.0
    predicted_tokens: float = 0.0
    engine_requests: float = 0.0
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0
    tiers: dict[str, float] = field(default_factory=dict)
    indexes: dict[str, float] = field(default_factory=dict)

    def weighed(self, newer: "_Sums") -> "_Sums":
        """Return the sums of `newer` plus these sums with the weight `KEPT_SHARE`. Tiers and
        indexes are only those of `newer`.
        """
        return _Sums(
            known_requests=KEPT_SHARE * self.known_requests + newer.known_requests,
            prompt_tokens=KEPT_SHARE * self.prompt_tokens + newer.prompt_tokens,
            predicted_tokens=KEPT_SHARE * self.predicted_tokens + newer.predicted_tokens,
            engine_requests=KEPT_SHARE * self.engine_requests + newer.engine_requests,
            queried_tokens=KEPT_SHARE * self.queried_tokens + newer.queried_tokens,
            hit_tokens=KEPT_SHARE * self.hit_tokens + newer.hit_tokens,
            tiers=_added(self.tiers, newer.tiers),
            indexes=_added(self.indexes, newer.indexes),
        )


class _Slot:
    """The open window of one endpoint's comparison of cache hits, and the sums of its earlier
    windows.
    """

    __slots__ = (
        "base",
        "indexes",
        "kept",
        "model",
        "peer_requests",
        "predicted_tokens",
        "prompt_bytes",
        "prompt_tokens",
        "prompts",
        "since_s",
        "verdict",
    )

    def __init__(self) -> None:
        self.kept: _Sums | None = None
        self.verdict = Verdict.WAITING
        self.open(None, -math.inf)

    def open(self, base: EndpointMetrics | None, now: Seconds) -> None:
        """Start a window of the comparison at `now`, at which the engine's counters had the values
        in `base`. If `base` is None, the next scrape gives these values and starts the window anew.
        """
        self.base = base
        self.since_s = now
        self.prompts = 0
        self.peer_requests = 0
        self.prompt_bytes = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.indexes: dict[str, int] = {}
        self.model: str | None = None
        """Model of all requests in the window; "" if they name several models. It is None if there
        are no requests.
        """


class _TokenSize(Struct):
    """Sums of the bytes and of the tokens of the prompts for one model, or for all models of the
    pool. Sums of older windows weigh less.
    """

    prompt_bytes: float = 0.0
    tokens: float = 0.0

    def learn(self, prompt_bytes: float, tokens: float) -> None:
        self.prompt_bytes = KEPT_SHARE * self.prompt_bytes + prompt_bytes
        self.tokens = KEPT_SHARE * self.tokens + tokens

    @property
    def bytes_per_token(self) -> float | None:
        """Return the average bytes per token of the model's prompts, within bounds, or None if
        fewer than `EVIDENCE_TOKENS_MIN` tokens were measured.
        """
        if self.tokens < EVIDENCE_TOKENS_MIN:
            return None
        ratio = self.prompt_bytes / self.tokens
        return min(max(ratio, BYTES_PER_TOKEN_MIN), BYTES_PER_TOKEN_MAX)


class HitAccuracy:
    """The accuracy of a pool's predicted cache hits. The class has no clock and no randomness."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._models: dict[str, _TokenSize] = {}
        """Bytes per token of each model by its name, the least recently updated model first."""
        self._pool = _TokenSize()
        self.errors: Final = {side: ErrorHistogram() for side in Side}
        """Histograms of the errors at the ends of all measured windows of engines that count
        requests: one for too high and one for too low predictions. An error of 0 counts in both.
        """

    # Events.

    def decided(self, slot: int, model: str, expected: Expected) -> None:
        """Add the cache hit that one decision predicts to the open window of the endpoint in
        `slot`. Do nothing if its prompt is unknown; the request then counts as one of another
        client.
        """
        if not expected.prompt_tokens:
            return
        window = self._slot(slot)
        window.prompts += expected.prompts
        window.prompt_bytes += expected.prompt_bytes
        window.prompt_tokens += expected.prompt_tokens
        window.predicted_tokens += expected.predicted_tokens
        if window.model is None:
            window.model = model
        elif window.model != model:
            window.model = ""
        for name, tokens in expected.indexes.items():
            window.indexes[name] = window.indexes.get(name, 0) + tokens

    def withdrawn(self, slot: int, expected: Expected | None, decided_at_s: Seconds) -> None:
        """Remove the predicted cache hit `expected` from the open window of the endpoint in `slot`,
        because the request was not computed there. Do nothing if `expected` is None, if the prompt
        is unknown, or if the window began after the decision.
        """
        window = self._slot(slot)
        if expected is None or not expected.prompt_tokens or decided_at_s < window.since_s:
            return
        window.prompts = max(0, window.prompts - expected.prompts)
        window.prompt_bytes = max(0, window.prompt_bytes - expected.prompt_bytes)
        window.prompt_tokens = max(0, window.prompt_tokens - expected.prompt_tokens)
        window.predicted_tokens = max(0, window.predicted_tokens - expected.predicted_tokens)
        for name, tokens in expected.indexes.items():
            window.indexes[name] = max(0, window.indexes.get(name, 0) - tokens)

    def peer_decided(self, slot: int, at_s: Seconds) -> None:
        """Count a peer's request in the open window of the endpoint in `slot`, unless the peer
        decided before the window began.
        """
        window = self._slot(slot)
        if at_s >= window.since_s:
            window.peer_requests += 1

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> Correction | None:
        """Read the engine's counters of cache hits on a metrics page. If a window ends with this
        scrape, set the verdict and count the error. Return the error of the predictions over the
        last windows, or None if no window ends or if it does not count.
        """
        window = self._slot(slot)
        base = window.base
        if isnan(metrics.cache_queried_tokens) or isnan(metrics.cache_hit_tokens):
            window.verdict = Verdict.UNTOLD
            window.kept = None
            window.open(None, now)
            return None
        if base is None:
            if window.verdict is Verdict.UNTOLD:
                window.verdict = Verdict.WAITING
            window.open(metrics, now)
            return None
        lasted_s = now - window.since_s
        if window.prompts < WINDOW_REQUESTS_MIN or lasted_s < WINDOW_S_MIN:
            if lasted_s < WINDOW_S_MAX:
                return None
            if window.prompts < FEW_REQUESTS_MIN:
                window.verdict = Verdict.WAITING
                window.kept = None
                window.open(metrics, now)
                return None
        return self._end(slot, window, base, metrics, now)

    def forget(self, slot: int) -> None:
        """Drop the comparison of cache hits of `slot`, because its endpoint left or restarted."""
        if slot < len(self._slots):
            self._slots[slot] = _Slot()

    # Results.

    def comparison(self, slot: int) -> HitComparison | None:
        """Return the comparison of predicted and counted cache hits of the endpoint in `slot`.
        Return None if no window was measured, or if the last one could not be compared.
        """
        kept = self._slots[slot].kept if slot < len(self._slots) else None
        return None if kept is None else _compared(kept)

    def verdict(self, slot: int) -> Verdict:
        """Return the result of the last window of the comparison of cache hits for the endpoint in
        `slot`.
        """
        return self._slots[slot].verdict if slot < len(self._slots) else Verdict.WAITING

    def bytes_per_token(self, model: str) -> float | None:
        """Return the average bytes per token of prompts for `model`. Use the average of the pool if
        that is unknown, and return None if both are.
        """
        known = self._models.get(model)
        learnt = None if known is None else known.bytes_per_token
        return self._pool.bytes_per_token if learnt is None else learnt

    def models(self) -> Iterator[tuple[str, float]]:
        """Yield (model name, bytes per token) for each model whose bytes per token are known."""
        for model, size in self._models.items():
            learnt = size.bytes_per_token
            if learnt is not None:
                yield model, learnt

    # Windows.

    def _end(
        self,
        slot: int,
        window: _Slot,
        base: EndpointMetrics,
        metrics: EndpointMetrics,
        now: Seconds,
    ) -> Correction | None:
        newer = _Sums(
            known_requests=window.prompts + window.peer_requests,
            prompt_tokens=window.prompt_tokens,
            predicted_tokens=window.predicted_tokens,
            engine_requests=_rise(base.ttft_count, metrics.ttft_count),
            queried_tokens=metrics.cache_queried_tokens - base.cache_queried_tokens,
            hit_tokens=metrics.cache_hit_tokens - base.cache_hit_tokens,
            tiers=_risen(base.tier_hit_tokens, metrics.tier_hit_tokens),
            indexes=dict(window.indexes),
        )
        window.verdict = _judged(newer)
        if window.verdict is Verdict.MEASURED:
            self._learn_size(window, newer)
            window.kept = newer if window.kept is None else window.kept.weighed(newer)
        else:
            window.kept = None
        # An impossible page is not compared with the pages before and after it.
        usable = window.verdict in {Verdict.MEASURED, Verdict.STILL}
        window.open(metrics if usable else None, now)
        if window.kept is None:
            return None
        compared = _compared(window.kept)
        error = compared.error
        for side, wrong in ((Side.OVER, error), (Side.UNDER, -error)):
            if compared.known_share and wrong >= 0.0:
                self.errors[side].observe(abs(wrong))
        size = self._pool.bytes_per_token
        return Correction(
            slot=slot,
            error=error,
            bytes_per_token=float(BYTES_PER_TOKEN) if size is None else size,
        )

    def _learn_size(self, window: _Slot, newer: _Sums) -> None:
        if newer.engine_requests <= 0.0:
            return
        tokens = newer.queried_tokens / newer.engine_requests * window.prompts
        self._pool.learn(window.prompt_bytes, tokens)
        model = window.model
        if not model or len(model) > MODEL_CHARACTERS_MAX:
            return
        size = self._models.pop(model, None) or _TokenSize()
        size.learn(window.prompt_bytes, tokens)
        self._models[model] = size
        if len(self._models) > MODELS_MAX:
            del self._models[next(iter(self._models))]

    def _slot(self, number: int) -> _Slot:
        slots = self._slots
        while number >= len(slots):
            slots.append(_Slot())
        return slots[number]


def _judged(newer: _Sums) -> Verdict:
    if newer.queried_tokens < 0.0 or newer.hit_tokens < 0.0 or newer.engine_requests < 0.0:
        return Verdict.FELL
    if not newer.queried_tokens:
        return Verdict.STILL if not newer.hit_tokens else Verdict.IMPOSSIBLE
    if newer.hit_tokens > newer.queried_tokens or not math.isfinite(newer.queried_tokens):
        return Verdict.IMPOSSIBLE
    return Verdict.MEASURED


def _compared(kept: _Sums) -> HitComparison:
    engine = kept.hit_tokens / kept.queried_tokens
    share = 0.0
    if kept.engine_requests > 0.0:
        share = min(1.0, kept.known_requests / kept.engine_requests)
    low, high = 0.0, 1.0
    if share >= ALL_KNOWN_SHARE:
        low = high = engine
    elif share:
        # The other requests found all of their tokens, or none.
        low = max(0.0, (engine - (1.0 - share)) / share)
        high = min(1.0, engine / share)
    return HitComparison(
        predicted=_share(kept.predicted_tokens, kept.prompt_tokens),
        engine=engine,
        low=low,
        high=high,
        known_share=share,
        tiers={tier: tokens / kept.queried_tokens for tier, tokens in kept.tiers.items()},
        indexes={name: _share(tokens, kept.prompt_tokens) for name, tokens in kept.indexes.items()},
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _added(older: Mapping[str, float], newer: Mapping[str, float]) -> dict[str, float]:
    return {name: KEPT_SHARE * older.get(name, 0.0) + tokens for name, tokens in newer.items()}


def _rise(before: float, after: float) -> float:
    """Return the increase of a counter from `before` to `after`, or 0 if one of the two is NaN."""
    rise = after - before
    return 0.0 if isnan(rise) else rise


def _risen(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the increase of the counter of cache hits of each tier, by tier. Tiers that are
    missing in `before` or `after`, or whose counter fell, are omitted.
    """
    if not before or not after:
        return {}
    return {
        tier: count - before[tier]
        for tier, count in after.items()
        if tier in before and count >= before[tier]
    }
