"""Ours and the field's, of plugins that are all here."""

import pytest

from epp.configuration.build import plugin_tables
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


@pytest.mark.parametrize("name", STRATEGIES)
def test_they_need_no_other_distribution(name):
    """Whatever types they name."""
    config = load_config(STRATEGIES[name].config, name, plugin_tables())
    plugins = [one.plugin for one in (*config.profile.filters, *config.profile.scorers)]
    plugins += [config.profile.picker, *config.indexes.values()]
    assert not {plugin.type_name for plugin in plugins} & RIVALS
