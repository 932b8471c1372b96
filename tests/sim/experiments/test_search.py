"""Which configurations are tried: what is planted is found, halving is as told, chance is seeded."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sim.cluster.policies import PolicySource, policy_source
from sim.experiments.search import (
    BATCH,
    EXCESS_LOSS_WEIGHT,
    FINALISTS,
    PROMOTED_SHARE,
    RUNGS,
    Search,
    Trial,
    one_cost,
    pareto,
    runs_expected,
)
from sim.experiments.space import Space

TEXT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: prefix-cache-scorer}, {type: queue-scorer}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache-scorer, weight: 1}, {pluginRef: queue-scorer, weight: 1}]
"""
PRESENT = PolicySource(name="present", text=TEXT, source="present.yaml")
PICKER = '[[plugins]]\nplugin = "max-score-picker"\ntypes = ["random-picker"]\n'
TOLERANCE = 0.02
PREFIX_OVER_QUEUE = 20.0
"""The planted optimum; the present configuration has 1."""


def planted(rung, policies):
    """As though a run took longer the further its weights are from the optimum, on every rung."""
    return [cost_of(policy) for policy in policies]


def cost_of(policy):
    prefix, queue, picker = described(policy)
    away = abs(math.log(max(prefix, 0.02) / max(queue, 0.02) / PREFIX_OVER_QUEUE))
    return (away - math.log(PREFIX_OVER_QUEUE) + 5.0 * (picker == "random-picker"), 0.0)


def described(policy):
    """Both weights and the picker, without the trial that a configuration is put to."""
    prefix, queue, picker = yaml.safe_load(policy.text)["schedulingProfiles"][0]["plugins"]
    return prefix["weight"], queue["weight"], picker["pluginRef"]


def searched(measured=planted, *, trials=60, seed=1, space=None):
    search = Search(space or Space(PRESENT), trials=trials, seed=seed, tolerance=TOLERANCE)
    search.run(measured)
    return search


def told(search):
    return [(one.number, one.values, one.costs, one.refused) for one in search.trials]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_planted_is_found(tmp_path, seed):
    """A ratio of two weights, among things that do not matter and a picker that must not be."""
    file = tmp_path / "space.toml"
    file.write_text(PICKER)
    search = searched(seed=seed, space=Space(PRESENT, file=file))
    best = search.best()
    prefix, queue, picker = described(best.policy)
    assert PREFIX_OVER_QUEUE / 2 < prefix / queue < PREFIX_OVER_QUEUE * 2
    assert picker == "max-score-picker"
    assert best in search.finalists(PRESENT.hash)
    late = [sum(one.costs[0]) for one in search.trials[-2 * BATCH :] if one.costs]
    early = [sum(one.costs[0]) for one in search.trials[1:BATCH] if one.costs]
    assert sum(late) / len(late) < sum(early) / len(early), "it has learnt nothing"


def test_the_first_that_is_tried_is_the_present_configuration():
    """What it is compared with costs nothing, and the search begins with it."""
    first = searched(trials=1).trials[0]
    assert first.hash == PRESENT.hash
    # A present value outside its range, and the search begins anywhere.
    away = PolicySource(name="away", text=TEXT.replace("weight: 1}]", "weight: 99}]"), source="")
    assert searched(trials=1, space=Space(away)).trials[0].hash != away.hash


def test_the_same_seed_tries_the_same_however_often_it_is_stopped():
    """A longer search begins as a shorter one; another seed does otherwise."""

    class StoppedError(Exception):
        pass

    whole = searched(trials=2 * BATCH)
    assert told(searched(trials=2 * BATCH)) == told(whole)
    assert told(searched(trials=BATCH)) == told(whole)[:BATCH]
    assert told(searched(trials=2 * BATCH, seed=2)) != told(whole)
    calls = 0

    def stopping(rung, policies):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise StoppedError
        return planted(rung, policies)

    search = Search(Space(PRESENT), trials=2 * BATCH, seed=1, tolerance=TOLERANCE)
    with pytest.raises(StoppedError):
        search.run(stopping)
    assert search.best().finished, "what is known by then can be told"
    assert told(search)[:BATCH] == told(whole)[:BATCH]


