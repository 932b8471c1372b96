import pytest

from epp.configuration.build import default_config
from epp.configuration.describing import config_hash, diff_configs
from epp.configuration.explaining import explain
from tests.configuration.test_config import HEAD, SAMPLES, TABLES, WEIGHTED, load, sample


def test_the_hash_tells_what_decides_and_nothing_else():
    """Comments, source and spelled-out defaults do not count; a weight does."""
    plain = load(WEIGHTED)
    same = load("# tuned\n" + WEIGHTED.replace("weight: 3", "weight: 3.0"), "other.yaml")
    spelled = load(
        WEIGHTED.replace(
            "- type: prefix-cache-scorer",
            "- type: approx-prefix-cache-producer\n- type: prefix-cache-scorer\n"
            "- {type: utilization-detector, parameters: {queueDepthThreshold: 5.0}}",
        )
    )
    assert config_hash(plain) == config_hash(same) == config_hash(spelled)
    assert diff_configs(plain, same) == []
    assert len(config_hash(plain)) == 12
    assert config_hash(plain) != config_hash(load(WEIGHTED.replace("weight: 3", "weight: 4")))


def test_eviction_counts_as_a_difference():
    off = load(WEIGHTED + "featureGates: [flowControl]\nflowControl: {}\n")
    on = load(WEIGHTED + "featureGates: [flowControl]\nflowControl: {enableEviction: true}\n")
    assert config_hash(on) != config_hash(off)
    assert len(diff_configs(off, on)) == 1


def test_a_difference_is_told_by_plugin_and_parameter():
    """What hot reload logs."""
    old = load(WEIGHTED)
    text = (
        WEIGHTED.replace(
            "- type: prefix-cache-scorer\n",
            "- type: prefix-cache-scorer\n  parameters: {matchLengthWeight: 0.5}\n"
            "- type: fresh-metrics-filter\n- type: token-load-scorer\n",
        )
        .replace(
            "  - pluginRef: queue-scorer\n    weight: 2\n", "  - pluginRef: fresh-metrics-filter\n"
        )
        .replace(
            "  - pluginRef: lora-affinity-scorer\n    weight: 1\n",
            "  - pluginRef: token-load-scorer\n    weight: 4\n",
        )
        .replace("weight: 3", "weight: 5")
    )
    lines = diff_configs(old, load(text))
    assert lines == [
        "scorer queue-scorer: removed",
        "scorer lora-affinity-scorer: removed",
        "profile: filters none -> fresh-metrics-filter",
        "filter fresh-metrics-filter: added",
        "scorer prefix-cache-scorer: weight 3 -> 5",
        "scorer prefix-cache-scorer: matchLengthWeight 0 -> 0.5",
        "scorer token-load-scorer: added with weight 4",
    ]


@pytest.mark.parametrize("name", [path.stem for path in sorted(SAMPLES.glob("*.yaml"))])
def test_equal_hash_means_no_difference(name):
    """And a difference from the default means another hash."""
    config, default = sample(name), default_config(TABLES)
    assert diff_configs(config, config) == []
    assert bool(diff_configs(default, config)) == (config_hash(default) != config_hash(config))


def test_pages_beside_the_metrics_are_part_of_a_configuration():
    """Whether they are asked for, and how."""
    plugins = HEAD + "plugins:\n- {type: queue-scorer}\n- {type: models-data-extractor}\n"
    documents = [
        plugins,
        plugins + "- {type: models-data-source}\n",
        plugins + "- {type: models-data-source, parameters: {interval: 9s}}\n",
    ]
    none, some, slower = map(load, documents)
    assert diff_configs(none, some) == ["page models: added"]
    assert diff_configs(some, slower) == ["page models: interval unset -> 9s"]
    assert len({config_hash(config) for config in (none, some, slower)}) == 3
    assert "page models of endpoints\n" in explain(some)
    assert "page models" not in explain(none)
