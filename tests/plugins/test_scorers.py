import math

import numpy as np
import pytest
from msgspec import ValidationError, convert

from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.failures import PluginFailures
from epp.plugins import pickers, scorers
from tests.builders import affinity, candidates, lora, request, resident

NAN = math.nan


def scored(scorer, pool, **fields):
    found = scorer.score(request(**fields), pool)
    return [NAN] * len(pool) if found is None else found.tolist()


def approx(values):
    return pytest.approx(values, nan_ok=True)


HERMETIC = {
    "lower queue and KV cache": (
        "my-model-12345",
        [(3, 0.2, ()), (0, 0.1, ()), (10, 0.2, ())],
        [1.5, 1.9, 0.8],
        1,
    ),
    "adapter in use, short queue": (
        "sql-lora-1fdg2",
        [(0, 0.2, ("foo", "bar")), (0, 0.1, ("foo", "sql-lora-1fdg2")), (10, 0.2, ("foo", "bar"))],
        [1.8, 2.9, 0.8],
        1,
    ),
    "adapter beats KV cache": (
        "sql-lora-1fdg2",
        [(10, 0.2, ("foo", "bar")), (10, 0.4, ("foo", "sql-lora-1fdg2")), (10, 0.3, ("foo",))],
        [1.8, 2.6, 1.7],
        1,
    ),
    "nobody is shed": (
        "sql-lora-1fdg3",
        [(6, 0.2, ("foo", "bar", "sql-lora-1fdg3")), (0, 0.85, ("foo",)), (10, 0.9, ("foo",))],
        [2.2, 1.15, 0.1],
        0,
    ),
}


@pytest.mark.parametrize("case", HERMETIC)
def test_the_reference_pickers_own_cases_give_its_sums(case):
    """Queue, KV cache, prefix and LoRA with weight 1 each add up as in the reference's tests."""
    model, pods, sums, best = HERMETIC[case]
    pool = candidates(
        waiting_requests=[queue for queue, _, _ in pods],
        kv_cache_usage=[usage for _, usage, _ in pods],
        adapters=[lora(*active) for _, _, active in pods],
        matched_blocks=[0] * len(pods),
    )
    plugins = (
        scorers.Queue(),
        scorers.KVCacheUtilization(),
        scorers.PrefixCache(),
        scorers.LoraAffinity(),
    )
    profile = SchedulingProfile(
        name="default",
        filters=(),
        scorers=tuple(WeightedScorer(plugin.type_name, plugin, 1.0) for plugin in plugins),
        picker_name="max-score-picker",
        picker=pickers.MaxScore(),
    )
    failures = PluginFailures()
    total = profile.score(request(model=model), pool, failures).total
    assert total.tolist() == approx(sums)
    assert profile.pick(total, pool, None, 7, failures).tolist() == [best]
    assert not len(failures)


def test_the_share_of_the_prompt_is_the_prefix_score():
    """Matched over total blocks."""
    pool = candidates(matched_blocks=[0, 5, 10], total_blocks=10)
    assert scored(scorers.PrefixCache(), pool) == approx([0.0, 0.5, 1.0])


def test_a_prompt_without_a_full_block_scores_0():
    """Nothing to match is not a match."""
    assert scored(scorers.PrefixCache(), candidates(matched_blocks=[0, 0])) == [0.0, 0.0]
    assert scored(scorers.PrefixCache(), candidates(2)) == [0.0, 0.0]


def test_the_length_of_the_match_counts_by_its_weight():
    """w * min(1, matched tokens / S)^2 + (1 - w) * share."""
    scorer = scorers.PrefixCache(match_length_weight=0.4, match_length_scale_tokens=1024)
    pool = candidates(matched_blocks=[4, 8, 32], total_blocks=32, block_tokens=64)
    expected = [0.4 * 0.25**2 + 0.6 / 8, 0.4 * 0.5**2 + 0.6 / 4, 1.0]
    assert scored(scorer, pool) == approx(expected)


