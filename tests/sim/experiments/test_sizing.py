"""How few pods keep bounds, with made-up runs: which are asked for, and what is made of them."""

import pytest
from msgspec.structs import replace

from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.demand import demand_of
from sim.experiments.run import RunSettings
from sim.experiments.run_journal import StoppedError
from sim.experiments.sizing import (
    GROWTH,
    ONE_LOST,
    TARGET_SHARES,
    Option,
    Sizing,
    SizingTask,
    at_load,
)
from sim.experiments.warm_up import WarmUp
from sim.measurement.objectives import bounds_in
from sim.measurement.summaries import KeptRun, PartSummary
from tests.sim.made import arrival, filled

SEEDS = 5
CARD = find_profile(DEFAULT_PROFILE)


class MadeUpRuns:
    """A TTFT for each run, from its settings; remembers what it was asked for."""

    def __init__(self, ttft_s, runs_max=10_000):
        self.asked = []
        self._ttft_s = ttft_s
        self._runs_max = runs_max

    def of(self, wanted):
        if len(self.asked) + len(wanted) > self._runs_max:
            raise StoppedError
        self.asked += wanted
        return [self._run(settings) for settings in wanted]

    def _run(self, settings):
        return filled(
            KeptRun,
            requests={"sent": 100, "complete": 100},
            ttft_s={"p90": self._ttft_s(settings)},
            e2e_s={"mean": 8.0},
            requests_per_s=10.0,
            traffic={"generated": True},
            pool={"pods_max": 1, "pods_mean": 1.0, "pod_hours": 1.0},
        )


def pods_of(settings):
    return len(settings.cluster.pods)


def needing(pods):
    """Enough from so many on, for any number of them a little different from seed to seed."""
    return lambda settings: pods / pods_of(settings) - 0.001 * (5 + settings.repetition)


def option(profile=CARD, policy="default", price=None):
    source = policy_source(policy)
    return Option(
        profile=profile,
        policy=source,
        price_per_hour=price,
        settings=RunSettings(
            trace="day.jsonl", policy=source, cluster=ClusterSettings(pods=(PodKind.of(profile),))
        ),
    )


def task(options=None, *, sized_s_max=3600.0, pods_max=32, every_count=False):
    return SizingTask(
        bounds=bounds_in("ttft-p90=1"),
        seeds=SEEDS,
        generated=True,
        pods_max=pods_max,
        growth=1.5,
        pod_startup_s=60.0,
        answer_only=False,
        every_count=every_count,
        demand=demand_of(
            [arrival(at, time_s=10.0 * at) for at in range(100)], sized_s_max=sized_s_max
        ),
        warm_up=WarmUp(
            seconds=20.0, given=False, needed_s=20.0, share_excluded=0.02, busiest_s=60.0,
            busiest_from_s=100.0, busiest_excluded=False,
        ),
        options=options or [option()],
    )  # fmt: skip


def carried_out(ttft_s, **of):
    runs = MadeUpRuns(ttft_s)
    sizing = Sizing(task(**of), runs)
    sizing.carry_out()
    assert sizing.complete
    return sizing, runs


@pytest.mark.parametrize("needed", [1, 2, 7, 31, 32])
def test_it_finds_the_smallest_number_that_is_enough(needed):
    """Having tried both beside it, with every repetition where it is close."""
    sizing, _ = carried_out(needing(needed))
    found = sizing.options[0]
    assert found.pods == needed
    assert found.known[needed]
    assert needed == 1 or not found.known[needed - 1]
    assert needed == 32 or found.known[needed + 1]
    assert len(found.runs[needed]) == SEEDS


def test_other_repetitions_are_other_traffic():
    """Not other dice alone: the seed that draws it is another too."""
    _, runs = carried_out(needing(4))
    seeds = {(one.repetition, one.seed, one.read.seed) for one in runs.asked}
    assert seeds == {(at, 1 + at, 1 + at) for at in range(SEEDS)}


def test_a_number_that_is_far_too_small_costs_one_run():
    """No further one could save it."""
    sizing, _ = carried_out(lambda settings: 100.0 if pods_of(settings) < 20 else 0.5)
    tried = {one.pods: one.runs for one in sizing.options[0].counts()}
    assert all(runs == (1 if pods < 20 else SEEDS) for pods, runs in tried.items())


