import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import joined_names, load_config
from epp.configuration.memory_plan import MemoryPlan, fitted
from epp.core.abilities import Abilities, Origin
from epp.core.decision.inputs import PoolReplaced, ServedBy
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.index import joined, missing_verbs
from epp.core.knowledge.prefix import PrefixIndexSettings
from tests.builders import affinity, endpoint, request

DOCUMENT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: approx-prefix-cache-producer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
  - pluginRef: max-score-picker
"""


class ToldSettings(PrefixIndexSettings, frozen=True):
    """Stands for an index that engines tell."""

    abilities = Abilities(
        origin=Origin.TOLD, counts_blocks=True, shares=True, limits_memory=True, measures=True
    )


@pytest.fixture
def settings():
    """The default profile, beside whose index there is one that is told."""
    made = build_settings(load_config(DOCUMENT, "here", plugin_tables()))
    indexes = {**made.indexes, "told": ToldSettings()}
    return replace(made, indexes=indexes, joined=joined_names(indexes, made.prefix))


def held(scheduler, asked):
    return scheduler.schedule(asked, 1.0).candidates.matched_blocks.tolist()


def test_what_any_origin_says_is_held_is_held():
    """Slot by slot; one alone is what it is."""
    told, decided = affinity([4, 0, 1], 5), affinity([1, 3, 0], 5)
    assert joined([told]) is told
    found = joined([told, decided])
    assert (found.matched.tolist(), found.total) == ([4, 3, 1], 5)


def test_indexes_of_several_origins_fill_the_matched_blocks_together(settings):
    """What is decided here and what engines told of the other endpoint."""
    scheduler = Scheduler(settings, seed=1)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    asked = request(prompts=(bytes(1_024),))
    scheduler.indexes["told"].record(asked, 1, 0.0)
    assert held(scheduler, asked) == [0, 4]
    scheduler.indexes["approx-prefix-cache-producer"].record(asked, 0, 0.0)
    assert held(scheduler, asked) == [4, 4]


def test_where_a_request_moved_to_all_origins_count(settings):
    """The lease has what was there before it came."""
    scheduler = Scheduler(settings, seed=1)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    lease = scheduler.schedule(request(prompts=(bytes(1_024),)), 0.0).lease
    other = 1 - lease.slot
    scheduler.indexes["told"].record(request(prompts=(bytes(512),)), other, 0.0)
    scheduler.take(ServedBy(lease, endpoint(other).address), 0.5)
    assert lease.matched_blocks == 2


def test_a_second_index_is_among_the_metrics_and_in_the_memory_plan(settings):
    """By being there."""
    scheduler = Scheduler(settings, seed=1)
    standings = {one.name: one for one in scheduler.index_standings()}
    assert {name: one.origin for name, one in standings.items()} == {
        "approx-prefix-cache-producer": Origin.DECIDED,
        "told": Origin.TOLD,
    }
    assert all(one.is_open and one.measures for one in standings.values())
    plan = MemoryPlan(limit_bytes=0, bodies_bytes=0, indexes_bytes=2**20)
    limits = [index.memory_max_bytes for index in fitted(settings.indexes, plan).values()]
    assert limits == [2**19] * 2


def test_an_index_that_measures_nothing_or_fails_to_is_there_all_the_same(settings):
    """Its name, type and origin are known without it."""

    class Mute(PrefixIndexSettings, frozen=True):
        abilities = Abilities(counts_blocks=True)

    class Failing(PrefixIndexSettings, frozen=True):
        def open(self):
            index = PrefixIndexSettings().open()
            index.measures = None
            return index

    indexes = {"mute": Mute(), "failing": Failing(), **settings.indexes}
    scheduler = Scheduler(structs.replace(settings, indexes=indexes), seed=1)
    mute, failing, *_ = scheduler.index_standings()
    assert (mute.name, mute.origin, mute.is_open, mute.measures) == ("mute", None, True, None)
    assert (failing.is_open, failing.measures) == (False, None)
    assert [one.name for one in scheduler.failures] == ["failing"]


def test_of_one_origin_the_first_counts_and_blocks_must_be_as_long():
    """What cannot be compared is not joined."""
    first, same = PrefixIndexSettings(), PrefixIndexSettings()
    longer = ToldSettings(block_size_tokens=128)
    indexes = {"first": first, "same": same, "longer": longer}
    assert joined_names(indexes, "first") == ("first",)
    assert joined_names({**indexes, "told": ToldSettings()}, "first") == ("first", "told")


def test_an_index_that_lacks_what_it_declares_is_told():
    """By the verbs."""
    index = PrefixIndexSettings().open()
    assert missing_verbs(PrefixIndexSettings.abilities, index) == []
    assert missing_verbs(Abilities(counts_inflight=True), index) == ["release"]
    assert "match" in missing_verbs(Abilities(), np)
