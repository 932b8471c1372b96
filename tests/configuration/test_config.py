import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.configuration.compatibility import ACCEPTED, PARSERS, REFUSED
from epp.configuration.config import CONFIG_MAX_BYTES, ConfigError, PickerConfig, load_config
from epp.configuration.describing import config_hash, diff_configs
from epp.configuration.disaggregation import STAGE_HANDLERS
from epp.core.abilities import Abilities
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.parameters import Parameters
from epp.plugins import DEPRECATED, FILTERS, PICKERS, SCORERS
from epp.plugins.strategies import STRATEGIES

SAMPLES = Path(__file__).parent / "config_samples"
TABLES = plugin_tables()
WEIGHTED = STRATEGIES["weighted-scores"].config

NEEDED = {
    "by-label": {"label": "tier", "validValues": ["a"]},
    "utilization-filter": {"conditions": [{"metric": "waiting-queue", "maxValue": 1}]},
    "endpoint-attribute-filter": {
        "attribute": "a",
        "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 1}},
    },
    "endpoint-attribute-scorer": {
        "attributeKey": "a",
        "algorithm": {"type": "linear_lower_is_better"},
    },
    "max-saturation-detector": {"detectors": ["utilization-detector"]},
    "priority-holdback-policy": {"minCeiling": 0.5},
    "header-label-affinity-scorer": {"headerName": "x-zone", "labelKey": "zone"},
    "disaggregatedset-rollout-screener": {"revisionGating": {"mode": "disabled"}},
}
"""Parameters of types that do not do without."""

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def load(text, source="config.yaml"):
    return load_config(text, source, TABLES)


def load_parts(**sections):
    head = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    return load(json.dumps(head | sections))


def load_plugins(*plugins):
    return load_parts(plugins=list(plugins))


def problems(function, *arguments, **sections):
    with pytest.raises(ConfigError) as error:
        function(*arguments, **sections)
    return [problem.removeprefix("config.yaml: ") for problem in error.value.problems]


def warnings(config):
    return [warning.removeprefix("config.yaml: ") for warning in config.warnings]


def sample(name):
    return load((SAMPLES / f"{name}.yaml").read_bytes(), f"{name}.yaml")


# --- what loads ---


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_in_the_words_of_the_field_load(path):
    """An existing ConfigMap works unchanged (D10)."""
    config = load(path.read_bytes(), path.name)
    assert isinstance(config, PickerConfig)
    assert all(warning.startswith(f"{path.name}: ") for warning in config.warnings)


def test_the_default_is_a_strategy_of_ours():
    """The one that the leaderboard found best, with every missing part made."""
    config = default_config(TABLES)
    homing = load(STRATEGIES["homing"].config)
    assert config_hash(config) == config_hash(homing)
    assert diff_configs(config, homing) == []
    assert config.profile.filters == ()
    assert config.profile.picker_name == "max-score-picker"
    assert config.prefix == "approx-prefix-cache-producer"
    assert config.indexes == {"approx-prefix-cache-producer": PrefixIndexSettings()}
    assert config.parsers == PARSERS
    assert config.warnings == ()


def test_the_chart_default_weighs_two_two_three_without_warnings():
    """reference/endpoint-pickers.md 2.4."""
    config = sample("chart-default")
    assert [scorer.weight for scorer in config.profile.scorers] == [2, 2, 3]
    assert config.warnings == ()
    assert config.parsers == ("openai-parser",)
    assert config.metrics.source.path == "/metrics"


def test_a_scorer_without_weight_weighs_one():
    """As in the reference picker."""
    assert {scorer.weight for scorer in sample("four-scorers").profile.scorers} == {1.0}


def test_two_prefix_indexes_stay_apart_and_the_first_is_the_default():
    """The guide for tiered caches declares one index a tier."""
    config = sample("tiered-prefix-cache")
    assert list(config.indexes) == ["gpu-prefix-cache", "cpu-prefix-cache"]
    assert config.prefix == "gpu-prefix-cache"
    assert config.indexes["cpu-prefix-cache"].lru_capacity_per_server == 41_000


def test_index_parameters_of_the_old_scorer_go_to_the_index():
    """First releases had the index inside `prefix-cache-scorer`."""
    config = sample("first-generation")
    index = config.indexes["approx-prefix-cache-producer"]
    assert index.lru_capacity_per_server == 31_250
    assert index.max_prefix_blocks_to_match == 256
    assert index.block_tokens == 64
    assert config.saturation.metrics_staleness_threshold == pytest.approx(0.2)
    assert config.staleness_given
    said = "\n".join(config.warnings)
    for word in ("v1alpha1 is deprecated", "moved to", "blockSizeTokens 1 is below the minimum"):
        assert word in said


def test_a_session_index_is_found_by_its_type_whatever_its_name():
    """The scorer asks for `session-id-producer`; the document calls it `sessions`."""
    config = sample("sessions")
    assert list(config.indexes) == ["session-id-producer"]
    assert config.indexes["session-id-producer"].header_name == "x-claude-code-session-id"
    assert config.indexes["session-id-producer"].ttl == 600.0
    assert config.prefix == ""


def test_a_missing_producer_is_made_with_the_parameters_that_its_reader_wants():
    """`no-hit-lru-scorer` carries the size of its index."""
    config = load_plugins({"type": "no-hit-lru-scorer", "parameters": {"lruSize": 7}})
    assert config.indexes["no-hit-lru-producer"].lru_size == 7


