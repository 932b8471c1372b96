"""What every strategy keeps to, driven by the scheduler as the shells drive it."""

import pytest

from epp.strategies import FAMILIES, STRATEGIES, plugin_classes
from epp.testing import churn
from epp.testing.churn import strangers_differ
from tests.strategies.driven import settings_of


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_decides_whatever_happens(name):
    """No plugin fails, nobody is refused while a pod is there, and the same dice fall the same."""
    settings = settings_of(name)
    after = churn(settings)
    assert list(after.scheduler.failures) == []
    assert all(after.went)
    assert after.scheduler.ledger.open_leases == 0
    assert churn(settings).went == after.went


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_endpoint_that_left_is_forgotten(name):
    """What comes into its slot is a stranger: it has nothing that the other had."""
    assert strangers_differ(churn(settings_of(name))) == ""


def test_names_are_told_apart():
    """Strategies and plugins: no family hides another's."""
    names = [strategy.name for family in FAMILIES for strategy in family.STRATEGIES]
    assert len(names) == len(set(names))
    for kind in ("FILTERS", "SCORERS", "PICKERS", "INDEXES"):
        listed = [plugin.type_name for family in FAMILIES for plugin in getattr(family, kind, ())]
        assert len(listed) == len(set(listed)) == len(plugin_classes(kind))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_says_whose_idea_it_is(name):
    """In a sentence for tables; names are as on a command line."""
    strategy = STRATEGIES[name]
    assert strategy.idea.endswith(".")
    assert name == name.lower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
