"""Figures over the repeated runs of one configuration, in the form of summary.json."""

from collections.abc import Sequence

from msgspec import UNSET

from sim.measurement.intervals import Estimate, Varied
from sim.measurement.measures import rounded
from sim.measurement.summaries import ComparedRun, EstimateSummary, Requests


def ended_of(runs: Sequence[ComparedRun]) -> Requests:
    """Return the number of sent requests and the numbers of requests by outcome, summed over
    `runs`.
    """
    return Requests(
        **{
            name: sum(getattr(one.requests, name) for one in runs)
            for name in Requests.__struct_fields__
        }
    )


def estimate_summary(found: Estimate) -> EstimateSummary:
    """Return a mean with its confidence interval in the form of summary.json, rounded."""
    return EstimateSummary(
        value=rounded(found.value),
        low=None if found.low is None else rounded(found.low),
        high=None if found.high is None else rounded(found.high),
    )


def varied_between(runs: Sequence[ComparedRun]) -> Varied:
    """Return how many repetitions `runs` are and how their traffic differs: generated anew,
    resampled from a recording, or the same. All runs have the same configuration.
    """
    traffic = [one.traffic for one in runs if one.traffic is not UNSET]
    resampled = next((one.resampled for one in traffic if one.resampled), None)
    return Varied(
        repetitions=len(runs),
        generated=any(one.generated for one in traffic),
        blocks=resampled.blocks if resampled else 0,
        cut=resampled.cut if resampled else "",
    )
