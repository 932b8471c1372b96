"""Warnings about traces that are valid but look like a mistake, such as a wrong unit or column.

The check reads the first requests of a trace in the order of its lines, and changes nothing.
"""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, Final

import msgspec

from epp.core.types import Seconds
from sim.traces.arrival import Arrival, TraceError
from sim.traces.reading import LineFormat, Trace

LOOKED_AT_MAX: Final = 1_000
"""Maximum number of requests at the beginning of a trace that are checked for plausibility."""
_REQUESTS_MIN: Final = 10
"""Minimum number of requests for warnings about arrival rates and constant columns."""
_GAP_S_MIN: Final = 0.002
"""Mean gap in seconds between arrivals below which times look like seconds that were read as
milliseconds. Known traces have at most some hundred requests a second; such a misread trace has a
thousand times its rate.
"""
_GAP_S_MAX: Final = 60.0
"""Mean gap in seconds between arrivals above which times look like milliseconds that were read as
seconds. Traces for load tests have more than one request a minute.
"""


def warnings_of(trace: Trace) -> list[str]:
    """Return a sentence for each implausible property of a trace; a generated workload has none.
    Raises `OSError`.

    A trace that cannot be read has no warnings, because reading it raises the error.
    """
    if not isinstance(trace.format, LineFormat):
        return []
    try:
        if trace.generated() is not None:
            return []
        arrivals = list(islice(trace.as_written(), LOOKED_AT_MAX))
    except TraceError:
        return []
    if not arrivals:
        return []
    return [
        *_about_times(trace, arrivals),
        # Texts without known answers all have the same estimate.
        *([] if trace.format.token_estimate else _about_tokens(arrivals)),
        *_about_sharing(arrivals, named="columns" in trace.format.takes),
    ]


def _about_times(trace: Trace, arrivals: Sequence[Arrival]) -> list[str]:
    told_s = [one.time_s for one in arrivals if one.after is None]
    if _changes(trace, told_s, rate_per_s=2 * (trace.options.rate_per_s or 1.0)):
        sent = "requests are sent at 1 a second: set --rate-per-s"
        return [] if trace.options.rate_per_s else [f"The trace has no times, so {sent}."]
    found = []
    decreasing = sum(later < earlier for earlier, later in pairwise(told_s))
    if decreasing:
        found.append(
            f"{decreasing:,} of the first {len(told_s):,} times are earlier than the one before: "
            "requests are sorted by time."
        )
    gap_s = _mean_gap_s(told_s)
    if gap_s is None or trace.options.time_unit:
        return found
    if gap_s < _GAP_S_MIN and _changes(trace, told_s, time_unit="s"):
        found.append(
            f"The first {len(told_s):,} requests arrive at {1 / gap_s:,.0f} a second; their time looks "
            "like seconds: use --time-unit s."
        )
    if gap_s > _GAP_S_MAX and _changes(trace, told_s, time_unit="ms"):
        found.append(
            f"The first {len(told_s):,} requests arrive {gap_s:,.0f} s apart; their time looks like "
            "milliseconds: use --time-unit ms."
        )
    return found


def _changes(trace: Trace, told_s: Sequence[Seconds], **options: Any) -> bool:
    """Return whether reading the trace with other `options` gives other times.

    For example, the option `time_unit` changes nothing if the trace states the unit.
    """
    read = msgspec.structs.replace(trace.options, **options)
    others = Trace(trace.path, trace.format, read).as_written()
    others_s = [one.time_s for one in islice(others, LOOKED_AT_MAX) if one.after is None]
    return others_s != told_s


def _mean_gap_s(told_s: Sequence[Seconds]) -> Seconds | None:
    """Return the mean gap in seconds between times.

    Return None for fewer than 10 requests, or if all arrive at once.
    """
    if len(told_s) < _REQUESTS_MIN:
        return None
    span_s = max(told_s) - min(told_s)
    return span_s / (len(told_s) - 1) if span_s else None


def _about_tokens(arrivals: Sequence[Arrival]) -> list[str]:
    if len(arrivals) < _REQUESTS_MIN:
        return []
    found = []
    for name, counts in (
        ("prompt", {one.prompt_tokens for one in arrivals}),
        ("output", {one.output_tokens for one in arrivals}),
    ):
        if len(counts) == 1:
            found.append(
                f"All of the first {len(arrivals):,} requests have {counts.pop():,} {name} tokens: "
                "is that the right column?"
            )
    return found


def _about_sharing(arrivals: Sequence[Arrival], *, named: bool) -> list[str]:
    if any(one.blocks for one in arrivals):
        return []
    told = "The trace does not say what prompts share: no request can find its prefix in a cache"
    return [
        f"{told}. If a column says it, name it with --columns prefix=NAME." if named else f"{told}."
    ]
