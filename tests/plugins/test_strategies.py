"""Ours and the field's, of plugins that are all here."""

import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.compatibility import RIVALS
from epp.configuration.config import load_config
from epp.plugins.strategies import STRATEGIES


def test_the_weights_are_of_all_that_is_known():
    """Section 4 of the design."""
    text = STRATEGIES["weighted-scores"].config
    profile = load_config(text, "weighted-scores", plugin_tables()).profile
    assert {scorer.name: scorer.weight for scorer in profile.scorers} == {
        "prefix-cache-scorer": 3,
        "queue-scorer": 2,
        "kv-cache-utilization-scorer": 2,
        "lora-affinity-scorer": 1,
        "active-request-scorer": 1,
    }


def weights(name):
    profile = load_config(STRATEGIES[name].config, name, plugin_tables()).profile
    return {scorer.name: scorer.weight for scorer in profile.scorers}


@pytest.mark.parametrize("name", ["llm-d-3-2-2", "sticky-until-saturated"])
def test_with_adapters_it_is_the_same_and_their_scorer(name):
    """With the weight that its project gives it."""
    adapters = {"lora-affinity-scorer": 1}
    assert weights(f"{name}-lora") == weights(name) | adapters
    kept = [
        [(one.name, one.plugin) for one in config.profile.filters]
        for config in (
            load_config(STRATEGIES[one].config, one, plugin_tables())
            for one in (name, f"{name}-lora")
        )
    ]
    assert kept[0] == kept[1]


def test_what_is_held_until_the_first_token_does_not_drain():
    """Nothing that a speed tells is read by what it decides by."""
    name = "sticky-until-saturated"
    assert weights(f"{name}-first-token") == weights(name)
    config = load_config(STRATEGIES[f"{name}-first-token"].config, name, plugin_tables())
    assert build_settings(config).prefill_tokens_per_s == 1.0


@pytest.mark.parametrize("name", STRATEGIES)
def test_they_need_no_other_distribution(name):
    """Whatever types they name."""
    config = load_config(STRATEGIES[name].config, name, plugin_tables())
    plugins = [one.plugin for one in (*config.profile.filters, *config.profile.scorers)]
    plugins += [config.profile.picker, *config.indexes.values()]
    assert not {plugin.type_name for plugin in plugins} & RIVALS
