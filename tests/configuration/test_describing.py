import pytest

from epp.configuration.build import default_config
from epp.configuration.describing import config_hash, diff_configs
from tests.configuration.test_config import SAMPLES, TABLES, WEIGHTED, load, sample


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
