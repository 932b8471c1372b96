"""Every plugin that comes with the product declares what it does, and does what it declares."""

import pytest

from epp.configuration.build import plugin_tables
from epp.core.abilities import Abilities
from epp.core.decision.plugin import declaration_fault

TABLES = plugin_tables()
OPINIONS = {**TABLES.filters, **TABLES.scorers, **TABLES.pickers}


@pytest.mark.parametrize("kind", [*OPINIONS.values(), *TABLES.indexes.values()])
def test_a_plugin_of_ours_declares_its_abilities(kind):
    assert declaration_fault(kind) is None
    assert kind.abilities is not Abilities()


@pytest.mark.parametrize("kind", OPINIONS.values())
def test_a_plugin_of_ours_says_what_it_reads(kind):
    """The columns, or the index: what says neither would be given a prefix index for nothing."""
    assert kind.abilities.reads is not None or kind.abilities.reads_index


def test_scores_are_kept_of_those_that_read_what_scrapes_change():
    """By name: one that is lost here is asked at every request."""
    kept = {
        name
        for name, kind in TABLES.scorers.items()
        if kind.abilities.reads is not None
        and set(kind.abilities.reads)
        <= {"waiting_requests", "running_requests", "kv_cache_usage", "adapter_state", "model"}
    }
    assert kept >= {
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "running-requests-size-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
    }
