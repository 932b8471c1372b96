"""The demand of a trace in tokens over time. It selects the part of a trace that `sim size` sizes
for, and gives a first guess of the number of pods.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.profiles import Profile, StepWork
from sim.measurement.measures import OUTPUT_WEIGHT
from sim.measurement.summaries import DemandSummary
from sim.traces.arrival import Arrival

STRETCHES_MAX: Final = 288
"""Maximum number of equally long stretches into which a trace is divided: one day in steps of five
minutes.
"""
STRETCH_S_MIN: Final[Seconds] = 300.0
_BATCH: Final = 64
"""Number of requests that are assumed to decode in one batch, for the first guess of the number of
pods.
"""
_PREFILL_TOKENS: Final = 8_192


class Demand(Struct, frozen=True, kw_only=True):
    """Total demand of some requests: their number, prompt tokens and output tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def work(self) -> float:
        """Work in prompt tokens; each output token counts as `OUTPUT_WEIGHT` prompt tokens."""
        return self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens


class Stretch(Struct, frozen=True, kw_only=True):
    """A period of a trace with its requests and their demand."""

    start_s: Seconds
    end_s: Seconds
    places: range
    """Positions in the trace of the requests that arrive in this period."""
    demand: Demand

    def summary(self, busiest: float) -> DemandSummary:
        """Return the stretch in the form of summary.json. `busiest` is the work of the trace's
        busiest stretch, to which this stretch's work is related.
        """
        return DemandSummary(
            start_s=self.start_s,
            end_s=self.end_s,
            requests=self.demand.requests,
            prompt_tokens=self.demand.prompt_tokens,
            output_tokens=self.demand.output_tokens,
            of_busiest=self.demand.work / busiest if busiest else 0.0,
        )


class TraceDemand(Struct, frozen=True, kw_only=True):
    """The demand of a trace: in total, over time, and in the stretch that `sim size` sizes for."""

    whole: Stretch
    sized_for: Stretch
    """The whole trace if it is short enough to be simulated, else its busiest stretch."""
    over_time: list[Stretch]

    @property
    def work_per_s(self) -> float:
        """Work per second (`Demand.work`, with output tokens converted to prompt tokens) of the
        stretch that `sim size` sizes for.
        """
        return _per_s(self.sized_for)

    def share_of_sized(self, stretch: Stretch) -> float:
        """Return the work per second of `stretch` as a share of the sized stretch's work per
        second; 1 if the sized stretch has none.
        """
        return _per_s(stretch) / self.work_per_s if self.work_per_s else 1.0

    @property
    def cut(self) -> bool:
        """True if the sized stretch is only a part of the trace."""
        return self.sized_for.places != self.whole.places


def demand_of(arrivals: Iterable[Arrival], *, sized_s_max: Seconds) -> TraceDemand:
    """Return the demand of `arrivals`, which are in order of time. If they span more than
    `sized_s_max`, the sized stretch is the busiest one of that length.

    The function holds three numbers for each request in memory. Raises what iterating over
    `arrivals` raises, and `ValueError` if there are no requests.
    """
    times_s: list[Seconds] = []
    work: list[tuple[int, int]] = []
    for arrival in arrivals:
        times_s.append(arrival.time_s)
        work.append((arrival.prompt_tokens, arrival.output_tokens))
    if not times_s:
        raise ValueError("no requests")
    span_s = times_s[-1]
    whole = _stretch(0.0, span_s, range(len(times_s)), work)
    # All stretches are equally long, so that the last one does not look idle.
    steps = min(max(1, int(span_s / STRETCH_S_MIN)), STRETCHES_MAX)
    step_s = span_s / steps
    # The last request belongs to the stretch that ends with it.
    last = steps - 1
    firsts: dict[int, int] = {}
    for at, time_s in enumerate(times_s):
        firsts.setdefault(min(int(time_s / step_s), last) if step_s else 0, at)
    ends = [*list(firsts.values())[1:], len(times_s)]
    over_time = [
        _stretch(number * step_s, min((number + 1) * step_s, span_s), range(first, end), work)
        for (number, first), end in zip(firsts.items(), ends, strict=True)
    ]
    sized_for = whole if span_s <= sized_s_max else _busiest(times_s, work, sized_s_max)
    return TraceDemand(whole=whole, sized_for=sized_for, over_time=over_time)


def guessed_pods(stretch: Stretch, profile: Profile, speed: float) -> int:
    """Return a rough number of pods that the work of `stretch` keeps busy, assuming that half of
    the prompt tokens are cached.

    The search for the number of pods begins there; its result hardly depends on this guess.
    """
    span_s = (stretch.end_s - stretch.start_s) / speed
    return max(1, round(sum(busy_times(stretch, profile)) / span_s)) if span_s else 1


def busy_times(
    stretch: Stretch, profile: Profile, cached_share: float = 0.5
) -> tuple[Seconds, Seconds]:
    """Return roughly how many seconds the work of `stretch` keeps one pod busy with prefill, and
    with decoding, if `cached_share` of the prompt tokens are cached.
    """
    demand = stretch.demand
    tokens = min(_PREFILL_TOKENS, profile.max_num_batched_tokens)
    context = demand.prompt_tokens // demand.requests
    batch = max(1, min(_BATCH, profile.kv_tokens // max(1, context), profile.max_num_seqs))
    step = StepWork(
        tokens=batch, decodes=batch, decode_context_tokens=batch * context, sequences=batch
    )
    prefill_s = demand.prompt_tokens * (1 - cached_share) / profile.prefill_tokens_per_s(tokens)
    return prefill_s, demand.output_tokens * profile.step_s(step) / batch


def _busiest(
    times_s: Sequence[Seconds], work: Sequence[tuple[int, int]], span_s: Seconds
) -> Stretch:
    """Return the stretch with the most work among those that begin with a request and are `span_s`
    long.
    """
    best = (-1.0, 0, 0)
    now, end = 0.0, 0
    for first, begins_s in enumerate(times_s):
        while end < len(times_s) and times_s[end] < begins_s + span_s:
            now += _weight(work[end])
            end += 1
        if now > best[0]:
            best = (now, first, end)
        now -= _weight(work[first])
    _, first, end = best
    return _stretch(times_s[first], times_s[first] + span_s, range(first, end), work)


def _per_s(stretch: Stretch) -> float:
    length_s = stretch.end_s - stretch.start_s
    return stretch.demand.work / length_s if length_s else 0.0


def _weight(one: tuple[int, int]) -> float:
    return one[0] + OUTPUT_WEIGHT * one[1]


def _stretch(
    start_s: Seconds, end_s: Seconds, places: range, work: Sequence[tuple[int, int]]
) -> Stretch:
    demand = Demand(
        requests=len(places),
        prompt_tokens=sum(work[at][0] for at in places),
        output_tokens=sum(work[at][1] for at in places),
    )
    return Stretch(start_s=start_s, end_s=end_s, places=places, demand=demand)
