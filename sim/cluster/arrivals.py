"""A trace's arrivals made ready for a run: spread, at another rate."""

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
    """How far apart the ticks of the trace's clock are, judged by its first 1,000 arrivals.

    0 unless most requests share their tick with another and ticks are half a second apart or more:
    other traces need not be spread. Mooncake's conversation trace ticks every 3 s.
    """
    times_s = [arrival.time_s for arrival in islice(arrivals, _LOOKED_AT)]
    ticks = sorted(set(times_s))
    gaps_s = sorted(later - tick for tick, later in pairwise(ticks))
    coarse = bool(gaps_s) and gaps_s[0] >= _GRID_S_MIN and 2 * len(ticks) <= len(times_s)
    return gaps_s[len(gaps_s) // 2] if coarse else 0.0


def spread_out(arrivals: Iterable[Arrival], width_s: Seconds, seed: int) -> Iterator[Arrival]:
    """Delay each arrival by a uniform draw from [0, `width_s`), and sort them anew.

    What waits for an answer is left alone: its time only says when it cannot come earlier.
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
    """The same requests `factor` times as fast; think times stay."""
    for arrival in arrivals:
        yield msgspec.structs.replace(arrival, time_s=arrival.time_s / factor)


class Rate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From `from_s` to `to_s` of the run requests come `factor` times as fast as elsewhere.

    With `factor_end` the rate changes evenly from the one to the other.
    """

    from_s: Instant
    to_s: Instant
    factor: Annotated[float, Meta(ge=0.001, le=1_000.0)]
    factor_end: Annotated[float, Meta(ge=0.001, le=1_000.0)] | None = None

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)

    @property
    def length_s(self) -> Seconds:
        """Of the run."""
        return self.to_s - self.from_s

    @property
    def last(self) -> float:
        """The factor at its end."""
        return self.factor if self.factor_end is None else self.factor_end

    @property
    def consumed_s(self) -> Seconds:
        """How much of the trace's time passes in it: the integral of the factor."""
        return self.length_s * (self.factor + self.last) / 2

    def after_s(self, consumed_s: Seconds) -> Seconds:
        """How long into it so much of the trace's time has passed: the inverse of that integral."""
        slope = (self.last - self.factor) / self.length_s
        root = math.sqrt(max(0.0, self.factor**2 + 2 * slope * consumed_s))
        # Not (root - factor) / slope, which is nothing by nothing at a constant rate.
        return 2 * consumed_s / (root + self.factor)


def at_rates(arrivals: Iterable[Arrival], rates: Sequence[Rate]) -> Iterator[Arrival]:
    """The same requests in the same order, faster or slower while `rates` say so; think times stay.

    `rates` ascend and do not overlap.
    """
    left = deque(rates)
    run_s = trace_s = 0.0
    """An instant of the run, and what of the trace comes then: before, all is settled."""
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


def made_ready(
    arrivals: Iterable[Arrival],
    *,
    seed: int,
    jitter_s: Seconds,
    speed: float,
    rates: Sequence[Rate] = (),
) -> Iterator[Arrival]:
    """The same requests, spread over `jitter_s`, then `speed` times as fast, then at `rates`."""
    some = spread_out(arrivals, jitter_s, seed) if jitter_s else iter(arrivals)
    some = some if speed == 1.0 else faster(some, speed)
    return at_rates(some, rates) if rates else some


class Pace(Struct, frozen=True):
    """How fast the requests of a trace come."""

    requests_per_s: float
    """From the first to the last; 1 if they all come at once."""
    waits: bool
    """Some wait for the answers to others, and cannot be hurried."""


def pace_of(arrivals: Iterable[Arrival], requests_max: int | None = None) -> Pace:
    """Of the first `requests_max`."""
    count, latest_s, waits = 0, 0.0, False
    for arrival in islice(arrivals, requests_max):
        count += 1
        latest_s = max(latest_s, arrival.time_s)
        waits = waits or arrival.after is not None
    return Pace(count / latest_s if latest_s else 1.0, waits)
