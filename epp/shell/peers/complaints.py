"""What goes wrong between replicas, as lines of the log that nobody else can multiply."""

from typing import Final

import structlog

from epp.core.types import Seconds

REPEAT_S: Final[Seconds] = 60.0

_log = structlog.get_logger(__name__)


class Complaints:
    """One line a minute for each sentence, with how often it would have been said since the last.

    Where there is something good to tell it is as rare. Sentences are written here in the program; what others send only fills `details`.
    """

    def __init__(self, repeat_s: Seconds = REPEAT_S) -> None:
        self._repeat_s = repeat_s
        self._said_at_s: dict[str, Seconds] = {}
        self._since: dict[str, int] = {}

    def say(self, sentence: str, now: Seconds, **details: object) -> None:
        """As a warning."""
        if (times := self._due(sentence, now)) is not None:
            _log.warning(sentence, times=times, **details)

    def note(self, sentence: str, now: Seconds, **details: object) -> None:
        """As a piece of information: what goes well again."""
        if (times := self._due(sentence, now)) is not None:
            _log.info(sentence, times=times, **details)

    def _due(self, sentence: str, now: Seconds) -> int | None:
        """How often it would have been said since the last time; None: not to be said yet."""
        times = self._since.get(sentence, 0) + 1
        said_at_s = self._said_at_s.get(sentence)
        if said_at_s is not None and now < said_at_s + self._repeat_s:
            self._since[sentence] = times
            return None
        self._said_at_s[sentence] = now
        self._since[sentence] = 0
        return times
