"""`sim size`: a search with few runs finds the number that trying every number finds."""

import json
import signal

import pytest
import yaml
from msgspec.structs import replace

from sim.__main__ import main
from sim.experiments.size import _with_front
from sim.measurement.summaries import SizedSummary
from tests.sim.experiments.test_replay import started, wait_for, written
from tests.sim.made import BLOCK_TOKENS, filled

SLO = ("--slo", "ttft-p90=0.25")
PODS_MAX = 8
SEEDS = 4
SMALL = ("--pods-max", PODS_MAX, "--seeds", SEEDS, "--workers", "2")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """More than a pod computes in time: prompts of some thousand tokens, few of them shared."""
    path = tmp_path_factory.mktemp("size") / "busy.jsonl"
    return written(path, 300, rate=60.0, groups=150, blocks=(20, 60))


def size(trace, *arguments):
    return main(["size", *map(str, (trace, *arguments)), "--block-tokens", str(BLOCK_TOKENS)])


def summary_of(out):
    return json.loads((out / "summary.json").read_bytes())


@pytest.fixture(scope="module")
def sized(trace, tmp_path_factory):
    """The folder of a whole sizing, checked against every count."""
    out = tmp_path_factory.mktemp("sized") / "out"
    assert size(
        trace, *SLO, *SMALL, "--price", "llama-3.1-8b-h100-tp1=2.5", "--config", "default",
        "--config", "round-robin", "--every-count", "--out", out,
    ) == 0  # fmt: skip
    return out


def test_it_finds_what_every_count_finds(sized):
    """With half the runs or fewer, of eight numbers; of more numbers with fewer still."""
    summary = summary_of(sized)
    assert summary["complete"]
    for option in summary["options"]:
        assert option["pods"] is not None
        assert 1 < option["pods"] < PODS_MAX
        every = option["every_count"]
        assert option["pods"] == every["pods"]
        assert every["runs"] == PODS_MAX * SEEDS
        assert [one["pods"] for one in every["counts"]] == list(range(1, PODS_MAX + 1))
        assert 2 * option["runs"] <= every["runs"]


def test_its_neighbours_were_tried(sized):
    """The count below does not keep the bounds, the one above does."""
    for option in summary_of(sized)["options"]:
        tried = {one["pods"]: one["kept"] for one in option["counts"]}
        assert not tried[option["pods"] - 1]
        assert tried[option["pods"]]
        assert tried[option["pods"] + 1]


def test_what_it_costs_is_told(sized):
    """Of the cheapest, by hand."""
    summary = summary_of(sized)
    option = summary["options"][summary["chosen"]]
    part = summary["sized_for"]
    assert option["cost_per_hour"] == option["pods"] * 2.5
    assert option["cost_per_hour"] == min(one["cost_per_hour"] for one in summary["options"])
    hours = (part["end_s"] - part["start_s"]) / 3600
    tokens = part["prompt_tokens"] + part["output_tokens"]
    expected = option["cost_per_hour"] * hours / tokens * 1e6
    assert option["cost_per_million_tokens"] == pytest.approx(expected, rel=1e-5)
    assert any(one["on_front"] for one in summary["options"])


def test_headroom_is_told(sized):
    """A pod that is lost needs another one at most a few; more traffic needs no fewer."""
    summary = summary_of(sized)
    pods = summary["options"][summary["chosen"]]["pods"]
    cases = {one["case"]: one["pods"] for one in summary["headroom"]}
    assert set(cases) == {"one pod lost", "more traffic"}
    assert cases["one pod lost"] >= pods
    assert cases["more traffic"] >= pods


def test_an_autoscaler_is_written_out(sized):
    """With the target that was tried."""
    found = summary_of(sized)["autoscaling"]
    hpa, scaled = yaml.safe_load_all((sized / "autoscaling.yaml").read_text())
    assert hpa["spec"]["maxReplicas"] == scaled["spec"]["maxReplicaCount"] == found["pods_max"]
    assert found["target"] > 0
    assert found["pod_hours"] > 0


def test_what_was_varied_is_said(sized):
    """Traffic, not dice alone."""
    told = (sized / "report.md").read_text()
    assert "replays a resample of the trace" in told
    assert "with 95 % confidence" in told
    assert "resamples of" in summary_of(sized)["varied"]
    assert "<svg" in (sized / "report.html").read_text()


