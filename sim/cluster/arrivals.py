"""A trace's arrivals made ready for a run: spread, at another rate."""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from epp.core.types import Seconds
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


def made_ready(
    arrivals: Iterable[Arrival], *, seed: int, jitter_s: Seconds, speed: float
) -> Iterator[Arrival]:
    """The same requests, spread over `jitter_s`, then `speed` times as fast."""
    some = spread_out(arrivals, jitter_s, seed) if jitter_s else iter(arrivals)
    return some if speed == 1.0 else faster(some, speed)


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