def test_a_detector_serves_as_saturation_detector_and_as_filter():
    """One declaration, both uses."""
    config = sample("sticky-until-busy")
    names = [named.name for named in config.profile.filters]
    assert names == ["prefix-cache-affinity-filter", "utilization-detector"]
    assert config.saturation.queue_depth_threshold == 8
    assert config.saturation.metrics_staleness_threshold == 3.0


def test_metric_names_of_an_engine_are_read():
    """`engineConfigs` replaces an engine's names; selectors are kept as written."""
    config = sample("custom-engine")
    assert config.metrics.source.port == 9400
    extractor = config.metrics.extractor
    assert extractor.default_engine == "atom"
    (engine,) = extractor.engine_configs
    assert engine.running_requests_spec == 'atom:requests{state="running",rank=0}'
    assert engine.lora_spec == ""


def test_without_profiles_everything_declared_is_one_profile_in_declared_order():
    """Filters, scorers and the picker; a detector stays what it is."""
    config = load_plugins(
        {"type": "queue-scorer"},
        {"type": "decode-filter"},
        {"type": "utilization-detector"},
        {"name": "fresh", "type": "fresh-metrics-filter", "parameters": {"maxAge": "500ms"}},
        {"type": "random-picker"},
    )
    assert config.profile.name == "default"
    assert [named.name for named in config.profile.filters] == ["decode-filter", "fresh"]
    assert config.profile.filters[1].plugin.max_age == 0.5
    assert config.profile.picker_name == "random-picker"


def test_a_profile_without_picker_takes_the_best_score():
    """The one that is declared, else one with the defaults."""
    assert load_plugins({"type": "queue-scorer"}).profile.picker_name == "max-score-picker"
    config = load_parts(
        plugins=[{"type": "queue-scorer"}, {"name": "best", "type": "max-score-picker"}],
        schedulingProfiles=[{"name": "p", "plugins": [{"pluginRef": "queue-scorer"}]}],
    )
    assert config.profile.picker_name == "best"
    assert config.warnings == ()


@pytest.mark.parametrize(
    "type_name", sorted({*FILTERS, *SCORERS, *PICKERS, *ACCEPTED} - set(STAGE_HANDLERS))
)
def test_every_type_loads_with_no_more_than_it_needs(type_name):
    """Each type loads with only its required parameters. Handlers of stages also need profiles; the
    tests in test_stages.py load them.
    """
    config = load_plugins({"type": type_name, "parameters": NEEDED.get(type_name)})
    assert config.profile.picker_name in {"max-score-picker", type_name}


def test_json_is_read_like_yaml():
    """JSON is a part of YAML; text and bytes are alike."""
    text = json.dumps({"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"})
    assert config_hash(load(text)) == config_hash(load(text.encode()))


# --- what warns ---


@pytest.mark.parametrize(
    ("plugin", "sentence"),
    [
        (
            {"type": "approx-prefix-cache-producer", "parameters": {"blockSizeTokens": 16}},
            "plugins[0] (approx-prefix-cache-producer): blockSizeTokens 16 is below the minimum; 64 is used",
        ),
        (
            {"type": "approx-prefix-cache-producer", "parameters": {"blockSize": 128}},
            "plugins[0] (approx-prefix-cache-producer): blockSize is deprecated, use blockSizeTokens",
        ),
        (
            {"type": "approx-prefix-cache-producer", "parameters": {"maxPrefixBlocksToMatch": 9}},
            "plugins[0] (approx-prefix-cache-producer): maxPrefixBlocksToMatch has no effect, because maxPrefixTokensToMatch is 131072 and not 0",
        ),
        (
            {"type": "data-parallel-profile-handler"},
            "plugins[0] (data-parallel-profile-handler): has no effect without primaryPort, because data-parallel ranks with a port each are separate endpoints; for ranks behind one address use data-parallel-rank-producer",
        ),
        (
            {
                "type": "inflight-load-producer",
                "parameters": {"addEstimatedOutputTokens": True, "outputRatio": 2},
            },
            "plugins[0] (inflight-load-producer): addEstimatedOutputTokens has no effect, because load in flight counts requests and uncached prompt tokens",
        ),
        (
            {"type": "token-producer", "parameters": {"estimate": {"image": {}}}},
            "plugins[0] (token-producer): parameters of `estimate` have no effect, because a token counts as 4 bytes",
        ),
        (
            {"type": "model-server-protocol-metrics"},
            "plugins[0] (model-server-protocol-metrics): type model-server-protocol-metrics is deprecated, use core-metrics-extractor",
        ),
        (
            {"type": "inflight-load-producer", "parameters": {"maxEstimatedOutputTokens": 9}},
            "plugins[0] (inflight-load-producer): maxEstimatedOutputTokens has no effect, because load in flight counts requests and uncached prompt tokens",
        ),
        (
            {"type": "session-affinity-filter", "parameters": {"profileName": "prefill"}},
            "plugins[0] (session-affinity-filter): profileName has no effect, because it cannot change the endpoint of a session",
        ),
        (
            {"type": "dcgm-data-source"},
            "plugins[0] (dcgm-data-source): has no effect, because there is no dcgm-extractor",
        ),
        (
            {"type": "models-data-extractor"},
            "plugins[0] (models-data-extractor): has no effect, because there is no models-data-source",
        ),
        (
            {"type": "endpoint-attribute-scorer", "parameters": {"attributeKey": "load", "algorithm": {"type": "linear_lower_is_better"}}},
            "plugins[0] (endpoint-attribute-scorer): no producer provides load/core-metrics-extractor; expected a customMetrics of core-metrics-extractor, or GPUUtilization of dcgm-extractor",
        ),
        (
            {"type": "by-label-selector"},
            "plugins[0] (by-label-selector): type by-label-selector is deprecated, use label-selector-filter",
        ),
    ],
)  # fmt: skip
def test_what_does_less_than_it_says_warns(plugin, sentence):
    """Accepted, with one sentence."""
    assert sentence in warnings(load_plugins(plugin))


