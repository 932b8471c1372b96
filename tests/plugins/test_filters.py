import pytest
from msgspec import ValidationError, convert

from epp.core.duration import Duration
from epp.core.knowledge.saturation import UtilizationDetector
from epp.plugins import FILTERS, filters
from tests.builders import affinity, candidates, lora, request, resident


def utilization(*conditions, **parameters):
    told = [{"metric": metric, "maxValue": most} for metric, most in conditions]
    return convert({"conditions": told, **parameters}, filters.Utilization)


def kept(plugin, pool, **fields):
    return plugin.keep(request(**fields), pool).tolist()


LABELS = (
    {"tier": "gold", "zone": "a"},
    {"tier": "silver", "zone": "a"},
    {"tier": "gold"},
    {},
)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"matchLabels": {"tier": "gold"}}, [True, False, True, False]),
        ({"matchLabels": {"tier": "gold", "zone": "a"}}, [True, False, False, False]),
        (
            {"matchExpressions": [{"key": "tier", "operator": "In", "values": ["gold", "tin"]}]},
            [True, False, True, False],
        ),
        (
            {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["gold"]}]},
            [False, True, False, True],
        ),
        (
            {"matchExpressions": [{"key": "zone", "operator": "Exists"}]},
            [True, True, False, False],
        ),
        (
            {"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]},
            [False, False, True, True],
        ),
        (
            {
                "matchLabels": {"zone": "a"},
                "matchExpressions": [
                    {"key": "tier", "operator": "NotIn", "values": ["gold"]},
                    {"key": "zone", "operator": "Exists"},
                ],
            },
            [False, True, False, False],
        ),
    ],
)
@pytest.mark.parametrize("type_name", ["label-selector-filter", "by-label-selector"])
def test_a_selector_selects_as_in_kubernetes(type_name, selector, expected):
    """All labels and all expressions must match; NotIn accepts a missing label."""
    assert kept(convert(selector, FILTERS[type_name]), candidates(labels=LABELS)) == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"label": "tier", "validValues": ["gold"]}, [True, False, True, False]),
        (
            {"label": "tier", "validValues": ["silver"], "allowsNoLabel": True},
            [False, True, False, True],
        ),
        ({"label": "tier", "allowsNoLabel": True}, [False, False, False, True]),
    ],
)
def test_the_older_label_filter_still_works(parameters, expected):
    """One label, its values, and whether it may be missing."""
    assert kept(convert(parameters, FILTERS["by-label"]), candidates(labels=LABELS)) == expected


