"""The warm-up that a sizing excludes, and the busiest part of the traffic, which it judges separately.

Caches are empty at the start of a run. A prompt that repeats text of a prompt one minute earlier misses
the cache in the first minute, and finds it from then on. The warm-up lasts until few such tokens are
missing. It is no longer than that, because the answer ignores excluded traffic. Text of a session that
begins in the trace was in no cache before, so it needs no warm-up.

All times are of the trace. A run at X times the load excludes the same part of the trace, which takes
an X-th of the time there.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.types import Seconds
from sim.measurement.measures import OUTPUT_WEIGHT, Floats, busiest_from_s
from sim.measurement.summaries import WarmUpSummary
from sim.traces.arrival import Arrival

COLD_SHARE: Final = 0.05
"""Share of the prompt tokens that may miss a cache because it was empty at the start."""
EXCLUDED_CHOSEN: Final = 0.2
"""Maximum share of the requests that an automatically chosen warm-up excludes."""
EXCLUDED_WARNED: Final = 0.25
BUSIEST_S: Final[Seconds] = 60.0
BUSIEST_REQUESTS: Final = 200
"""Requests in the busiest part at the mean rate; with fewer, its percentiles would mean little."""
BUSIER: Final = 1.1
"""Ratio to the work of all later parts above which a part is the busiest, and not so by chance."""
TEXTS_MAX: Final = 10_000_000
"""Maximum number of remembered texts; later ones count as new each time."""
_SHARED: Final = "\0"
"""Owner of a text that several sessions used; no session has this name."""


class WarmUp(Struct, frozen=True, kw_only=True):
    """The excluded warm-up and the busiest part, in the trace's time."""

    seconds: Seconds
    given: bool
    needed_s: Seconds
    share_excluded: float
    busiest_s: Seconds
    busiest_from_s: Seconds
    busiest_excluded: bool

    @property
    def warning(self) -> str:
        """Warning about the exclusion for readers of the answer; "" if none is needed."""
        told = []
        if self.share_excluded > EXCLUDED_WARNED:
            told.append(f"{self.share_excluded:.0%} of the requests")
        if self.busiest_excluded:
            told.append(f"the busiest part of the traffic (from {self.busiest_from_s:,.0f} s on)")
        if not told:
            return ""
        return (
            f"The warm-up of {self.seconds:,.4g} s excludes {' and '.join(told)}, so the answer may be "
            f"too small. Leave out --warm-up to exclude no more than caches need ({self.needed_s:,.4g} s), "
            "or use a longer trace."
        )

    def summary(self) -> WarmUpSummary:
        """Return its form in summary.json."""
        return WarmUpSummary(
            seconds=self.seconds,
            needed_s=self.needed_s,
            given=self.given,
            share_excluded=self.share_excluded,
            busiest_s=self.busiest_s,
            busiest_from_s=self.busiest_from_s,
            busiest_excluded=self.busiest_excluded,
            warning=self.warning,
        )


def warm_up_of(
    arrivals: Iterable[Arrival], *, generated: bool, given_s: Seconds | None = None
) -> WarmUp:
    """Return the warm-up for a trace in order of time.

    `given_s` is the user's warm-up, or None to choose one. A chosen warm-up is as long as the caches
    need, but excludes at most `EXCLUDED_CHOSEN` of the requests and not the busiest part.

    In a `generated` trace, a session begins with its first turn there. In a recording it may have
    begun before. The function uses about 200 bytes of memory for each text and 24 for each request.
    Raises as iterating does, and `ValueError` if there are no requests.
    """
    reuse = _Reuse(generated=generated)
    for arrival in arrivals:
        reuse.add(arrival)
    if not reuse.times_s:
        raise ValueError("no requests")
    times_s = np.array(reuse.times_s) - reuse.times_s[0]
    work = np.array(reuse.work)
    span_s = float(times_s[-1])
    busiest_s = min(max(BUSIEST_S, BUSIEST_REQUESTS * span_s / len(times_s)), max(span_s, 1.0))
    busiest = busiest_from_s(times_s, work, busiest_s)
    seconds = given_s
    if seconds is None:
        seconds = min(reuse.needed_s(), float(times_s[int(EXCLUDED_CHOSEN * len(times_s))]))
        if _excludes(seconds, times_s, work, busiest_s):
            seconds = busiest
    return WarmUp(
        seconds=seconds,
        given=given_s is not None,
        needed_s=reuse.needed_s(),
        share_excluded=float(np.mean(times_s < seconds)),
        busiest_s=busiest_s,
        busiest_from_s=busiest,
        busiest_excluded=_excludes(seconds, times_s, work, busiest_s),
    )


