"""The leaderboard's rows of one case: the figures of each strategy, their ratio to the best
strategy, and whether the difference from it is significant.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from sim.experiments.leaderboard.cell import CellResult
from sim.experiments.repetitions import ended_of, estimate_summary, varied_between
from sim.measurement.intervals import compare_runs, estimated
from sim.measurement.measures import figures_of, rounded
from sim.measurement.ranking import MEASURES, best_of, in_the_running, times_as_bad
from sim.measurement.summaries import Behind, Requests, RunSummary, StandingSummary


class Runs(Struct, frozen=True, kw_only=True):
    """The completed runs of one strategy in one case."""

    strategy: str
    by_seed: Mapping[int, CellResult]
    failed: bool = False
    """True if a run of the strategy in this case failed with at least one of the seeds."""


def case_rows(case: str, runs: Sequence[Runs], first_seed: int) -> list[StandingSummary]:
    """Return a row for each strategy whose runs have not failed, over the seeds that all these
    strategies have completed.

    There are no rows until `first_seed` is among these seeds. With `first_seed`, a recorded trace
    is replayed unchanged.
    """
    there = [one for one in runs if not one.failed]
    if not there:
        return []
    shared = set.intersection(*(set(one.by_seed) for one in there))
    if first_seed not in shared:
        return []
    seeds = sorted(shared)
    found = {one.strategy: [one.by_seed[seed] for seed in seeds] for one in there}
    figures = {
        name: [_figures_of(result.summary) for result in results] for name, results in found.items()
    }
    varied = varied_between([one.summary for one in next(iter(found.values()))])
    values = {
        name: {measure: estimated([run[measure] for run in of], varied) for measure in MEASURES}
        for name, of in figures.items()
    }
    lost = {name: _ended(results).share_lost for name, results in found.items()}
    running = in_the_running(lost)
    best = {
        measure: best_of({name: values[name][measure].value for name in running}, measure)
        for measure in MEASURES
    }
    # One of several equally good strategies is enough as the reference.
    against = {
        leader: {name: compare_runs(figures[leader], of, varied) for name, of in figures.items()}
        for leader in {names[0] for names in best.values() if names}
    }
    rows = []
    for name, results in found.items():
        behind: dict[str, Behind] = {}
        for measure, leaders in best.items():
            if not leaders:
                continue
            difference = against[leaders[0]][name][measure].difference
            reference = values[leaders[0]][measure].value
            times = times_as_bad(values[name][measure].value, reference, measure)
            behind[measure] = Behind(
                times=None if times is None else rounded(times),
                best=name in leaders,
                within=None if difference.lacking else not difference.significant,
            )
        rows.append(
            StandingSummary(
                case=case,
                strategy=name,
                seeds=len(seeds),
                varied=varied.over,
                lacking=varied.lacking,
                requests=_ended(results),
                in_the_running=name in running,
                figures={measure: estimate_summary(one) for measure, one in values[name].items()},
                behind=behind,
                warnings=list(
                    dict.fromkeys(said for one in results for said in one.summary.warnings)
                ),
            )
        )
    return rows


def _figures_of(summary: RunSummary) -> dict[str, float]:
    busiest = summary.imbalance.requests.max_over_mean
    told = figures_of(summary) | {"imbalance": math.nan if busiest is None else busiest}
    return {measure: told[measure] for measure in MEASURES}


def _ended(results: Sequence[CellResult]) -> Requests:
    return ended_of([one.summary for one in results])