def test_a_third_of_each_batch_goes_on():
    """And no more runs than a bar was told; a last batch may be smaller."""
    rungs = []

    def counting(rung, policies):
        rungs.append((rung, len(policies)))
        return planted(rung, policies)

    search = searched(counting, trials=BATCH + 4)
    assert rungs == [(0, 12), (1, 4), (0, 4), (1, 2)]
    assert runs_expected(BATCH + 4) == sum(count + 1 for _, count in rungs)
    finished = [one for one in search.trials[:BATCH] if one.finished]
    others = [one for one in search.trials[:BATCH] if not one.finished]
    assert len(finished) == math.ceil(BATCH * PROMOTED_SHARE)
    assert max(sum(one.costs[0]) for one in finished) <= min(sum(one.costs[0]) for one in others)
    assert len(RUNGS) == 2
    assert RUNGS[-1] == 1.0


def test_what_is_no_configuration_is_told_and_not_measured():
    """Both weights off, say, where that is the best that there is: drawn one time in sixty or so."""
    seen = []

    def watching(rung, policies):
        seen.extend(policies)
        return [(sum(described(policy)[:2]), 0.0) for policy in policies]

    search = searched(watching, trials=4 * BATCH)
    refused = [one for one in search.trials if one.refused]
    assert refused
    assert all("all weights of profile default are 0" in one.refused for one in refused)
    assert all(not one.costs and one.cost == math.inf for one in refused)
    assert not {one.policy.name for one in refused} & {one.name for one in seen}


def test_finalists_are_others_than_the_present_and_than_each_other():
    """Trials that differ only beyond what is written are one configuration."""

    def alike(rung, policies):
        return [(0.0, 0.0)] * len(policies)

    search = searched(alike, trials=2 * BATCH)
    twin = search.trials[1]
    for one in search.trials[:FINALISTS]:
        one.costs, one.cost = [(0.0, 0.0), (-1.0, 0.0)], -1.0
    search.trials[2].hash = twin.hash
    found = search.finalists(PRESENT.hash)
    assert found[:2] == [twin, search.trials[3]]
    assert len({one.hash for one in found} | {PRESENT.hash}) == len(found) + 1 <= FINALISTS + 1


def test_of_nothing_there_is_no_best():
    """Before the first batch has been measured."""
    search = Search(Space(PRESENT), trials=5, seed=1, tolerance=TOLERANCE)
    assert search.best() is None
    assert search.finalists(PRESENT.hash) == search.front() == []


@pytest.mark.parametrize(
    ("costs", "number"),
    [
        ((-0.5, 0.1), -0.4 + EXCESS_LOSS_WEIGHT * (0.1 - math.log(1.02))),
        ((-0.5, math.log(1.02)), -0.5 + math.log(1.02)),
        ((-0.5, -0.1), -0.6),
        ((0.2, 0.2), 0.4 + 2 * EXCESS_LOSS_WEIGHT * (0.2 - math.log(1.02))),
    ],
)
def test_what_is_given_up_beyond_the_tolerance_weighs_more_than_a_gain(costs, number):
    """Nobody is chosen who gives up more, so that it is no use to look there."""
    assert one_cost(costs, TOLERANCE) == pytest.approx(number)


def test_those_who_give_up_too_much_do_not_go_on():
    """However much they gain in the other objective."""

    def dear(rung, policies):
        return [(-1.0, 0.3) if at % 3 else (-0.1, 0.0) for at, _ in enumerate(policies)]

    search = searched(dear, trials=BATCH)
    finished = [one for one in search.trials if one.finished]
    assert {one.costs[0] for one in finished} == {(-0.1, 0.0)}
    assert search.best().cost == pytest.approx(-0.1)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), max_size=20))
def test_nobody_on_the_front_is_dominated_and_everybody_else_is(costs):
    """By definition, with ties kept."""
    policy = policy_source("default")
    trials = [
        Trial(number=at, values={}, policy=policy, costs=[(0.0, 0.0), one])
        for at, one in enumerate(costs)
    ]
    front = {one.number for one in pareto(trials)}

    def dominated(at):
        return any(
            other != costs[at] and other[0] <= costs[at][0] and other[1] <= costs[at][1]
            for other in costs
        )

    assert front == {at for at in range(len(costs)) if not dominated(at)}