def test_what_traffic_decides_is_not_sure():
    """The figures keep the bound, their interval does not: named as one that might do."""

    def ttft_s(settings):
        return {3: 0.9 + 0.1 * (settings.repetition - 2)}.get(
            pods_of(settings), 2.0 if pods_of(settings) < 3 else 0.5
        )

    sizing, _ = carried_out(ttft_s)
    assert (sizing.options[0].pods, sizing.options[0].perhaps) == (4, 3)


def test_a_number_that_is_enough_by_luck_is_passed_over():
    """The next above it is not."""
    sizing, _ = carried_out(
        lambda settings: 0.5 if pods_of(settings) in {1, *range(6, 33)} else 2.0
    )
    assert sizing.options[0].pods == 6


def test_nothing_is_enough():
    """There is neither a cheapest option nor headroom of one."""
    sizing, _ = carried_out(lambda _: 2.0)
    assert sizing.chosen is None
    assert sizing.why_none == "No option keeps all bounds with up to 32 pods."
    assert not sizing.headroom
    assert sizing.options[0].counts()[-1].pods == 32


def test_the_cheapest_is_chosen():
    """By what all its pods cost, not by their number."""
    large = find_profile("llama-3.1-70b-h100-tp4")
    options = [option(price=1.0), option(large, price=5.0)]

    def ttft_s(settings):
        return needing(3 if settings.cluster.pods[0].profile == large else 9)(settings)

    sizing, _ = carried_out(ttft_s, options=options)
    assert [one.pods for one in sizing.options] == [9, 3]
    assert sizing.chosen == 0
    unpriced, _ = carried_out(
        ttft_s, options=[replace(options[0], price_per_hour=None), options[1]]
    )
    assert unpriced.chosen is None
    assert "--price" in unpriced.why_none


def test_of_equal_costs_the_one_with_more_left_is_chosen():
    """Two strategies that need as many pods."""
    options = [option(policy="round-robin"), option(policy="default")]

    def ttft_s(settings):
        return needing(4)(settings) * (0.9 if settings.policy.name == "default" else 1.0)

    sizing, _ = carried_out(ttft_s, options=options)
    assert [one.pods for one in sizing.options] == [4, 4]
    assert sizing.chosen == 1


def test_headroom_is_of_a_lost_pod_and_of_faster_requests():
    """A pod leaves at a tenth of the time, and who lost it asks again; or all is so much faster."""

    def ttft_s(settings):
        lost = 1 if settings.scenario is not None else 0
        return settings.speed * 4 / max(0.1, pods_of(settings) - lost) - 0.001

    sizing, runs = carried_out(ttft_s)
    assert sizing.options[0].pods == 4
    assert {case: one.pods for case, one in sizing.headroom.items()} == {ONE_LOST: 5, GROWTH: 6}
    lost = [one for one in runs.asked if one.scenario is not None and one.scenario.incidents]
    assert {one.scenario.incidents[0].at_s for one in lost} == {99.0}
    assert {one.cluster.clients.retries for one in lost} == {1}


@pytest.mark.parametrize(("kept_below", "share"), [(100.0, 1.0), (15.0, 0.6), (0.0, 0.4)])
def test_the_highest_target_that_keeps_the_bounds_is_taken(kept_below, share):
    """Of some below what a pod has in flight: 10 a second for 8 s on 4 pods; else the lowest."""

    def ttft_s(settings):
        scaled = settings.scenario and settings.scenario.autoscalers
        if scaled:
            return 0.5 if scaled[0].target < kept_below else 2.0
        return needing(4)(settings)

    sizing, _ = carried_out(ttft_s)
    settings, runs = sizing.autoscaled
    assert settings.target == pytest.approx(share * 20)
    assert share in TARGET_SHARES
    assert settings.startup_s == 60.0
    assert settings.pods_max >= 5
    assert len(runs) == SEEDS


def test_of_a_long_trace_a_stretch_is_sized_for_and_the_whole_is_autoscaled():
    """Once: of one run nothing is sure."""
    sizing, runs = carried_out(needing(4), sized_s_max=200.0)
    whole = [one for one in runs.asked if one.scenario and one.scenario.autoscalers]
    assert {(one.requests_from, one.requests_max) for one in whole} == {(0, 100)}
    assert len(sizing.autoscaled[1]) == 1


