"""What a change did, and what was different after a moment."""

import io
import json

import pytest

from epp.__main__ import main
from epp.commands.changes import show_changes
from epp.core.decision.inputs import RequestEnded
from epp.core.duration import Duration
from epp.core.knowledge.inflight import Outcome
from epp.flags.subcommands import ChangesFlags
from epp.journal.records import EndpointState
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_decision_history import Keeping
from tests.shell.operators.decisions.test_recent_decisions import exchange_of


class Night:
    """Ten minutes of traffic, a change, and ten more in which all go to pod-0, are slow and fail."""

    def __init__(self, folder):
        self.folder = folder
        self.keeping = Keeping(folder)
        self.keeping.changes.apply(1, "a" * 64, "config.yaml", (), {})
        self.serve(ttft_s=0.2)
        self.keeping.recent.know_states({"pod-2": EndpointState("slow", "3 times", 1.0)})
        self.keeping.clock.now_s += 1.5
        self.changed_s = self.keeping.clock.now_s
        self.keeping.changes.apply(2, "b" * 64, "config.yaml", ["weight of q: 4 > 0"], {})
        pool = self.keeping.told.scheduler.pool
        self.serve(ttft_s=0.5, status=502, subset=(pool.columns.endpoints[0].address,))
        self.keeping.clock.now_s += 1.0
        self.keeping.end()

    def serve(self, *, ttft_s, status=200, **fields):
        scheduler, recent = self.keeping.told.scheduler, self.keeping.recent
        for at in range(60):
            self.keeping.clock.now_s += 10.0
            decision = scheduler.schedule(make_request(request_id=f"r-{at}", **fields), 0.25)
            recent.decided(decision)
            scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 0.25)
            ended = exchange_of(decision, first_output_at_s=100.0 + ttft_s)
            recent.completed(ended, Outcome(status=status), 102.0)

    def ask(self, **flags):
        out, err = io.StringIO(), io.StringIO()
        asked = ChangesFlags(dir=str(self.folder), **flags)
        code = show_changes(asked, out, err, clock=self.keeping.clock)
        return code, out.getvalue(), err.getvalue()


@pytest.fixture
def night(tmp_path):
    return Night(tmp_path)


def line_of(text, begins):
    (line,) = [line for line in text.splitlines() if line.startswith(begins)]
    return line.split("  ")


def test_the_last_change_is_told_by_before_and_after(night):
    """In one screen: what changed, where requests went, and how they fared."""
    code, text, err = night.ask()
    assert (code, err) == (0, "")
    head, change, *_ = text.splitlines()
    assert head.startswith("2023-11-14T22:")
    assert change == "  configuration generation 2 at homing-0: weight of q: 4 > 0"
    words = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert "10 min before  10 min after" in text, "the picker started ten minutes before"
    assert words["TTFT p50"][-4:] == ["0.2", "s", "0.5", "s"]
    assert words["failed"][-2:] == ["0.0%", "100.0%"]
    assert words["pod-0"][-3:] == ["0.0%", ">", "100.0%"]
    assert words["pod-0"][3] == "100.0%"
    assert words["pod-1"][3] == "-"
    assert "pod-2 is slow: 3 times" in text.partition("meanwhile")[2]
    assert len(text.splitlines()) <= 40
    assert all(len(line) <= 160 for line in text.splitlines())


def test_any_moment_can_be_compared_around(night):
    """As when TTFT doubled, with the change among what happened meanwhile."""
    at = f"{round(night.keeping.clock.now_s - night.changed_s) + 120}s"
    code, text, _ = night.ask(at=at, window=Duration(180.0))
    assert code == 0
    assert "configuration generation 2 at homing-0" in text.partition("meanwhile")[2]
    assert "3 min before" in text
    _, text, _ = night.ask(at=at, window=Duration(40.0))
    assert "40 s before" in text


def test_it_is_told_as_json_too(night):
    """The same numbers, unrounded where they are not words."""
    _, text, _ = night.ask(json=True)
    told = json.loads(text)
    assert told["before"]["decided"] == told["after"]["decided"] == 60
    assert told["after"]["endpoints"]["pod-0"]["share"] == 1.0
    assert [one["generation"] for one in told["changes"]] == [1, 2]


def test_without_a_change_one_is_asked_for(tmp_path):
    """The first document of a process is no change; another one after a restart is."""
    keeping = Keeping(tmp_path)
    keeping.changes.apply(1, "a" * 64, "config.yaml", (), {})
    keeping.end()
    asked = ChangesFlags(dir=str(tmp_path))
    out, err = io.StringIO(), io.StringIO()
    assert show_changes(asked, out, err, clock=keeping.clock) == 1
    assert "give a time with --at" in err.getvalue()
    keeping.clock.now_s += 60.0
    again = Keeping(tmp_path, keeping.clock)
    again.changes.apply(1, "b" * 64, "config.yaml", (), {})
    again.end()
    assert show_changes(asked, out, err, clock=keeping.clock) == 0
    assert "the picker started at homing-0 with config.yaml, bbbb" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dir=/none"], "cannot be read: No such file"),
        (["--dir=/none", "--window=25h"], "expected 1s to 24h"),
        (["now"], "expected flags only"),
    ],
)
def test_what_cannot_be_answered_is_told(arguments, told, capsys):
    """In a sentence."""
    assert main(["changes", *arguments]) == 2
    assert told in capsys.readouterr().err
