"""The judgement: who is chosen, and what it takes to beat the present configuration."""

import math

import pytest

from sim.cluster.policies import PolicySource, policy_source
from sim.experiments.measured_runs import Half
from sim.experiments.run_journal import StoppedError
from sim.experiments.search import Trial
from sim.experiments.tuning import GUARDS, LOADS, LOST, Guard, Objective, Tuning
from sim.measurement.summaries import KeptRun
from tests.sim.made import filled

SEEDS = 4
PRESENT = policy_source("default")
NOISE = (0.0, 0.001, -0.001, 0.002)
"""By repetition, a share of the figure: what traffic does to it."""


def run(
    ttft_s=1.0, tokens_per_s=1000.0, *, repetition=0, refused=0, aborted=0, e2e_s=2.0, stalls=0.0
):
    """What a run of generated traffic has shown."""
    distribution = dict.fromkeys(("mean", "p50", "p90", "p99"), ttft_s)
    complete = 1000 - refused - aborted
    return filled(
        KeptRun,
        requests={"sent": 1000, "complete": complete, "refused": refused, "aborted": aborted},
        traffic={"generated": repetition > 0},
        ttft_s=distribution,
        tpot_s={"mean": 0.01},
        e2e_s={"mean": e2e_s},
        itl_s={"mean": 0.01, "p99": 0.02, "stall_share": stalls},
        hit_rate=0.5,
        output_tokens_per_s=tokens_per_s,
        goodput={"share": 1.0},
    )


class Runs:
    """In the place of runs: figures by (name of the configuration, half, load)."""

    def __init__(self, **figures):
        self.figures = figures
        self.asked = []

    def of(self, wanted):
        self.asked += [(policy.name, sample) for policy, sample in wanted]
        return [self.one(policy.name, sample) for policy, sample in wanted]

    def one(self, name, sample):
        found = self.figures.get(name, {})
        fields = {"ttft_s": 1.0, "tokens_per_s": 1000.0}
        fields |= (
            found.get("always", {}) | found.get(sample.half.value, {}) | found.get(sample.load, {})
        )
        # Common random numbers: traffic does the same to everybody, up to a little.
        noise = 1 + 0.2 * sample.repetition
        wobble = 1 + NOISE[sample.repetition] * (name != PRESENT.name)
        fields["ttft_s"] *= noise * wobble
        fields["tokens_per_s"] *= wobble
        return run(repetition=sample.repetition, **fields)


class Found:
    """In the place of a search: these are its finalists."""

    def __init__(self, names):
        self.trials = [
            Trial(number=at, values={}, policy=PolicySource(name=name))
            for at, name in enumerate(names)
        ]
        self.costs = None

    def run(self, measured):
        self.costs = [measured(rung, [one.policy for one in self.trials]) for rung in (0, 1)]

    def best(self):
        return self.trials[0]

    def pilots(self, present_hash):
        return [one.policy for one in self.finalists(present_hash)]

    def finalists(self, present_hash):
        assert present_hash == PRESENT.hash
        return self.trials


def tuned(objective=Objective.THROUGHPUT, tolerance=0.0, guards=(), **figures):
    runs, search = Runs(**figures), Found(figures)
    tuning = Tuning(
        search, runs, PRESENT, measures=objective.measures, tolerance=tolerance, seeds=SEEDS,
        requests=400, guards=guards,
    )  # fmt: skip
    tuning.run()
    return tuning, runs, search


FAST = {"always": {"ttft_s": 0.5}}


def test_the_best_is_chosen_on_one_half_and_judged_on_the_other():
    """Under every seed, at three loads; the first half is for choosing alone."""
    tuning, runs, _ = tuned(fair={"always": {"ttft_s": 0.9}}, fast=FAST)
    assert tuning.chosen.policy.name == "fast"
    assert tuning.beats
    assert list(tuning.held_out) == list(LOADS) == [1.0, 0.7, 1.3]
    judged = [(name, one) for name, one in runs.asked if one.half is Half.HOLD_OUT]
    assert {name for name, _ in judged} == {"default", "fast"}, "the half that no choice sees"
    assert len(judged) == 2 * len(LOADS) * SEEDS
    assert {one.share for _, one in judged} == {1.0}
    found = tuning.held_out[1.0].differences["ttft_p90_s"]
    assert found.verdict == "better"
    assert found.reference == pytest.approx(1.3)
    assert found.relative == pytest.approx(-0.5, abs=0.01)