def test_a_longer_match_never_scores_lower():
    """Whatever the weight of the length."""
    pool = candidates(matched_blocks=range(65), total_blocks=64)
    for weight in (0.0, 0.3, 1.0):
        scorer = scorers.PrefixCache(match_length_weight=weight, match_length_scale_tokens=2048)
        assert np.all(np.diff(scorer.score(request(), pool)) >= 0)


def test_another_prefix_index_can_be_named():
    """The scorer reads the index whose name it is given."""
    scorer = scorers.PrefixCache(prefix_match_info_producer_name="cpu-tier")
    pool = candidates(
        matched_blocks=[1, 0], total_blocks=1, affinities={"cpu-tier": affinity([0, 3], 4)}
    )
    assert scored(scorer, pool) == approx([0.0, 0.75])
    assert scorer.producer == "cpu-tier"
    assert scorers.PrefixCache().producer == ""


@pytest.mark.parametrize(
    ("scorer", "column"),
    [
        (scorers.Queue(), "waiting_requests"),
        (scorers.RunningRequests(), "running_requests"),
    ],
)
@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ([3, 0, 10], [0.7, 1.0, 0.0]),
        ([4, 4], [1.0, 1.0]),
        ([0], [1.0]),
        ([NAN, 2, 6], [NAN, 1.0, 0.0]),
        ([NAN, 2, 2], [NAN, 1.0, 1.0]),
        ([NAN, NAN], [NAN, NAN]),
    ],
)
def test_load_is_scored_between_the_least_and_the_most(scorer, column, load, expected):
    """(most - own) / (most - least), 1 if all are equal; the unknown stay out of it."""
    assert scored(scorer, candidates(**{column: load})) == approx(expected)


def test_a_free_kv_cache_scores_1():
    """1 - usage."""
    pool = candidates(kv_cache_usage=[0.0, 0.25, 1.0, NAN])
    assert scored(scorers.KVCacheUtilization(), pool) == approx([1.0, 0.75, 0.0, NAN])


@pytest.mark.parametrize(
    ("parameters", "inflight", "expected"),
    [
        ({}, [0, 0], [1.0, 1.0]),
        ({}, [0, 1, 4], [1.0, 0.75, 0.0]),
        ({"idleThreshold": 2}, [0, 2, 3, 4], [1.0, 1.0, 0.25, 0.0]),
        ({"idleThreshold": 4}, [0, 2, 3, 4], [1.0, 1.0, 1.0, 1.0]),
        ({"maxBusyScore": 0.5}, [0, 1, 4], [1.0, 0.375, 0.0]),
    ],
)
def test_requests_in_flight_lower_the_score(parameters, inflight, expected):
    """1 up to the idle threshold, else (most - own) / most * maxBusyScore."""
    scorer = convert(parameters, scorers.ActiveRequests)
    assert scored(scorer, candidates(inflight_requests=inflight)) == approx(expected)


def test_uncached_tokens_in_flight_and_of_this_request_lower_the_score():
    """1 - min(1, (in flight + own uncached) / threshold)."""
    pool = candidates(
        inflight_prefill_tokens=[0, 0, 500, 5000],
        matched_blocks=[0, 4, 4, 0],
        total_blocks=4,
        block_tokens=64,
        prompt_tokens=256,
    )
    scorer = scorers.TokenLoad(queue_threshold_tokens=1000)
    assert scored(scorer, pool) == approx([0.744, 1.0, 0.5, 0.0])


def test_an_empty_queue_scores_a_half_when_only_load_counts():
    """0.5 * (1 - min(waiting, threshold) / threshold)."""
    pool = candidates(waiting_requests=[0, 32, 128, 1000, NAN])
    assert scored(scorers.LoadAware(), pool) == approx([0.5, 0.375, 0.0, 0.0, NAN])
    pool = candidates(waiting_requests=[1])
    assert scored(scorers.LoadAware(threshold=2), pool) == approx([0.25])


