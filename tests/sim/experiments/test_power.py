"""How small a gain can be confirmed: held against tunings that were thrown by chance."""

import math
from random import Random

import pytest
from msgspec.structs import replace

from sim.experiments.compare import difference_summary
from sim.experiments.power import GAIN_WANTED, POWER, power_of
from sim.measurement.intervals import Varied, compare_runs
from sim.reports.compare_report import BETTER

MEASURE = "ttft_p90_s"
SEEDS = 6
VARIED = Varied(repetitions=SEEDS, generated=True)


def difference(random, *, gain=0.0, spread=0.1, varied=VARIED):
    """Of two configurations on the same traffic, which does a little less of the same to each."""
    before, after = [], []
    for _ in range(varied.repetitions):
        traffic = random.gauss(1.0, 0.1)
        before.append({MEASURE: traffic + random.gauss(0.0, spread)})
        after.append({MEASURE: traffic + random.gauss(0.0, spread) - gain})
    found = compare_runs(before, after, varied)[MEASURE]
    return replace(difference_summary(MEASURE, found), reference=found.reference)


def test_a_gain_as_large_as_is_told_is_confirmed_four_times_out_of_five():
    """And one of half the size much less often."""
    random = Random(1)
    pilots = [{MEASURE: difference(random)} for _ in range(200)]
    gain = power_of(pilots, VARIED, requests=1000).gains[MEASURE]
    confirmed = {
        size: sum(difference(random, gain=size).verdict == BETTER for _ in range(1000)) / 1000
        for size in (gain, gain / 2)
    }
    assert confirmed[gain] == pytest.approx(POWER, abs=0.08)
    assert confirmed[gain / 2] < 0.5


def test_a_quarter_of_the_gain_takes_sixteen_times_the_traffic():
    """Of what is wanted it is told how much traffic or how many seeds it takes."""
    pilots = [{MEASURE: difference(Random(2), spread=0.3)}]
    power = power_of(pilots, VARIED, requests=1000)
    gain = power.gains[MEASURE]
    assert gain > GAIN_WANTED
    assert power.requests_needed[MEASURE] == math.ceil(1000 * (gain / GAIN_WANTED) ** 2)


def test_more_seeds_are_proposed_where_they_are_enough():
    """Of generated traffic each is more of it; of a recording they only say better how much varies."""
    found = difference(Random(3))
    generated = power_of([{MEASURE: found}], VARIED, requests=1000)
    needed = generated.seeds_needed[MEASURE]
    assert needed > SEEDS
    found = difference(Random(3), spread=0.3)
    recorded = Varied(repetitions=SEEDS, generated=False, blocks=30, cut="30 blocks of 120 s")
    assert not power_of([{MEASURE: found}], recorded, requests=1000).seeds_needed
    few = Varied(repetitions=3, generated=False, blocks=30, cut="30 blocks of 120 s")
    found = difference(Random(3), spread=0.1, varied=few)
    assert power_of([{MEASURE: found}], few, requests=1000).seeds_needed[MEASURE] > 3


def test_what_is_confirmed_anyhow_needs_nothing_more():
    power = power_of([{MEASURE: difference(Random(1), spread=0.001)}], VARIED, requests=1000)
    assert power.gains[MEASURE] < GAIN_WANTED
    assert power.requests_needed == power.seeds_needed == {}


def test_too_short_a_recording_confirms_nothing():
    """It says why."""
    short = Varied(repetitions=SEEDS, generated=False, blocks=2, cut="2 blocks of 120 s")
    pilots = [{MEASURE: difference(Random(1), varied=short)}]
    power = power_of(pilots, short, requests=1000)
    assert power.lacking == "the trace has 2 blocks of 120 s, confidence intervals need at least 5"
    assert power.gains == {}


def test_where_nothing_differs_nothing_is_told():
    """Alike to the last digit: how figures would vary is not known."""
    assert power_of([{MEASURE: difference(Random(1), spread=0.0)}], VARIED, requests=9).gains == {}
    assert power_of([], VARIED, requests=9).gains == {}