@pytest.mark.parametrize(
    ("plugin", "roles"),
    [
        (
            filters.DecodeRole(),
            {"decode", "prefill-decode", "both", "encode-prefill-decode", None},
        ),
        (
            filters.PrefillRole(),
            {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"},
        ),
        (filters.EncodeRole(), {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_each_stage_has_its_roles(plugin, roles):
    """By label llm-d.ai/role; only decode accepts an endpoint without it."""
    every = [
        "decode", "prefill", "encode", "both", "prefill-decode", "encode-prefill",
        "encode-prefill-decode", "router", "", None,
    ]  # fmt: skip
    labels = [{} if role is None else {"llm-d.ai/role": role} for role in every]
    assert kept(plugin, candidates(labels=labels)) == [role in roles for role in every]


def test_stale_endpoints_are_dropped_while_one_is_fresh():
    """An age equal to the limit is fresh; never scraped is infinitely old."""
    plugin = filters.FreshMetrics()
    assert kept(plugin, candidates(metrics_age_s=[0.5, 2.0, 2.1, float("inf")])) == [
        True, True, False, False,
    ]  # fmt: skip
    assert kept(plugin, candidates(metrics_age_s=[3.0, float("inf")])) == [True, True]


def test_an_endpoint_with_other_adapters_in_every_slot_is_dropped():
    """Full without this adapter goes; with it, with room, or silent stays."""
    pool = candidates(
        adapters=[
            lora("a", "b", slots_max=2),
            lora("a", "mine", slots_max=2),
            lora("a", slots_max=2),
            None,
            lora("a", slots_max=0),
        ]
    )
    assert kept(filters.LoraCapacity(), pool, model="mine") == [False, True, True, True, True]


@pytest.mark.parametrize("report", [resident(gpu=["mine"]), resident(cpu=["mine"])])
def test_an_idle_adapter_is_known_by_its_residency(report):
    """It is an adapter although nobody uses it now."""
    pool = candidates(adapters=[report, lora("a", slots_max=1)])
    assert kept(filters.LoraCapacity(), pool, model="mine") == [True, False]


def test_all_stay_where_every_slot_is_taken():
    """A full pool still serves; the request waits for a slot."""
    full = resident(gpu=["a"], cpu=["mine"], active=["a"], slots_max=1)
    assert kept(filters.LoraCapacity(), candidates(adapters=[full, full]), model="mine") == [
        True, True,
    ]  # fmt: skip


def test_what_may_be_the_base_model_is_not_kept_from_busy_adapters():
    """No candidate reports it as an adapter, and a base model needs no slot."""
    pool = candidates(adapters=[lora("a", slots_max=1), lora(slots_max=1)])
    assert kept(filters.LoraCapacity(), pool, model="base") == [True, True]


def warm_pool(tokens=(0, 0, 0)):
    return candidates(
        matched_blocks=[10, 8, 7], total_blocks=10, inflight_prefill_tokens=list(tokens)
    )


def test_a_name_of_a_latency_predictor_is_told_to_have_no_effect():
    assert filters.PrefixCacheAffinity().warnings() == ()
    (said,) = filters.PrefixCacheAffinity(latency_prediction_info_producer_name="a").warnings()
    assert "latencyPredictionInfoProducerName has no effect" in said


def test_only_warm_endpoints_stay():
    """Those that hold at least the threshold's share of the prompt."""
    assert kept(filters.PrefixCacheAffinity(), warm_pool()) == [True, True, False]


def test_the_threshold_is_met_by_its_own_ratio():
    """11 of 20 blocks are 0.55 whatever binary fractions say."""
    pool = candidates(matched_blocks=[11, 0], total_blocks=20)
    assert kept(filters.PrefixCacheAffinity(affinity_threshold=0.55), pool) == [True, False]


def test_all_stay_while_nobody_is_warm():
    """A cold prompt, or one without a full block, is left to the scorers."""
    pool = candidates(matched_blocks=[7, 0], total_blocks=10)
    assert kept(filters.PrefixCacheAffinity(), pool) == [True, True]
    assert kept(filters.PrefixCacheAffinity(), candidates(2)) == [True, True]
    assert kept(filters.PrefixCacheAffinity(affinity_threshold=0), warm_pool()) == [True] * 3


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((20_000, 16_000, 0), [True, True, False]),
        ((20_000, 16_001, 0), [True, True, True]),
        ((20_000, 20_000, 5_000), [True, True, False]),
    ],
)
def test_warmth_is_given_up_for_a_shorter_wait(tokens, expected):
    """The best warm endpoint may be the maximum slower than the best cold one, not more."""
    plugin = convert(
        {"maxTTFTPenaltyMs": 1000, "peakPrefillThroughput": 16_000}, filters.PrefixCacheAffinity
    )
    assert kept(plugin, warm_pool(tokens)) == expected


def test_warmth_is_weighed_by_the_speed_of_each_endpoint_unless_one_is_given():
    """The slow one waits longer for fewer tokens; a speed in the configuration is everybody's."""
    pool = warm_pool((20_000, 20_000, 0))
    own = filters.PrefixCacheAffinity(max_ttft_penalty_ms=1_000)
    given = filters.PrefixCacheAffinity(max_ttft_penalty_ms=1_000, peak_prefill_throughput=40_000)
    assert kept(own, pool) == [True, True, True]
    assert kept(given, pool) == [True, True, False]
    pool = warm_pool((20_000, 20_000, 0))
    pool._columns.prefill_tokens_per_s[1] = 40_000.0
    assert kept(own, pool) == [True, True, False]


def test_a_maximum_of_0_never_gives_up_warmth():
    """As in the field."""
    plugin = filters.PrefixCacheAffinity(max_ttft_penalty_ms=0)
    assert kept(plugin, warm_pool((10**9, 10**9, 0))) == [True, True, False]


def test_exploration_is_drawn_from_the_request_id():
    """About its share of requests explore, and the same ones each time."""
    plugin = filters.PrefixCacheAffinity(exploration_probability=0.25)
    explored = [all(kept(plugin, warm_pool(), request_id=f"id-{i}")) for i in range(2000)]
    assert 0.22 < sum(explored) / len(explored) < 0.28
    assert explored == [all(kept(plugin, warm_pool(), request_id=f"id-{i}")) for i in range(2000)]
    always = filters.PrefixCacheAffinity(exploration_probability=1)
    assert kept(always, warm_pool(), request_id="\ud800") == [True, True, True]


def test_another_prefix_index_decides_what_is_warm():
    """By the name of its producer."""
    plugin = filters.PrefixCacheAffinity(prefix_match_info_producer_name="cpu-tier")
    pool = candidates(2, affinities={"cpu-tier": affinity([0, 4], 4)})
    assert kept(plugin, pool) == [False, True]
    assert (plugin.producer, plugin.producer_type) == ("cpu-tier", "approx-prefix-cache-producer")


def test_the_saturation_detector_is_a_filter():
    """Under its own name; as the one by utilization it sheds load."""
    assert FILTERS["utilization-detector"] is UtilizationDetector
    assert {name for name, plugin in FILTERS.items() if plugin.abilities.sheds_load} == {
        "concurrency-detector",
        "utilization-detector",
        "utilization-filter",
    }


@pytest.mark.parametrize(
    ("type_name", "parameters", "problem"),
    [
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "tier", "operator": "In"}]},
            r"In of label tier takes at least one of `values`, has 0",
        ),
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "tier", "operator": "Exists", "values": ["a"]}]},
            r"Exists of label tier takes none of `values`, has 1",
        ),
        (
            "label-selector-filter",
            {"matchExpressions": [{"key": "tier", "operator": "Gt", "values": ["1"]}]},
            r"\$\.matchExpressions\[0\]\.operator",
        ),
        ("label-selector-filter", {"matchLabel": {}}, "matchLabel"),
        ("by-label", {"label": "tier"}, "set validValues or allowsNoLabel"),
        ("by-label", {"label": "", "allowsNoLabel": True}, r"\$\.label"),
        (
            "prefix-cache-affinity-filter",
            {"ttftSource": "latencyPredictor"},
            "latencyPredictor is not supported.*use prefillThroughput",
        ),
        ("prefix-cache-affinity-filter", {"affinityThreshold": 1.1}, "affinityThreshold"),
        ("prefix-cache-affinity-filter", {"maxTTFTPenaltyMs": -1}, "maxTTFTPenaltyMs"),
        ("prefix-cache-affinity-filter", {"peakPrefillThroughput": 0}, "peakPrefillThroughput"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(type_name, parameters, problem):
    """In one sentence that names the parameter."""
    with pytest.raises(ValidationError, match=problem):
        convert(parameters, FILTERS[type_name])


def test_an_age_limit_that_nothing_meets_is_refused():
    """0 s would call every endpoint stale."""
    with pytest.raises(ValueError, match="maxAge is 0s; it must be more than 0s"):
        filters.FreshMetrics(max_age=Duration(0))


@pytest.mark.parametrize(
    ("metric", "column"),
    [
        ("active-requests", "inflight_requests"),
        ("running-requests", "running_requests"),
        ("waiting-queue", "waiting_requests"),
    ],
)
def test_utilization_keeps_who_has_at_most_so_much(metric, column):
    """What an engine does not tell counts as nothing."""
    pool = candidates(**{column: [0, 4, 5]})
    assert kept(utilization((metric, 4)), pool) == [True, True, False]
    unknown = candidates(n=1)
    assert kept(utilization((metric, 0)), unknown) == [True]


def test_utilization_wants_every_condition():
    """Of which there can be several of one metric, too."""
    pool = candidates(kv_cache_usage=[0.5, 0.9, 0.5], waiting_requests=[0, 0, 9])
    both = utilization(("kv-cache-utilization", 0.8), ("waiting-queue", 2))
    assert kept(both, pool) == [True, False, False]
    assert kept(utilization(("waiting-queue", 10), ("waiting-queue", 2)), pool) == [
        *(True, True, False)
    ]


def test_where_utilization_leaves_nobody_all_are_left_only_if_it_is_told():
    """Else the client is told to come back."""
    pool = candidates(waiting_requests=[5, 6])
    assert kept(utilization(("waiting-queue", 1)), pool) == [False, False]
    assert kept(utilization(("waiting-queue", 1), fallbackOnEmpty=True), pool) == [True, True]
    assert filters.Utilization.abilities.sheds_load


@pytest.mark.parametrize(
    "conditions",
    [
        [],
        [{"metric": "waiting-queue"}],
        [{"metric": "queue", "maxValue": 1}],
        [{"metric": "waiting-queue", "maxValue": -1}],
        [{"metric": "kv-cache-utilization", "maxValue": 1.1}],
        [{"metric": "waiting-queue", "maxValue": 1}] * 65,
    ],
)
def test_conditions_that_cannot_be_are_refused(conditions):
    """None, unknown, without a limit, below zero, more than all, too many."""
    with pytest.raises(ValidationError):
        convert({"conditions": conditions}, filters.Utilization)
