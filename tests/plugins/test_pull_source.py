"""Who is named as the source of a prompt's head, and when nobody is."""

from collections import Counter

import numpy as np
import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import diff_configs
from epp.configuration.explaining import explain
from epp.core.decision.inputs import EventsHeard, PoolReplaced, StreamChanged
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.index import EXACT, HOST_BLOCKS
from epp.core.kv_events.payload import Stored
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.token_ids import packed
from epp.plugins.pull_source import SOURCE_HEADER, PullSource
from tests.builders import candidates, endpoint, request

PRECISE = "precise-prefix-cache-producer"


def pool(matched, host=None, *, told=True, waiting=None):
    """Candidates of an index that engines tell, or of one of decisions; blocks of 64 tokens."""
    columns = {EXACT: np.ones(len(matched))} if told else {}
    if host is not None:
        columns[HOST_BLOCKS] = np.array(host, dtype=np.float64)
    known = Affinity(np.array(matched), 100, columns)
    return candidates(waiting_requests=waiting or [0] * len(matched), affinities={PRECISE: known})


def source(of, chosen, **parameters):
    plugin = PullSource(prefix_match_info_producer_name=PRECISE, **parameters)
    found = plugin.request_headers(request(), of, endpoint(chosen))
    assert set(found) <= set(plugin.own_headers)
    return found.get(SOURCE_HEADER)


def test_whoever_holds_most_in_the_memory_of_its_host_is_named():
    """What the device alone holds nobody can fetch."""
    assert source(pool([50, 9, 0], host=[4, 9, 0]), 2) == "192.168.1.2:8000"
    assert source(pool([50, 0, 0], host=[0, 0, 0]), 2) is None
    assert source(pool([50, 0, 0]), 2) is None


def test_who_has_it_itself_pulls_nothing():
    """Wherever it has it; and nobody pulls from itself."""
    assert source(pool([9, 9, 0], host=[0, 9, 0]), 0) is None
    assert source(pool([4, 9, 0], host=[9, 9, 0]), 0) is None
    assert source(pool([0, 9, 0], host=[0, 9, 0]), 1) is None
    assert source(pool([8, 9, 0], host=[0, 9, 0]), 0) == "192.168.1.2:8000"


@pytest.mark.parametrize(("least", "named"), [(1, True), (320, True), (321, False)])
def test_few_tokens_are_computed(least, named):
    found = source(pool([4, 9, 0], host=[0, 9, 0]), 0, min_cached_token_delta=least)
    assert (found is not None) is named


def test_an_index_of_decisions_is_believed():
    """It knows no tiers."""
    assert source(pool([0, 9, 3], told=False), 0) == "192.168.1.2:8000"
    assert source(pool([0, 0, 0], told=False), 0) is None


def test_those_within_a_block_of_each_other_share_the_work():
    """By the request's id, the more the shorter their queues; who is further behind is not asked."""
    of = pool([0, 9, 9, 9, 7], host=[0, 9, 9, 8, 7], waiting=[0, 0, 0, 9, 0])
    plugin = PullSource(prefix_match_info_producer_name=PRECISE)
    named = Counter(
        plugin.request_headers(request(request_id=str(number)), of, endpoint(0))[SOURCE_HEADER]
        for number in range(2_000)
    )
    assert set(named) == {f"192.168.1.{number}:8000" for number in (2, 3, 4)}
    assert named["192.168.1.4:8000"] < named["192.168.1.2:8000"] / 4
    again = plugin.request_headers(request(request_id="7"), of, endpoint(0))
    assert again == plugin.request_headers(request(request_id="7"), of, endpoint(0))


DOCUMENT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters: {kvEventsConfig: {discoverPods: false}}
- type: label-selector-filter
  parameters: {matchLabels: {free: "yes"}}
- type: queue-scorer
- type: p2p-source-producer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer, minCachedTokenDelta: 64}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: label-selector-filter
  - pluginRef: queue-scorer
"""


def test_a_filter_does_not_hide_a_source():
    """Who is too busy to serve can still be pulled from."""
    config = load_config(DOCUMENT, "here", plugin_tables())
    scheduler = Scheduler(build_settings(config), seed=1)
    scheduler.take(PoolReplaced([endpoint(0, labels={"free": "yes"}), endpoint(1)]), 0.0)
    ids = packed(range(300))
    for slot in range(2):
        scheduler.take(StreamChanged(slot, StreamState.LIVE, complete=True), 0.0)
    stored = Stored([1, 2], None, ids[: 4 * 128], 64, "cpu")
    scheduler.take(EventsHeard(1, (stored,)), 0.0)
    decision = scheduler.schedule(request(token_ids=(ids,), prompt_tokens=300), 0.0)
    assert decision.endpoint == endpoint(0, labels={"free": "yes"})
    assert decision.request_headers() == {SOURCE_HEADER: "192.168.1.2:8000"}
    other = scheduler.schedule(request(token_ids=(packed(range(9, 300)),)), 0.0)
    assert other.request_headers() == {}
    assert not list(scheduler.failures)


def test_it_works_by_being_declared():
    """No profile names it; documents with and without it differ."""
    with_it = load_config(DOCUMENT, "a", plugin_tables())
    text = DOCUMENT + "  - pluginRef: p2p-source-producer\n"
    with pytest.raises(ConfigError, match="is a request plugin, expected a filter"):
        load_config(text, "b", plugin_tables())
    head, _, tail = DOCUMENT.partition("- type: p2p-source-producer")
    without = head + tail.partition("\n")[2].partition("\n")[2]
    before = load_config(without, "b", plugin_tables())
    assert diff_configs(before, with_it) == ["request plugin p2p-source-producer: added"]
    assert "p2p-source-producer" in explain(with_it)


def test_what_has_no_effect_is_told():
    """Prompts are computed where requests are served."""
    assert PullSource(prefill_profile_name="prefill").warnings() == []
    assert PullSource(prefill_profile_name="other").warnings()
    text = DOCUMENT.replace("minCachedTokenDelta: 64", "prefillProfileName: other")
    (told,) = [w for w in load_config(text, "a", plugin_tables()).warnings if "prefill" in w]
    assert told.startswith("a: plugins[3] (p2p-source-producer): ")


def test_an_index_that_is_missing_is_named():
    """As of a scorer."""
    text = DOCUMENT.replace("prefixMatchInfoProducerName: precise-", "prefixMatchInfoProducerName: no-such-")  # fmt: skip
    with pytest.raises(
        ConfigError, match="producer no-such-prefix-cache-producer names no declared plugin"
    ):
        load_config(text, "a", plugin_tables())
