"""The section `flowControl`: names and meanings of llm-d-router."""

import json

import pytest

from epp.configuration.build import build_settings, plugin_tables, settings_warnings
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import config_hash, diff_configs
from epp.configuration.explaining import explain
from epp.core.flow.agent_admission import AgentAdmission
from epp.core.flow.band_selection import (
    StrictBandSelection,
    WeightDistribution,
    WeightedBandSelection,
)
from epp.core.flow.ceilings import PriorityHoldback, SoftReflectiveCeiling, StaticCeiling
from epp.core.flow.detectors import (
    ConcurrencyDetector,
    MaxSaturation,
    NeverSaturated,
    RoomDetector,
    Utilization,
)
from epp.core.flow.settings import BandSettings, Fairness, Ordering
from epp.core.knowledge.agent_sessions import AGENT_HEADERS, AgentSessionSettings
from epp.core.types import Stage
from tests.configuration.flow_samples import supported, text_of

TABLES = plugin_tables()


def load_parts(**sections):
    head = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    return load_config(json.dumps(head | sections), "c", TABLES)


def queue(*plugins, gates=("flowControl",), **section):
    return load_parts(
        featureGates=list(gates),
        plugins=[{"type": "queue-scorer"}, *plugins],
        schedulingProfiles=[{"name": "p", "plugins": [{"pluginRef": "queue-scorer"}]}],
        flowControl=section,
    )


def problems(*plugins, **section):
    with pytest.raises(ConfigError) as error:
        queue(*plugins, **section)
    return [problem.partition(": ")[2] for problem in error.value.problems]


def test_the_queue_is_off_unless_its_gate_is_on():
    assert load_parts().flow is None
    off = queue(gates=["flowControl=false"], maxBytes="1Gi", priorityBands=[])
    assert off.flow is None
    assert [warning.partition(": ")[2] for warning in off.warnings] == [
        "flowControl.maxBytes has no effect without `featureGates: [flowControl]`",
        "flowControl.priorityBands has no effect without `featureGates: [flowControl]`",
    ]


def test_the_defaults_are_those_of_the_field():
    """But the detector, which learns what endpoints have room for."""
    flow = load_parts(featureGates=["flowControl"]).flow
    assert (flow.requests_max, flow.bytes_max) == (0, 0)
    assert (flow.wait_s_max, flow.empty_pool_wait_s_max) == (60.0, 60.0)
    assert flow.band(7) == BandSettings(requests_max=5_000, bytes_max=1_000_000_000)
    assert flow.band(0).fairness is Fairness.NONE
    assert flow.policy == StaticCeiling(threshold=1.0)
    assert flow.detector == RoomDetector()


@pytest.mark.parametrize("given", [{}, {"enableEviction": False}, {"enableEviction": True}])
def test_running_requests_are_evicted_only_if_that_is_switched_on(given):
    config = queue(**given)
    assert config.flow.evicts is given.get("enableEviction", False)
    assert ("eviction: a running request" in explain(config)) is config.flow.evicts


def test_the_guide_of_the_field_loads_as_it_means():
    flow = queue(
        {"type": "concurrency-detector", "parameters": {"maxConcurrency": 132}},
        {"type": "round-robin-fairness-policy"},
        {"type": "fcfs-ordering-policy"},
        maxBytes="10Gi",
        maxRequests="1k",
        defaultRequestTTL="60s",
        priorityBands=[
            {
                "priority": at,
                "maxRequests": most,
                "fairnessPolicyRef": "round-robin-fairness-policy",
            }
            for at, most in ((100, 500), (0, 200), (-10, 50))
        ],
        saturationDetector={"pluginRef": "concurrency-detector"},
    ).flow
    assert (flow.bytes_max, flow.requests_max) == (10 * 2**30, 1_000)
    assert [flow.band(at).requests_max for at in (100, 0, -10, 5)] == [500, 200, 50, 5_000]
    assert flow.band(100).fairness is Fairness.REQUESTS
    assert flow.detector == ConcurrencyDetector(max_concurrency=132)


