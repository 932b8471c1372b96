"""smg's `bucket`: each endpoint gets prompts of a range of lengths, chosen so that all prefill as much."""

import bisect
import math
from collections import deque
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.core.duration import Duration, check_above_zero
from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Candidates,
    Floats,
    InferenceRequest,
    Parameters,
    Seconds,
)
from epp.strategies.narrowing import least_of, only
from epp.strategies.strategy import Strategy, config_of, producer, step

_WINDOW_TOKENS: Final = "window_tokens"
"""Column: prompt tokens routed to each endpoint within the window."""
_SHORTER_SHARE: Final = "shorter_share"
"""Column: of all tokens of the window, as last fitted, the share in shorter prompts; one for all."""
_REFIT_RATIO: Final = 2.0


class LengthBucketsSettings(Parameters, frozen=True):
    """`length-buckets-producer`: lengths of what was routed within the last seconds."""

    type_name: ClassVar[str] = "length-buckets-producer"
    abilities: ClassVar[Abilities] = Abilities()

    window: Duration = Duration(5.0)
    requests_max: Annotated[int, Meta(ge=1)] = 8_192
    """Of a window; the oldest of more are dropped early."""
    first_range_tokens: Annotated[float, Meta(gt=0)] = 4_096.0
    """Until something was seen, lengths are taken to be spread evenly up to here."""

    def __post_init__(self) -> None:
        check_above_zero("window", self.window)

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return LengthBuckets(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply everything to a running index."""
        return isinstance(index, LengthBuckets) and index.configure(self)


class _Routed:
    """One request of the window."""

    __slots__ = ("at_s", "slot", "tokens")

    def __init__(self, at_s: Seconds, slot: int, tokens: int) -> None:
        self.at_s = at_s
        self.slot = slot
        self.tokens = tokens
        """0 once it was taken back."""


class LengthBuckets:
    """How many tokens each endpoint was sent lately, and how long prompts are lately.

    It knows nothing of what endpoints hold: `matched` is 0 of 0.
    """

    def __init__(self, settings: LengthBucketsSettings) -> None:
        self._window: deque[_Routed] = deque()
        self._tokens: list[int] = []
        """By slot, within the window."""
        self._fitted_at_s: Seconds = -math.inf
        self._lengths: list[int] = []
        """Ascending, of the window when it was last fitted."""
        self._shorter: list[int] = []
        """Tokens in all up to the prompt at the same position."""
        self.configure(settings)

    def configure(self, settings: LengthBucketsSettings) -> bool:
        """Adopt `settings`; what is too much for them goes with the next request."""
        self._window_s = float(settings.window)
        self._requests_max = settings.requests_max
        self._first_range_tokens = settings.first_range_tokens
        return True

    def __len__(self) -> int:
        return len(self._window)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """The two columns."""
        tokens = np.zeros(max(slots, len(self._tokens)))
        tokens[: len(self._tokens)] = self._tokens
        columns = {
            _WINDOW_TOKENS: tokens[:slots],
            _SHORTER_SHARE: np.full(slots, self._shorter_share(request.prompt_tokens)),
        }
        return Affinity(np.zeros(slots, dtype=np.int64), 0, columns)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> _Routed:
        """`slot` gets the tokens of `request`."""
        routed = _Routed(now, slot, request.prompt_tokens)
        self._window.append(routed)
        self._tokens.extend([0] * (slot + 1 - len(self._tokens)))
        self._tokens[slot] += routed.tokens
        self._drop_before(now - self._window_s)
        return routed

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` does not get them."""
        self._tokens[slot] -= recorded.tokens
        recorded.tokens = 0

    def forget(self, slot: int) -> None:
        """The next endpoint in `slot` was sent nothing."""
        for routed in self._window:
            if routed.slot == slot:
                self._tokens[slot] -= routed.tokens
                routed.tokens = 0

    def expire(self, now: Seconds) -> None:
        """Let go what is older than the window; once a window, fit the lengths anew."""
        self._drop_before(now - self._window_s)
        if now - self._fitted_at_s < self._window_s:
            return
        self._fitted_at_s = now
        lengths = sorted(routed.tokens for routed in self._window if routed.tokens)
        total = sum(lengths)
        before = self._shorter[-1] if self._shorter else 0
        changed = not before or not before / _REFIT_RATIO <= total <= before * _REFIT_RATIO
        if total and changed:
            self._lengths = lengths
            self._shorter = list(accumulate(lengths))

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The size of an engine's cache does not matter here."""

    def _shorter_share(self, tokens: int) -> float:
        if not self._lengths:
            return min(tokens / self._first_range_tokens, 1.0)
        shorter = bisect.bisect_left(self._lengths, tokens)
        return self._shorter[shorter - 1] / self._shorter[-1] if shorter else 0.0

    def _drop_before(self, cutoff_s: Seconds) -> None:
        window = self._window
        while window and (window[0].at_s < cutoff_s or len(window) > self._requests_max):
            gone = window.popleft()
            self._tokens[gone.slot] -= gone.tokens
            gone.tokens = 0


class LengthBucket(Parameters, frozen=True):
    """Bucket number floor(n * share of all tokens that is in shorter prompts), of n endpoints.

    If the tokens that endpoints were sent within 5 s are more than `balance_abs` apart, and the most
    are more than `balance_rel` times the least: the fewest tokens. Source: smg, `bucket`, which it
    offers for prefill endpoints.

    Differs: bounds are quantiles of the window's tokens, where the original fills one bucket after
    the other; n are the candidates in the order of the list. Lengths are tokens, as there for
    requests that come tokenised. They are fitted anew when the window's tokens are twice or half of
    what they were, once every 5 s, as there.
    Kept: 32 tokens are less than one prompt, so that in nearly all traffic the fewest tokens decide
    and the buckets hardly ever.
    """

    type_name: ClassVar[str] = "length-bucket-scorer"
    producer_type: ClassVar[str] = LengthBucketsSettings.type_name

    balance_abs: Annotated[float, Meta(ge=0)] = 32.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.0001

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        n = len(candidates)
        columns = candidates.affinity(self.producer_type).columns
        tokens = columns.get(_WINDOW_TOKENS, np.zeros(n))
        least, most = float(tokens.min()), float(tokens.max())
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return only(least_of(tokens))
        share = float(columns.get(_SHORTER_SHARE, np.zeros(n))[0])
        scores = np.zeros(n)
        scores[min(int(n * share), n - 1)] = 1.0
        return scores


INDEXES: Final = (LengthBucketsSettings,)

SCORERS: Final = (LengthBucket,)

STRATEGIES: Final = (
    Strategy(
        name="smg-bucket",
        idea="smg bucket: prompts by length, or who was sent the fewest tokens in the last 5 s.",
        config=config_of(producer(LengthBucketsSettings.type_name), step(LengthBucket.type_name)),
    ),
)