def test_the_same_on_any_number_of_processes_and_over_stops(trace, tmp_path, capsys):
    """Ctrl-C: 130; the same command then repeats no run, and gives what one start gives."""
    flags = (*SLO, *SMALL[:-2], "--answer-only")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert size(trace, *flags, "--workers", "1", "--out", whole) == 0
    process = started("size", trace, *flags, "--workers", "2", "--out", stopped)
    runs = stopped / "runs.jsonl"
    wait_for(process, runs)
    while len(runs.read_bytes().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command resumes from there" in errors
    kept = runs.read_bytes().splitlines()
    assert not summary_of(stopped)["complete"]
    capsys.readouterr()
    assert size(trace, *flags, "--workers", "2", "--out", stopped) == 0
    assert f"resuming after {len(kept) - 1} runs" in capsys.readouterr().out
    assert runs.read_bytes().splitlines()[: len(kept)] == kept
    keys = [json.loads(line)["key"] for line in runs.read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys))
    assert (stopped / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()


@pytest.mark.filterwarnings("default")
def test_a_dask_cluster_gives_the_same_to_the_digit(scheduler, trace, tmp_path, monkeypatch):
    """Two worker processes, started elsewhere, against this machine's: every byte of what is told."""
    flags = (*SLO, *SMALL, "--answer-only")
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.chdir(trace.parent)
    assert size(trace.name, *flags, "--out", here) == 0
    assert size(trace.name, *flags, "--executor", f"dask://{scheduler}", "--out", there) == 0
    for name in ("summary.json", "report.md", "report.html"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


def test_a_promise_that_nothing_keeps_is_said_to_be_one(trace, tmp_path, capsys):
    """Exit code 0: that is an answer. No manifests."""
    out = tmp_path / "out"
    assert size(trace, "--slo", "ttft-p90=0.001", *SMALL, "--out", out) == 0
    assert "No option keeps all bounds with up to 8 pods." in capsys.readouterr().out
    summary = summary_of(out)
    assert summary["options"][0]["pods"] is None
    assert summary["chosen"] is None
    assert not (out / "autoscaling.yaml").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--out DIR is needed"),
        (
            ("--out", "OUT", "--seeds", "2"),
            "--seeds is 2; expected at least 3, which confidence intervals need",
        ),
        (("--out", "OUT", "--pods", "4"), "--pods is the result of sim size: leave it out"),
        (("--out", "OUT", "--price", "other=1"), "--price other: expected one of the profiles"),
        (("--out", "OUT", "--price", "a=1", "--price", "a=2"), "--price: a is given twice"),
        (
            ("--out", "OUT", *("--profile", "llama-3.1-8b-h100-tp1") * 2),
            "--profile: llama-3.1-8b-h100-tp1 is given twice",
        ),
        (
            ("--out", "OUT", "--faults-per-hour", "1"),
            "--faults-per-hour does not work with sim size",
        ),
    ],
)
def test_what_makes_no_task_is_refused(trace, tmp_path, flags, told, capsys):
    """In a sentence, with exit code 2, and nothing is written."""
    out = tmp_path / "out"
    named = [str(out) if flag == "OUT" else flag for flag in flags]
    assert size(trace, *SLO, *named) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"sim: {told}")
    assert errors.count("\n") == 1
    assert not out.exists()


def test_traffic_that_could_show_nothing_is_refused(tmp_path, capsys):
    """Four requests at once can be drawn in too few ways: said before any run."""
    few = tmp_path / "few.jsonl"
    line = {"timestamp": 0, "input_length": 64, "output_length": 4}
    few.write_text("".join(f"{json.dumps(line | {'hash_ids': [at]})}\n" for at in range(4)))
    out = tmp_path / "out"
    assert size(few, *SLO, *SMALL, "--out", out) == 1
    assert (
        "There is not enough data: the trace has 4 sessions, confidence intervals need at least 5"
        in capsys.readouterr().err
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--slo", "fast"), "'fast' is not a bound"),
        ((*SLO, "--price", "3"), "'3' is not PROFILE=PRICE"),
        ((*SLO, "--growth", "0.5"), "'0.5' is not a number from 1 to 100"),
        ((*SLO, "--pods-max", "0"), "'0' is not an integer from 1"),
    ],
)
def test_a_flag_that_is_none_is_refused(trace, flags, told, capsys):
    """As every command line is."""
    with pytest.raises(SystemExit) as stopped:
        size(trace, *flags)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_without_prices_pods_of_one_kind_have_a_front():
    """They are their own price; of several kinds nobody can say."""
    one = filled(SizedSummary, profile="a", config="default", pods=4, used=0.5)
    other = replace(one, config="random", pods=5, used=0.4)
    beaten = replace(one, config="round-robin", pods=6, used=0.9)
    assert [option.on_front for option in _with_front([one, other, beaten])] == [True, True, False]
    mixed = [one, replace(other, profile="b")]
    assert [option.on_front for option in _with_front(mixed)] == [False, False]


MEANS = ("--requests-per-s", "30", "--prompt-tokens", "500", "--output-tokens", "20")


def sized_without_a_trace(out, *arguments):
    return main(["size", *SLO, *map(str, arguments), "--out", str(out)])