def test_what_a_profile_leaves_out_warns():
    """A plugin in no profile, and a weight of what is not weighed."""
    config = load_parts(
        plugins=[
            {"type": "queue-scorer"},
            {"type": "lora-affinity-scorer"},
            {"type": "decode-filter"},
        ],
        schedulingProfiles=[
            {
                "name": "p",
                "plugins": [
                    {"pluginRef": "queue-scorer"},
                    {"pluginRef": "decode-filter", "weight": 2},
                ],
            }
        ],
    )
    assert warnings(config) == [
        "schedulingProfiles[0].plugins[1]: the weight of filter decode-filter has no effect",
        "plugins[1] (lora-affinity-scorer): is in no profile and has no effect",
    ]


@pytest.mark.parametrize(
    "gate", ["dataLayer", "prepareDataPlugins=true", "haPopulateNonLeaderDatastore"]
)
def test_a_feature_gate_without_effect_warns(gate):
    """Known gates of the field; flowControl may be given as off."""
    config = load_parts(featureGates=[gate, "flowControl=false"])
    assert len(config.warnings) == 1
    assert "featureGates[0]" in config.warnings[0]


# --- what is refused ---


@pytest.mark.parametrize("type_name", sorted(REFUSED))
def test_a_type_of_the_field_that_is_not_here_is_refused_with_what_to_do_instead(type_name):
    """By name; what is named as substitute exists."""
    (problem,) = problems(load_plugins, {"type": type_name})
    start = f"plugins[0] ({type_name}): type {type_name} is not supported: "
    assert problem.startswith(start)
    instead = problem.removeprefix(start)
    known = {*FILTERS, *SCORERS, *PICKERS, *ACCEPTED, "approx-prefix-cache-producer"}
    assert any(name in instead for name in known) or "remove it" in instead or "--" in instead


def test_no_type_is_both_known_and_refused():
    """The tables do not contradict each other."""
    known = {*FILTERS, *SCORERS, *PICKERS, *TABLES.indexes, *ACCEPTED}
    assert not known & set(REFUSED)
    assert set(DEPRECATED) <= known


@pytest.mark.parametrize(("name", "count"), [("flow-control", 3)])
def test_guides_that_need_more_than_there_is_are_refused_as_a_whole(name, count):
    """Every problem at once, each in one line, none of them a consequence of another."""
    with pytest.raises(ConfigError) as error:
        load((SAMPLES / "refused" / f"{name}.yaml").read_bytes())
    assert len(error.value.problems) == count
    assert all("\n" not in problem for problem in error.value.problems)
    assert str(error.value) == "\n".join(error.value.problems)


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        (
            {"type": "queue-scorer", "parameters": {"x": 1}},
            "plugins[0] (queue-scorer): parameters has unknown field `x`",
        ),
        (
            {"type": "load-aware-scorer", "parameters": {"treshold": 1}},
            "plugins[0] (load-aware-scorer): parameters has unknown field `treshold`, did you mean `threshold`?",
        ),
        (
            {"name": "mine", "type": "load-aware-scorer", "parameters": {"threshold": "many"}},
            "plugins[0] (mine): parameters.threshold: expected a number, got a text",
        ),
        (
            {"type": "load-aware-scorer", "parameters": {"threshold": 0}},
            "plugins[0] (load-aware-scorer): parameters.threshold: expected a number above 0",
        ),
        (
            {"type": "fresh-metrics-filter", "parameters": {"maxAge": "2"}},
            "plugins[0] (fresh-metrics-filter): parameters.maxAge: '2' is not a duration such as 300ms, 2s or 1m30s",
        ),
        (
            {"type": "fresh-metrics-filter", "parameters": {"maxAge": 2}},
            "plugins[0] (fresh-metrics-filter): parameters.maxAge: expected a text, got 2",
        ),
        (
            {"type": "fresh-metrics-filter", "parameters": {"maxAge": "0s"}},
            "plugins[0] (fresh-metrics-filter): parameters: maxAge is 0s; it must be more than 0s",
        ),
        (
            {"type": "by-label"},
            "plugins[0] (by-label): parameters needs field `label`",
        ),
        (
            {"type": "label-selector-filter", "parameters": {"matchExpressions": [{"key": "a", "operator": "Has"}]}},
            "plugins[0] (label-selector-filter): parameters.matchExpressions[0].operator: expected In, NotIn, Exists or DoesNotExist, got 'Has'",
        ),
        (
            {"type": "token-producer", "parameters": {"udsTokenizerConfig": {}}},
            "plugins[0] (token-producer): parameters: the udsTokenizerConfig tokenizer backend is not supported: use `vllm`, the renderer, or `local`",
        ),
        (
            {"type": "core-metrics-extractor", "parameters": {"engineConfigs": [{"name": "a", "kvUsageSpec": "a{b"}]}},
            "plugins[0] (core-metrics-extractor): parameters.engineConfigs[0].kvUsageSpec: 'a{b' is not a metric such as name or name{label=value}",
        ),
        (
            {"type": "core-metrics-extractor", "parameters": {"defaultEngine": "tgi"}},
            "plugins[0] (core-metrics-extractor): parameters: defaultEngine tgi is not one of llama.cpp, sglang, triton, triton-tensorrt-llm, trtllm-serve, vllm",
        ),
        (
            {"type": "core-metrics-extractor", "parameters": {"engineConfigs": [{"name": "a"}]}},
            "plugins[0] (core-metrics-extractor): parameters.engineConfigs[0]: engine a has no queuedRequestsSpec, which identifies its page",
        ),
        (
            {"type": "metrics-data-source", "parameters": {"port": 0}},
            "plugins[0] (metrics-data-source): parameters.port: expected a whole number of at least 1",
        ),
        (
            {"type": "metrics-data-source", "parameters": {"clientCertPath": "a.pem"}},
            "plugins[0] (metrics-data-source): parameters: clientCertPath and clientKeyPath must be given together",
        ),
        (
            {"type": "dcgm-data-source", "parameters": {"interval": "2h"}},
            "plugins[0] (dcgm-data-source): parameters: interval is 7200s; it must be from 0s to 3600s",
        ),
        (
            {"type": "models-data-source", "parameters": {"interval": "5"}},
            "plugins[0] (models-data-source): parameters: '5' is not a duration such as 300ms, 2s or 1m30s",
        ),
        (
            {"type": "utilization-filter", "parameters": {"conditions": [{"metric": "waiting-queue", "maxValue": 1}], "inFlightLoadProducerName": "mine"}},
            "plugins[0] (utilization-filter): inFlightLoadProducerName mine names no declared inflight-load-producer",
        ),
        (
            {"type": "inflight-load-producer", "parameters": {"prefixMatchInfoProducerName": "aprox-prefix-cache-producer"}},
            "plugins[0] (inflight-load-producer): prefixMatchInfoProducerName aprox-prefix-cache-producer names no declared plugin",
        ),
        (
            {"type": "queue-scorr"},
            "plugins[0] (queue-scorr): type queue-scorr is unknown, did you mean `queue-scorer`?",
        ),
        ({"type": "zzz"}, "plugins[0] (zzz): type zzz is unknown"),
        ({"name": "a"}, "plugins[0] needs field `type`"),
        ({"type": "queue-scorer", "weight": 2}, "plugins[0] has unknown field `weight`"),
        ({"type": 3}, "plugins[0].type: expected a text, got a whole number"),
        ("queue-scorer", "plugins[0]: expected a mapping, got a text"),
        (
            {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "x"}},
            "plugins[0] (prefix-cache-scorer): producer x names no declared plugin",
        ),
        (
            {
                "type": "prefix-cache-scorer",
                "parameters": {"prefixMatchInfoProducerName": "request-attribute-reporter"},
            },
            "plugins[0] (prefix-cache-scorer): producer request-attribute-reporter is not supported: nothing is computed from usage: use --parse-response-usage",
        ),
    ],
)  # fmt: skip
def test_a_bad_plugin_is_named_with_its_field(plugin, problem):
    """File, plugin, path, and what was expected."""
    assert problems(load_plugins, plugin) == [problem]


