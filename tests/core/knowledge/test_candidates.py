import math

import numpy as np
import pytest

from epp.core.knowledge.candidates import (
    ATTRIBUTES_MAX,
    SCRAPED,
    VERSIONED,
    Candidates,
    Columns,
)
from epp.core.types import AdapterReport
from tests.builders import NOW_S, affinity, candidates, endpoint, lora, resident


def test_a_new_slot_holds_what_an_unknown_endpoint_would():
    """NaN, never scraped, nothing in flight; however often the columns grew."""
    columns = Columns()
    slots = [columns.add_slot() for _ in range(40)]
    assert slots == list(range(40))
    assert len(columns) == 40
    pool = Candidates(columns, np.array(slots), 5.0, affinities={})
    assert np.isnan(pool.waiting_requests).all()
    assert np.isnan(pool.running_requests).all()
    assert np.isnan(pool.kv_cache_usage).all()
    assert np.isinf(pool.metrics_age_s).all()
    assert not pool.saturated.any()
    assert not pool.inflight_requests.any()
    assert not pool.inflight_prefill_tokens.any()
    assert not pool.adapter_state.generation.any()


def test_growing_keeps_what_is_known():
    """Values stay in their slots."""
    columns = Columns()
    first = columns.add_slot()
    columns.waiting_requests[first] = 7.0
    columns.inflight_requests[first] = 3
    for _ in range(100):
        columns.add_slot()
    assert columns.waiting_requests[first] == 7.0
    assert columns.inflight_requests[first] == 3


def filled_slot():
    columns = Columns()
    slot = columns.add_slot()
    columns.endpoints[slot] = endpoint()
    columns.waiting_requests[slot] = columns.running_requests[slot] = 4.0
    columns.kv_cache_usage[slot] = 0.5
    columns.observed_at_s[slot] = 1.0
    columns.saturated[slot] = True
    columns.inflight_requests[slot] = 2
    columns.prefill_backlog_tokens[slot] = 100.0
    columns.prefill_drained_at_s[slot] = 5.0
    columns.set_adapters(slot, lora("a", slots_max=2))
    return columns, slot


def test_forgetting_observations_keeps_work_in_flight():
    """A restarted engine says anew what it has; what was sent to it was sent."""
    columns, slot = filled_slot()
    columns.forget_observations(slot)
    pool = Candidates(columns, np.array([slot]), 5.0, affinities={})
    assert math.isnan(pool.waiting_requests[0])
    assert math.isinf(pool.metrics_age_s[0])
    assert not pool.saturated[0]
    assert pool.adapter_state.generation[0] == 0
    assert not pool.adapter_state.active("a")[0]
    assert pool.inflight_requests[0] == 2
    assert pool.inflight_prefill_tokens[0] == 100.0
    assert len(pool.endpoints) == 1


def test_clearing_a_slot_forgets_all():
    """The next endpoint in it starts from nothing."""
    columns, slot = filled_slot()
    columns.clear(slot)
    pool = Candidates(columns, np.array([slot]), 5.0, affinities={})
    assert pool.inflight_requests[0] == 0
    assert pool.inflight_prefill_tokens[0] == 0.0
    assert math.isnan(pool.kv_cache_usage[0])
    assert columns.endpoints[slot] is None


def test_the_age_of_metrics_is_counted_from_the_last_good_scrape():
    """Seconds before `now`."""
    pool = candidates(metrics_age_s=[0.0, 1.5, math.inf])
    assert pool.metrics_age_s.tolist() == [0.0, 1.5, math.inf]


def test_prefill_tokens_drain_with_time():
    """As fast as is known of the endpoint, which need not be what is said of it; never below 0."""
    columns = Columns()
    for backlog_tokens in (1000.0, 1000.0, 100.0):
        slot = columns.add_slot()
        columns.prefill_backlog_tokens[slot] = backlog_tokens
        columns.prefill_drained_at_s[slot] = 10.0 if slot else 12.0
        columns.prefill_drain_tokens_per_s[slot] = 100.0
    pool = Candidates(columns, np.arange(3), 12.0, affinities={})
    assert pool.inflight_prefill_tokens.tolist() == [1000.0, 800.0, 0.0]
    columns.prefill_drain_tokens_per_s[1] = 400.0
    assert pool.inflight_prefill_tokens.tolist() == [1000.0, 200.0, 0.0]
    columns.prefill_tokens_per_s[1] = 200.0
    assert pool.inflight_prefill_tokens.tolist() == [1000.0, 200.0, 0.0]
    assert pool.prefill_tokens_per_s.tolist() == [15_928.0, 200.0, 15_928.0]


