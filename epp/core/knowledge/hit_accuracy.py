"""How wrong belief is: what decisions predicted of an endpoint's cache, and what its engine counted.

Engines count prompt tokens that were looked up in their prefix cache and those that were there; the
picker counts, as it decides, what it sends and what it believes to be there. Both are compared over
*windows* of an endpoint, which end with a scrape. No response is read for that.

**Shares, not sums.** Our tokens may be estimates, and of several pickers each sees its own requests,
while an engine counts those of all. So shares of tokens are compared. They are of the same requests as
far as all of the engine's are ours or those of peers, which spread as ours do. How many others there are
the engine's own count of requests says: they may have found all or nothing, so that of ours a range
is known, and belief is wrong by what it is outside of that.

**Counters are not trusted.** Those that stand still while requests are sent, jump back, or say that
more was found than looked for make their window count for nothing, and the endpoint's verdict says so.

**What is old is not shown.** An endpoint that got too few requests to be measured is not compared at
all until it gets more.

**Bytes a token** of a model follow from the same windows: our bytes a prompt over the engine's tokens
a request. Both are means, so that requests of others change them only by being longer or shorter. An
image counts with the few bytes that are kept of it, for that is what it takes in an index.
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from math import isnan
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field

from epp.core.types import BYTES_PER_TOKEN, EndpointMetrics, Seconds

WINDOW_REQUESTS_MIN: Final = 32
"""A window has so many of our requests before it ends early."""
WINDOW_S_MIN: Final[Seconds] = 20.0
"""And lasts so long: what is sent shortly before its end is looked up after it."""
WINDOW_S_MAX: Final[Seconds] = 300.0
"""A window that lasts longer ends, and counts if it has `FEW_REQUESTS_MIN`."""
FEW_REQUESTS_MIN: Final = 8
"""With fewer what is known of an endpoint is given up."""
KEPT_SHARE: Final = 0.5
"""What a window weighs beside the next one."""
ALL_KNOWN_SHARE: Final = 0.95
"""Of its requests the engine is taken to have no others: counts are never of the same instant."""
BYTES_PER_TOKEN_MIN: Final = 1.0
BYTES_PER_TOKEN_MAX: Final = 16.0
EVIDENCE_TOKENS_MIN: Final = 16_384
"""Tokens from which on the bytes of one are taken to be known."""
MODELS_MAX: Final = 64
"""Of whose tokens the bytes are learnt; the one of which was heard longest ago makes room."""
MODEL_CHARACTERS_MAX: Final = 256
"""Of nothing with a longer name bytes are learnt: whoever asks for a model names it."""
ERROR_BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Of the histogram of errors, above 1.0 there is none."""
NO_INDEXES: Final[Mapping[str, int]] = MappingProxyType({})


class Verdict(StrEnum):
    """What the last window of an endpoint came to."""

    WAITING = "waiting"
    """There was none yet, or it had too few requests."""
    MEASURED = "measured"
    UNTOLD = "untold"
    """Its page has no such counters."""
    STILL = "still"
    """Requests were sent there and its counters did not move."""
    FELL = "fell"
    """A counter was less than before, though the engine did not restart."""
    IMPOSSIBLE = "impossible"
    """More was found than was looked for."""


class Side(StrEnum):
    """Belief is wrong by too much or too little."""

    OVER = "over"
    UNDER = "under"


class Expected(Struct, frozen=True, kw_only=True, gc=False):
    """What a decision expects of the cache of the endpoint that it chose."""

    prompt_tokens: int
    """0: the prompt is not known."""
    predicted_tokens: int
    """Those among them that are believed to be there."""
    prompt_bytes: int
    prompts: int = 1
    """Each is a request to the engine."""
    indexes: Mapping[str, int] = NO_INDEXES
    """Index beside the one that engines tell -> `predicted_tokens`, had it alone been asked."""


class HitComparison(Struct, frozen=True, kw_only=True):
    """Of one endpoint, over its last windows, each weighing half as much as the next."""

    predicted: float
    """Share of the prompt tokens sent there that were believed to be there, 0 to 1."""
    engine: float
    """Share of the prompt tokens looked up there that the engine found, whoever sent them."""
    low: float
    high: float
    """What the share of ours alone can be."""
    known_share: float
    """Of the engine's requests, ours and those that peers told of; 0: it does not count requests."""
    tiers: Mapping[str, float] = field(default_factory=dict)
    """Tier -> share of the prompt tokens that was found there, where the engine tells."""
    indexes: Mapping[str, float] = field(default_factory=dict)
    """Index beside the one that engines tell -> `predicted`, had it alone been asked."""

    @property
    def error(self) -> float:
        """Above 0: more is believed than is there, below: less; 0 where that cannot be said."""
        if self.predicted > self.high:
            return self.predicted - self.high
        return min(0.0, self.predicted - self.low)


class Correction(Struct, frozen=True, kw_only=True):
    """What a window says to an index whose predictions it compared."""

    slot: int
    error: float
    """As of `HitComparison`."""
    bytes_per_token: float
    """Of what is sent to the pool."""