def profile(*entries, **more):
    plugins = [
        {"type": "queue-scorer"},
        {"type": "decode-filter"},
        {"type": "max-score-picker"},
        {"type": "random-picker"},
        {"type": "openai-parser"},
    ]
    return load_parts(
        plugins=plugins, schedulingProfiles=[{"name": "p", "plugins": list(entries)}], **more
    )


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (
            [{"pluginRef": "queue-score"}],
            "schedulingProfiles[0].plugins[0]: pluginRef queue-score names no declared plugin, did you mean `queue-scorer`?",
        ),
        (
            [{"pluginRef": "openai-parser"}],
            "schedulingProfiles[0].plugins[0]: openai-parser is a parser, expected a filter or scorer or picker",
        ),
        (
            [{"pluginRef": "queue-scorer", "weight": -1}],
            "schedulingProfiles[0]: the weight of scorer queue-scorer is -1.0; it must be finite and at least 0",
        ),
        (
            [{"pluginRef": "queue-scorer", "weight": "2"}],
            "schedulingProfiles[0].plugins[0].weight: expected a number or nothing, got a text",
        ),
        (
            [{"pluginRef": "queue-scorer", "weight": True}],
            "schedulingProfiles[0].plugins[0].weight: expected a number or nothing, got true or false",
        ),
        (
            [{"pluginRef": "queue-scorer", "weight": 0}],
            "schedulingProfiles[0]: all weights of profile p are 0; at least one must be above 0",
        ),
        (
            [{"pluginRef": "queue-scorer"}, {"pluginRef": "queue-scorer"}],
            "schedulingProfiles[0].plugins[1]: queue-scorer is already in this profile",
        ),
        (
            [{"pluginRef": "max-score-picker"}, {"pluginRef": "random-picker"}],
            "schedulingProfiles[0] has 2 pickers, expected at most one: max-score-picker, random-picker",
        ),
    ],
)  # fmt: skip
def test_a_bad_profile_says_which_entry_is_wrong(entries, problem):
    """References, weights and pickers."""
    assert problems(profile, *entries) == [problem]


@pytest.mark.parametrize("weight", [".inf", ".nan", "-.inf"])
def test_a_weight_is_finite(weight):
    """YAML can say infinity and not a number."""
    text = f"""{HEAD}plugins: [{{type: queue-scorer}}]
schedulingProfiles: [{{name: p, plugins: [{{pluginRef: queue-scorer, weight: {weight}}}]}}]"""
    (problem,) = problems(load, text)
    assert "must be finite and at least 0" in problem


def test_a_second_profile_needs_a_handler():
    """The handler names the profile of each stage."""
    (problem,) = problems(load_parts, schedulingProfiles=[{"name": "a"}, {"name": "b"}])
    assert problem.startswith("schedulingProfiles has 2 profiles, expected one")


