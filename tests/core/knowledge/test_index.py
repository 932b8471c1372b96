import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.configuration.memory_plan import MemoryPlan, fitted
from epp.configuration.needed_indexes import joined_names
from epp.core.abilities import Abilities, Origin
from epp.core.decision.inputs import (
    EventsHeard,
    EventsVoided,
    PoolReplaced,
    ServedBy,
    StreamChanged,
    Tick,
)
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.index import EXACT, joined, missing_verbs
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.kv_events.payload import Stored
from epp.core.kv_events.stream import StreamState
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
    return scheduler.schedule(asked, 1.0).leg.candidates.matched_blocks.tolist()


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
    standings = {one.name: one for one in scheduler.indexes.standings()}
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
    mute, failing, *_ = scheduler.indexes.standings()
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


def told_by_engines(matched, total, exact):
    """What an index says whose engines tell all of some endpoints."""
    return Affinity(np.array(matched), total, {EXACT: np.array(exact)})


def test_of_an_endpoint_that_told_all_nobody_else_is_asked():
    """Of the others the greater share of the prompt counts, in blocks of the first."""
    told = told_by_engines([2, 2, 0, 9], 12, [1.0, 0.0, 0.0, 0.0])
    decided = affinity([4, 4, 2, 1], 4)
    found = joined([told, decided], [16, 64])
    assert (found.matched.tolist(), found.total) == ([2, 12, 6, 9], 12)


def test_without_the_tokens_of_a_prompt_decisions_answer_alone():
    """In blocks as long as those of the first, also of endpoints that told all."""
    told = told_by_engines([0, 0], 0, [1.0, 0.0])
    found = joined([told, affinity([3, 1], 4)], [16, 64])
    assert (found.matched.tolist(), found.total) == ([12, 4], 16)


ENGINES_TELL = DOCUMENT.replace(
    "- type: approx-prefix-cache-producer\n",
    "- type: precise-prefix-cache-producer\n"
    "  parameters: {tokenProcessorConfig: {blockSizeTokens: 64}}\n",
)


def test_decisions_count_where_engines_are_not_heard():
    """Live and complete: what the engine says, and what was decided a moment ago; else decisions."""
    made = build_settings(load_config(ENGINES_TELL, "here", plugin_tables()))
    scheduler = Scheduler(made, seed=1)
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    ids = b"".join(number.to_bytes(4, "little") for number in range(300))
    asked = request(prompts=(bytes(1_500),), token_ids=(ids,), prompt_tokens=300)
    first = scheduler.schedule(asked, 0.0)
    slot = first.lease.slot

    def matched(now, given=asked):
        return scheduler.indexes.matched_at(given, slot, 2, now)

    scheduler.take(Tick(), 50.0)
    assert matched(100.0) == 4, "all of its 5 blocks of bytes, which are 4 of tokens"
    scheduler.take(StreamChanged(slot, StreamState.LIVE, complete=True), 100.0)
    assert matched(101.0) == 0, "it said nothing of this prompt"
    stored = Stored(hashes=[1, 2], tokens=ids[: 128 * 4], block_tokens=64)
    scheduler.take(EventsHeard(slot, (stored,)), 101.0)
    assert matched(102.0) == 2
    without = request(prompts=(bytes(1_500),), prompt_tokens=375)
    assert matched(103.0, without) == 5, "nobody knows its tokens"
    scheduler.take(StreamChanged(slot, StreamState.STALE, complete=True), 103.0)
    assert matched(104.0) == 4
    scheduler.take(EventsVoided(slot), 104.0)
    scheduler.take(StreamChanged(slot, StreamState.LIVE, complete=True), 104.0)
    assert matched(105.0) == 0