def test_what_it_costs_is_a_ratio_on_the_same_run():
    """Below 0 is better, whether more of the measure is or less."""
    _, runs, search = tuned(fast=FAST, much={"always": {"tokens_per_s": 2000.0}})
    (first, last) = search.costs
    assert (
        first
        == last
        == [(pytest.approx(-0.693, abs=1e-3), 0.0), (0.0, pytest.approx(-0.693, abs=1e-3))]
    )
    assert [one.share for _, one in runs.asked[:6]] == [0.25] * 3 + [1.0] * 3


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"always": {"ttft_s": 0.5, "tokens_per_s": 900.0}}, "the other objective pays for it"),
        ({"always": {"ttft_s": 0.5, "refused": 5}}, "requests that were refused are not late"),
        ({"always": {"ttft_s": 1.2}}, "it is worse"),
        ({}, "it is alike"),
    ],
)  # fmt: skip
def test_a_gain_that_something_else_pays_for_is_none(figures, why):
    """Nobody is chosen, and the half that is held out stays untouched."""
    tuning, runs, _ = tuned(dear=figures)
    assert tuning.chosen is tuning.best is None, why
    assert tuning.complete
    assert not tuning.beats
    assert not [one for _, one in runs.asked if one.half is Half.HOLD_OUT]


@pytest.mark.parametrize(
    ("half", "why"),
    [
        ({"hold-out": {"ttft_s": 1.0}}, "the gain is gone"),
        ({1.3: {"ttft_s": 1.5}}, "worse above the load"),
        ({0.7: {"tokens_per_s": 900.0}}, "worse below it, in the other objective"),
        ({1.3: {"refused": 50}}, "it refuses what comes above the load"),
    ],
)
def test_a_gain_that_does_not_hold_beats_nothing(half, why):
    """Chosen on the first half, and then not good enough."""
    tuning, _, _ = tuned(lucky=FAST | half)
    assert tuning.chosen.policy.name == "lucky"
    assert not tuning.beats, why


@pytest.mark.parametrize(("tolerance", "beats"), [(0.0, False), (0.02, False), (0.06, True)])
def test_a_little_may_be_given_up_for_much(tolerance, beats):
    """A twentieth of the throughput for half of the time, if somebody says so."""
    tuning, _, _ = tuned(
        tolerance=tolerance, fast={"always": {"ttft_s": 0.5, "tokens_per_s": 950.0}}
    )
    assert tuning.beats is beats
    if beats:
        (told,) = {tuple(one.worse(0.02)) for one in tuning.held_out.values()}
        assert told == ("output_tokens_per_s",)


def test_lost_requests_count_as_ten_times_worse_and_impatient_clients_do_not():
    """In each objective, so that a search learns to keep away; one in a thousand is chance."""
    _, _, search = tuned(
        lossy={"always": {"ttft_s": 0.5, "refused": 2}},
        chance={"always": {"refused": 1}},
        left={"always": {"aborted": 100}},
        none={"always": {"ttft_s": float("nan")}},
    )
    (first, _) = search.costs
    assert first == [(LOST, LOST), (0.0, 0.0), (0.0, 0.0), (LOST, 0.0)]


def test_time_between_tokens_may_be_the_other_objective():
    """The two that are looked at, and no others."""
    assert Objective("itl").measures == ("ttft_p90_s", "itl_mean_s")
    tuning, _, _ = tuned(Objective.ITL, fast={"always": {"ttft_s": 0.5, "tokens_per_s": 10.0}})
    assert tuning.beats, "throughput is none of the objectives here"
    assert set(tuning.held_out[1.0].differences) == {"ttft_p90_s", "itl_mean_s"}