def test_the_newest_version_of_the_document_is_read_like_the_one_before():
    """`llm-d.ai/v1`: the same meaning, and nothing to warn of."""
    text = (SAMPLES / "optimized-baseline.yaml").read_text()
    assert "apiVersion: llm-d.ai/v1alpha1\n" in text
    newest = load(text.replace("llm-d.ai/v1alpha1", "llm-d.ai/v1"))
    assert config_hash(newest) == config_hash(load(text))
    assert newest.warnings == load(text).warnings


def test_what_others_configure_of_replicas_here_is_flags():
    """It loads, in both spellings, decides nothing, and each member is told of."""
    spelt = {
        "peerDiscovery": {"pluginRef": "slices"},
        "crossReplicaSyncerPluginRef": "local-syncer",
        "crossReplicaSyncInterval": "200ms",
        "crossReplicaPublishTimeout": "1s",
        "crossReplica": {"syncerPluginRef": "local-syncer"},
    }
    plugins = [{"type": "queue-scorer"}, {"type": "local-syncer"}]
    plain, told = (load_parts(plugins=plugins, dataLayer=layer) for layer in ({}, spelt))
    assert config_hash(plain) == config_hash(told)
    assert [warning.partition(": ")[2] for warning in told.warnings] == [
        (
            "dataLayer.peerDiscovery has no effect, because replicas find each other by --peer-service or "
            "--peers"
        ),
        (
            "dataLayer.crossReplicaSyncerPluginRef has no effect, because replicas share by --peer-service, "
            "--peers or --peer-url"
        ),
        (
            "dataLayer.crossReplicaSyncInterval has no effect, because replicas share changes within "
            "20ms"
        ),
        "dataLayer.crossReplicaPublishTimeout has no effect, because sharing never waits for replicas",
        (
            "dataLayer.crossReplica has no effect, because replicas share by --peer-service, --peers or "
            "--peer-url"
        ),
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_load_is_shared_by_replicas_that_share_at_all(shared):
    """Asking for it is what happens; asking not to is told of."""
    parameters = {"syncCrossReplicaState": shared}
    loaded = load_plugins({"type": "inflight-load-producer", "parameters": parameters})
    told = [warning for warning in loaded.warnings if "syncCrossReplicaState" in warning]
    assert len(told) == (not shared)


def test_two_plugins_of_one_name_are_refused():
    """The name defaults to the type."""
    twice = [{"type": "queue-scorer"}, {"name": "queue-scorer", "type": "load-aware-scorer"}]
    assert problems(load_plugins, *twice) == [
        "plugins[1] (queue-scorer): the name queue-scorer is taken by an earlier plugin"
    ]


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"kind": None}, "kind is missing, expected 'EndpointPickerConfig'"),
        ({"kind": "ConfigMap"}, "kind is 'ConfigMap', expected 'EndpointPickerConfig'"),
        ({"apiVersion": "v1"}, "apiVersion is 'v1', expected 'llm-d.ai/v1' or 'llm-d.ai/v1alpha1'"),
        ({"apiVersion": []}, "apiVersion is [], expected 'llm-d.ai/v1' or 'llm-d.ai/v1alpha1'"),
        ({"plugin": []}, "has unknown field `plugin`, did you mean `plugins`?"),
        ({"plugins": {}}, "plugins: expected a list, got dict"),
        (
            {"featureGates": ["flowControl"], "flowControl": {"bandSelectionPolicyPluginRef": "x"}},
            "flowControl.bandSelectionPolicyPluginRef: pluginRef x names no declared plugin",
        ),
        (
            {"dataLayer": {"discovery": {"pluginRef": "x"}}},
            "dataLayer.discovery is not supported, because endpoints are given with --endpoints-file: remove it",
        ),
        (
            {"dataLayer": {"sources": [{"pluginRef": "x"}]}},
            "dataLayer.sources[0]: pluginRef x names no declared plugin",
        ),
        (
            {"requestHandler": {"parsers": [{"pluginRef": "x"}]}},
            "requestHandler.parsers[0]: pluginRef x names no declared plugin",
        ),
        ({"parser": {}}, "parser needs field `pluginRef`"),
        (
            {"saturationDetector": {"queueDepthThreshold": 0}},
            "saturationDetector: parameters.queueDepthThreshold: expected a number above 0",
        ),
        (
            {
                "plugins": [{"type": "decode-filter"}],
                "flowControl": {"saturationDetector": {"pluginRef": "decode-filter"}},
            },
            "flowControl.saturationDetector: decode-filter is a filter, expected a utilization-detector, unless `featureGates: [flowControl]` is set",
        ),
        ({"featureGates": ["flowContrl"]}, "featureGates[0]: feature gate 'flowContrl' is unknown, did you mean `flowControl`?"),
        ({"featureGates": ["dataLayer=1"]}, "featureGates[0]: 'dataLayer=1' is not a feature gate; expected gate, gate=true or gate=false"),
    ],
)  # fmt: skip
def test_a_bad_section_is_refused(sections, problem):
    """The head, and what is beside plugins and profiles."""
    assert problems(load_parts, **sections) == [problem]


