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
"""Number of our requests after which a window may end before `WINDOW_S_MAX`."""
WINDOW_S_MIN: Final[Seconds] = 20.0
"""Shortest duration of a window, because an engine looks up the last requests of a window after its
end.
"""
WINDOW_S_MAX: Final[Seconds] = 300.0
"""Longest duration of a window; it then counts if it has `FEW_REQUESTS_MIN` requests."""
FEW_REQUESTS_MIN: Final = 8
"""Number of requests below which the earlier results of an endpoint are dropped."""
KEPT_SHARE: Final = 0.5
"""Weight of a window relative to the next one."""
ALL_KNOWN_SHARE: Final = 0.95
"""Share of known requests from which an engine counts as having no others; the two counts never
match in time.
"""
BYTES_PER_TOKEN_MIN: Final = 1.0
BYTES_PER_TOKEN_MAX: Final = 16.0
EVIDENCE_TOKENS_MIN: Final = 16_384
"""Number of tokens from which the bytes per token count as known."""
MODELS_MAX: Final = 64
"""Maximum number of models with known bytes per token; the one that was updated longest ago is
dropped.
"""
MODEL_CHARACTERS_MAX: Final = 256
"""Longest name of a model whose bytes per token are learnt, because clients choose the names."""
ERROR_BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Upper bounds of the histogram of errors; no error exceeds 1.0."""
NO_INDEXES: Final[Mapping[str, int]] = MappingProxyType({})


class Verdict(StrEnum):
    """The result of the last window of an endpoint."""

    WAITING = "waiting"
    """No window has ended yet, or the last one had too few requests."""
    MEASURED = "measured"
    UNTOLD = "untold"
    """The page has no such counters."""
    STILL = "still"
    """The counters did not change although requests were sent."""
    FELL = "fell"
    """A counter was lower than before, although the engine did not restart."""
    IMPOSSIBLE = "impossible"
    """More tokens were found than looked up."""


class Side(StrEnum):
    """The direction of an error: the prediction was too high or too low."""

    OVER = "over"
    UNDER = "under"


class Expected(Struct, frozen=True, kw_only=True, gc=False):
    """The cache hit that a decision predicts for its endpoint."""

    prompt_tokens: int
    """Number of prompt tokens; 0 if the prompt is unknown."""
    predicted_tokens: int
    """Number of prompt tokens that are predicted to be cached."""
    prompt_bytes: int
    prompts: int = 1
    """Number of prompts, each of which is a request to the engine."""
    indexes: Mapping[str, int] = NO_INDEXES
    """Prediction by each index other than the one fed by engines, had it been used alone."""


def expected_hit(
    request: InferenceRequest,
    cached_tokens: int,
    candidates: Candidates,
    position: int,
    others: Sequence[str],
) -> Expected:
    """Return the prediction that the candidate at `position` has `cached_tokens` cached.

    `others` are the names of the indexes whose predictions are compared too.
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
    """The comparison of one endpoint over its last windows, each with half the weight of the next."""

    predicted: float
    """Predicted share of cached tokens among the prompt tokens sent there, 0 to 1."""
    engine: float
    """Share of found tokens among the prompt tokens that the engine looked up, from all senders."""
    low: float
    high: float
    """Range of the possible share of our requests alone: `low` to `high`."""
    known_share: float
    """Share of the engine's requests that are ours or were shared by peers; 0 if it does not count
    requests.
    """
    tiers: Mapping[str, float] = field(default_factory=dict)
    """Share of the prompt tokens that was found in each tier, if the engine reports it."""
    indexes: Mapping[str, float] = field(default_factory=dict)
    """Value of `predicted` by each index other than the one fed by engines, had it been used alone."""

    @property
    def error(self) -> float:
        """Return the error: above 0 if too much was predicted, below 0 if too little; 0 if unknown."""
        if self.predicted > self.high:
            return self.predicted - self.high
        return min(0.0, self.predicted - self.low)


class Correction(Struct, frozen=True, kw_only=True):
    """A window's result for the index whose predictions it compared."""

    slot: int
    error: float
    """Error as defined in `HitComparison`."""
    bytes_per_token: float
    """Average bytes per token of all prompts sent to the pool."""


