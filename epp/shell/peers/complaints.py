"""Log problems between replicas at a bounded rate, however often other hosts cause them."""

from typing import Final

import structlog

from epp.core.types import Seconds

REPEAT_S: Final[Seconds] = 60.0

_log = structlog.get_logger(__name__)


class Complaints:
    """A rate limiter that logs each sentence at most once a minute, with the number of repetitions.

    Messages about recoveries are limited in the same way. All sentences are constants of the
    program; data of other hosts appears only in `details`.
    """

    def __init__(self, repeat_s: Seconds = REPEAT_S) -> None:
        self._repeat_s = repeat_s
        self._said_at_s: dict[str, Seconds] = {}
        self._since: dict[str, int] = {}

    def say(self, sentence: str, now: Seconds, **details: object) -> None:
        """Log the warning `sentence`, unless it was logged within the last minute."""
        if (times := self._due(sentence, now)) is not None:
            _log.warning(sentence, times=times, **details)

    def note(self, sentence: str, now: Seconds, **details: object) -> None:
        """Log a recovery as an informational message, unless `sentence` was logged within the last
        minute.
        """
        if (times := self._due(sentence, now)) is not None:
            _log.info(sentence, times=times, **details)

    def _due(self, sentence: str, now: Seconds) -> int | None:
        """Count an occurrence of `sentence`. Return the number of occurrences since it was last
        logged, or None if it may not be logged again yet.
        """
        times = self._since.get(sentence, 0) + 1
        said_at_s = self._said_at_s.get(sentence)
        if said_at_s is not None and now < said_at_s + self._repeat_s:
            self._since[sentence] = times
            return None
        self._said_at_s[sentence] = now
        self._since[sentence] = 0
        return times
