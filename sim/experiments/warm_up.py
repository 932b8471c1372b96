"""The warm-up that `sim size` excludes from figures, and the busiest part of the traffic, which it
judges separately.

Caches are empty at the start of a run. A prompt that repeats text of a prompt one minute earlier
misses the cache in the first minute, and finds it from then on. The warm-up lasts until few such
tokens are missing. It is no longer than that, because excluded traffic does not influence the
result. Text of a session that begins in the trace was in no cache before, so it needs no warm-up.

All times are in seconds of the trace's clock. A run at X times the load excludes the same part of
the trace, which takes an X-th of the time there.
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
"""Maximum share of all prompt tokens of the trace that may miss a cache because it was empty at the
start, after a warm-up that is as long as caches need.
"""
EXCLUDED_CHOSEN: Final = 0.2
"""Maximum share of the requests that an automatically chosen warm-up excludes."""
EXCLUDED_WARNED: Final = 0.25
BUSIEST_S: Final[Seconds] = 60.0
BUSIEST_REQUESTS: Final = 200
"""Minimum number of requests that the busiest part has at the mean rate, unless the trace is
shorter; with fewer requests, its percentiles would mean little.
"""
BUSIER_RATIO: Final = 1.1
"""Ratio between the work of the busiest part of a trace and of the busiest one after the warm-up.
Above it, the difference is not attributed to chance, and the warm-up is said to exclude the busiest
part.
"""
TEXTS_MAX: Final = 10_000_000
"""Maximum number of distinct texts whose last use is stored; further texts count as new each
time.
"""
_SHARED: Final = "\0"
"""Value of `_Use.owner` for a text that several sessions used; no session has this name."""


class WarmUp(Struct, frozen=True, kw_only=True):
    """The warm-up that is excluded and the busiest part of a trace, in seconds of the trace's
    clock.
    """

    seconds: Seconds
    given: bool
    needed_s: Seconds
    share_excluded: float
    busiest_s: Seconds
    busiest_from_s: Seconds
    busiest_excluded: bool

    @property
    def warning(self) -> str:
        """Warning for readers of the result if the warm-up excludes much of the traffic or its
        busiest part; "" if it does not.
        """
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
        """Return the warm-up in the form of summary.json."""
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
    """Return the warm-up and the busiest part for `arrivals`, which are in order of time.

    `given_s` is the warm-up in seconds that the user chose, or None to determine one. A determined
    warm-up is as long as the caches need, but excludes at most `EXCLUDED_CHOSEN` of the requests
    and not the busiest part.

    In a `generated` trace, a session begins with its first turn there. In a recording it may have
    begun before. The function uses about 200 bytes of memory for each text and 80 for each request.
    Raises what iterating over `arrivals` raises, and `ValueError` if there are no requests.
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
    """Return whether a warm-up of `seconds` excludes the busiest part: no part of `length_s` after
    the warm-up is nearly as busy.
    """
    left = times_s >= seconds
    busiest = _work_of_busiest(times_s, work, length_s)
    return busiest > BUSIER_RATIO * _work_of_busiest(times_s[left], work[left], length_s)


def _work_of_busiest(times_s: Floats, work: Floats, length_s: Seconds) -> float:
    start_s = busiest_from_s(times_s, work, length_s)
    return float(work[(times_s >= start_s) & (times_s < start_s + length_s)].sum())


class _Reuse:
    """Reuse of prompt texts in one cache of unlimited size: how long ago each text was last
    used.
    """

    def __init__(self, *, generated: bool) -> None:
        self._generated = generated
        self.times_s: list[Seconds] = []
        self.work: list[float] = []
        """Work of each request in prompt tokens: its weighted output tokens, and the prompt tokens
        that not even a warm cache could have had.
        """
        self._prompt_tokens = 0
        self._tokens_by_gap_s: Counter[int] = Counter()
        """Number of prompt tokens that could have been cached before the trace began, by whole
        seconds since their text's last use.
        """
        self._last: dict[int, _Use] = {}
        """Last and first use of each text so far, by the text's id."""
        self._begun: set[str] = set()
        """Sessions that began in the trace; only in a generated trace."""

    def add(self, arrival: Arrival) -> None:
        """Record the texts and the work of one request."""
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
        """Return the time in seconds after which prompt tokens that miss an initially empty cache
        are at most a share `COLD_SHARE` of all prompt tokens.
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
        """Return how many tokens at the beginning of the prompt were used before, and record the
        prompt's texts as used now. Count those that could have been cached before the trace began.
        """
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
        """Subtract a reused text from the work of the request that used it first, because a warm
        cache would have had it.
        """
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
    """The last use and the first use of a prompt text."""

    at_s: Seconds
    owner: str
    """The session that used the text, or `_SHARED` if several sessions did."""
    first: int | None
    """Position of the request whose work includes the text. None if the text was an answer, or once
    another use shows that a warm cache would have had it.
    """