def test_three_numbers_are_enough(tmp_path, capsys):
    """The traffic that they describe is kept beside the answer, and can be sized as any trace."""
    out, again = tmp_path / "out", tmp_path / "again"
    few = ("--pods-max", "3", "--seeds", "3", "--workers", "1", "--answer-only")
    few = (*few, "--requests", "300")
    assert sized_without_a_trace(out, *MEANS, *few) == 0
    told = capsys.readouterr().out
    assert "1 pod of llama-3.1-8b-h100-tp1 under default keeps ttft-p90 at most 250 ms" in told
    assert (out / "report.md").read_text().startswith(
        "# Pods for 30 requests/s, 500 prompt and 20 output tokens\n"
    )  # fmt: skip
    summary = summary_of(out)
    assert summary["generated"]
    mean = summary["trace"]["prompt_tokens"] / summary["trace"]["requests"]
    assert mean == pytest.approx(500, rel=0.25)
    assert sized_without_a_trace(out, *MEANS, *few) == 0, "the same command continues"
    assert "resuming after" in capsys.readouterr().out
    other = (*MEANS[:1], "40", *MEANS[2:])
    assert sized_without_a_trace(out, *other, *few) == 1
    assert "is other traffic than these numbers describe" in capsys.readouterr().err
    assert main(["size", str(out / "traffic.yaml"), *SLO, *few, "--out", str(again)]) == 0
    assert summary_of(again)["options"] == summary["options"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "TRACE is missing; without a trace, give --requests-per-s, --prompt-tokens, --output"),
        (MEANS[:4], "--output-tokens is missing: traffic without a trace needs --requests-per-s"),
        (("day.jsonl", *MEANS), "--requests-per-s does not work with TRACE: give one of them"),
        (
            (*MEANS[:2], "--prompt-tokens", "200000", *MEANS[4:]),
            "a mean of 200,020 tokens a request is too large for llama-3.1-8b-h100-tp1",
        ),
    ],
)
def test_numbers_that_describe_no_traffic_are_refused(tmp_path, flags, told, capsys):
    """In a sentence, with exit code 2, and nothing is written."""
    out = tmp_path / "out"
    assert sized_without_a_trace(out, *flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"sim: {told}")
    assert errors.count("\n") == 1
    assert not out.exists()


def test_the_first_line_warns_of_a_warm_up_that_excludes_too_much(trace, tmp_path, capsys):
    """It says what to do; the report begins with it too."""
    flags = (*SLO, *SMALL[:-2], "--answer-only", "--workers", "1", "--warm-up", "3")
    out = tmp_path / "out"
    assert size(trace, *flags, "--out", out) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Warning: The warm-up of 3 s excludes ")
    assert "% of the requests" in first
    assert "Leave out --warm-up" in first
    assert f"**{first}**" in (out / "report.md").read_text()
    assert first in (out / "report.html").read_text()
    assert summary_of(out)["warm_up"]["given"]


def test_what_is_judged_is_told(sized):
    """All of the traffic and its busiest part, each with its limit; and what is excluded, and why."""
    summary = summary_of(sized)
    part = summary["warm_up"]
    assert not part["warning"]
    assert part["share_excluded"] <= 0.2
    bounds = [(one["name"], one["busiest"]) for one in summary["options"][0]["counts"][0]["bounds"]]
    assert bounds == [
        ("ttft-p90", False), ("lost", False), ("ttft-p90", True), ("lost", True),
    ]  # fmt: skip
    assert "on its busiest" in (sized / "report.md").read_text()
    assert "ttft-p90, busiest part" in (sized / "report.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("workload", "slo"),
    [
        ("interactive-chat --rate 6 --duration 120", "ttft-p90=0.3"),
        ("multi-turn --rate 4 --duration 150", "ttft-p90=0.3"),
    ],
)
def test_more_of_the_same_traffic_needs_no_fewer_pods(tmp_path, workload, slo):
    """The chat needed 4 pods, and 3 for 1.3 times as much, when its busiest minute was excluded."""
    trace = tmp_path / "trace.jsonl"
    assert main(["trace", "generate", *workload.split(), "--out", str(trace)]) == 0
    found = []
    for load in ("1", "1.3", "2"):
        out = tmp_path / load
        flags = ("--slo", slo, "--speed", load, "--answer-only", "--pods-max", "12", "--out", out)
        assert main(["size", str(trace), *map(str, flags)]) == 0
        found.append(summary_of(out)["options"][0]["pods"])
    assert None not in found
    assert found == sorted(found)


def test_a_long_trace_is_sized_for_the_same_requests_at_every_speed(trace, tmp_path):
    """Else more traffic would be other traffic, with more requests to be sure of."""
    flags = ("--slo", "ttft-p90=60", "--pods-max", "1", "--seeds", "3", "--workers", "1")
    parts = []
    for speed in ("1", "2"):
        out = tmp_path / speed
        more = ("--stretch", "2", "--speed", speed, "--answer-only", "--out", out)
        assert size(trace, *flags, *more) == 0
        summary = summary_of(out)
        assert summary["sized_for"]["requests"] < summary["trace"]["requests"]
        parts.append(summary["sized_for"])
    assert parts[0] == parts[1]
