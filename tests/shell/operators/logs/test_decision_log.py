import json

import pytest
import structlog

from epp.core.decision.account import Queued
from epp.core.decision.profile import Scored
from epp.core.types import Refusal, RefusalReason
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.logs.set_up import configure_logging
from tests.shell.operators.decided import SCORERS, make_decision, make_request, with_leg


@pytest.fixture(autouse=True)
def _restore_structlog():
    yield
    structlog.reset_defaults()


@pytest.fixture
def log(capsys):
    """Returns a function: level, options -> (decision log, function that reads the lines)."""

    def start(level, **options):
        configure_logging("json", level)
        decisions = DecisionLog(structlog.get_logger(), level=level, **options)
        return decisions, lambda: [
            json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]
        ]

    return start


REFUSAL = Refusal(
    reason=RefusalReason.SATURATED,
    status=429,
    message="the client wrote: secret",
    eliminated={"utilization-detector": 3},
)


def test_every_decision_is_one_line_at_debug(log):
    """At debug each decision has its score table, best candidate first."""
    decisions, lines = log("debug")
    for number in range(1, 6):
        decisions.decided(make_decision(number=number))
    found = lines()
    assert [line["number"] for line in found] == [1, 2, 3, 4, 5]
    line = found[0]
    assert (line["event"], line["level"]) == ("decision", "debug")
    assert (line["endpoint"], line["address"]) == ("prod/vllm-3", "10.0.0.3:8000")
    assert (line["matched_blocks"], line["total_blocks"]) == (3, 10)
    assert (line["ready"], line["eliminated"]) == (5, {"fresh-metrics-filter": 1})
    best = line["scores"][0]
    assert best["endpoint"] == "prod/vllm-3"
    assert best["parts"] == dict(zip(SCORERS, (3.0, 0.25, 1.0), strict=True))
    assert best["total"] == 4.25
    assert best["matched_blocks"] == 3
    assert [row["total"] for row in line["scores"]] == sorted(
        (row["total"] for row in line["scores"]), reverse=True
    )
    assert "rank" not in line


def test_the_rank_that_was_named_is_told(log):
    decisions, lines = log("debug")
    decisions.decided(with_leg(make_decision(), rank=0))
    (line,) = lines()
    assert line["rank"] == 0


def test_info_samples_by_decision_number(log):
    """Every nth decision is logged, from the first on, the same in every run."""
    decisions, lines = log("info", sample_every=10)
    for number in range(1, 35):
        decisions.decided(make_decision(number=number))
    assert [line["number"] for line in lines()] == [1, 11, 21, 31]


def test_warning_logs_neither_decisions_nor_refusals(log):
    """Above info nothing ordinary is written."""
    decisions, lines = log("warning")
    decisions.decided(make_decision())
    decisions.refused(REFUSAL, 1.0)
    assert lines() == []


def test_the_chosen_endpoint_is_in_a_cut_table(log):
    """A long table is cut to the best; whoever was chosen is kept even if it is not among them."""
    decisions, lines = log("debug", candidates_max=3)
    decision = make_decision(endpoints=30, picked=20)
    scores, weights = decision.leg.scored.scores.copy(), decision.leg.scored.weights
    scores[:, 20] = 0.0
    worst = Scored(weights @ scores, scores, weights)
    decisions.decided(with_leg(decision, scored=worst))
    [line] = lines()
    assert len(line["scores"]) == 3
    assert line["scores"][-1]["endpoint"] == "prod/vllm-20"
    assert line["candidates"] == 30


def test_refusals_are_limited_per_second_and_the_rest_is_told(log):
    """A storm of refusals writes a few lines; the next second says how many were left out."""
    decisions, lines = log("info", refusals_per_second_max=2)
    for step in range(7):
        decisions.refused(REFUSAL, 5.0 + step / 10)
    decisions.refused(REFUSAL, 6.0)
    found = lines()
    assert len(found) == 3
    assert "left_out" not in found[1]
    assert found[2]["left_out"] == 5
    assert found[2]["eliminated"] == {"utilization-detector": 3}


