"""Preparation of a trace's arrivals for a run: random delays within the clock's resolution, and
other request rates.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from random import Random
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.cluster.windows import Instant, check_window
from sim.traces.arrival import Arrival

_LOOKED_AT: Final = 1_000
_GRID_S_MIN: Final = 0.5


def grid_s(arrivals: Iterable[Arrival]) -> Seconds:
    """Return the resolution of a trace's clock in seconds, estimated from its first 1,000 arrivals.

    The result is 0, which means that arrivals need not be spread, unless ticks are at least 0.5 s
    apart and have at least two requests each on average. Mooncake's conversation trace has ticks of
    3 s.
    """
    times_s = [arrival.time_s for arrival in islice(arrivals, _LOOKED_AT)]
    ticks = sorted(set(times_s))
    gaps_s = sorted(later - tick for tick, later in pairwise(ticks))
    coarse = bool(gaps_s) and gaps_s[0] >= _GRID_S_MIN and 2 * len(ticks) <= len(times_s)
    return gaps_s[len(gaps_s) // 2] if coarse else 0.0


def spread_out(arrivals: Iterable[Arrival], width_s: Seconds, seed: int) -> Iterator[Arrival]:
    """Yield the arrivals, each delayed by a uniform random time below `width_s`, in the new order
    of time.

    Arrivals that wait for an answer to another request are not delayed, because their time is only
    a lower limit.
    """
    random = Random(f"{seed}:jitter")
    waiting: list[tuple[Seconds, int, Arrival]] = []
    for arrival in arrivals:
        while waiting and waiting[0][0] <= arrival.time_s:
            yield heapq.heappop(waiting)[2]
        time_s = arrival.time_s
        if arrival.after is None:
            time_s += random.random() * width_s
        moved = msgspec.structs.replace(arrival, time_s=time_s)
        heapq.heappush(waiting, (time_s, arrival.index, moved))
    while waiting:
        yield heapq.heappop(waiting)[2]


def faster(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """Yield the arrivals at `factor` times the request rate. Think times do not change."""
    for arrival in arrivals:
        yield msgspec.structs.replace(arrival, time_s=arrival.time_s / factor)


class Rate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A period from `from_s` to `to_s` of the run in which requests arrive `factor` times as fast
    as without it.

    With `factor_end` the factor changes linearly from `factor` to `factor_end`.
    """

    from_s: Instant
    to_s: Instant
    factor: Annotated[float, Meta(ge=0.001, le=1_000.0)]
    factor_end: Annotated[float, Meta(ge=0.001, le=1_000.0)] | None = None

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)

    @property
    def length_s(self) -> Seconds:
        """Length in seconds of the period in which the request rate is changed."""
        return self.to_s - self.from_s

    @property
    def last(self) -> float:
        """Factor on the request rate at the end of the period: `factor_end`, or `factor` if the
        rate is constant.
        """
        return self.factor if self.factor_end is None else self.factor_end

    @property
    def consumed_s(self) -> Seconds:
        """Seconds of the trace that are replayed in the period: the integral of the factor over the
        period.
        """
        return self.length_s * (self.factor + self.last) / 2

    def after_s(self, consumed_s: Seconds) -> Seconds:
        """Return the time in seconds from the start of the period until `consumed_s` seconds of the
        trace have been replayed.

        This is the inverse of the integral of the factor.
        """
        slope = (self.last - self.factor) / self.length_s
        root = math.sqrt(max(0.0, self.factor**2 + 2 * slope * consumed_s))
        # (root - factor) / slope would be 0 / 0 at a constant rate.
        return 2 * consumed_s / (root + self.factor)


def at_rates(arrivals: Iterable[Arrival], rates: Sequence[Rate]) -> Iterator[Arrival]:
    """Yield the arrivals in the same order, at other request rates in the periods of `rates`.

    `rates` are in order of time and do not overlap. Think times do not change.
    """
    left = deque(rates)
    run_s = trace_s = 0.0
    """Time of the run, and the corresponding time of the trace, up to which arrivals are
    converted.
    """
    for arrival in arrivals:
        time_s = arrival.time_s
        while left:
            begins_s = trace_s + left[0].from_s - run_s
            ends_s = begins_s + left[0].consumed_s
            if time_s < ends_s:
                break
            run_s, trace_s = left.popleft().to_s, ends_s
        if left and time_s >= begins_s:
            at_s = left[0].from_s + left[0].after_s(time_s - begins_s)
        else:
            at_s = run_s + time_s - trace_s
        yield msgspec.structs.replace(arrival, time_s=at_s)


def prepared_arrivals(
    arrivals: Iterable[Arrival],
    *,
    seed: int,
    jitter_s: Seconds,
    speed: float,
    rates: Sequence[Rate] = (),
) -> Iterator[Arrival]:
    """Yield the arrivals of a trace as a run needs them: delayed by random times as in
    `spread_out`, then at `speed` times the request rate, then at the rates of `rates`.
    """
    some = spread_out(arrivals, jitter_s, seed) if jitter_s else iter(arrivals)
    some = some if speed == 1.0 else faster(some, speed)
    return at_rates(some, rates) if rates else some


class Pace(Struct, frozen=True):
    """The mean request rate of a trace, and whether some of its requests wait for the answers to
    others.
    """

    requests_per_s: float
    """Mean request rate from the start of the trace to its last request; 1 if all requests arrive
    at time 0.
    """
    waits: bool
    """True if some requests are sent only after the answer to another one, so that a higher --speed
    may not raise their rate.
    """


def pace_of(arrivals: Iterable[Arrival], requests_max: int | None = None) -> Pace:
    """Return the mean request rate of the first `requests_max` arrivals, or of all if it is None,
    and whether any of them waits for the answer to another request.
    """
    count, latest_s, waits = 0, 0.0, False
    for arrival in islice(arrivals, requests_max):
        count += 1
        latest_s = max(latest_s, arrival.time_s)
        waits = waits or arrival.after is not None
    return Pace(count / latest_s if latest_s else 1.0, waits)
