"""What was decided last night, without a picker."""

import io
import json

import pytest

from epp.__main__ import main
from epp.commands.decisions import show_decisions
from epp.core.decision.profile import WeightedScorer
from epp.core.duration import Duration
from epp.flags.subcommands import DecisionsFlags
from epp.journal.records import EndpointState
from epp.plugins.added_time import AddedTime
from tests.builders import request as make_request
from tests.shell.operators.decisions.test_decision_history import Keeping, decisions
from tests.shell.operators.decisions.test_explanation import PROMPT, Told
from tests.shell.operators.pages.test_debug_pages import REFUSAL


@pytest.fixture
def kept(tmp_path):
    """Twenty-one decisions among endpoints that are slow, and a refusal."""
    keeping = Keeping(tmp_path / "homing-0")
    slow = EndpointState("slow", "3 times the median", 7_267.0)
    keeping.recent.know_states({f"pod-{at}": slow for at in range(3)})
    keeping.decide(20, model="llama")
    keeping.decide(1, request_id="r-7", model="qwen", status=503)
    keeping.recent.refused(REFUSAL, make_request(request_id="no", model="llama"))
    keeping.end()
    keeping.clock.now_s += 1.0
    return keeping


def ask(kept, **flags):
    out, err = io.StringIO(), io.StringIO()
    asked = DecisionsFlags(dir=str(kept.folder.parent), **flags)
    code = show_decisions(asked, out, err, clock=kept.clock)
    return code, out.getvalue(), err.getvalue()


def test_sums_and_the_last_ones_are_shown(kept):
    """Of the folders in the folder too: on a shared volume each replica has one."""
    code, text, err = ask(kept, n=3)
    assert (code, err) == (0, "")
    head, *sums = text.split("\n\n")[0].splitlines()
    assert ": 21 decisions, " in head
    assert "1 refused rejected-no-endpoints" in head
    assert sums[-1].startswith("all ")
    listed = text.split("\n\n")[1].splitlines()
    assert len(listed) == 4
    assert "r-7" in text
    assert "homing-0" in text


def test_it_can_be_narrowed(kept):
    """By model, endpoint and kind; nothing found is 1."""
    told = json.loads(ask(kept, model="qwen", json=True)[1])
    assert [row["request_id"] for row in told["decisions"]] == ["r-7"]
    assert told["failed"] == 1.0
    refused = json.loads(ask(kept, refused="true", json=True)[1])
    assert [row["refused"] for row in refused["decisions"]] == ["rejected-no-endpoints"]
    assert ask(kept, endpoint="pod-9")[0] == 1
    code, _, err = ask(kept, since="1h", until="2h")
    assert code == 2
    assert "expected a time before" in err


def test_one_request_is_explained_from_files(kept, capsys):
    """As a picker would, and why not another; endpoints that were slow are marked."""
    folder = str(kept.folder)
    assert main(["explain", "r-7", f"--dir={folder}", "--endpoint=pod-9"]) == 0
    text = capsys.readouterr().out
    assert "request r-7 (model qwen, priority 0)" in text
    assert "configuration generation 3" in text
    assert "why not pod-9: the reason is no longer recorded" in text
    assert "ended: 503" in text
    assert "(slow)" in text
    runner_up = text.split("runner-up ")[1].split(" (")[0]
    assert main(["explain", "r-7", f"--dir={folder}", f"--endpoint={runner_up}"]) == 0
    assert f"why not {runner_up}: {runner_up} (slow) had " in capsys.readouterr().out
    assert main(["explain", "r-8", f"--dir={folder}"]) == 1
    assert "contains no request r-8" in capsys.readouterr().err
    assert main(["explain", "r-8", "--dir=/none"]) == 2


def test_what_a_cost_was_made_of_is_told_from_files_too(tmp_path, capsys):
    """By the plugin with the parameters that it had then."""
    scorer = WeightedScorer("added-time-scorer", AddedTime(adapter_load=Duration(2.5)), 1.0)
    keeping = Keeping(tmp_path, told=Told(scorer))
    keeping.decide(1, request_id="r-7", prompts=(PROMPT,), prompt_tokens=len(PROMPT) // 4)
    keeping.end()
    (past,) = decisions(keeping.read())
    assert past.setting.costs == (scorer.plugin,)
    assert main(["explain", "r-7", f"--dir={tmp_path}"]) == 0
    assert "  cost by added-time-scorer for pod-" in capsys.readouterr().out


def test_nothing_in_the_files_can_steer_a_terminal(tmp_path):
    """A model is named by the client."""
    keeping = Keeping(tmp_path / "a")
    keeping.decide(1, request_id="a\x1b[2J", model="b\nc")
    keeping.end()
    keeping.clock.now_s += 1.0
    text = ask(keeping)[1]
    assert "\x1b" not in text
    assert "a?[2J" in text