class ErrorHistogram:
    """Errors of windows, by how large they were."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ERROR_BOUNDS) + 1)
        """The last one: above all bounds."""
        self.total = 0.0

    def observe(self, error: float) -> None:
        """`error`: 0 to 1."""
        at = sum(error > bound for bound in ERROR_BOUNDS)
        self.counts[at] += 1
        self.total += error


class _Sums(Struct, kw_only=True):
    """Of one window, or of several with their weights."""

    known_requests: float = 0.0
    prompt_tokens: float = 0.0
    predicted_tokens: float = 0.0
    engine_requests: float = 0.0
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0
    tiers: dict[str, float] = field(default_factory=dict)
    indexes: dict[str, float] = field(default_factory=dict)

    def weighed(self, newer: "_Sums") -> "_Sums":
        """`newer`, and this with less weight; of tiers and indexes those that `newer` has."""
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
    """The window that is open, and what is kept of those before it."""

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
        """A window begins with the counters of `base`; None: with those of the next scrape."""
        self.base = base
        self.since_s = now
        self.prompts = 0
        self.peer_requests = 0
        self.prompt_bytes = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.indexes: dict[str, int] = {}
        self.model: str | None = None
        """"" if there were several."""


class _TokenSize(Struct):
    """Bytes and tokens of one model, with what is older weighing less."""

    prompt_bytes: float = 0.0
    tokens: float = 0.0

    def learn(self, prompt_bytes: float, tokens: float) -> None:
        self.prompt_bytes = KEPT_SHARE * self.prompt_bytes + prompt_bytes
        self.tokens = KEPT_SHARE * self.tokens + tokens

    @property
    def bytes_per_token(self) -> float | None:
        """None: too little is known."""
        if self.tokens < EVIDENCE_TOKENS_MIN:
            return None
        ratio = self.prompt_bytes / self.tokens
        return min(max(ratio, BYTES_PER_TOKEN_MIN), BYTES_PER_TOKEN_MAX)


class HitAccuracy:
    """Depends on nothing but its arguments: the same calls tell the same in any process."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._models: dict[str, _TokenSize] = {}
        """In the order in which they were last learnt of."""
        self._pool = _TokenSize()
        self.errors: Final = {side: ErrorHistogram() for side in Side}
        """Of all windows that were measured; one without an error is in both at 0."""

    # What happens.

    def decided(self, slot: int, model: str, expected: Expected) -> None:
        """A request goes to `slot`. One whose prompt is not known counts as somebody else's."""
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

    def withdrawn(self, slot: int, expected: Expected, decided_at_s: Seconds) -> None:
        """A request that was decided then was not computed there."""
        window = self._slot(slot)
        if not expected.prompt_tokens or decided_at_s < window.since_s:
            return
        window.prompts = max(0, window.prompts - expected.prompts)
        window.prompt_bytes = max(0, window.prompt_bytes - expected.prompt_bytes)
        window.prompt_tokens = max(0, window.prompt_tokens - expected.prompt_tokens)
        window.predicted_tokens = max(0, window.predicted_tokens - expected.predicted_tokens)
        for name, tokens in expected.indexes.items():
            window.indexes[name] = max(0, window.indexes.get(name, 0) - tokens)

    def peer_decided(self, slot: int, at_s: Seconds) -> None:
        """A peer sent a request to `slot` then; what was before the window is no part of it."""
        window = self._slot(slot)
        if at_s >= window.since_s:
            window.peer_requests += 1

    def scraped(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> Correction | None:
        """Counters of the engine in `slot`; what the window says that ends with them, if one does."""
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
        """The endpoint in `slot` left or restarted."""
        if slot < len(self._slots):
            self._slots[slot] = _Slot()

    # What is known.

    def comparison(self, slot: int) -> HitComparison | None:
        """None: no window of its endpoint was measured, or the last one could not be."""
        kept = self._slots[slot].kept if slot < len(self._slots) else None
        return None if kept is None else _compared(kept)

    def verdict(self, slot: int) -> Verdict:
        """What the last window of its endpoint came to."""
        return self._slots[slot].verdict if slot < len(self._slots) else Verdict.WAITING

    def bytes_per_token(self, model: str) -> float | None:
        """Of prompts for a model; None: too little is known of it, and of the pool as a whole."""
        known = self._models.get(model)
        learnt = None if known is None else known.bytes_per_token
        return self._pool.bytes_per_token if learnt is None else learnt

    def models(self) -> Iterator[tuple[str, float]]:
        """(model, bytes a token) of those that are known."""
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
        # Nothing is compared with a page that says what cannot be, neither before nor after it.
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
        # The others found all of theirs, or nothing.
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
    """0: it is not told."""
    rise = after - before
    return 0.0 if isnan(rise) else rise


def _risen(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float]:
    """Of each tier; those of which both pages tell, and that did not fall."""
    if not before or not after:
        return {}
    return {
        tier: count - before[tier]
        for tier, count in after.items()
        if tier in before and count >= before[tier]
    }
