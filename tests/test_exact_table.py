"""Tests of the script that measures the tables of docs/kv-events.md."""

import pytest

from docs import exact
from docs.exact import (
    APPROXIMATE,
    EXACT,
    LEARNING_ARMS,
    Condition,
    Figures,
    cells,
    hits_more,
    measure,
    read,
)
from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.knowledge.hit_accuracy import WINDOW_S_MIN


def figures(hit_rate, **others):
    defaults = {"ttft_mean_s": 0.1, "ttft_p90_s": 0.2, "off_tokens": 10.0}
    return Figures(hit_rate=hit_rate, **(defaults | others))


def test_all_that_the_page_shows_was_measured_by_what_measures_it_now():
    measured = read()
    assert measured.under == exact.under()
    found = {(cell.arm, cell.condition): len(cell.runs) for cell in measured.cells}
    assert found == {(arm.name, condition): exact.SEEDS for arm, condition in cells()}


def test_who_is_told_nothing_is_measured_once_for_all_delays():
    late = Condition(delay_s=5.0, loss=0.5)
    assert late.of(APPROXIMATE) == Condition().of(APPROXIMATE)
    assert late.of(EXACT) == late
    assert late.cluster(APPROXIMATE).kv_events is None
    told = late.cluster(EXACT).kv_events
    assert (told.delay_s, told.loss) == (5.0, 0.5)


@pytest.mark.parametrize("adapters", [0, 4, 16])
def test_adapters_share_the_same_number_of_prefixes(adapters):
    workload = Condition(pressure=1.2, adapters=adapters).workload()
    assert workload.content.groups * max(1, adapters) * exact.PREFIX_TOKENS == pytest.approx(
        1.2 * exact.PODS * exact.CACHE_TOKENS
    )


def test_differences_are_of_the_same_traffic():
    """That one draw has fewer hits than another says nothing."""
    found = hits_more(
        [figures(0.2), figures(0.5), figures(0.8)], [figures(0.25), figures(0.55), figures(0.85)]
    )
    assert found.value == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05)


def test_a_measurement_has_every_arm_and_seed():
    """Short: who is told of each hit is less wrong than who is not."""
    condition = Condition(pickers=2, peers=False, delay_s=0.0, duration_s=12.0, warm_up_s=2.0)
    wanted = [(arm, condition.of(arm)) for arm in exact.ARMS]
    measured = exact.Measured(under=exact.under(), cells=[*measure(wanted, [1, 2])])
    for arm in exact.ARMS:
        runs = measured.of(arm, condition)
        assert len(runs) == 2
        assert all(0 < run.hit_rate < 1 for run in runs)
        assert runs[0] != runs[1]
    off = [sum(run.off_tokens for run in measured.of(arm, condition)) for arm in exact.ARMS]
    assert off[1] < off[0]


def test_corrections_are_measured_over_several_windows():
    """Else the arm that learns is the one that does not."""
    for condition in exact.LEARNT.values():
        assert condition.warm_up_s >= 2 * WINDOW_S_MIN
        assert condition.duration_s - condition.warm_up_s >= 5 * WINDOW_S_MIN


def test_pods_may_tell_of_another_cache_than_they_have():
    """Of which engines know nothing."""
    plain, told = (Condition(told_times=times).cluster(APPROXIMATE).pods[0] for times in (1.0, 2.0))
    assert told.advertised_blocks == 2 * plain.advertised_blocks
    assert told.engine == plain.engine


def test_the_arms_differ_in_what_corrects_alone():
    """So that what one gains is what corrections gain."""
    configured = [load_config(arm.config, arm.name, plugin_tables()) for arm in LEARNING_ARMS[:2]]
    settings = [build_settings(one) for one in configured]
    assert [index.correct_by_engine for one in settings for index in one.indexes.values()] == [
        False,
        True,
    ]
    assert settings[0].indexes.keys() == settings[1].indexes.keys()
    assert settings[0].profile.plugin_names == settings[1].profile.plugin_names


def test_what_was_not_measured_is_named():
    with pytest.raises(LookupError, match=r"run `python -m docs.exact`"):
        exact.Measured(under={}, cells=[]).of(EXACT, Condition())
