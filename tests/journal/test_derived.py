"""Decisions of a capture: what its inputs say about them, and nothing more."""

import io
import json

import pytest

from epp.commands.changes import show_changes
from epp.commands.decisions import show_decisions
from epp.core.decision.inputs import OutputStarted, RequestEnded, ServedBy
from epp.core.journal.events import Lost
from epp.core.knowledge.inflight import Outcome
from epp.flags.subcommands import ChangesFlags, DecisionsFlags
from epp.journal import derived as module
from epp.journal.decisions import changes_in, read_past
from epp.journal.derived import derived
from epp.journal.past import PastChange, PastDecision, PastLoss, PastRefusal
from tests.core.journal.traffic import Live, document
from tests.journal.test_reenacting import write


@pytest.fixture
def live():
    one = Live(document())
    one.begin(3)
    one.scrape()
    return one


def of(found, kind):
    return [one for one in found if isinstance(one, kind)]


def test_a_decision_has_its_endpoint_and_its_outcome(live):
    """Times are Unix times, and durations count from the decision."""
    live.now = 2.0
    asked = live.ask(prompts=(b"x" * 1024,), prompt_tokens=256, priority=0)
    lease = asked.lease
    live.scheduler.take(OutputStarted(lease), 2.5)
    live.scheduler.take(RequestEnded(lease, Outcome(status=200, cached_tokens=128)), 4.0)
    (past,) = of(derived(live.events), PastDecision)
    assert (past.at_s, past.told.number) == (1002.0, 1)
    assert past.told.endpoint == asked.endpoint.name
    assert past.told.address == asked.endpoint.address
    assert (past.told.prompt_tokens, past.told.total_blocks, past.told.ready) == (256, 4, 3)
    assert (past.told.request_id, len(past.told.model)) == ("", 16)
    assert (past.end.status, past.end.cached_tokens) == (200, 128)
    assert (past.end.duration_s, past.end.first_output_s) == (2.0, 0.5)
    assert past.served is None


def test_an_endpoint_that_served_instead_is_named(live):
    lease = live.ask(priority=0).lease
    other = next(at for slot, at in live.scheduler.pool.endpoints() if slot != lease.slot)
    live.scheduler.take(ServedBy(lease, other.address), live.now)
    (past,) = of(derived(live.events), PastDecision)
    assert (past.served.endpoint, past.served.address) == (other.name, other.address)
    assert past.end is None


def test_refusals_losses_and_changes_are_told(live):
    """A repeated configuration is no change; the first one is that of the start."""
    live.begin(0)
    live.ask(priority=0)
    live.tell(Lost(events=7))
    live.configure(document())
    live.configure(document(weight=5))
    live.notes.clear()
    found = list(derived(live.events))
    (refused,) = of(found, PastRefusal)
    assert refused.told.reason == "rejected-no-endpoints"
    assert [one.records for one in of(found, PastLoss)] == [7]
    assert [one.change.generation for one in of(found, PastChange)] == [1, 2]


def test_a_change_says_what_differs(live):
    live.configure(document(weight=5))
    _, change = of(derived(live.events), PastChange)
    assert change.change.changes == ("scorer queue-scorer: weight 2 -> 5",)


def test_open_decisions_are_bounded(live, monkeypatch):
    """The oldest is returned without its end."""
    monkeypatch.setattr(module, "OPEN_MAX", 2)
    for _ in range(5):
        live.ask(priority=0)
    found = derived(live.events)
    assert [one.told.number for one in of(found, PastDecision)] == [1, 2, 3, 4, 5]


def test_a_capture_answers_what_a_history_answers(tmp_path):
    """`epp decisions` and `epp changes` read it."""
    picker = write(tmp_path, 100)
    picker.configure(document(weight=5))
    picker.begin_segment()
    now_s = 1000.0 + picker.now
    past = list(read_past(tmp_path, 0.0, now_s))
    assert len(of(past, PastDecision)) + len(of(past, PastRefusal)) == 100
    assert len(changes_in(tmp_path)) == 1
    out, err = io.StringIO(), io.StringIO()
    flags = DecisionsFlags(dir=str(tmp_path), since="1m", json=True)
    assert show_decisions(flags, out, err, lambda: now_s + 1.0) == 0
    told = json.loads(out.getvalue())
    assert sum(one["decided"] for one in told["endpoints"].values()) == told["decided"]
    row = next(one for one in told["decisions"] if "known" in one)
    known = row["known"]["endpoint"]
    assert known.pop("matched_blocks") == row["matched_blocks"]
    assert set(known.values()) == {None}, "what a capture does not record is unknown"
    out = io.StringIO()
    flags = ChangesFlags(dir=str(tmp_path), at="10s")
    assert show_changes(flags, out, err, lambda: now_s) == 0
    assert "decisions a second" in out.getvalue()
    flags = DecisionsFlags(dir=str(tmp_path), since="1m")
    assert show_decisions(flags, out, err, lambda: now_s + 1.0) == 0
    assert not err.getvalue()
