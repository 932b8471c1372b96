"""Latency prediction is on if a document asks for it, and off otherwise."""

from pathlib import Path

import pytest

from epp.configuration.build import build_settings
from epp.configuration.describing import describe
from epp.configuration.document import ConfigError
from epp.configuration.explaining import explain
from epp.plugins.added_time import AddedTime
from tests.configuration.test_config import load

SAMPLE = (Path(__file__).parent / "config_samples" / "latency.yaml").read_text()
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def document(plugins, used):
    declared = "".join(f"- {plugin}\n" for plugin in plugins)
    refs = "".join(f"  - pluginRef: {name}\n" for name in used)
    return f"{HEAD}plugins:\n{declared}schedulingProfiles:\n- name: default\n  plugins:\n{refs}"


def test_the_guide_of_the_field_loads():
    config = load(SAMPLE)
    latency = build_settings(config).latency
    assert latency is not None
    assert latency.refuses
    assert latency.estimator == AddedTime()
    assert "approx-prefix-cache-producer" in config.indexes
    assert describe(config)["latency prediction"]["refuses"] is True
    assert "latency prediction: a regression" in explain(config)


def test_it_is_off_if_nothing_asks_for_it():
    config = load(document(["type: queue-scorer"], ["queue-scorer"]))
    assert config.latency is None
    assert "latency prediction" not in describe(config)
    assert "latency prediction" not in explain(config)


@pytest.mark.parametrize(
    "plugin",
    ["type: predicted-latency-producer", "type: latency-slo-admitter", "type: latency-scorer"],
)
def test_each_of_the_three_plugins_switches_it_on(plugin):
    name = plugin.removeprefix("type: ")
    used = ["queue-scorer", *([name] if name == "latency-scorer" else [])]
    latency = load(document(["type: queue-scorer", plugin], used)).latency
    assert latency is not None
    assert latency.refuses == (name == "latency-slo-admitter")


def test_the_estimate_is_that_of_the_profiles_scorer():
    scorer = "{type: added-time-scorer, parameters: {adapterLoad: 3s}}"
    config = load(document([scorer, "type: predicted-latency-producer"], ["added-time-scorer"]))
    assert config.latency.estimator.adapter_load == 3.0


def test_a_name_that_is_no_producer_is_a_problem():
    scorer = "{type: latency-scorer, parameters: {latencyPredictionInfoProducerName: x}}"
    with pytest.raises(ConfigError) as error:
        load(document([scorer], ["latency-scorer"]))
    assert "x names no declared predicted-latency-producer" in str(error.value)
    named = "{type: predicted-latency-producer, name: x}"
    assert load(document([scorer, named], ["latency-scorer"])).latency is not None


@pytest.mark.parametrize("parameter", ["sloBufferFactor: 1.5", "contextTTL: 5m"])
def test_parameters_without_effect_are_warned_of(parameter):
    producer = f"{{type: predicted-latency-producer, parameters: {{{parameter}}}}}"
    config = load(document(["type: queue-scorer", producer], ["queue-scorer"]))
    assert any(f"{parameter.partition(':')[0]} has no effect" in said for said in config.warnings)