def test_bands_of_objectives_have_templates():
    flow = queue(
        {"type": "program-aware-fairness", "parameters": {"lasHalfLifeSeconds": 30}},
        defaultPriorityBand={"fairnessPolicyRef": "program-aware-fairness", "maxRequests": 9},
        defaultNegativePriorityBand={"orderingPolicyRef": "slo-deadline-ordering-policy"},
        priorityBands=[{"priority": 3}],
    ).flow
    assert flow.band(1).fairness is flow.band(-1).fairness is Fairness.DECAYING_TOKENS
    assert flow.band(1).half_life_s == 30.0
    assert flow.band(-1).ordering is Ordering.FIRST_OUTPUT
    assert flow.band(3) == BandSettings()


def test_a_band_may_have_a_ttl_of_its_own():
    """A template too; a band without one has that of the queue."""
    config = queue(
        defaultRequestTTL="30s",
        priorityBands=[
            {"priority": 1, "defaultRequestTTL": "5s"},
            {"priority": 2, "defaultRequestTTL": "0s"},
            {"priority": 3},
        ],
        defaultNegativePriorityBand={"defaultRequestTTL": "2m", "priority": -1},
    )
    flow = config.flow
    assert [flow.band(at).wait_s_max for at in (1, 2, 3, 0, -7)] == [5.0, 0.0, None, None, 120.0]
    assert [flow.longest_wait_s(at) for at in (1, 2, 3, -7)] == [30.0, 0.0, 30.0, 120.0]
    assert "defaultNegativePriorityBand.priority has no effect" in config.warnings[-1]
    text = explain(config)
    assert "bands of other negative priorities: one queue for all flows" in text
    assert [line for line in text.splitlines() if "      longest wait while" in line] == [
        f"      longest wait while the pool has endpoints: {limit}"
        for limit in ("no limit", "5 s", "120 s")
    ]


@pytest.mark.parametrize(
    ("name", "parameters", "policy"),
    [
        ("static-usage-limit-policy", {"threshold": 0.8}, StaticCeiling(threshold=0.8)),
        (
            "priority-holdback-policy",
            {"minCeiling": 0.4, "domain": "value"},
            PriorityHoldback(min_ceiling=0.4, domain="value"),
        ),
        ("soft-reflective-ceiling-policy", {}, SoftReflectiveCeiling()),
    ],
)
def test_every_usage_limit_policy_loads(name, parameters, policy):
    plugin = {"type": name, "parameters": parameters}
    assert queue(plugin, usageLimitPolicyPluginRef=name).flow.policy == policy


@pytest.mark.parametrize(
    ("name", "parameters", "policy"),
    [
        ("strict-band-selection-policy", {}, StrictBandSelection()),
        (
            "weighted-band-selection-policy",
            {"distribution": "linear", "saturationThreshold": 0.5},
            WeightedBandSelection(distribution=WeightDistribution.LINEAR, saturation_threshold=0.5),
        ),
    ],
)
def test_every_band_selection_policy_loads(name, parameters, policy):
    config = queue({"type": name, "parameters": parameters}, bandSelectionPolicyPluginRef=name)
    assert config.flow.selection == policy
    assert f"bands     {name}" in explain(config)


def test_a_band_selection_policy_need_not_be_declared():
    flow = queue(bandSelectionPolicyPluginRef="weighted-band-selection-policy").flow
    assert flow.selection == WeightedBandSelection()


def test_the_largest_of_several_detectors_may_depend_on_the_stage():
    flow = queue(
        {"type": "utilization-detector", "parameters": {"queueDepthThreshold": 9}},
        {"type": "concurrency-detector"},
        {
            "type": "max-saturation-detector",
            "parameters": {
                "detectors": ["utilization-detector", "concurrency-detector"],
                "stages": {"concurrency-detector": ["prefill"]},
            },
        },
        saturationDetector={"pluginRef": "max-saturation-detector"},
    ).flow
    assert isinstance(flow.detector, MaxSaturation)
    first, second = flow.detector.detectors
    assert isinstance(first, Utilization)
    assert first.detector.queue_depth_threshold == 9
    assert second == ConcurrencyDetector()
    assert flow.detector.stages == {1: frozenset({Stage.PREFILL})}