def test_all_problems_are_reported_together():
    """One edit instead of one a try."""
    found = problems(
        load_parts,
        plugins=[
            {"type": "queue-scorer", "parameters": {"a": 1, "b": 2}},
            {"type": "request-attribute-reporter"},
        ],
        schedulingProfiles=[
            {"name": "p", "plugins": [{"pluginRef": "queue-scorer"}, {"pluginRef": "x"}]}
        ],
    )
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "is empty, expected an EndpointPickerConfig"),
        (b"- a", "is not a mapping, expected an EndpointPickerConfig"),
        (b"a: 1\na: 2", "line 2: key `a` appears twice in one mapping"),
        (b"plugins:\n- {type: a, type: b}", "line 2: key `type` appears twice in one mapping"),
        (b"a: &x 1\nb: *x", "line 2: alias *x is not supported; expected the value itself"),
        (b"a: [" + b"[" * 100_000, "line 1: is nested more than 32 levels deep"),
        (b"kind: }", "line 1: expected YAML: did not find expected node content"),
        (b"a: 1\n---\nb: 2", "line 2: expected a single document in the stream, but found another document"),
        (b"a: !!python/name:os.system x", "line 1: could not determine a constructor for the tag"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_says_where(text, problem):
    """With the line where there is one."""
    (found,) = problems(load, text)
    assert found.startswith(problem)


def test_what_is_not_text_or_too_long_is_refused():
    """Bytes that are no UTF-8; a megabyte and one byte."""
    (found,) = problems(load, b"\xff\xfe\x00")
    assert found.startswith("is not YAML: ")
    assert problems(load, b" " * (CONFIG_MAX_BYTES + 1)) == [
        f"has {CONFIG_MAX_BYTES + 1} bytes, expected at most {CONFIG_MAX_BYTES}"
    ]


_NAMES = st.sampled_from(
    ["apiVersion", "kind", "plugins", "type", "name", "parameters", "schedulingProfiles",
     "pluginRef", "weight", "dataLayer", "sources", "extractors", "flowControl", "parsers",
     "saturationDetector", "requestHandler", "featureGates", "parser", "maxAge", "estimate"]
)  # fmt: skip
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["queue-scorer", "prefix-cache-scorer", "fresh-metrics-filter", "1s"])
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_NAMES | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.dictionaries(_NAMES, _VALUES))
@example({"flowControl": {"\n": None}})
@example({"dataLayer": {"\x1b[2J": None}})
def test_any_document_loads_or_is_refused_in_sentences(sections):
    """Never another exception, never an empty refusal."""
    try:
        load_parts(**sections)
    except ConfigError as error:
        refusal = error.problems
    else:
        refusal = ("fine",)
    assert refusal
    assert all(sentence and sentence.isprintable() for sentence in refusal)


@settings(max_examples=200)
@given(st.binary(max_size=64) | st.text(max_size=64))
def test_any_bytes_are_refused_in_one_sentence(text):
    """No configuration is that short."""
    with pytest.raises(ConfigError) as error:
        load(text)
    assert all(len(problem.splitlines()) == 1 for problem in error.value.problems)


def test_a_configuration_is_a_value():
    """Loaded twice it is equal; nothing in it can be assigned."""
    config = sample("optimized-baseline")
    assert config == sample("optimized-baseline")
    with pytest.raises(AttributeError):
        config.prefix = "x"
    assert msgspec.structs.replace(config, prefix="") != config


# --- pages beside the metrics, attributes, names ---

GPU_FILTER = {
    "type": "endpoint-attribute-filter",
    "parameters": {
        "attribute": "GPUUtilization",
        "producer": "dcgm-extractor",
        "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 0.9}},
    },
}


def test_pages_of_gpus_and_models_are_asked_for_where_somebody_reads_them():
    """By whatever name, with or without a wiring of the data layer."""
    plugins = [
        {"type": "dcgm-data-source", "name": "gpus", "parameters": {"interval": "3s"}},
        {"type": "dcgm-extractor", "name": "of-gpus"},
        {"type": "models-data-source"},
        {"type": "models-data-extractor"},
        GPU_FILTER,
    ]
    wired = {"sources": [{"pluginRef": "gpus", "extractors": [{"pluginRef": "of-gpus"}]}]}
    for layer in ({}, wired):
        config = load_parts(plugins=plugins, dataLayer=layer)
        assert config.warnings == ()
        assert (config.metrics.gpus.port, config.metrics.gpus.interval_s) == (9400, 3.0)
        assert config.metrics.models.path == "/v1/models"
    assert load_plugins(GPU_FILTER).metrics.gpus is None


@pytest.mark.parametrize(
    ("plugins", "sources", "problem"),
    [
        (
            ["dcgm-data-source", "core-metrics-extractor"],
            [{"pluginRef": "dcgm-data-source", "extractors": [{"pluginRef": "core-metrics-extractor"}]}],
            "dataLayer.sources[0].extractors[0]: core-metrics-extractor is a core-metrics-extractor, expected a dcgm-extractor, which reads the pages of dcgm-data-source",
        ),
        (
            ["dcgm-data-source", "queue-scorer"],
            [{"pluginRef": "dcgm-data-source", "extractors": [{"pluginRef": "queue-scorer"}]}],
            "dataLayer.sources[0].extractors[0]: queue-scorer is a scorer, expected a extractor",
        ),
        (
            ["dcgm-data-source", {"type": "dcgm-data-source", "name": "other"}],
            [],
            "plugins[1] (other): only one dcgm-data-source is allowed, and dcgm-data-source is declared before it",
        ),
    ],
)  # fmt: skip
def test_a_page_is_read_by_what_understands_it(plugins, sources, problem):
    """Once."""
    given = [{"type": one} if isinstance(one, str) else one for one in plugins]
    assert problems(load_parts, plugins=given, dataLayer={"sources": sources}) == [problem]


def test_a_scorer_can_bring_a_filter():
    """At its place among the filters; where it does not filter it brings none."""
    aware = {"type": "context-length-aware", "parameters": {"enableFiltering": True}}
    names = [
        filter_.name
        for filter_ in load_plugins(
            {"type": "decode-filter"}, aware, {"type": "fresh-metrics-filter"}
        ).profile.filters
    ]
    assert names == ["decode-filter", "context-length-aware", "fresh-metrics-filter"]
    plain = load_plugins({"type": "context-length-aware"})
    assert plain.profile.filters == ()
    assert [scorer.name for scorer in plain.profile.scorers] == ["context-length-aware"]