def test_prompts_and_client_sentences_are_never_logged(log):
    """Neither the prompt nor the sentence for the client, which may quote it, is in a line."""
    decisions, lines = log("debug")
    decisions.decided(make_decision())
    decisions.refused(REFUSAL, 1.0, make_request())
    assert "secret" not in json.dumps(lines())


def test_long_client_text_is_cut(log):
    """A megabyte of model name does not become a megabyte of log."""
    decisions, lines = log("debug")
    decisions.decided(make_decision(make_request("m" * 1_000_000)))
    [line] = lines()
    assert len(line["model"]) < 300


def test_unpaired_surrogates_do_not_break_a_line(log):
    """JSON text may carry what UTF-8 cannot."""
    decisions, lines = log("debug")
    decisions.decided(make_decision(make_request("a\ud800b\nc")))
    [line] = lines()
    assert line["model"] == "a\ud800b\nc"


def test_exceptions_are_structured_in_json(log, capsys):
    """An exception is a list of frames in the same line, not lines of its own."""
    configure_logging("json", "info")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("task failed")
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["exception"][0]["exc_value"] == "broken"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_exceptions_give_no_data_away(log_format, capsys):
    """Neither local variables nor a text that quotes them, in either format."""
    configure_logging(log_format, "info")
    body = "a secret prompt"
    try:
        raise ValueError(f"cannot read {body}")
    except ValueError:
        structlog.get_logger().exception("a stream failed")
    out = capsys.readouterr().out
    assert "ValueError" in out
    assert "test_exceptions_give_no_data_away" in out
    assert "secret" not in out


def test_a_client_cannot_forge_a_console_line(capsys):
    """A model name with a line break, an escape sequence and half a surrogate pair."""
    configure_logging("console", "debug")
    decisions = DecisionLog(structlog.get_logger(), level="debug")
    decisions.decided(make_decision(make_request("a\n2026 [info] forged\x1b[2J\ud800")))
    (line,) = capsys.readouterr().out.splitlines()
    assert "\x1b" not in line
    assert "forged" in line


def test_a_refusal_says_whose_it_was(log):
    """Request id, path and model; id and path also of what could not be parsed."""
    decisions, lines = log("info")
    request = make_request(request_id="r-7")
    decisions.refused(REFUSAL, 1.0, request, request_id="r-7", path="/v1/chat/completions")
    decisions.refused(REFUSAL, 1.0, request_id="r-8" * 1_000, path="/v1" * 1_000)
    parsed, unparsed = lines()
    assert (parsed["request_id"], parsed["model"]) == ("r-7", "llama")
    assert parsed["path"] == "/v1/chat/completions"
    assert unparsed["request_id"].startswith("r-8")
    assert len(unparsed["request_id"]) == len(unparsed["path"]) == 257


def test_a_refusal_of_the_queue_says_how_long_the_request_waited(log):
    decisions, lines = log("info")
    queued = Queued(
        waited_s=60.0,
        flow="small",
        priority=0,
        ahead=12,
        behind="big",
        behind_requests=9,
        charged_tokens=0.0,
        why="8 of 8 endpoints are full",
    )
    decisions.refused(REFUSAL, 1.0, make_request(), queued=queued)
    (line,) = lines()
    assert line["queued"] == queued.fields()
    assert line["queued"]["behind"] == "big"


def test_console_lines_are_for_people(capsys):
    """The console format is one readable line, without colours when it is no terminal."""
    configure_logging("console", "info")
    structlog.get_logger().info("ready", port=9002)
    structlog.get_logger().debug("unseen")
    out = capsys.readouterr().out
    assert "ready" in out
    assert "port=9002" in out
    assert "unseen" not in out
    assert "\x1b" not in out