def test_a_speed_that_nobody_told_is_the_fields_default():
    """An endpoint that restarts keeps its own."""
    columns = Columns()
    slots = [columns.add_slot() for _ in range(20)]
    assert set(columns.prefill_tokens_per_s[slots].tolist()) == {15_928.0}
    columns.prefill_tokens_per_s[3] = 1.0
    columns.clear(3)
    assert columns.prefill_tokens_per_s[3] == 1.0


def test_taking_some_keeps_every_column_in_step():
    """By mask or by positions; indexes are by slot and follow."""
    pool = candidates(
        waiting_requests=[0, 1, 2, 3],
        matched_blocks=[4, 5, 6, 7],
        total_blocks=8,
        labels=[{"n": str(number)} for number in range(4)],
        adapters=[lora(name) for name in "abcd"],
        affinities={"other": affinity([9, 8, 7, 6], 9)},
        prompt_tokens=640,
    )
    for taken in (
        pool.take(np.array([False, True, False, True])),
        pool.take(np.array([1, 3])),
        pool.take(np.array([True, True, False, True])).take(np.array([1, 2])),
    ):
        assert len(taken) == 2
        assert taken.slot.tolist() == [1, 3]
        assert taken.waiting_requests.tolist() == [1, 3]
        assert taken.matched_blocks.tolist() == [5, 7]
        assert taken.total_blocks.tolist() == [8, 8]
        assert [labels["n"] for labels in taken.labels] == ["1", "3"]
        assert taken.adapter_state.active("d").tolist() == [False, True]
        assert taken.affinity("other").matched.tolist() == [8, 6]
        assert taken.affinity("other").total == 9
        assert taken.uncached_tokens.tolist() == [320.0, 192.0]
    assert len(pool) == 4


def test_uncached_tokens_are_never_negative():
    """Estimates of bytes and of tokens may disagree by a few."""
    pool = candidates(matched_blocks=[0, 1, 2], total_blocks=2, block_tokens=64, prompt_tokens=100)
    assert pool.uncached_tokens.tolist() == [100.0, 36.0, 0.0]


def test_no_name_means_the_default_prefix_index():
    """As an empty producer name does in a configuration."""
    pool = candidates(matched_blocks=[1, 2], total_blocks=3)
    assert pool.affinity("").matched.tolist() == [1, 2]
    assert pool.affinity("").total == 3


def test_an_index_that_does_not_exist_knows_nothing():
    """0 of 0 for all."""
    pool = candidates(2)
    for name in ("", "missing"):
        assert pool.affinity(name).matched.tolist() == [0, 0]
        assert pool.affinity(name).total == 0
    assert pool.matched_blocks.tolist() == pool.total_blocks.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["waiting_requests", "inflight_requests", "matched_blocks"])
def test_a_column_is_scratch_for_who_asked(name):
    """The pool does not see what a plugin writes into it."""
    pool = candidates(
        waiting_requests=[1, 2], inflight_requests=[1, 2], matched_blocks=[1, 2], total_blocks=2
    )
    getattr(pool, name)[:] = 99
    assert getattr(pool, name).tolist() == [1, 2]


def test_adapters_are_counted_by_generation():
    """Counts for each candidate, and who has which."""
    pool = candidates(
        adapters=[
            None,
            lora("a", "b", slots_max=4),
            resident(gpu=["a", "b", "c"], cpu=["d"], active=["a"], pinned=["b"], slots_max=3),
            AdapterReport(),
        ]
    )
    state = pool.adapter_state
    assert state.generation.tolist() == [0, 1, 2, 1]
    assert state.slots_max.tolist() == [0, 4, 3, 0]
    assert state.active_count.tolist() == [0, 2, 1, 0]
    assert state.resident_count.tolist() == [0, 0, 3, 0]
    assert state.idle_count.tolist() == [0, 0, 1, 0]
    assert state.active("a").tolist() == [False, True, True, False]
    assert state.on_gpu("a").tolist() == [False, False, True, False]
    assert state.on_cpu("d").tolist() == [False, False, True, False]


def test_endpoints_are_those_of_the_slots():
    """In the order of the candidates."""
    pool = candidates(3).take(np.array([2, 0]))
    assert [found.address for found in pool.endpoints] == ["192.168.1.3:8000", "192.168.1.1:8000"]
    assert NOW_S - pool.metrics_age_s[0] == NOW_S


def test_candidates_know_who_they_were_after_one_has_left():
    """A slot that was emptied and taken by another endpoint still has its name of then."""
    columns = Columns()
    for number in (1, 2):
        columns.endpoints[columns.add_slot()] = endpoint(number)
    pool = Candidates(columns, np.array([0, 1]), NOW_S, affinities={})
    columns.clear(0)
    columns.endpoints[0] = endpoint(3)
    assert [one.name for one in pool.endpoints] == ["pod-1", "pod-2"]


