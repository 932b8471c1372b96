"""What is promised, and whether repeated runs show that it is kept."""

import itertools
import math

import pytest
from msgspec.structs import replace

from sim.measurement.intervals import Varied
from sim.measurement.objectives import (
    NAMES,
    Bound,
    ObjectiveError,
    bound_summary,
    bounds_in,
    cannot_be_kept,
)
from sim.measurement.summaries import KeptRun
from tests.sim.made import filled

RECORDED = Varied(repetitions=5, generated=False, blocks=30, cut="30 blocks of 120 s")
DRAWN = Varied(repetitions=5, generated=True)


def run(ttft_p90_s=1.0, goodput=1.0, complete=100):
    return filled(
        KeptRun,
        requests={"sent": 100, "complete": complete},
        ttft_s={"p90": ttft_p90_s},
        goodput={"share": goodput},
    )


def test_bounds_are_read():
    """What is lost is bounded also where nothing is said of it, and may be told."""
    told = bounds_in("ttft-p90=2, itl-p99=0.1,goodput=0.99")
    assert [(bound.name, bound.limit) for bound in told] == [
        ("ttft-p90", 2.0), ("itl-p99", 0.1), ("goodput", 0.99), ("lost", 0.01),
    ]  # fmt: skip
    assert bounds_in("lost=0.2") == (Bound(name="lost", limit=0.2),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is not a bound; expected NAME=LIMIT with one of ttft-mean"),
        ("ttft-p90", "'ttft-p90' is not a bound"),
        ("itl-p90=1", "'itl-p90=1' is not a bound"),
        ("ttft-p90=fast", "ttft-p90=fast: expected a number from 1e-06 to 86400"),
        ("ttft-p90=0", "ttft-p90=0: expected"),
        ("goodput=99", "goodput=99: expected a number from 1e-06 to 1"),
        ("lost=nan", "lost=nan: expected"),
        ("ttft-p90=1,ttft-p90=2", "ttft-p90 has two bounds"),
    ],
)
def test_what_is_none_is_refused(text, told):
    """In a sentence."""
    with pytest.raises(ObjectiveError) as refused:
        bounds_in(text)
    assert str(refused.value).startswith(told)


def test_every_name_has_a_figure():
    """Of a run that has it; where it has none it keeps nothing."""
    for name in NAMES:
        bound = Bound(name=name, limit=0.5)
        value = bound.value_of(filled(KeptRun))
        assert math.isnan(value) or value == 0
        assert not bound.kept_by(math.nan)


def test_a_figure_within_the_bound_is_not_enough():
    """Its interval must be: one-sided, so nearer than the end of the two-sided one."""
    bound = Bound(name="ttft-p90", limit=1.1)
    narrow = [run(value) for value in (1.0, 1.01, 0.99, 1.02, 0.98)]
    wide = [run(value) for value in (1.0, 1.2, 0.8, 1.3, 0.7)]
    sure, unsure = (bound_summary(bound, runs, RECORDED) for runs in (narrow, wide))
    assert sure.kept
    assert sure.figure.value < sure.sure < sure.figure.high
    assert sure.used == pytest.approx(sure.sure / 1.1, rel=1e-4)
    assert (unsure.kept, unsure.kept_by_figure) == (False, True)


def test_goodput_is_sure_from_below():
    """The limit below counts, which a fresh draw keeps and the mean over many all the more."""
    bound = Bound(name="goodput", limit=0.9)
    found = bound_summary(
        bound, [run(goodput=one) for one in (0.95, 0.96, 0.94, 0.95, 0.95)], DRAWN
    )
    assert found.kept
    assert found.sure < found.figure.low < found.figure.value
    assert not bound_summary(
        bound, [run(goodput=one) for one in (0.95, 0.85, 0.99, 0.99, 0.95)], DRAWN
    ).kept


def test_of_too_few_repetitions_nothing_is_sure():
    """However good they are."""
    two = Varied(repetitions=2, generated=True)
    found = bound_summary(Bound(name="ttft-p90", limit=9.0), [run(), run()], two)
    assert (found.sure, found.kept, found.kept_by_figure) == (None, False, True)
    assert found.used == pytest.approx(1 / 9, rel=1e-4), "by the figure"


def test_a_pool_that_loses_requests_keeps_no_promise():
    """Its latencies are of those that it answered."""
    fast = [run(0.1, complete=90)] * 5
    told = {bound.name: bound_summary(bound, fast, DRAWN).kept for bound in bounds_in("ttft-p90=1")}
    assert told == {"ttft-p90": True, "lost": False}


@pytest.mark.parametrize("varied", [RECORDED, DRAWN])
def test_what_cannot_be_kept_any_more_is_not_kept_in_the_end(varied):
    """Whatever comes after: to stop early changes no answer."""
    bounds = bounds_in("ttft-p90=1,goodput=0.9")
    varied = replace(varied, repetitions=4)
    stopped = 0
    for values in itertools.product((0.5, 0.9, 2.0, 6.0), repeat=4):
        runs = [run(value, goodput=1.0 if value < 5 else 0.6) for value in values]
        kept = all(bound_summary(bound, runs, varied).kept for bound in bounds)
        for count in range(1, 5):
            if cannot_be_kept(bounds, runs[:count], repetitions=4, generated=varied.generated):
                stopped += count == 1
                assert not kept
    assert stopped, "one repetition is enough for some"
