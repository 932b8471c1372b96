"""What every plugin of the tables keeps to, whatever the pool looks like: `epp.testing` says it."""

from random import Random

import numpy as np
import pytest

from epp.configuration.build import INDEXES
from epp.plugins import DEPRECATED, FILTERS, PICKERS, SCORERS
from epp.testing import candidates, check_plugin
from homing_rivals import PLUGINS

THRESHOLD = {"type": "threshold", "threshold": {"operator": "LessThan", "value": 0.5}}
VARIANTS = {
    "by-label": [{"label": "llm-d.ai/role", "validValues": ["decode"], "allowsNoLabel": True}],
    "label-selector-filter": [
        {},
        {"matchExpressions": [{"key": "llm-d.ai/role", "operator": "Exists"}]},
    ],
    "prefix-cache-affinity-filter": [{}, {"explorationProbability": 0.5}, {"maxTTFTPenaltyMs": 1}],
    "prefix-cache-scorer": [
        {},
        {"matchLengthWeight": 0.5, "matchLengthScaleTokens": 100},
        {"agreement": "rendezvous", "agreementBelow": 1.0, "agreementKeyTokens": 1},
    ],
    "utilization-filter": [
        {"conditions": [{"metric": "waiting-queue", "maxValue": 4}], "fallbackOnEmpty": True},
        {
            "conditions": [
                {"metric": "active-requests", "maxValue": 4},
                {"metric": "kv-cache-utilization", "maxValue": 0.5},
            ]
        },
    ],
    "endpoint-attribute-filter": [
        {"attribute": "a", "algorithm": THRESHOLD},
        {"attribute": "a", "algorithm": THRESHOLD, "onMissing": "Fail", "fallbackOnEmpty": True},
    ],
    "header-label-affinity-scorer": [
        {"headerName": "x-zone", "labelKey": "zone"},
        {"headerName": "x-zone", "labelKey": "zone", "stampResponseHeader": False},
    ],
    "topology-affinity-filter": [{}, {"minAffinity": "zone"}],
    "endpoint-attribute-scorer": [
        {"attributeKey": "a", "algorithm": {"type": "linear_lower_is_better"}},
        {
            "attributeKey": "a",
            "algorithm": {
                "type": "linear_higher_is_better",
                "normalization": {"fixedRange": {"min": 0, "max": 2}},
            },
        },
    ],
    "context-length-aware": [{"label": "llm-d.ai/role"}],
    "active-request-scorer": [{}, {"idleThreshold": 2, "maxBusyScore": 0.5}],
    "token-load-scorer": [{}, {"queueThresholdTokens": 1000}],
    "session-affinity-scorer": [{}, {"strategy": "session_id"}],
    "session-affinity-filter": [{}, {"strategy": "session_id"}],
    "approx-prefix-cache-producer": [{"lruCapacityPerServer": 50}],
    "session-id-producer": [
        {"sessionsMax": 50},
        {"sessionsMax": 50, "sources": [{"header": "x-user-id"}], "cookieName": "a"},
    ],
    "agent-session-producer": [{"sessionsMax": 50, "capacityTokens": 500}],
    "mm-embeddings-cache-producer": [{"cacheSizeInMBPerServer": 10}],
    "user-tokens-producer": [{"usersMax": 20}],
    "block-load-producer": [{"activeBlocksMax": 50, "lruCapacityPerServer": 50}],
    "answered-blocks-producer": [{"blocksPerEndpointMax": 50}],
    "routed-blocks-producer": [{"blocksPerEndpointMax": 50}],
    "preble-history-producer": [{"lruCapacityPerServer": 50, "window": "1s"}],
    "radix-tree-producer": [{"lruCapacityPerServer": 50}],
}

SELECTING = {
    "label-selector-filter", "by-label-selector", "by-label", "decode-filter", "prefill-filter", "encode-filter",
    "endpoint-attribute-filter", "utilization-filter",
}  # fmt: skip
"""They select, so they may select nobody."""

BY_ORDER = {"no-hit-lru-scorer", "user-token-place-scorer"}
"""Never-used endpoints are ranked in the order in which they come, or all are, as in the original."""


TABLES = [FILTERS, SCORERS, PICKERS, INDEXES, {one.type_name: one for one in PLUGINS}]


@pytest.mark.parametrize(
    ("name", "plugin", "parameters"),
    [
        pytest.param(name, plugin, parameters, id=f"{name} {parameters}")
        for table in TABLES
        for name, plugin in table.items()
        for parameters in VARIANTS.get(name, [{}])
    ],
)
def test_a_plugin_keeps_the_contract(name, plugin, parameters):
    """Alone, on endpoints of any state, and in the scheduler while everything changes."""
    check_plugin(plugin, parameters, selects=name in SELECTING, by_order=name in BY_ORDER)


@pytest.mark.parametrize(("name", "plugin"), PICKERS.items())
def test_a_picker_picks_one_unless_it_is_told_more(name, plugin):
    """And the sums stay as they are, though it may write on them."""
    sums = np.array([1.0, 3.0, 2.0])
    chosen = plugin().pick(sums, candidates(3), Random(1), 7)
    assert chosen.shape == (1,)
    assert sums.tolist() == [1.0, 3.0, 2.0]


def test_a_plugin_is_found_under_its_own_name():
    """Or under an older one that is flagged as such."""
    for table in (FILTERS, SCORERS, PICKERS):
        for name, plugin in table.items():
            assert name in {plugin.type_name, *DEPRECATED}
    assert set(DEPRECATED) <= set(FILTERS)
    assert set(DEPRECATED.values()) <= set(FILTERS) - set(DEPRECATED)


def test_readers_of_an_index_say_which():
    """So that one that is missing can be made."""
    readers = {
        name: (plugin.producer, plugin.producer_type)
        for name, table in (("filter", FILTERS), ("scorer", SCORERS))
        for name, kind in table.items()
        if kind.abilities.reads_index and (plugin := kind())
    }
    assert readers == {
        "added-time-scorer": ("", "approx-prefix-cache-producer"),
        "decode-time-scorer": ("", "approx-prefix-cache-producer"),
        "mm-embeddings-cache-scorer": ("mm-embeddings-cache-producer",) * 2,
        "latency-scorer": ("", "approx-prefix-cache-producer"),
        "prefix-cache-affinity-filter": ("", "approx-prefix-cache-producer"),
        "prefix-cache-scorer": ("", "approx-prefix-cache-producer"),
        "no-hit-lru-scorer": ("no-hit-lru-producer", "no-hit-lru-producer"),
        "session-affinity-filter": (None, "session-id-producer"),
        "session-affinity-scorer": (None, "session-id-producer"),
        "thunder-agent": ("agent-session-producer",) * 2,
        "token-load-scorer": ("", "approx-prefix-cache-producer"),
    }