def test_a_column_has_another_version_when_it_tells_something_else():
    """Not when it is told the same again, unknown or not."""
    columns = Columns()
    slot = columns.add_slot()

    def changed(verb, *told):
        before, total = dict(columns.versions), columns.version
        verb(slot, *told)
        found = {name for name in VERSIONED if columns.versions[name] != before[name]}
        assert (columns.version != total) == bool(found)
        return found

    nan = math.nan
    assert changed(columns.set_load, nan, nan, nan) == set()
    assert changed(columns.set_load, 1.0, nan, nan) == {"waiting_requests"}
    assert changed(columns.set_load, 1.0, 2.0, nan) == {"running_requests"}
    assert changed(columns.set_load, 1.0, 2.0, 0.5) == {"kv_cache_usage"}
    assert changed(columns.set_load, 1.0, 2.0, 0.5) == set()
    assert (columns.waiting_requests[slot], columns.kv_cache_usage[slot]) == (1.0, 0.5)
    assert changed(columns.set_kv_capacity, nan) == set()
    assert changed(columns.set_kv_capacity, 4_096.0) == {"kv_capacity_tokens"}
    assert changed(columns.set_kv_capacity, 4_096.0) == set()
    assert changed(columns.set_adapters, lora("a")) == {"adapter_state"}
    assert changed(columns.set_attributes, {}) == set()
    assert changed(columns.set_attributes, {"a": 1.0}) == {"attribute"}
    assert changed(columns.set_attributes, {"a": 1.0}) == set()
    assert changed(columns.forget_observations) == set(SCRAPED)
    assert np.isnan(columns.running_requests[slot])


def test_attributes_are_known_of_those_that_tell_them():
    """Whatever they are called, also after the columns grew; the copy is the caller's."""
    pool = candidates(attributes=[{"a": 1.0}, {"b": 2.0}, {}])
    assert pool.attribute("a").tolist()[0] == 1.0
    assert np.isnan(pool.attribute("a")[1:]).all()
    assert pool.attribute("b").tolist()[1] == 2.0
    assert np.isnan(pool.attribute("c")).all()
    pool.attribute("a")[:] = 9.0
    assert pool.attribute("a").tolist()[0] == 1.0
    for _ in range(100):
        pool._columns.add_slot()
    assert pool._columns.attributes["a"][0] == 1.0
    assert np.isnan(pool._columns.attributes["a"][1:]).all()


def test_an_attribute_that_nobody_tells_any_more_leaves_its_place_to_others():
    """There are so many places, and configurations change."""
    columns = Columns()
    first, second = columns.add_slot(), columns.add_slot()
    for slot in (first, second):
        columns.set_attributes(slot, {str(number): 1.0 for number in range(ATTRIBUTES_MAX)})
    columns.set_attributes(first, {"new": 2.0})
    assert "new" not in columns.attributes
    columns.set_attributes(second, {})
    assert columns.attributes == {}
    columns.set_attributes(first, {"new": 2.0})
    assert columns.attributes["new"][first] == 2.0
    columns.clear(first)
    assert columns.attributes == {}


def test_the_version_of_columns_is_that_of_all_of_them():
    """Whichever of them changes."""
    pool = candidates(2)
    before = pool.version_of(("waiting_requests", "labels")), pool.version_of(("labels",))
    pool._columns.changed("waiting_requests")
    after = pool.version_of(("waiting_requests", "labels")), pool.version_of(("labels",))
    assert after == (before[0] + 1, before[1])


def test_adapters_are_told_of_while_anybody_tells_of_them():
    columns = Columns()
    first, second = columns.add_slot(), columns.add_slot()
    seen = Candidates(columns, np.array([0, 1]), NOW_S, affinities={})
    assert not seen.adapters_reported
    for slot in (first, second, second):
        columns.set_adapters(slot, lora("a"))
    columns.clear(first)
    assert seen.adapters_reported
    columns.forget_observations(second)
    assert not seen.adapters_reported


def test_the_greatest_age_is_that_of_whom_nobody_has_scraped():
    columns = Columns()
    for age_s in (3.0, 1.0):
        slot = columns.add_slot()
        columns.observed_at_s[slot] = NOW_S - age_s
    both = Candidates(columns, np.array([0, 1]), NOW_S, affinities={})
    assert both.metrics_age_s_max == 3.0
    assert both.take(np.array([1])).metrics_age_s_max == 1.0
    assert both.take(np.array([], dtype=np.int64)).metrics_age_s_max == math.inf
    assert not both.all_observed_within(2.9)
    assert both.all_observed_within(3.0)
    columns.clear(0)
    assert both.metrics_age_s_max == math.inf
    assert not both.all_observed_within(1e9)
