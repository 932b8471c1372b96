"""Who is best in each case, how far the others are behind, and whether that is sure."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from sim.experiments.jobs import ended_of, estimate_summary, varied_between
from sim.experiments.leaderboard.cell import CellResult
from sim.measurement.intervals import compare_runs, estimated
from sim.measurement.measures import figures_of, rounded
from sim.measurement.summaries import (
    Behind,
    Requests,
    RunSummary,
    StandingSummary,
    Total,
    TotalSummary,
)

MEASURES: Final[Mapping[str, bool]] = {
    "ttft_mean_s": False,
    "ttft_p50_s": False,
    "ttft_p90_s": False,
    "ttft_p99_s": False,
    "e2e_mean_s": False,
    "itl_mean_s": False,
    "output_tokens_per_s": True,
    "hit_rate": True,
    "imbalance": False,
}
"""Of `figures_of`, and how many times the mean of all pods' requests the busiest pod had; whether
more is better."""
JUDGED: Final = ("ttft_p90_s", "e2e_mean_s", "output_tokens_per_s")
"""By which all cases are summed up."""
LOST_MORE_MAX: Final = 0.01
"""Of its requests: who loses more than the one who loses least is not in the running, for figures
are of answers."""


class Runs(Struct, frozen=True, kw_only=True):
    """A strategy in a case."""

    strategy: str
    by_seed: Mapping[int, CellResult]
    failed: bool = False
    """One of its seeds at least cannot be run."""


def case_rows(case: str, runs: Sequence[Runs], first_seed: int) -> list[StandingSummary]:
    """A row for each of `runs` that has not failed; of the seeds under which all of these have run.

    None as long as `first_seed` is not among them: of a recorded trace it is the trace as it is.
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
    running = [name for name in found if lost[name] <= min(lost.values()) + LOST_MORE_MAX]
    best = {
        measure: _best([(values[name][measure].value, name) for name in running], more)
        for measure, more in MEASURES.items()
    }
    against = {
        leader: {name: compare_runs(figures[leader], of, varied) for name, of in figures.items()}
        for leader in set(best.values())
        if leader is not None
    }
    rows = []
    for name, results in found.items():
        behind: dict[str, Behind] = {}
        for measure, leader in best.items():
            if leader is None:
                continue
            difference = against[leader][name][measure].difference
            reference = values[leader][measure].value
            behind[measure] = Behind(
                of_best=rounded(values[name][measure].value / reference) if reference else None,
                best=name == leader,
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


def totals(rows: Sequence[StandingSummary], hold_outs: frozenset[str]) -> list[TotalSummary]:
    """Each strategy over all cases, and over the hold-outs alone; the best E2E mean first."""
    told = []
    for name in dict.fromkeys(row.strategy for row in rows):
        mine = [row for row in rows if row.strategy == name]
        held = [row for row in mine if row.case in hold_outs]
        told.append(
            TotalSummary(
                strategy=name,
                cases=len(mine),
                all={measure: _total(mine, measure) for measure in JUDGED},
                hold_outs={measure: _total(held, measure) for measure in JUDGED},
            )
        )

    def order(total: TotalSummary) -> tuple[int, float]:
        times = total.all["e2e_mean_s"].times_the_best
        # Who was not everywhere did not do all of it.
        return -total.cases, math.inf if times is None else times

    return sorted(told, key=order)


def _total(rows: Sequence[StandingSummary], measure: str) -> Total:
    """How many times as bad as the best, as a geometric mean, and where it is worst."""
    times: dict[str, float] = {}
    level = 0
    for row in rows:
        found = row.behind.get(measure)
        if found is None or not found.of_best:
            continue
        of_best = found.of_best
        times[row.case] = 1 / of_best if MEASURES[measure] else of_best
        level += bool(row.in_the_running and (found.best or found.within))
    if not times:
        return Total(times_the_best=None, level=0, cases=0, worst=None, worst_times=None)
    worst = max(times, key=times.__getitem__)
    mean = math.exp(sum(map(math.log, times.values())) / len(times))
    return Total(
        times_the_best=rounded(mean),
        level=level,
        cases=len(times),
        worst=worst,
        worst_times=rounded(times[worst]),
    )


def _figures_of(summary: RunSummary) -> dict[str, float]:
    busiest = summary.imbalance.requests.max_over_mean
    told = figures_of(summary) | {"imbalance": math.nan if busiest is None else busiest}
    return {measure: told[measure] for measure in MEASURES}


def _ended(results: Sequence[CellResult]) -> Requests:
    return ended_of([one.summary for one in results])


def _best(values: Sequence[tuple[float, str]], more: bool) -> str | None:
    """Of equals the first; None if nobody has the figure."""
    known = [(value, name) for value, name in values if not math.isnan(value)]
    if not known:
        return None
    found = max(known, key=_value) if more else min(known, key=_value)
    return found[1]


def _value(found: tuple[float, str]) -> float:
    return found[0]
