"""How long answers are, by what engines count of those that have ended.

Engines count answers and their tokens: what both have risen by from one page to the next is how long the
answers were that ended between them. Of one endpoint the last answers count, of the pool the median of
its endpoints, so that one that counts wrongly, or says what cannot be, moves nobody.
"""

import math
from statistics import median
from typing import Final

from epp.core.types import EndpointMetrics

ANSWERS_MIN: Final = 16
"""Of one endpoint; of fewer it says nothing."""
ANSWERS_REMEMBERED: Final = 256
"""Of one endpoint, of which the older count half as much as the newer."""
TOKENS_MIN: Final = 32.0
"""As if no answer were shorter on average: what a context costs who decodes beside it is never nothing."""
TOKENS_MAX: Final = 1e6
"""Of more for each answer a rise is not believed."""


class _Slot:
    """Of one life of one endpoint."""

    __slots__ = ("answers", "answers_total", "tokens", "tokens_total")

    def __init__(self) -> None:
        self.answers_total = self.tokens_total = math.nan
        """As of the last page that told."""
        self.answers = self.tokens = 0.0
        """Those that are remembered, the older ones as fewer."""

    def rose(self, answers: float, tokens: float) -> None:
        kept = 0.5 ** (answers / ANSWERS_REMEMBERED)
        self.answers = self.answers * kept + answers
        self.tokens = self.tokens * kept + tokens


class AnswerLengths:
    """Depends on nothing but its arguments: the same calls tell the same in any process."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self.tokens: float | None = None
        """Of an answer of the pool on average, as of the last `tick`; None: too little is known."""

    def scraped(self, slot: int, metrics: EndpointMetrics) -> None:
        """A good page of the endpoint in `slot`."""
        answers_total, tokens_total = metrics.answers_total, metrics.answer_tokens_total
        known = self._slots.get(slot)
        if known is None:
            if math.isnan(answers_total):
                return
            known = self._slots[slot] = _Slot()
        answers = answers_total - known.answers_total
        # Most pages: none has ended.
        if answers == 0.0:
            return
        tokens = tokens_total - known.tokens_total
        known.answers_total, known.tokens_total = answers_total, tokens_total
        # NaN too: one of the two pages did not tell.
        if 0.0 < answers < math.inf and 0.0 <= tokens <= answers * TOKENS_MAX:
            known.rose(answers, tokens)

    def forget(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted."""
        self._slots.pop(slot, None)

    def tick(self) -> None:
        """Make `tokens` of what pages have told."""
        lengths = [
            one.tokens / one.answers for one in self._slots.values() if one.answers >= ANSWERS_MIN
        ]
        self.tokens = max(median(lengths), TOKENS_MIN) if lengths else None