def test_what_is_stopped_is_not_complete():
    """What was known by then stays, and nothing counts as beaten."""
    runs, search = Runs(fast=FAST), Found(["fast"])
    tuning = Tuning(
        search, runs, PRESENT, measures=Objective.ITL.measures, tolerance=0.0, seeds=SEEDS,
        requests=400,
    )  # fmt: skip
    plain = runs.of

    def of(wanted):
        if wanted[0][1].half is Half.HOLD_OUT:
            raise StoppedError
        return plain(wanted)

    runs.of = of
    with pytest.raises(StoppedError):
        tuning.run()
    assert tuning.finals
    assert tuning.chosen is tuning.best is not None
    assert not tuning.complete
    assert not tuning.beats


def test_a_guard_stops_a_gain_that_costs_elsewhere():
    """Half of the time to the first token, a hundredth more of the whole: sure, and so too much."""
    dear = {"always": {"ttft_s": 0.5, "e2e_s": 2.02}}
    tuning, _, _ = tuned(guards=GUARDS, dear=dear)
    assert tuning.chosen is None
    ((_, against),) = tuning.finals
    assert against.better
    assert against.stopped_by(GUARDS) == ["e2e_mean_s"]
    told = against.summary(0.0, GUARDS)
    assert told.stopped_by == ["e2e_mean_s"]
    assert told.guards["e2e_mean_s"].relative == pytest.approx(0.01)
    assert set(told.differences) == {"ttft_p90_s", "output_tokens_per_s"}
    assert tuned(dear=dear)[0].beats, "without guards nobody looks"


def test_a_guard_may_allow_a_share():
    """As much as somebody says, and no more."""
    dear = {"always": {"ttft_s": 0.5, "e2e_s": 2.02}}
    for allowed, beats in ((0.005, False), (0.02, True)):
        guards = [Guard(measure="e2e_mean_s", allowed=allowed)]
        assert tuned(guards=guards, dear=dear)[0].beats is beats


def test_a_guard_looks_at_every_load_of_the_half_that_judges():
    """Chosen, because on the first half it costs nothing."""
    tuning, _, _ = tuned(guards=GUARDS, lucky=FAST | {1.3: {"e2e_s": 3.0}})
    assert tuning.chosen.policy.name == "lucky"
    assert not tuning.beats
    stopped = {load: one.stopped_by(GUARDS) for load, one in tuning.held_out.items()}
    assert stopped == {1.0: [], 0.7: [], 1.3: ["e2e_mean_s"]}


def test_the_search_keeps_away_from_what_a_guard_would_stop():
    """No gain in either objective, and the worse the more it costs; what is little may be chance."""
    _, _, search = tuned(
        guards=GUARDS,
        tolerance=0.02,
        dear={"always": {"ttft_s": 0.5, "e2e_s": 4.0}},
        chance={"always": {"ttft_s": 0.5, "e2e_s": 2.02}},
    )
    dear, chance = search.costs[0]
    assert dear == (pytest.approx(math.log(2)), pytest.approx(math.log(2)))
    assert chance == (pytest.approx(-math.log(2), abs=1e-3), 0.0)


def test_a_guard_of_what_there_is_none_of_stops_nobody():
    """No stalls before, and none to divide by; none left is no loss."""
    guards = [Guard(measure="stall_share")]
    before = {PRESENT.name: {"always": {"stalls": 0.1}}}
    _, _, search = tuned(guards=guards, fast=FAST)
    assert search.costs[0] == [(pytest.approx(-math.log(2)), 0.0)]
    tuning, _, search = tuned(guards=guards, fast=FAST, **before)
    assert search.costs[0][0] == (pytest.approx(-math.log(2)), 0.0)
    assert tuning.beats


def test_what_can_be_confirmed_is_known_before_the_search():
    """From a few on the half for tuning, and of the objectives alone."""
    runs, search = Runs(fast=FAST), Found(["fast"])
    tuning = Tuning(
        search, runs, PRESENT, measures=Objective.ITL.measures, tolerance=0.0, seeds=SEEDS,
        requests=400, guards=GUARDS[:1],
    )  # fmt: skip
    tuning.estimate_power()
    assert search.costs is None
    assert {one.half for _, one in runs.asked} == {Half.TUNING}
    assert tuning.power.requests == 400
    assert tuning.power.seeds == SEEDS
    assert set(tuning.power.gains) == {"ttft_p90_s"}, "of the other nothing varies here"