@pytest.mark.parametrize(
    ("kept_below", "share", "asked"), [(100.0, 1.0, [2]), (17.0, 0.8, [2]), (13.0, 0.6, [2, 2])]
)
def test_of_a_whole_trace_two_targets_are_tried_at_once(kept_below, share, asked):
    """One run each would leave all cores but one idle; the highest that keeps the bounds is taken."""
    sets = []

    class InSets(MadeUpRuns):
        def of(self, wanted):
            scaled = sum(bool(one.scenario and one.scenario.autoscalers) for one in wanted)
            sets.extend([scaled] if scaled else [])
            return super().of(wanted)

    def ttft_s(settings):
        scaled = settings.scenario and settings.scenario.autoscalers
        if scaled:
            return 0.5 if scaled[0].target < kept_below else 2.0
        return needing(4)(settings)

    sizing = Sizing(task(sized_s_max=200.0), InSets(ttft_s))
    sizing.carry_out()
    settings, runs = sizing.autoscaled
    assert settings.target == pytest.approx(share * 20)
    assert len(runs) == 1
    assert sets == asked


def test_every_number_is_run_to_check_the_search():
    """It says what is found so, also where the search was misled by luck."""

    def ttft_s(settings):
        return 0.5 if pods_of(settings) in {*range(2, 5), *range(9, 17)} else 2.0

    sizing, _ = carried_out(ttft_s, every_count=True, pods_max=16)
    assert sizing.every_smallest(0) == 9
    assert sum(one.runs for one in sizing.every[0].counts()) == 16 * SEEDS
    assert sizing.options[0].pods == 2


def test_what_was_stopped_tells_what_is_known():
    """No answer, and of the number that was being tried no verdict."""
    runs = MadeUpRuns(needing(1), runs_max=3)
    sizing = Sizing(task(), runs)
    with pytest.raises(StoppedError):
        sizing.carry_out()
    assert not sizing.complete
    assert sizing.chosen is None
    assert sizing.why_none == ""
    (tried,) = sizing.options[0].counts()
    assert (tried.runs, tried.kept) == (1, None)


def test_no_more_are_in_flight_than_came():
    """Requests that come all at once have no rate that lasts."""

    class AtOnce(MadeUpRuns):
        def _run(self, settings):
            return replace(super()._run(settings), requests_per_s=1e9)

    sizing = Sizing(task(), AtOnce(needing(4)))
    sizing.carry_out()
    assert sizing.autoscaled[0].target == 100 / 4


def test_more_traffic_never_needs_fewer_pods():
    """Where fewer are enough by luck: one pod less is not enough for the traffic as it is."""

    def ttft_s(settings):
        needed = 4 if settings.speed == 1.0 and settings.scenario is None else 3
        return 0.5 if pods_of(settings) >= needed else 2.0

    sizing, runs = carried_out(ttft_s)
    assert sizing.options[0].pods == 4
    assert sizing.headroom[GROWTH].pods == 4
    assert sizing.headroom[ONE_LOST].pods == 4
    assert not [one for one in runs.asked if one.speed > 1.0 and pods_of(one) < 4]


def test_the_same_part_of_the_trace_is_excluded_at_every_load():
    """Twice as fast it takes half the time; the busiest part likewise."""
    usual = replace(option().settings, speed=2.0, warm_up_s=30.0, busiest_s=60.0)
    faster = at_load(usual, 1.5)
    assert (faster.speed, faster.warm_up_s, faster.busiest_s) == (3.0, 20.0, 40.0)
    unset = at_load(option().settings, 2.0)
    assert (unset.speed, unset.warm_up_s, unset.busiest_s) == (2.0, None, None)


def test_a_number_that_breaks_a_bound_only_in_the_busiest_part_is_not_enough():
    """All of the traffic keeps it with two pods, the busiest part with five."""

    def run(settings):
        pods = pods_of(settings)
        busiest = {"requests": {"sent": 10, "complete": 10}, "ttft_s": {"p90": 5.0 / pods}}
        return filled(
            KeptRun,
            requests={"sent": 100, "complete": 100},
            ttft_s={"p90": 2.0 / pods},
            busiest=filled(PartSummary, **busiest),
            traffic={"generated": True},
        )

    class Parts:
        def of(self, wanted):
            return [run(settings) for settings in wanted]

    sizing = Sizing(replace(task(), answer_only=True), Parts())
    sizing.carry_out()
    found = sizing.options[0]
    assert found.pods == 5
    told = {one.pods: one.bounds for one in found.counts()}[4]
    assert [(one.name, one.busiest, one.kept_by_figure) for one in told] == [
        ("ttft-p90", False, True), ("lost", False, True),
        ("ttft-p90", True, False), ("lost", True, True),
    ]  # fmt: skip
