"""The weights that decided before times were added up."""

from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from epp.strategies import STRATEGIES


def test_all_that_is_known_is_weighed():
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
