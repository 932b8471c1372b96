"""Captures and histories that the version before the journal wrote are read as it read them.

`previous/` was written by the tree of commit f32f2d8b: a capture of 120 decisions in four pairs of
files with a reload, a capture with KV events, and a history of two files with an outcome elsewhere,
a refusal, a state and two changes of the configuration. `expected.json` is what that tree read.
"""

import hashlib
import io
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from epp.commands.changes import show_changes
from epp.commands.decisions import explain_past, show_decisions
from epp.configuration.config import load_config
from epp.flags.subcommands import ChangesFlags, DecisionsFlags
from epp.journal.problem import JournalError
from epp.journal.reenacting import decide_again, judge, totals
from sim.traces.formats import open_trace
from tests.core.journal.traffic import PLUGINS, document

PREVIOUS = Path(__file__).parent / "previous"
EXPECTED = json.loads((PREVIOUS / "expected.json").read_text())
NOW_S = EXPECTED["now_s"]
CAPTURES = ("capture", "capture-of-events")


@pytest.fixture
def history(tmp_path):
    """A copy that was written lately; the age of files decides which are read."""
    return shutil.copytree(
        PREVIOUS / "decisions", tmp_path / "decisions", copy_function=shutil.copy
    )


def shown(show, flags):
    out, err = io.StringIO(), io.StringIO()
    show(flags, out, err, lambda: NOW_S)
    assert not err.getvalue()
    return json.loads(out.getvalue())


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_is_decided_again(name):
    """Every decision is the same."""
    assert totals(decide_again(PREVIOUS / name, PLUGINS)) == EXPECTED["again"][name]


def test_another_configuration_is_judged_by_a_capture():
    """The same decisions change, and the same differences come first."""
    config = load_config(document(weight=0), "new", PLUGINS)
    folder = PREVIOUS / "capture"
    assert totals(decide_again(folder, PLUGINS, config)) == EXPECTED["weightless"]
    assert msgspec.to_builtins(judge(folder, PLUGINS, config)) == EXPECTED["judged"]


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_is_replayed(name):
    """The simulator reads the same requests."""
    requests = [
        (
            *(one.time_s, one.prompt_tokens, one.output_tokens, one.output_tokens_max),
            *(one.blocks, one.lengths, one.model, one.session, one.cache_salt, one.priority),
        )
        for one in open_trace(PREVIOUS / name)
    ]
    assert len(requests) == EXPECTED["requests"][name]
    assert hashlib.sha256(repr(requests).encode()).hexdigest() == EXPECTED["arrivals"][name]


def test_requests_alone_are_a_trace_too(tmp_path):
    """The events of a capture are not needed to replay it."""
    for path in (PREVIOUS / "capture").glob("requests-*"):
        shutil.copy(path, tmp_path)
    assert len(list(open_trace(tmp_path))) == EXPECTED["requests"]["capture"]


def test_decisions_of_a_history_are_listed(history):
    """Sums, rows, costs and outcomes are the same."""
    flags = DecisionsFlags(dir=str(history), since="1h", json=True)
    assert shown(show_decisions, flags) == EXPECTED["decisions"]


def test_changes_of_a_history_are_compared(history):
    """The changes of the configuration and of states are the same."""
    flags = ChangesFlags(dir=str(history), json=True)
    assert shown(show_changes, flags) == EXPECTED["changes"]


def test_a_decision_of_a_history_is_explained(history):
    """The row names the same reasons."""
    assert explain_past(str(history), "elsewhere", "pod-1", NOW_S) == EXPECTED["explained"]


def test_a_history_is_no_capture(history):
    """Its level is too low to decide again, and the message says what is needed."""
    with pytest.raises(JournalError, match="expected files of `epp serve --capture`"):
        decide_again(history, PLUGINS)