@pytest.mark.parametrize("name", supported())
def test_a_sample_of_the_field_has_a_hash_and_an_explanation(name):
    """`epp serve` needs the hash before it serves."""
    config = load_config(text_of(name), name, TABLES)
    assert len(config_hash(config)) == 12
    assert diff_configs(config, config) == []
    assert explain(config)


def test_the_age_of_metrics_follows_the_scrape_interval_unless_it_is_given():
    detector = {"pluginRef": "utilization-detector"}
    for parameters, expected_s in (({}, 10.0), ({"metricsStalenessThreshold": "3s"}, 3.0)):
        plugin = {"type": "utilization-detector", "parameters": parameters}
        config = queue(plugin, saturationDetector=detector)
        flow = build_settings(config, refresh_interval_s=2.0).flow
        assert float(flow.detector.detector.metrics_staleness_threshold) == expected_s


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            {"maxRequests": "many"},
            "flowControl.maxRequests is 'many'; expected a quantity such as 500, 1k or 10Gi",
        ),
        (
            {"maxBytes": -1},
            "flowControl.maxBytes is -1; expected a quantity such as 500, 1k or 10Gi",
        ),
        ({"defaultRequestTTL": "-1s"}, "flowControl: a TTL is negative; it must be 0s or more"),
        (
            {"priorityBands": [{"priority": 1, "defaultRequestTTL": "-1s"}]},
            "flowControl: a TTL is negative; it must be 0s or more",
        ),
        (
            {"priorityBands": [{"priority": 1}, {"priority": 1}]},
            "flowControl.priorityBands has priority 1 2 times",
        ),
        (
            {"usageLimitPolicyPluginRef": "priority-holdback-policy"},
            (
                "flowControl.usageLimitPolicyPluginRef: pluginRef priority-holdback-policy names no "
                "declared plugin"
            ),
        ),
        (
            {"defaultPriorityBand": {"fairnessPolicyRef": "queue-scorer"}},
            (
                "flowControl.defaultPriorityBand.fairnessPolicyRef: queue-scorer is a scorer, expected a "
                "fairness policy"
            ),
        ),
        (
            {"saturationDetector": {"pluginRef": "decode-filter"}},
            (
                "flowControl.saturationDetector: decode-filter is a filter, expected a saturation "
                "detector"
            ),
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(section, problem):
    plugins = [{"type": "decode-filter"}] if "saturationDetector" in section else []
    assert problems(*plugins, **section) == [problem]


def test_a_detector_that_contains_itself_is_refused():
    cycle = {
        "type": "max-saturation-detector",
        "parameters": {"detectors": ["max-saturation-detector"]},
    }
    found = problems(cycle, saturationDetector={"pluginRef": "max-saturation-detector"})
    assert len(found) == 1
    assert "contains itself" in found[0]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"defaultRequestTTL": "300s"}, "Envoy ends a stream after 300s"),
        ({"defaultRequestTTL": "0s"}, "requests may wait without a limit"),
        (
            {"priorityBands": [{"priority": 3, "defaultRequestTTL": "400s"}]},
            "requests may wait up to 400s",
        ),
        ({"maxRequests": 0}, "5000 requests may wait, but Envoy allows 1024 streams"),
        (
            {"usageLimitPolicyPluginRef": "soft-reflective-ceiling-policy"},
            "has an effect only if InferenceObjectives",
        ),
        (
            {"defaultPriorityBand": {"orderingPolicyRef": "edf-ordering-policy"}},
            "only for requests with the header x-llm-d-inference-ttl",
        ),
    ],
)
def test_contradictions_with_the_gateway_warn(section, said):
    config = queue(**{"maxRequests": 1_000, **section})
    assert sum(said in warning for warning in settings_warnings(config)) == 1


def test_no_contradiction_does_not_warn():
    assert settings_warnings(queue(maxRequests=1_000)) == []


AGENTS = (
    {"type": "agent-identity", "parameters": {"additionalSessionHeaders": ["X-Session-Id"]}},
    {
        "type": "thunder-agent",
        "name": "thunder",
        "parameters": {
            "capacityTokens": 2_237_040,
            "utilThreshold": 0.9,
            "idleLeaseSeconds": 10,
            "headWaitStarvationMs": 20_000,
            "evictionTtlSeconds": 600,
            "evictionSweepSeconds": 10,
        },
    },
)


