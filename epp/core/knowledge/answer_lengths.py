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
"""Minimum number of ended answers of an endpoint before its average length counts in the pool's
median.
"""
ANSWERS_REMEMBERED: Final = 256
"""Number of an endpoint's answers after which the weight of an older answer has halved."""
TOKENS_MIN: Final = 32.0
"""Lower bound of the average answer length in tokens. It is above 0, because the context of a
request always slows the requests that decode beside it.
"""
TOKENS_MAX: Final = 1e6
"""Upper bound of the average number of tokens per answer between two metrics pages. An increase of
the counters with more is ignored.
"""


class _Slot:
    """The answer counters of one endpoint since it started."""

    __slots__ = ("answers", "answers_total", "tokens", "tokens_total")

    def __init__(self) -> None:
        self.answers_total = self.tokens_total = math.nan
        """Values of the engine's counters of answers and of answer tokens on the last metrics page;
        NaN before the first page.
        """
        self.answers = self.tokens = 0.0
        """Number of ended answers and number of their tokens. Older answers weigh less."""

    def rose(self, answers: float, tokens: float) -> None:
        kept = 0.5 ** (answers / ANSWERS_REMEMBERED)
        self.answers = self.answers * kept + answers
        self.tokens = self.tokens * kept + tokens


class AnswerLengths:
    """The average number of tokens in the answers of a pool's endpoints. The class has no clock and
    no randomness.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self.tokens: float | None = None
        """Median over the pool's endpoints of the average number of tokens in an answer, at least
        `TOKENS_MIN`, at the last `tick`. It is None if no endpoint has `ANSWERS_MIN` answers.
        """

    def scraped(self, slot: int, metrics: EndpointMetrics) -> None:
        """Read the answer counters on a good metrics page of the endpoint in `slot`."""
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
        """Drop the answer counters of `slot`, because its endpoint left or restarted."""
        self._slots.pop(slot, None)

    def tick(self) -> None:
        """Compute `tokens`, the median of the endpoints' average answer lengths, from the metrics
        pages so far.
        """
        lengths = [
            one.tokens / one.answers for one in self._slots.values() if one.answers >= ANSWERS_MIN
        ]
        self.tokens = max(median(lengths), TOKENS_MIN) if lengths else None
