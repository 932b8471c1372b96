"""What every strategy keeps to, driven by the scheduler as the shells drive it."""

import tomllib
from pathlib import Path

import pytest

from epp.configuration.compatibility import RIVALS
from epp.testing import churn
from epp.testing.churn import inherited_column
from homing_rivals import FAMILIES, PLUGINS
from sim.cluster.built_in import strategies
from tests.rivals.driven import settings_of

PROJECT = tomllib.loads((Path(__file__).parents[2] / "rivals/pyproject.toml").read_text())
STRATEGIES = strategies()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_decides_whatever_happens(name):
    """No plugin fails, nobody is refused while a pod is there, and the same dice fall the same.

    Only a strategy whose filters shed load may refuse a request.
    """
    settings = settings_of(name)
    after = churn(settings)
    assert list(after.scheduler.failures) == []
    sheds = any(one.plugin.abilities.sheds_load for one in settings.profile.filters)
    assert sheds or all(after.went)
    assert any(after.went)
    assert after.scheduler.ledger.open_leases == 0
    assert churn(settings).went == after.went


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_endpoint_that_left_is_forgotten(name):
    """What comes into its slot is a stranger: it has nothing that the other had."""
    assert inherited_column(churn(settings_of(name))) == ""


def test_every_plugin_is_found_by_the_public_entry_point_and_named_where_it_is_not_installed():
    """One row each, under its type."""
    offered = PROJECT["project"]["entry-points"]["homing.plugins"]
    assert offered == {one.type_name: f"{one.__module__}:{one.__name__}" for one in PLUGINS}
    assert len(PLUGINS) == len(offered)
    assert set(offered) == RIVALS


def test_names_are_told_apart():
    """No family hides another's strategies."""
    names = [strategy.name for family in FAMILIES for strategy in family.STRATEGIES]
    assert len(names) == len(set(names))
    assert set(names) < set(STRATEGIES)


def test_what_a_plugin_does_in_another_way_is_declared_by_who_decides_by_it():
    """A reader of a table does not read the text of a class."""
    for family in FAMILIES:
        plugins = [
            plugin
            for kind in ("FILTERS", "SCORERS", "PICKERS")
            for plugin in getattr(family, kind, ())
            if "Differs" in plugin.__doc__
        ]
        for strategy in family.STRATEGIES:
            if any(f"type: {plugin.type_name}\n" in strategy.config for plugin in plugins):
                assert strategy.omissions, strategy.name


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_says_whose_idea_it_is(name):
    """In a sentence for tables; names are as on a command line."""
    strategy = STRATEGIES[name]
    assert strategy.idea.endswith(".")
    assert not strategy.omissions.endswith(".")
    assert "\n" not in strategy.omissions
    assert name == name.lower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
