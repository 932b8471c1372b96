"""How sure a difference is."""

import math
from random import Random

import numpy as np
import pytest

from sim.measurement.intervals import compare_runs, student_t
from sim.measurement.measures import Series, mean, percentile


def series(ttft_s, *, every_s=1.0):
    """One request every `every_s` with these TTFTs."""
    count = len(ttft_s)
    return Series(
        arrived_s=np.arange(count) * every_s,
        ttft_s=np.array(ttft_s, dtype=float),
        **dict.fromkeys(
            ("tpot_s", "e2e_s", "queue_s", "prompt_tokens", "cached_tokens", "output_tokens"),
            np.ones(count),
        ),
    )


def both(one):
    return {"mean": mean(one.ttft_s), "p90": percentile(one.ttft_s, 90)}


def mean_alone(one):
    return {"mean": mean(one.ttft_s)}


def compared(reference, other):
    return compare_runs(reference, other, mean_alone)["mean"]


def noisy(seed, level, *, count=2_400, busy_s=60):
    """TTFTs that are alike for a minute at a time, as queues make them."""
    random = Random(seed)
    return [
        level * swell * random.uniform(0.8, 1.2)
        for swell in (random.expovariate(1.0) for _ in range(count // busy_s))
        for _ in range(busy_s)
    ]


@pytest.mark.parametrize(
    ("freedom", "expected"), [(4, 2.776), (9, 2.262), (29, 2.045), (1_000, 1.962)]
)
def test_the_quantile_is_that_of_the_tables(freedom, expected):
    """Two-sided 95 %, within half a per cent."""
    assert student_t(0.95, freedom) == pytest.approx(expected, rel=0.005)


def test_five_seeds_are_paired():
    """A difference that every seed shows is found although seeds differ by far more."""
    levels = [1.0, 3.0, 0.5, 2.0, 7.0]
    reference = [series([level] * 30) for level in levels]
    other = [series([level + 0.1 + 0.01 * at] * 30) for at, level in enumerate(levels)]
    found = compared(reference, other)
    assert found.over == "5 seeds"
    assert found.difference == pytest.approx(0.12)
    half = 2.776 * np.std([0.1, 0.11, 0.12, 0.13, 0.14], ddof=1) / math.sqrt(5)
    assert found.high - found.difference == pytest.approx(half, rel=0.01)
    assert found.significant


def test_a_mean_over_blocks_has_the_textbook_error():
    """Drawing equal blocks anew gives the standard error of the blocks' means, about."""
    values = noisy(1, 1.0)
    found = compared([series([0.0] * 2_400)], [series(values)])
    blocks = np.array(values).reshape(20, 120).mean(axis=1)
    half = 2.093 * blocks.std(ddof=1) / math.sqrt(20)
    assert found.over == "20 blocks of 120 s"
    assert found.high - found.low == pytest.approx(2 * half, rel=0.15)


def test_equal_configurations_are_rarely_called_different():
    """Of 40 pairs without a difference, at most a tenth: dependence inside a run is respected."""
    wrong = {"mean": 0, "p90": 0}
    for seed in range(40):
        one, other = (series(noisy(f"{seed}:{arm}", 1.0)) for arm in (0, 1))
        for name, found in compare_runs([one], [other], both).items():
            wrong[name] += found.significant
    assert all(count <= 4 for count in wrong.values()), wrong


def test_one_pair_of_runs_told_often_is_no_surer():
    """The blocks of the trace are what the interval is over, however many seeds repeat them."""
    reference, other = (series(noisy(arm, 1.0)) for arm in (0, 1))
    once = compare_runs([reference], [other], both)
    for seeds in (3, 5):
        found = compare_runs([reference] * seeds, [other] * seeds, both)
        for name in once:
            assert found[name].low == pytest.approx(once[name].low)
            assert found[name].high == pytest.approx(once[name].high)
            assert found[name].over.startswith("20 blocks of 120 s")


def test_what_differs_between_seeds_is_averaged():
    """Noise of their own makes four seeds surer than one."""
    reference = [series([1.0] * 2_400) for _ in range(4)]
    other = [series(noisy(seed, 1.0)) for seed in range(4)]
    one, four = (compared(reference[:seeds], other[:seeds]) for seeds in (1, 4))
    assert four.high - four.low < 0.7 * (one.high - one.low)


def test_blocks_that_seeds_share_are_counted_once():
    """Of 40 traces without a difference on average, at most a tenth is called different."""
    wrong = 0
    for trace in range(40):
        # What a block does to the difference it does under every seed; seeds hardly differ.
        one, other = (np.array(noisy(f"{trace}:{arm}", 1.0)) for arm in (0, 1))
        nudges = [Random(seed).uniform(-0.01, 0.01) for seed in range(4)]
        nudged = [series(other + nudge) for nudge in nudges]
        wrong += compared([series(one)] * 4, nudged).significant
    assert wrong <= 4


def test_a_short_trace_gives_no_interval():
    """Fewer than five blocks: there is too little to tell from, and it says how much is needed."""
    found = compared([series([1.0] * 100)] * 4, [series([2.0] * 100)] * 4)
    assert found.low is None
    assert not found.significant
    assert found.over == "1 block of 120 s"
    assert found.lacking == "1 block of 120 s, 5 are needed"


def test_a_measure_that_a_run_lacks_has_no_difference():
    """Nothing was completed under one seed: there is no mean over seeds, and it says so."""
    runs = [series(noisy(seed, 1.0)) for seed in range(5)]
    found = compared(runs, [*runs[:4], series([])])
    assert found.low is None
    assert found.lacking == "not every run has it"