def test_residency_gives_five_values():
    """On the GPU, in CPU memory, free slot, idle slot, saturated."""
    pool = candidates(
        adapters=[
            resident(gpu=["mine"], slots_max=1),
            resident(gpu=["a"], cpu=["mine"], slots_max=1),
            resident(gpu=["a"], active=["a"], slots_max=2),
            resident(gpu=["a", "b"], active=["a"], slots_max=2),
            resident(gpu=["a", "b"], active=["a", "b"], slots_max=2),
            resident(gpu=["a", "b"], active=["a"], pinned=["b"], slots_max=2),
        ]
    )
    expected = [1.0, 0.7, 0.6, 0.3, 0.0, 0.0]
    assert scored(scorers.LoraAffinity(), pool, model="mine") == expected


def test_activity_alone_gives_three_values():
    """In use, free slot, full: the older series list only adapters with requests."""
    pool = candidates(
        adapters=[lora("a", "mine", slots_max=2), lora("a", slots_max=2), lora("a", slots_max=1)]
    )
    assert scored(scorers.LoraAffinity(), pool, model="mine") == [1.0, 0.8, 0.0]


def test_an_endpoint_that_reports_no_adapters_is_unknown():
    """It is left to the median, and both generations may serve in one pool."""
    pool = candidates(
        adapters=[None, lora("mine", slots_max=1), resident(cpu=["mine"], slots_max=1)]
    )
    assert scored(scorers.LoraAffinity(), pool, model="mine") == approx([NAN, 1.0, 0.7])
    assert scored(scorers.LoraAffinity(), candidates(2)) == approx([NAN, NAN])


def test_a_cold_prompt_goes_where_none_went_for_longest():
    """Never used first, then least recently used, spread evenly from 1 to 0."""
    pool = candidates(5, affinities={"no-hit-lru-producer": affinity([2, 0, 3, 0, 1], 3)})
    assert scored(scorers.NoHitLru(), pool, cold=True) == approx([0.25, 1.0, 0.0, 0.75, 0.5])


def test_a_known_prompt_is_left_to_the_other_scorers():
    """0.5 for all when somebody holds its head."""
    pool = candidates(3, affinities={"no-hit-lru-producer": affinity([1, 2, 0])})
    assert scored(scorers.NoHitLru(), pool, cold=False) == [0.5, 0.5, 0.5]


def test_a_lone_candidate_for_a_cold_prompt_scores_1():
    """There is nothing to divide by."""
    assert scored(scorers.NoHitLru(), candidates(1), cold=True) == [1.0]


def test_a_named_prefix_index_decides_what_is_cold():
    """The request's own mark is for the default index."""
    scorer = scorers.NoHitLru(prefix_match_info_producer_name="cpu-tier")
    hit = candidates(2, affinities={"cpu-tier": affinity([0, 1])})
    assert scored(scorer, hit, cold=True) == [0.5, 0.5]
    miss = candidates(2, affinities={"cpu-tier": affinity([0, 0])})
    assert scored(scorer, miss, cold=False) == [1.0, 0.0]


def test_the_lru_index_is_made_with_the_size_of_the_scorer():
    """`lruSize` is a parameter of the scorer in the field and of the index here."""
    scorer = convert({"lruSize": 7, "prefixPluginName": "old"}, scorers.NoHitLru)
    assert (scorer.producer, scorer.producer_parameters) == ("no-hit-lru-producer", {"lruSize": 7})


@pytest.mark.parametrize(
    ("scorer", "parameters"),
    [
        (scorers.PrefixCache, {"matchLengthWeight": 1.5}),
        (scorers.PrefixCache, {"matchLengthScaleTokens": 0}),
        (scorers.ActiveRequests, {"idleThreshold": -1}),
        (scorers.ActiveRequests, {"maxBusyScore": 2}),
        (scorers.TokenLoad, {"queueThresholdTokens": 0}),
        (scorers.LoadAware, {"threshold": 0}),
        (scorers.NoHitLru, {"lruSize": 0}),
        (scorers.Queue, {"queueThreshold": 3}),
    ],
)
def test_parameters_out_of_bounds_are_refused(scorer, parameters):
    """By name, before anything is routed."""
    with pytest.raises(ValidationError, match=rf"{next(iter(parameters))}"):
        convert(parameters, scorer)
