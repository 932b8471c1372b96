"""What changed last, and what was refused since."""

from epp.journal.records import Applied
from epp.shell.operators.decisions.configuration_changes import CHANGES_MAX, ConfigurationChanges


def test_the_last_document_is_told_and_a_refused_one_until_the_next():
    """With the time of each."""
    passing = iter((1.0, 2.0, 3.0))
    changes = ConfigurationChanges(clock=lambda: next(passing))
    assert changes.applied == Applied()
    assert changes.refused is None
    changes.apply(1, "abc", "a.yaml", [f"change {at}" for at in range(50)], {"queue-scorer": 2.0})
    assert changes.applied.at_s == 1.0
    assert len(changes.applied.changes) == CHANGES_MAX
    changes.refuse("a.yaml: wrong")
    assert (changes.refused.at_s, changes.refused.problem) == (2.0, "a.yaml: wrong")
    assert changes.applied.generation == 1, "the last good one stays"
    changes.apply(2, "def", "a.yaml", [], {})
    assert changes.refused is None
    assert changes.applied.at_s == 3.0
