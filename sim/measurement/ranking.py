"""The arithmetic of a leaderboard: eligible strategies, their ratio to the best, and totals over
cases.

The functions take figures and return ranks. They use no files, runs or random numbers. Every
statement of a leaderboard about which strategy is better is computed here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sim.measurement.measures import rounded
from sim.measurement.summaries import (
    CaseSummary,
    ScopeTotal,
    StandingSummary,
    Total,
    TotalSummary,
)

MEASURES: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "ttft_mean_s": False,
        "ttft_p50_s": False,
        "ttft_p90_s": False,
        "ttft_p99_s": False,
        "e2e_mean_s": False,
        "itl_mean_s": False,
        "itl_p99_s": False,
        "output_tokens_per_s": True,
        "hit_rate": True,
        "goodput": True,
        "imbalance": False,
    }
)
"""Measures of each case of a leaderboard; True if a higher value is better. `imbalance` is the
number of requests of the busiest pod divided by the mean over all pods.
"""
JUDGED: Final = ("e2e_mean_s", "ttft_p90_s", "ttft_p99_s", "itl_p99_s", "output_tokens_per_s")
"""Measures for which the geometric mean of a strategy's ratios to the best is computed over cases.
"""
RANKED_BY: Final = JUDGED[0]
GOODPUT: Final = "goodput"
"""Name of the measure "share of requests within the latency targets". It may be 0, so leaderboards
show its mean over the cases instead of a ratio to the best.
"""
LOST_MORE_MAX: Final = 0.01
"""Maximum difference between a strategy's share of lost requests and the smallest share of all
strategies. A strategy above it is not eligible to be the best, because figures cover only answered
requests.
"""
BEHIND: Final = 1.05
"""Ratio to the best figure above which a strategy counts as behind, unless it is level with the
best (`is_level`).
"""

WITHOUT_ADAPTERS: Final = "without_adapters"
HELD_WITHOUT_ADAPTERS: Final = "hold_outs_without_adapters"
ALL: Final = "all"
SCOPES: Final = (WITHOUT_ADAPTERS, HELD_WITHOUT_ADAPTERS, ALL)
"""Groups of cases for each of which a leaderboard has totals and a ranking. In cases with LoRA
adapters, strategies that know adapters are far ahead, so a mean over all cases would say little
about the others.
"""


def scopes_of(cases: Iterable[CaseSummary]) -> dict[str, frozenset[str]]:
    """Return the names of the cases in each scope of the leaderboard. Scopes without cases are left
    out.
    """
    listed = list(cases)
    plain = frozenset(case.name for case in listed if not case.max_loras)
    held = frozenset(case.name for case in listed if case.hold_out)
    names = (plain, plain & held, frozenset(case.name for case in listed))
    return {scope: of for scope, of in zip(SCOPES, names, strict=True) if of}


def in_the_running(shares_lost: Mapping[str, float]) -> list[str]:
    """Return the eligible strategies: those whose share of lost requests is at most `LOST_MORE_MAX`
    above the smallest.

    `shares_lost` is the share of requests without an answer, by strategy.
    """
    least = min(shares_lost.values(), default=0.0)
    return [name for name, lost in shares_lost.items() if lost <= least + LOST_MORE_MAX]


def best_of(values: Mapping[str, float], measure: str) -> list[str]:
    """Return all strategies with the best value of `measure`; none if all values are NaN."""
    known = [value for value in values.values() if not math.isnan(value)]
    if not known:
        return []
    best = max(known) if MEASURES[measure] else min(known)
    return [name for name, value in values.items() if value == best]


def times_as_bad(value: float, best: float, measure: str) -> float | None:
    """Return how many times as bad as the best a value of `measure` is. None if one of the two is
    not finite or not above 0.

    It is the ratio to the best if less is better, and the inverse ratio if more is better.
    """
    worse, better = (best, value) if MEASURES[measure] else (value, best)
    if not (math.isfinite(worse) and math.isfinite(better) and worse > 0 and better > 0):
        return None
    return worse / better


def is_level(row: StandingSummary, measure: str) -> bool:
    """Return whether a strategy is level with the best in a case: it is eligible, and it is the
    best or the confidence interval of its difference from the best contains 0.
    """
    behind = row.behind.get(measure)
    return row.in_the_running and behind is not None and (behind.best or bool(behind.within))


def is_behind(row: StandingSummary, measure: str) -> bool:
    """Return whether a strategy is behind the best in a case.

    It is not level with the best (`is_level`), and its ratio to the best is above `BEHIND`.
    """
    behind = row.behind.get(measure)
    if behind is None or behind.times is None or is_level(row, measure):
        return False
    return behind.times > BEHIND


def totals(
    rows: Sequence[StandingSummary], scopes: Mapping[str, frozenset[str]]
) -> list[TotalSummary]:
    """Return the totals of each strategy over the cases of each scope in which it has a row.

    The strategies are sorted by their rank in the first scope, the best one first.
    """
    told = []
    for name in dict.fromkeys(row.strategy for row in rows):
        mine = [row for row in rows if row.strategy == name]
        over: dict[str, ScopeTotal] = {}
        for scope, cases in scopes.items():
            of_scope = [row for row in mine if row.case in cases]
            if of_scope:
                over[scope] = _scope_total(of_scope)
        told.append(TotalSummary(strategy=name, over=over))
    return ranked(told, next(iter(scopes), ALL), everybody=True)


def ranked(
    told: Sequence[TotalSummary], scope: str, *, everybody: bool = False
) -> list[TotalSummary]:
    """Return the strategies that have cases in `scope`, or all of `told` with `everybody`, sorted
    from the best to the worst.

    Strategies that ran in more cases come first, then those with the smaller ratio to the best.
    Strategies with equal totals keep their order.
    """

    def order(total: TotalSummary) -> tuple[int, float]:
        over = total.over.get(scope)
        times = None if over is None else over.figures[RANKED_BY].times_the_best
        # A strategy that is missing in some cases ranks after those that ran in more.
        return -(0 if over is None else over.cases), math.inf if times is None else times

    return sorted((one for one in told if everybody or scope in one.over), key=order)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of at least one value; all values must be above 0.

    A ratio of 2 in one case and of 1/2 in another cancel out.
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _scope_total(rows: Sequence[StandingSummary]) -> ScopeTotal:
    return ScopeTotal(
        cases=len(rows),
        out=sum(not row.in_the_running for row in rows),
        figures={measure: _total(rows, measure) for measure in JUDGED},
        goodput=_mean_share(rows, GOODPUT),
    )


def _mean_share(rows: Sequence[StandingSummary], measure: str) -> float | None:
    """Return the mean of a measure over the cases in which it is known; None if there are none."""
    told = [row.figures[measure].value for row in rows if measure in row.figures]
    known = [value for value in told if value is not None]
    return rounded(math.fsum(known) / len(known)) if known else None


def _total(rows: Sequence[StandingSummary], measure: str) -> Total:
    """Return the total of one measure over cases: the geometric mean of the ratios to the best, and
    the case with the worst ratio. The ratios and the case are None if no case has a ratio. A ratio
    below 1 of a strategy that is not eligible counts as 1.
    """
    times: dict[str, float] = {}
    for row in rows:
        found = row.behind.get(measure)
        if found is not None and found.times is not None:
            # A row that answers only some requests quickly must not count as ahead of rows that
            # answer all.
            times[row.case] = found.times if row.in_the_running else max(1.0, found.times)
    level = sum(is_level(row, measure) for row in rows if row.case in times)
    if not times:
        return Total(times_the_best=None, level=0, cases=0, worst=None, worst_times=None)
    worst = max(times, key=times.__getitem__)
    return Total(
        times_the_best=rounded(geometric_mean(list(times.values()))),
        level=level,
        cases=len(times),
        worst=worst,
        worst_times=rounded(times[worst]),
    )
