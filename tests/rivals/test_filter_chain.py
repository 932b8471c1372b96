"""Adapter, prefix below two thresholds, queue, KV cache."""

import math
from collections import Counter

import pytest

from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.types import EndpointMetrics
from homing_rivals.filter_chain import AdapterFirst, LeastKVCache, LeastQueue, LoadAwarePrefix
from tests.builders import candidates, endpoint, lora, request
from tests.rivals.driven import scheduler_of


def kept(plugin, model="adapter", **columns):
    keep = plugin.keep(request(model=model), candidates(**columns))
    return [at for at, stays in enumerate(keep) if stays]


def test_an_adapter_stays_where_it_runs_else_where_there_is_room():
    """Else anywhere; where nothing is reported, too."""
    some = [lora("adapter", slots_max=1), lora("other", slots_max=2), lora("other", slots_max=1)]
    assert kept(AdapterFirst(), adapters=some) == [0]
    assert kept(AdapterFirst(), model="third", adapters=some) == [1]
    assert kept(AdapterFirst(), model="third", adapters=some[2:] * 2) == [0, 1]
    assert kept(AdapterFirst(), adapters=[None, None]) == [0, 1]


@pytest.mark.parametrize(
    ("waiting", "usage", "expected"),
    [
        (5, 0.8, [0]),
        (5.5, 0.8, [1, 2]),
        (5, 0.81, [1, 2]),
        (math.nan, 0.1, [1, 2]),
    ],
)
def test_the_longest_match_counts_up_to_both_thresholds(waiting, usage, expected):
    """Both included: 5 waiting and 0.8 of the KV cache."""
    assert (
        kept(
            LoadAwarePrefix(),
            matched_blocks=[9, 0, 0],
            total_blocks=10,
            waiting_requests=[waiting, 0, 5],
            kv_cache_usage=[usage, 0.8, 0.0],
        )
        == expected
    )


def test_where_nobody_is_below_the_thresholds_the_prefix_counts_among_all():
    """As the proposal says."""
    assert kept(
        LoadAwarePrefix(),
        matched_blocks=[9, 3, 9],
        total_blocks=10,
        waiting_requests=[6, 7, 8],
        kv_cache_usage=[0.1, 0.1, 0.9],
    ) == [0, 2]


def test_a_match_counts_from_a_gain_on():
    """Of tokens and of the prompt, both included."""
    some = {
        "matched_blocks": [5, 0],
        "total_blocks": 10,
        "waiting_requests": [0, 0],
        "kv_cache_usage": [0, 0],
    }
    assert kept(LoadAwarePrefix(match_tokens_min=320), **some) == [0]
    assert kept(LoadAwarePrefix(match_tokens_min=321), **some) == [0, 1]
    assert kept(LoadAwarePrefix(match_ratio_min=0.5), **some) == [0]
    assert kept(LoadAwarePrefix(match_ratio_min=0.51), **some) == [0, 1]
    nothing = some | {"matched_blocks": [0, 0]}
    assert kept(LoadAwarePrefix(match_tokens_min=0), **nothing) == [0, 1]


def test_who_is_near_the_least_stays_with_it():
    """8 / 4 = 2 above the least, included; unknown is the median, here 4."""
    assert kept(LeastQueue(), waiting_requests=[0, 2, 3, 8]) == [0, 1]
    assert kept(LeastQueue(), waiting_requests=[0, math.nan, 4, 8]) == [0]
    assert kept(LeastQueue(), waiting_requests=[math.nan, math.nan]) == [0, 1]
    assert kept(LeastKVCache(), kv_cache_usage=[0.5, 0.5, 0.9]) == [0, 1]


def test_a_prompt_leaves_its_hot_spot_and_comes_back():
    """Proposal 0602: without a threshold prefix affinity overloads a server indefinitely."""
    scheduler = scheduler_of("gie-filter-chain")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(3)]), 0.0)

    def told(waiting):
        for slot in range(3):
            load = waiting if slot == home else 0
            scheduler.take(
                PageScraped(
                    slot,
                    EndpointMetrics(waiting_requests=load, running_requests=1, kv_cache_usage=0.2),
                ),
                now,
            )

    def went():
        asked = request(prompts=(b"p" * 4_096,), prompt_tokens=1_024)
        return scheduler.schedule(asked, now).lease.slot

    home, now = -1, 0.0
    told(0)
    home = went()
    assert {went() for _ in range(10)} == {home}
    told(6)
    elsewhere = {went() for _ in range(10)}
    assert home not in elsewhere
    assert len(elsewhere) == 1, "who got it next holds it too"
    told(5)
    again = Counter(went() for _ in range(20))
    assert set(again) == elsewhere, "of two who hold it, the shorter queue"


def test_the_adapter_counts_before_the_prefix():
    """Caches of adapters are not shared, and a swap costs more than a prefix."""
    scheduler = scheduler_of("gie-filter-chain")
    scheduler.take(PoolReplaced([endpoint(0), endpoint(1)]), 0.0)
    loads = EndpointMetrics(adapters=lora("other", slots_max=1))
    runs = EndpointMetrics(adapters=lora("adapter", slots_max=1))

    def went():
        asked = request(model="adapter", prompts=(b"p" * 4_096,), prompt_tokens=1_024)
        return scheduler.schedule(asked, 0.0).lease.slot

    scheduler.take(PageScraped(0, runs), 0.0)
    scheduler.take(PageScraped(1, loads), 0.0)
    assert {went() for _ in range(5)} == {0}
    scheduler.take(PageScraped(0, loads), 0.0)
    scheduler.take(PageScraped(1, runs), 0.0)
    assert {went() for _ in range(5)} == {1}