def _excludes(seconds: Seconds, times_s: Floats, work: Floats, length_s: Seconds) -> bool:
    """Return whether the rest of the trace has no part that is nearly as busy as the busiest."""
    left = times_s >= seconds
    busiest = _work_of_busiest(times_s, work, length_s)
    return busiest > BUSIER * _work_of_busiest(times_s[left], work[left], length_s)


def _work_of_busiest(times_s: Floats, work: Floats, length_s: Seconds) -> float:
    start_s = busiest_from_s(times_s, work, length_s)
    return float(work[(times_s >= start_s) & (times_s < start_s + length_s)].sum())


class _Reuse:
    """Reuse of text in one infinite cache: the time since the last use of each prompt's text."""

    def __init__(self, *, generated: bool) -> None:
        self._generated = generated
        self.times_s: list[Seconds] = []
        self.work: list[float] = []
        """Work of each request in prompt tokens: its output, and its text that no cache could have
        had.
        """
        self._prompt_tokens = 0
        self._tokens_by_gap_s: Counter[int] = Counter()
        """Tokens that may have been cached before the trace, by whole seconds since their last use."""
        self._last: dict[int, _Use] = {}
        """Last use by text."""
        self._begun: set[str] = set()
        """Sessions whose first turn is in the trace."""

    def add(self, arrival: Arrival) -> None:
        """Count one request."""
        now_s, session = arrival.time_s, arrival.session
        if self._generated and session and not arrival.turn:
            self._begun.add(session)
        reused = self._reused(arrival)
        self._prompt_tokens += arrival.prompt_tokens
        self.times_s.append(now_s)
        self.work.append(arrival.prompt_tokens - reused + OUTPUT_WEIGHT * arrival.output_tokens)
        if arrival.answer is not None:
            self._use(arrival.answer, arrival, first=None)

    def needed_s(self) -> Seconds:
        """Return the time after which the tokens missing from an initially empty cache are below
        `COLD_SHARE`.
        """
        left = float(sum(self._tokens_by_gap_s.values()))
        allowed = COLD_SHARE * self._prompt_tokens
        needed_s = 0
        for gap_s in sorted(self._tokens_by_gap_s):
            if left <= allowed:
                break
            needed_s = gap_s + 1
            left -= self._tokens_by_gap_s[gap_s]
        return float(needed_s)

    def _reused(self, arrival: Arrival) -> int:
        """Return how many tokens of the prompt's head were used before, and record the prompt."""
        reused, head = 0, True
        for text, tokens in arrival.spans():
            last = self._last.get(text)
            head = head and last is not None
            if head and last is not None:
                reused += tokens
                if last.owner != arrival.session or arrival.session not in self._begun:
                    self._tokens_by_gap_s[int(arrival.time_s - last.at_s)] += tokens
                    self._was_cached(last, tokens)
            self._use(text, arrival, first=len(self.times_s))
        return reused

    def _was_cached(self, last: "_Use", tokens: int) -> None:
        """Subtract text that others use too from the work of its first use: a warm cache has it."""
        if last.first is not None:
            self.work[last.first] -= tokens
            last.first = None

    def _use(self, text: int, arrival: Arrival, first: int | None) -> None:
        last = self._last.get(text)
        if last is not None:
            last.at_s = arrival.time_s
            last.owner = last.owner if last.owner == arrival.session else _SHARED
        elif len(self._last) < TEXTS_MAX:
            self._last[text] = _Use(arrival.time_s, arrival.session, first)


class _Use(Struct):
    """The last use of a text, and its first."""

    at_s: Seconds
    owner: str
    """The only session that used it, or `_SHARED`."""
    first: int | None
    """Number of the request whose work includes the text, or None once others have used it."""