class ErrorHistogram:
    """A histogram of the errors of windows."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ERROR_BOUNDS) + 1)
        """Counts by bound; the last one is for errors above all bounds."""
        self.total = 0.0

    def observe(self, error: float) -> None:
        """Count an error of 0 to 1."""
        at = sum(error > bound for bound in ERROR_BOUNDS)
        self.counts[at] += 1
        self.total += error


class _Sums(Struct, kw_only=True):
    """The sums of one window, or of several with their weights."""

    known_requests: float = 0.0
    prompt_tokens: float = 0.0
    predicted_tokens: float = 0.0
    engine_requests: float = 0.0
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0
    tiers: dict[str, float] = field(default_factory=dict)
    indexes: dict[str, float] = field(default_factory=dict)

    def weighed(self, newer: "_Sums") -> "_Sums":
        """Return `newer` plus this with less weight; tiers and indexes are those of `newer`."""
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
    """The open window of a slot, and the results of earlier ones."""

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
        """Start a window with the counters of `base`, or with those of the next scrape if `base` is
        None.
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
        """Model of all requests in the window, "" if there were several, or None without requests."""


class _TokenSize(Struct):
    """The bytes and tokens of one model; older values weigh less."""

    prompt_bytes: float = 0.0
    tokens: float = 0.0

    def learn(self, prompt_bytes: float, tokens: float) -> None:
        self.prompt_bytes = KEPT_SHARE * self.prompt_bytes + prompt_bytes
        self.tokens = KEPT_SHARE * self.tokens + tokens

    @property
    def bytes_per_token(self) -> float | None:
        """Return the bytes per token, or None if too little is known."""
        if self.tokens < EVIDENCE_TOKENS_MIN:
            return None
        ratio = self.prompt_bytes / self.tokens
        return min(max(ratio, BYTES_PER_TOKEN_MIN), BYTES_PER_TOKEN_MAX)


class HitAccuracy:
    """The accuracy of a pool's predictions. It depends only on its arguments."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._models: dict[str, _TokenSize] = {}
        """Token sizes by model, in the order of their last update."""
        self._pool = _TokenSize()
        self.errors: Final = {side: ErrorHistogram() for side in Side}
        """Histograms of all measured windows; a window without error counts as 0 in both."""

    # Events.

    def decided(self, slot: int, model: str, expected: Expected) -> None:
        """Count a decision for `slot`. A request with an unknown prompt counts as a request of
        others.
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
        """Undo the count of a request that was not computed at `slot`; do nothing without a
        prediction.
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
        """Count a peer's decision for `slot`, unless it was made before the window."""
        window = self._slot(slot)
        if at_s >= window.since_s:
            window.peer_requests += 1

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> Correction | None:
        """Read the engine's counters. Return the correction of the window that ends here, or None."""
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
        """Drop the results of `slot`, because its endpoint left or restarted."""
        if slot < len(self._slots):
            self._slots[slot] = _Slot()

    # Results.

    def comparison(self, slot: int) -> HitComparison | None:
        """Return the comparison of `slot`, or None if no window was measured or the last one could
        not be.
        """
        kept = self._slots[slot].kept if slot < len(self._slots) else None
        return None if kept is None else _compared(kept)

    def verdict(self, slot: int) -> Verdict:
        """Return the result of the last window of `slot`."""
        return self._slots[slot].verdict if slot < len(self._slots) else Verdict.WAITING

    def bytes_per_token(self, model: str) -> float | None:
        """Return the bytes per token of prompts for a model, or of the pool; None if too little is
        known.
        """
        known = self._models.get(model)
        learnt = None if known is None else known.bytes_per_token
        return self._pool.bytes_per_token if learnt is None else learnt

    def models(self) -> Iterator[tuple[str, float]]:
        """Yield (model, bytes per token) for each model with a known size."""
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
    """Return the increase, or 0 if a value is unknown."""
    rise = after - before
    return 0.0 if isnan(rise) else rise


def _risen(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the increase of each tier that both pages report and that did not fall."""
    if not before or not after:
        return {}
    return {
        tier: count - before[tier]
        for tier, count in after.items()
        if tier in before and count >= before[tier]
    }
