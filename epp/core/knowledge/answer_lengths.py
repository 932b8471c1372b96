"""The average length of answers, from the engines' counters of ended answers.

Engines count answers and their tokens. The increase of both from one page to the next gives the
length of the answers that ended in between. Recent answers of an endpoint weigh more than old ones.
The pool's value is the median of its endpoints, so one endpoint with wrong counters has no effect.
"""

import math
from statistics import median
from typing import Final

from epp.core.types import EndpointMetrics

ANSWERS_MIN: Final = 16
"""Minimum number of answers before an endpoint counts."""
ANSWERS_REMEMBERED: Final = 256
"""Number of answers after which the weight of an older answer has halved."""
TOKENS_MIN: Final = 32.0
"""Lower bound of the average. A context always costs the requests that decode beside it something."""
TOKENS_MAX: Final = 1e6
"""Upper bound of tokens per answer; a larger increase is ignored."""


class _Slot:
    """The counters of one endpoint since it started."""

    __slots__ = ("answers", "answers_total", "tokens", "tokens_total")

    def __init__(self) -> None:
        self.answers_total = self.tokens_total = math.nan
        """Counters on the last page that had them."""
        self.answers = self.tokens = 0.0
        """Decayed sums of answers and of their tokens."""

    def rose(self, answers: float, tokens: float) -> None:
        kept = 0.5 ** (answers / ANSWERS_REMEMBERED)
        self.answers = self.answers * kept + answers
        self.tokens = self.tokens * kept + tokens


class AnswerLengths:
    """The average answer length of a pool. It depends only on its arguments."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self.tokens: float | None = None
        """Average number of tokens in an answer of the pool at the last `tick`, or None if too
        little is known.
        """

    def scraped(self, slot: int, metrics: EndpointMetrics) -> None:
        """Read a good page of the endpoint in `slot`."""
        answers_total, tokens_total = metrics.answers_total, metrics.answer_tokens_total
        known = self._slots.get(slot)
        if known is None:
            if math.isnan(answers_total):
                return
            known = self._slots[slot] = _Slot()
        answers = answers_total - known.answers_total
        # No answer has ended since the last page, as in most cases.
        if answers == 0.0:
            return
        tokens = tokens_total - known.tokens_total
        known.answers_total, known.tokens_total = answers_total, tokens_total
        # The comparison also rejects NaN, if one of the two pages had no value.
        if 0.0 < answers < math.inf and 0.0 <= tokens <= answers * TOKENS_MAX:
            known.rose(answers, tokens)

    def forget(self, slot: int) -> None:
        """Drop the counters of `slot`, because its endpoint left or restarted."""
        self._slots.pop(slot, None)

    def tick(self) -> None:
        """Compute `tokens` from the pages so far."""
        lengths = [
            one.tokens / one.answers for one in self._slots.values() if one.answers >= ANSWERS_MIN
        ]
        self.tokens = max(median(lengths), TOKENS_MIN) if lengths else None
