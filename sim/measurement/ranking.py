"""The arithmetic of a leaderboard: who is in the running, how far each is behind, and all in all.

Figures in, ranks out: no files, no runs, no dice. What a board says of who is better is said here.
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
"""What is told of each case -> whether more is better. `imbalance`: how many times the mean of all
pods' requests the busiest pod had."""
JUDGED: Final = ("e2e_mean_s", "ttft_p90_s", "ttft_p99_s", "itl_p99_s", "output_tokens_per_s")
"""By which cases are summed up."""
RANKED_BY: Final = JUDGED[0]
GOODPUT: Final = "goodput"
"""A share, which may be 0: of it the mean over the cases is told, and not how many times the best it is."""
LOST_MORE_MAX: Final = 0.01
"""Of its requests: who loses more than the one who loses least is not in the running, for figures
are of answers."""
BEHIND: Final = 1.05
"""So many times as bad as the best, and beyond its interval, is behind."""

WITHOUT_ADAPTERS: Final = "without_adapters"
HELD_WITHOUT_ADAPTERS: Final = "hold_outs_without_adapters"
ALL: Final = "all"
SCOPES: Final = (WITHOUT_ADAPTERS, HELD_WITHOUT_ADAPTERS, ALL)
"""Over which cases a board sums up: where adapters are loaded, who knows of them is so far ahead that
a mean over all cases says little of the others."""


def scopes_of(cases: Iterable[CaseSummary]) -> dict[str, frozenset[str]]:
    """Scope -> names of its cases; only scopes that have any."""
    listed = list(cases)
    plain = frozenset(case.name for case in listed if not case.max_loras)
    held = frozenset(case.name for case in listed if case.hold_out)
    names = (plain, plain & held, frozenset(case.name for case in listed))
    return {scope: of for scope, of in zip(SCOPES, names, strict=True) if of}


def in_the_running(shares_lost: Mapping[str, float]) -> list[str]:
    """Of strategies -> share of their requests without an answer, those who lose hardly more than need be."""
    least = min(shares_lost.values(), default=0.0)
    return [name for name, lost in shares_lost.items() if lost <= least + LOST_MORE_MAX]


def best_of(values: Mapping[str, float], measure: str) -> list[str]:
    """Of strategies -> figure, those with the best one, all of equals; none if nobody has it."""
    known = [value for value in values.values() if not math.isnan(value)]
    if not known:
        return []
    best = max(known) if MEASURES[measure] else min(known)
    return [name for name, value in values.items() if value == best]


def times_as_bad(value: float, best: float, measure: str) -> float | None:
    """How many times as much as the best takes, or as little as it gives; None: it cannot be told."""
    worse, better = (best, value) if MEASURES[measure] else (value, best)
    if not (math.isfinite(worse) and math.isfinite(better) and worse > 0 and better > 0):
        return None
    return worse / better


def is_level(row: StandingSummary, measure: str) -> bool:
    """It is the best, or within the interval of the best, and in the running."""
    behind = row.behind.get(measure)
    return row.in_the_running and behind is not None and (behind.best or bool(behind.within))


def is_behind(row: StandingSummary, measure: str) -> bool:
    """It is beyond the interval of the best, and by more than that is worth telling."""
    behind = row.behind.get(measure)
    if behind is None or behind.times is None or is_level(row, measure):
        return False
    return behind.times > BEHIND


def totals(
    rows: Sequence[StandingSummary], scopes: Mapping[str, frozenset[str]]
) -> list[TotalSummary]:
    """Each strategy over the cases of each scope in which it has a row; the best of the first scope first."""
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
    """Those who are in `scope`, or `everybody`: the best first, equals as they were."""

    def order(total: TotalSummary) -> tuple[int, float]:
        over = total.over.get(scope)
        times = None if over is None else over.figures[RANKED_BY].times_the_best
        # Who was not everywhere did not do all of it.
        return -(0 if over is None else over.cases), math.inf if times is None else times

    return sorted((one for one in told if everybody or scope in one.over), key=order)


def geometric_mean(values: Sequence[float]) -> float:
    """Twice as bad here and half as bad there is as good. Of at least one, all above 0."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _scope_total(rows: Sequence[StandingSummary]) -> ScopeTotal:
    return ScopeTotal(
        cases=len(rows),
        out=sum(not row.in_the_running for row in rows),
        figures={measure: _total(rows, measure) for measure in JUDGED},
        goodput=_mean_share(rows, GOODPUT),
    )


def _mean_share(rows: Sequence[StandingSummary], measure: str) -> float | None:
    """The mean over the cases in which it is known."""
    told = [row.figures[measure].value for row in rows if measure in row.figures]
    known = [value for value in told if value is not None]
    return rounded(math.fsum(known) / len(known)) if known else None


def _total(rows: Sequence[StandingSummary], measure: str) -> Total:
    """How many times as bad as the best, as a geometric mean, and where it is worst."""
    times: dict[str, float] = {}
    for row in rows:
        found = row.behind.get(measure)
        if found is not None and found.times is not None:
            # What is quick with the answers that it gives is not ahead of those who give them all.
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