def test_names_of_producers_are_those_of_plugins():
    """By type or by name; of an index that is not the default one what is uncached is not known."""
    config = load_plugins(
        {"type": "inflight-load-producer", "name": "load"},
        {"type": "token-load-scorer", "parameters": {"inFlightLoadProducerName": "load"}},
        {
            "type": "active-request-scorer",
            "parameters": {"inFlightLoadProducerName": "inflight-load-producer"},
        },
    )
    assert config.warnings == ()
    other = load_plugins(
        {"type": APPROXIMATE},
        {"type": APPROXIMATE, "name": "other"},
        {
            "type": "inflight-load-producer",
            "parameters": {"prefixMatchInfoProducerName": "other"},
        },
        {"type": "prefix-cache-scorer"},
    )
    assert warnings(other) == [
        f"plugins[2] (inflight-load-producer): prefixMatchInfoProducerName other has no effect, because uncached tokens are estimated by {APPROXIMATE}"
    ]


def test_where_a_session_is_named_is_told_to_its_index():
    """By a scorer or a filter, to one that is declared too; of two who differ the first is right."""
    config = {"sources": [{"header": "x-a"}], "evictionTtlSeconds": 60}
    reader = {
        "type": "session-affinity-filter",
        "parameters": {"strategy": "session_id", "sessionIdConfig": config},
    }
    for declared in ([], [{"type": "session-id-producer", "parameters": {"sessionsMax": 7}}]):
        index = load_plugins(*declared, reader).indexes["session-id-producer"]
        assert [source.header for source in index.sources] == ["x-a"]
        assert (index.ttl, index.sessions_max) == (60.0, 7 if declared else 65_536)
    other = {
        "type": "session-affinity-scorer",
        "parameters": {"strategy": "session_id", "sessionIdConfig": {"evictionTtlSeconds": 30}},
    }
    both = load_plugins(reader, other)
    assert both.indexes["session-id-producer"].ttl == 60.0
    assert any("its ttl has no effect" in text for text in warnings(both))


class Broken(Parameters, frozen=True):
    """Raises wherever it is asked for what it declares."""

    type_name = "broken-scorer"
    abilities = Abilities(reads=(), warns=True, brings_filter=True)

    fails: str = "warnings"

    def score(self, request, candidates, /):
        return None

    def warnings(self):
        return [1 / 0] if self.fails == "warnings" else []

    @property
    def filter(self):
        return 1 / 0 if self.fails == "filter" else Undeclared()


class Undeclared(Parameters, frozen=True):
    """A filter that declares nothing."""

    abilities = None

    def keep(self, request, candidates, /):
        return None


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("warnings", "warnings raised ZeroDivisionError"),
        ("filter", "filter raised ZeroDivisionError"),
        ("nothing", "Undeclared declares no abilities"),
    ],
)
def test_a_plugin_that_fails_to_say_what_it_declares_is_refused(fails, said):
    """By its name."""
    tables = msgspec.structs.replace(TABLES, scorers={"broken-scorer": Broken})
    plugin = {"type": "broken-scorer", "parameters": {"fails": fails}}
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [plugin],
    }
    with pytest.raises(ConfigError, match=said) as error:
        load_config(json.dumps(document), "config.yaml", tables)
    assert error.value.problems[0].startswith("config.yaml: plugins[0] (broken-scorer): ")


SHADOW = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: prefix-cache-scorer
- type: session-affinity-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
shadow:
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 4}
  - {pluginRef: queue-scorer, weight: 2}