def agents(*plugins, refs=("queue-scorer", "thunder"), gates=("flowControl",), **section):
    return load_parts(
        featureGates=list(gates),
        plugins=[{"type": "queue-scorer"}, *(plugins or AGENTS)],
        schedulingProfiles=[{"name": "p", "plugins": [{"pluginRef": ref} for ref in refs]}],
        flowControl=section,
    )


def test_agent_sessions_are_admitted_by_one_plugin_in_three_places():
    """Scorer, fairness policy and saturation detector, as in llm-d-router."""
    config = agents(
        defaultRequestTTL="0s",
        saturationDetector={"pluginRef": "thunder"},
        defaultPriorityBand={"fairnessPolicyRef": "thunder"},
    )
    flow = config.flow
    assert flow.band(0).fairness is Fairness.SESSIONS
    assert flow.agents == AgentAdmission(head_wait_s_max=20.0)
    assert flow.detector == NeverSaturated()
    assert flow.identity_headers == ("x-session-id", *AGENT_HEADERS)
    index = config.indexes["agent-session-producer"]
    assert index == AgentSessionSettings(
        headers=("x-session-id", *AGENT_HEADERS),
        capacity_tokens=2_237_040,
        util_threshold=0.9,
        idle_lease_seconds=10.0,
        eviction_ttl_seconds=600.0,
    )
    text = explain(config)
    assert "band 0: agent sessions, admitted ones first, others when their tokens fit" in text
    assert "a waiting agent session is admitted after 20 s even without room" in text
    assert "flows without a fairness header: by x-session-id, x-claude-code-session-id" in text
    assert "agent-session-producer" in text


def test_sessions_without_a_queue_are_only_kept_at_their_endpoints():
    config = agents(gates=())
    assert config.flow is None
    assert any("sessions are not admitted by their size" in said for said in config.warnings)


def test_a_plugin_for_agents_must_follow_the_sessions():
    with pytest.raises(ConfigError) as error:
        agents(refs=("queue-scorer",), defaultPriorityBand={"fairnessPolicyRef": "thunder"})
    assert [one.partition(": ")[2] for one in error.value.problems] == [
        "plugins[2] (thunder): it must be in a scheduling profile, where it follows the sessions"
    ]


def test_agents_without_an_identity_plugin_are_known_by_their_headers():
    config = agents(AGENTS[1], defaultPriorityBand={"fairnessPolicyRef": "thunder"})
    assert config.indexes["agent-session-producer"].headers == ()
    assert config.flow.identity_headers == ()


def test_a_wait_that_ends_before_a_session_is_admitted_warns():
    config = agents(
        *AGENTS, defaultRequestTTL="15s", defaultPriorityBand={"fairnessPolicyRef": "thunder"}
    )
    said = "requests wait for 15s at most, but headWaitStarvationMs admits agent sessions after 20s"
    assert sum(said in warning for warning in settings_warnings(config)) == 1


def test_an_identity_alone_names_flows():
    flow = queue({"type": "agent-identity"}).flow
    assert flow.identity_headers == AGENT_HEADERS
    assert flow.agents is None


def test_each_band_is_explained():
    text = explain(
        queue(
            priorityBands=[{"priority": -1, "fairnessPolicyRef": "token-fairness-policy"}],
            usageLimitPolicyPluginRef="soft-reflective-ceiling-policy",
        )
    )
    assert "band 0: one queue for all flows; within a flow first come, first served" in text
    assert "band -1: flows in turn by tokens charged" in text
    assert "0.50 at 0.5, 0.20 at 0.8, 0.05 at 0.95, 0.00 at 1 mean load" in text
    assert "longest wait while the pool has endpoints: 60 s" in text


def test_a_change_of_the_queue_is_told():
    before, after = queue(maxRequests=10), queue(maxRequests=20)
    assert config_hash(before) != config_hash(after)
    assert diff_configs(before, after) == ["flow control: maxRequests 10 -> 20"]
    assert "flow control: added" in diff_configs(load_parts(), before)
