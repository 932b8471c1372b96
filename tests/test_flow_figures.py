"""The figures of the queue in overload: what is compared, and what the page shows of it."""

from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from docs import flow_figures
from docs.flow_figures import (
    ALONE,
    ARMS,
    BURST_S,
    DURATION_S,
    OFF,
    ON,
    PODS,
    PODS_MANY,
    SCENARIOS,
    SEEDS,
    WARM_UP_S,
    Row,
    Run,
    picture,
    planned_runs,
    read,
    row_of,
    simulated,
    source_of,
    table,
    target_table,
    targets,
    traffic,
)
from sim.cluster.simulated_request import Fate, SimulatedRequest
from sim.traces.arrival import Arrival

ROW = Row(
    run=Run(scenario="tenants", arm=ON, pickers=1, seed=1),
    ttft_p50_s=0.1,
    ttft_p90_s=0.2,
    ttft_p99_s=0.3,
    others_ttft_p90_s=3.0,
    goodput_per_s=10.0,
    served_per_s=40.0,
    queue_p99=4.0,
    queue_max=6.0,
    refused=0,
    failed=0,
    drained_s=None,
)


def rows(**changes):
    """A row for each run, all alike but for `changes`, which are functions of the run."""
    return [
        replace(
            ROW,
            run=run,
            drained_s=9.0 if run.scenario == "burst" else None,
            **{name: change(run) for name, change in changes.items()},
        )
        for run in planned_runs()
    ]


def reached(found):
    return {target.says: target.met for target in targets(found)}


def test_every_kind_of_traffic_is_served_with_and_without_the_queue():
    runs = planned_runs()
    assert len(set(runs)) == len(runs)
    known = {(run.scenario, run.arm) for run in runs}
    assert known == {(one, arm) for one in SCENARIOS for arm in ARMS} - {("burst", ALONE)}
    assert {run.pickers for run in runs if run.arm == ON} == {1, 2, 4}
    small = [run for run in runs if run.pods == PODS]
    assert runs[: len(small)] == small, "the larger pool comes last"
    assert [run.seed for run in small] == sorted(run.seed for run in small)


def test_protected_requests_are_the_same_alone():
    """They arrive at the same times, so that only the others make a difference."""
    scenario = SCENARIOS["tenants"]
    run = Run(scenario="tenants", arm=ON, pickers=1, seed=1)
    every = list(traffic(run))
    alone = list(traffic(replace(run, arm=ALONE)))
    mine = [one for one in every if scenario.protected(one)]
    assert [one.time_s for one in alone] == [one.time_s for one in mine]
    assert len(every) > 10 * len(alone)
    assert every[-1].time_s < DURATION_S
    assert [one.index for one in every] == list(range(len(every)))


def test_a_larger_pool_gets_more_requests_in_proportion():
    run = Run(scenario="batch", arm=ON, pickers=1, seed=1)
    few, many = (len(list(traffic(replace(run, pods=pods)))) for pods in (PODS, PODS_MANY))
    assert many / few == pytest.approx(PODS_MANY / PODS, rel=0.1)


def test_only_one_arm_has_the_queue():
    assert source_of(ON).load().flow is not None
    assert source_of(OFF).load().flow is None


def test_all_targets_are_reached_if_nothing_is_slower():
    assert all(reached(rows()).values())


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"ttft_p90_s": lambda run: 0.1 if run.arm == ALONE else 0.2}, "small tenant, TTFT p90"),
        ({"ttft_p99_s": lambda run: 0.1 if run.arm == ALONE else 0.3}, "interactive, TTFT p99"),
        ({"queue_p99": lambda run: 6.0}, "two tenants, engine queue p99"),
        ({"goodput_per_s": lambda run: 9.0 if run.arm == ON else 10.0}, "burst, goodput: on"),
        ({"failed": lambda run: int(run.seed == SEEDS[-1])}, "answers 5xx"),
        ({"ttft_p90_s": lambda run: 0.2 + 0.1 * (run.pickers > 1)}, "two tenants, small"),
    ],
)
def test_a_target_that_is_missed_is_shown_as_missed(changes, missed):
    found = rows(**changes)
    at_fault = [says for says, met in reached(found).items() if not met]
    assert any(says.startswith(missed) for says in at_fault)
    assert target_table(found).count("**no**") == len(at_fault)


def test_a_table_has_a_row_for_each_arm():
    lines = table(rows(), "tenants").splitlines()
    assert len(lines) == 2 + 5
    assert lines[2].startswith("| small tenant alone | 0.1 s | 0.2 s | 0.3 s | 3 s |")
    assert len(table(rows(), "burst").splitlines()) == 2 + 4


def test_a_run_measures_all_requests_after_the_warm_up():
    row = simulated(Run(scenario="tenants", arm=ALONE, pickers=1, seed=SEEDS[0]))
    assert 0.0 < row.ttft_p50_s < row.ttft_p90_s < row.ttft_p99_s < 2.0
    assert row.others_ttft_p90_s is None
    assert row.served_per_s == pytest.approx(5.6, rel=0.2)
    assert (row.refused, row.failed) == (0, 0)
    assert row.series[0][0] == flow_figures.WARM_UP_S


def test_only_complete_requests_were_served():
    """A refusal ends a request as an answer does."""
    run = Run(scenario="burst", arm=ON, pickers=1, seed=1)
    ended = [ended_with(fate, number) for number, fate in enumerate(Fate)]
    assert row_of(run, ended, [0.0]).served_per_s == 1 / (DURATION_S - WARM_UP_S)


def ended_with(fate, number):
    """A request that came at the burst and ended with `fate` before the last arrivals."""
    at_s = BURST_S[0]
    arrival = Arrival(index=number, time_s=at_s, prompt_tokens=256, output_tokens=2)
    request = SimulatedRequest(number, arrival, at_s)
    request.fate = fate
    request.routed_at, request.first_token_at, request.finished_at = at_s, at_s + 1.0, at_s + 2.0
    request.ended_at = at_s + 2.0
    return request


def test_the_page_shows_what_was_measured():
    measured = read()
    assert {row.run for row in measured} == set(planned_runs())
    root = ET.fromstring(picture())
    assert sum(one.tag.endswith("polyline") for one in root.iter()) == 3 + 3 + 2