"""


def test_a_shadow_profile_is_read_beside_the_one_that_acts():
    """It has the indexes that it needs, its plugins are in use, and it is told apart in a diff."""
    config = load_config(SHADOW, "here", TABLES)
    assert [scorer.name for scorer in config.profile.scorers] == ["queue-scorer"]
    assert [(one.name, one.weight) for one in config.shadow.scorers] == [
        ("prefix-cache-scorer", 4.0),
        ("queue-scorer", 2.0),
    ]
    assert config.prefix == "approx-prefix-cache-producer"
    assert not [sentence for sentence in config.warnings if "prefix-cache-scorer" in sentence]
    other = load_config(SHADOW.replace("weight: 4", "weight: 5"), "there", TABLES)
    assert diff_configs(config, other) == ["shadow scorer prefix-cache-scorer: weight 4 -> 5"]
    sampled = load_config(SHADOW.replace("shadow:", "shadow:\n  share: 0.25"), "there", TABLES)
    assert build_settings(sampled).shadow_share == 0.25
    assert diff_configs(config, sampled) == ["shadow profile: share 1 -> 0.25"]
    without = load_config(SHADOW.partition("shadow:")[0], "there", TABLES)
    assert without.shadow is None
    acting = load_config(
        SHADOW.partition("shadow:")[0] + "    weight: 2\n",
        "there",
        TABLES,
    )
    changes = diff_configs(config, acting)
    about_shadow = [line.startswith("shadow ") for line in changes]
    assert "scorer queue-scorer: weight 1 -> 2" in changes
    assert about_shadow == sorted(about_shadow)
    assert any(about_shadow)
    assert config_hash(without) != config_hash(config)


@pytest.mark.parametrize(
    ("shadow", "problem"),
    [
        ("shadow: []", "shadow: expected a mapping, got a list"),
        ("shadow: {plugins: []}", "of at least 1 entry"),
        ("shadow: {plugins: [{pluginRef: queue-scorer}], share: 0}", "above 0"),
        ("shadow: {plugins: [{pluginRef: nothing}]}", "shadow.plugins[0]"),
        (
            "shadow: {plugins: [{pluginRef: queue-scorer, weight: 0}]}",
            "all weights of profile shadow are 0",
        ),
        ("shadow: {plugins: [{pluginRef: queue-scorer}], weights: {}}", "unknown field `weights`"),
    ],
)
def test_a_shadow_that_is_none_is_refused(shadow, problem):
    """With its place."""
    with pytest.raises(ConfigError) as found:
        load_config(SHADOW.partition("shadow:")[0] + shadow, "here", TABLES)
    assert problem in " ".join(found.value.problems)


# --- an index that engines tell ---

TOLD = "precise-prefix-cache-producer"
APPROXIMATE = "approx-prefix-cache-producer"
READER = {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": TOLD}}


def told(**parameters):
    return {"type": TOLD, "parameters": parameters}


def test_where_engines_tell_decisions_answer_for_those_that_do_not():
    """In blocks of the first, whatever those of the other are; the order of the document does not count."""
    for plugins in (
        [told(), READER],
        [{"type": APPROXIMATE}, told(), READER],
        [READER, told(), {"type": APPROXIMATE}],
    ):
        config = load_plugins(*plugins)
        assert config.prefix == TOLD
        assert set(config.indexes) == {TOLD, APPROXIMATE}
        made = build_settings(config)
        assert made.joined == (TOLD, APPROXIMATE)
        assert made.block_tokens == 16


def test_the_wiring_of_the_field_loads_and_means_nothing():
    """Changes of endpoints always arrive; what would hear of them is named all the same."""
    source = {"pluginRef": "endpoint-notification-source", "extractors": [{"pluginRef": TOLD}]}
    plugins = [{"type": "endpoint-notification-source"}, told(), READER]
    config = load_parts(plugins=plugins, dataLayer={"sources": [source]})
    assert config.prefix == TOLD
    wrong = {**source, "extractors": [{"pluginRef": "prefix-cache-scorer"}]}
    (problem,) = problems(load_parts, plugins=plugins, dataLayer={"sources": [wrong]})
    assert "prefix-cache-scorer is a scorer, expected a index" in problem


def test_what_was_one_plugin_is_an_index_and_a_scorer():
    """With a sentence on how to write it now."""
    old = {
        "type": "precise-prefix-cache-scorer",
        "parameters": {"tokenProcessorConfig": {"blockSize": 64}},
    }
    config = load_plugins(old)
    assert config.indexes[TOLD].block_tokens == 64
    (scorer,) = config.profile.scorers
    assert scorer.plugin.prefix_match_info_producer_name == TOLD
    assert any("precise-prefix-cache-scorer is deprecated" in text for text in warnings(config))
    (problem,) = problems(load_plugins, told(), old)
    assert "declare only one of the two" in problem


def test_what_does_less_than_it_says_is_named():
    """Small blocks, sizes of stores, selectors, and prompts of which nobody makes tokens."""
    config = load_plugins(
        told(
            tokenProcessorConfig={"blockSize": 16},
            indexerConfig={"kvBlockIndexConfig": {"inMemoryConfig": {"podCacheSize": 5}}},
            kvEventsConfig={
                "discoverPods": False,
                "podDiscoveryConfig": {"podLabelSelector": "a=b"},
            },
        ),
        READER,
    )
    found = " | ".join(warnings(config))
    for part in ("blockSize is deprecated", "16 tokens use much", "podCacheSize", "podLabelSelector",
                 "from no engine", "only prompts that arrive as token ids"):  # fmt: skip
        assert part in found
    quiet = load_plugins(told(tokenProcessorConfig={"blockSizeTokens": 64}), READER)
    assert [text for text in warnings(quiet) if "token-producer" not in text] == []


# --- images ---


def mm(producer, scorer):
    return load_parts(
        plugins=[
            {"type": "mm-embeddings-cache-producer", **producer},
            {"type": "mm-embeddings-cache-scorer", "parameters": scorer},
        ],
        schedulingProfiles=[
            {"name": "default", "plugins": [{"pluginRef": "mm-embeddings-cache-scorer"}]}
        ],
    )


def test_the_fields_sample_for_images_loads():
    """It spells the parameter of its picker in another way, which is told."""
    config = mm({"parameters": {"cacheSizeInMB": 2048}}, {})
    (index,) = config.indexes.values()
    assert index.items_max == 1_024
    (told,) = warnings(config)
    assert "use cacheSizeInMBPerServer" in told
    assert told.startswith("plugins[0] (mm-embeddings-cache-producer): ")
    right = mm({"parameters": {"cacheSizeInMBPerServer": 2048}}, {})
    assert (right.indexes["mm-embeddings-cache-producer"].items_max, warnings(right)) == (1_024, [])


@pytest.mark.parametrize("scorer", [{}, {"producerName": "images"}])
def test_an_index_of_images_is_found_by_its_name_or_its_type(scorer):
    """It is one, whatever it is called by."""
    config = mm({"name": "images"}, scorer)
    (name,) = config.indexes
    (asking,) = config.profile.scorers
    assert asking.plugin.producer == name


def test_an_index_of_images_that_is_missing_is_made():
    config = load_plugins({"type": "mm-embeddings-cache-scorer"})
    assert list(config.indexes) == ["mm-embeddings-cache-producer"]
    (problem,) = problems(mm, {}, {"producerName": "no such"})
    assert "producer no such names no declared plugin" in problem
