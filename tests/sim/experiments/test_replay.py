"""`sim replay`, `sim compare` and `sim sweep`: what they print, write and refuse."""

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from msgspec import structs
from msgspec.structs import replace

from epp.configuration.build import plugin_tables
from epp.configuration.config import DEFAULT_CONFIG, load_config
from epp.configuration.describing import config_hash
from epp.configuration.document import ConfigError
from sim.__main__ import main
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.policies import policy_source
from sim.experiments.jobs import Crew, Experiment, JobError
from sim.experiments.run import Run
from sim.experiments.run_options import add_run_options, conditions, run_settings
from sim.measurement.intervals import Estimate
from sim.measurement.summaries import (
    ComparedConfig,
    ComparisonSummary,
    DifferenceSummary,
    EstimateSummary,
    NamedRun,
    ReplicasSummary,
    Requests,
    RunSummary,
)
from sim.reports.compare_report import comparison_table, verdict
from sim.reports.report import markdown_table, number, seconds, table
from sim.reports.run_report import explained
from sim.traces import reading
from tests.sim.made import BLOCK_TOKENS, arrivals, filled, kind
from tests.sim.terminal import on_a_terminal

ROOT = Path(__file__).parents[3]


FIGURES = defaultdict(lambda: EstimateSummary(value=1.0, low=0.5, high=1.5))
"""Of a configuration, whatever the figure."""
RUN = NamedRun(config="one", seed=1, run=filled(RunSummary, bad_lines=0, window={"drain_s": 1.0}))


def compared(difference):
    """A configuration that has completed all that it was sent."""
    requests = Requests(sent=5, complete=5, refused=0, failed=0, aborted=0)
    return ComparedConfig(requests=requests, figures=FIGURES, difference=difference)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two hundred requests in the format of Mooncake, with blocks of 64 tokens."""
    return written(tmp_path_factory.mktemp("trace") / "made.jsonl", 200)


def written(path, count, **fields):
    with path.open("w") as file:
        for one in arrivals(count, **fields):
            ids = [*one.blocks, 9_000_000 + one.index]
            line = {
                "timestamp": one.time_s * 1000,
                "input_length": one.prompt_tokens,
                "output_length": one.output_tokens,
                "hash_ids": ids[: -(-one.prompt_tokens // BLOCK_TOKENS)],
            }
            file.write(json.dumps(line) + "\n")
    return path


def sim(*arguments):
    return main([str(argument) for argument in (*arguments, "--block-tokens", BLOCK_TOKENS)])


def test_a_replay_fills_its_folder(trace, tmp_path, capsys):
    """Everything that was promised is there, and the files agree with each other."""
    out = tmp_path / "out"
    assert sim("replay", trace, "--pods", "4", "--out", out) == 0
    assert capsys.readouterr().out.startswith("seed 1\n")
    summary = json.loads((out / "summary.json").read_bytes())
    rows = pq.read_table(out / "requests.parquet").to_pylist()
    decisions = [json.loads(line) for line in (out / "decisions.jsonl").read_text().splitlines()]
    assert summary["requests"]["complete"] == len(rows) == len(decisions) == 200
    assert summary["complete"]
    assert [line["request"] for line in decisions] == list(range(200))
    by_request = {row["request"]: row for row in rows}
    for line in decisions:
        row = by_request[line["request"]]
        assert line["endpoint"] == row["pod"]
        assert line["cached_tokens"] == row["cached_tokens"]
        assert line["predicted_cached_tokens"] == row["predicted_cached_tokens"]
        best = max(line["candidates"], key=lambda candidate: candidate["score"])
        chosen = next(one for one in line["candidates"] if one["endpoint"] == line["endpoint"])
        assert chosen["score"] == pytest.approx(best["score"])
        assert sum(chosen["parts"].values()) == pytest.approx(chosen["score"])
        assert chosen["matched_blocks"] * 64 == line["predicted_cached_tokens"]
        assert all(one["matched_blocks"] <= line["total_blocks"] for one in line["candidates"])
    assert any(line["predicted_cached_tokens"] for line in decisions)
    total = sum(row["prompt_tokens"] for row in rows)
    assert summary["hit_rate"] == pytest.approx(
        sum(row["cached_tokens"] for row in rows) / total, rel=1e-5
    )
    mean = sum(row["ttft_s"] for row in rows) / 200
    assert summary["ttft_s"]["mean"] == pytest.approx(mean, rel=1e-5)
    assert "TTFT" in (out / "report.md").read_text()


@pytest.mark.parametrize("policy", ["default", "random", "file"])
def test_only_who_has_a_prefix_index_is_judged_by_its_estimate(trace, tmp_path, capsys, policy):
    """A baseline, or a configuration that goes by load alone, estimates nothing."""
    config = policy
    if policy == "file":
        config = tmp_path / "queue.yaml"
        config.write_text(
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
            "plugins: [{type: queue-scorer}]\n"
            "schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]\n"
        )
    out = tmp_path / "out"
    assert sim("replay", trace, "--config", config, "--pods", "4", "--out", out) == 0
    prediction = json.loads((out / "summary.json").read_bytes())["prediction"]
    told = capsys.readouterr().out + (out / "report.md").read_text()
    assert (prediction["bias_tokens"] is None) is (policy != "default")
    assert (prediction["mean_absolute_error_tokens"] is None) is (policy != "default")
    assert ("estimate of the cache" in told) is (policy == "default")


def test_session_affinity_without_sessions_is_warned_of(trace, tmp_path, capsys):
    """It is random then: the table, the summary and the report say so; with sessions they do not."""
    sentence = "No request has a session, so session affinity chose pods at random."
    out = tmp_path / "out"
    assert sim("replay", trace, "--config", "session-affinity", "--pods", "2", "--out", out) == 0
    assert sentence in capsys.readouterr().out
    assert json.loads((out / "summary.json").read_bytes())["warnings"] == [sentence]
    assert f"**{sentence}**" in (out / "report.md").read_text()
    path = tmp_path / "sessions.jsonl"
    path.write_text(HEADER + ONE % ', "session": "a"')
    assert main(["replay", str(path), "--config", "session-affinity"]) == 0
    assert sentence not in capsys.readouterr().out


LATE = """
import numpy as np
from epp.plugins.contract import Parameters

class Late(Parameters, frozen=True):
    type_name = "late-scorer"

    def score(self, request, candidates, /):
        if request.request_id == "0":
            raise KeyError
        return np.ones(len(candidates))
"""


def test_a_plugin_that_failed_during_the_run_is_told_with_its_figures(
    trace, tmp_path, capsys, offer
):
    """They are those of a picker without it, as in production."""
    offer("plugin_late", LATE, "plugin_late:Late")
    config = tmp_path / "late.yaml"
    config.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: late-scorer}]\n"
    )
    out = tmp_path / "out"
    assert sim("replay", trace, "--config", config, "--pods", "2", "--out", out) == 0
    (sentence,) = json.loads((out / "summary.json").read_bytes())["warnings"]
    assert sentence.startswith(
        "late-scorer failed once. The picker routed requests without this plug-in: score raised KeyError at "
    )
    assert "late-scorer failed" in capsys.readouterr().out


def test_all_that_a_run_depends_on_is_among_its_conditions(trace, tmp_path):
    """Its configuration by hash, what is in effect by default, and every flag."""
    out = tmp_path / "out"
    flags = ["--max-loras", "2", "--skip-bad", "--check", "--requests", "20"]
    assert sim("replay", trace, "--pods", "2", *flags, "--out", out) == 0
    told = json.loads((out / "summary.json").read_bytes())["conditions"]
    hashed = config_hash(load_config(DEFAULT_CONFIG, "", plugin_tables()))
    assert told["config_hashes"] == {"default": hashed}
    assert (told["max_loras"], told["skip_bad"], told["check"]) == (2, True, True)
    assert (told["block_tokens"], told["jitter_s"]) == (BLOCK_TOKENS, 0)


def test_a_baseline_has_no_hash_and_several_runs_have_theirs(trace):
    """By the name of each configuration."""
    one, other = (described(trace, policy=policy) for policy in ("random", "default"))
    hashes = conditions(one, other)["config_hashes"]
    assert hashes["random"] is None
    assert re.fullmatch("[0-9a-f]{12}", hashes["default"])


@pytest.mark.parametrize(("given", "in_effect_s"), [([], 3.0), (["--jitter", "0"], 0.0)])
def test_the_jitter_that_is_told_is_the_one_in_effect(tmp_path, given, in_effect_s):
    """A trace whose clock ticks every three seconds is spread over them unless told otherwise."""
    path = tmp_path / "ticks.jsonl"
    path.write_text(
        HEADER + "".join(ONE.replace('": 0', f'": {3 * (at // 4)}', 1) % "" for at in range(40))
    )
    assert main(["replay", str(path), *given, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["conditions"][
        "jitter_s"
    ] == (in_effect_s)


def test_the_report_tells_conditions_in_words(trace, tmp_path):
    """No Python: nothing of None, of False or of braces."""
    out = tmp_path / "out"
    assert sim("replay", trace, "--config", "random", "--pods", "4", "--out", out) == 0
    told = (out / "report.md").read_text().split("## What was run")[1].split("## What is not")[0]
    assert not re.search("None|True|False|[{}'\\[\\]]", told)
    for row in (
        "| pods by profile | llama-3.1-8b-h100-tp1: 4 |", "| maximum number of requests | all |",
        "| the picker observes first tokens | no |", "| hash of the configuration | random: none (a baseline) |",
        "| network delay, one way | 0.5 ms |", "| mean patience of impatient clients | 10 s |",
    ):  # fmt: skip
        assert row in told
    assert "_" not in told


def test_a_trace_without_times_is_replayed_at_the_rate_asked_for(tmp_path):
    """Raw requests, eleven of them: at ten a second they arrive within one."""
    path = tmp_path / "raw.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 2}
    path.write_text((json.dumps(body) + "\n") * 11)
    last_s = {}
    for rate in ("1", "10"):
        out = tmp_path / rate
        flags = ["--trace-format", "openai", "--rate-per-s", rate]
        assert main(["replay", str(path), *flags, "--out", str(out)]) == 0
        rows = pq.read_table(out / "requests.parquet").to_pylist()
        last_s[rate] = max(row["arrival_s"] for row in rows)
    assert last_s == {"1": pytest.approx(10.0), "10": pytest.approx(1.0)}


def test_the_page_opens_offline(trace, tmp_path):
    """One file without addresses, with its charts and the explorer of decisions in it."""
    out = tmp_path / "out"
    assert sim("replay", trace, "--pods", "4", "--out", out) == 0
    page = (out / "report.html").read_text()
    assert "://" not in page
    assert page.count("<svg") >= 8
    for wanted in ("Time to first token", "upper limit", "Why this pod?", "pod-3"):
        assert wanted in page


def test_a_page_tells_counts_and_shares_apart(trace, tmp_path):
    """Of each pod two charts over time, each with an axis that says what it measures."""
    out = tmp_path / "out"
    assert sim("replay", trace, "--pods", "40", "--no-decisions", "--out", out) == 0
    page = (out / "report.html").read_text()
    assert "The first 32 of 40 pods over time" in page
    assert page.count(">requests</text>") == page.count(">share (%)</text>") == 32
    assert page.count(">TTFT (s)</text>") == page.count(">arrival rate (requests/s)</text>") == 1


LINE = {
    "request": 5, "time_s": 1.5, "outcome": "complete", "endpoint": "pod-1", "refusal": None,
    "served": None,
    "total_blocks": 4, "predicted_cached_tokens": 192, "cached_tokens": 176,
    "candidates": [
        {"endpoint": f"pod-{at}", "matched_blocks": 3 * at, "score": float(at), "parts": {"a": at}}
        for at in range(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {},
            "at 1.500 s was routed to pod-1; 176 prompt tokens were in the cache. The picker expected",
        ),
        (
            {"outcome": "failed"},
            "was routed to pod-1, which could not serve it. The picker expected 192",
        ),
        (
            {"outcome": "aborted"},
            "was routed to pod-1, and its client disconnected before the end.",
        ),
        (
            {"outcome": "aborted", "time_s": None, "endpoint": None, "candidates": []},
            "client disconnected",
        ),
        (
            {"outcome": "failed", "time_s": None, "endpoint": None, "candidates": []},
            "no picker was running",
        ),
        ({"served": "pod-0"}, "was routed to pod-1 and rerouted to pod-0; 176 prompt tokens"),
        ({"endpoint": None, "refusal": "0 of 2", "candidates": []}, "was refused: 0 of 2."),
        ({"candidates": []}, "in the cache. This policy scores no pods"),
    ],
)
def test_a_decision_is_explained_by_what_happened(changes, told):
    """Served, failed, left by its client before or after it was routed, refused, or not scored."""
    found = explained(LINE | changes)
    assert found["said"].startswith("Request 5 ")
    assert told in found["said"]
    assert "None" not in found["said"]
    assert bool(found["rows"]) == bool((LINE | changes)["candidates"])


def test_the_best_candidate_of_a_decision_comes_first():
    """With the blocks that each matched; a large pool is cut, and says so."""
    found = explained(LINE)
    assert found["rows"][1:] == [
        ["pod-1", "1.0000", "3", "1.0000"],
        ["pod-0", "0.0000", "0", "0.0000"],
    ]
    assert found["chosen"] == 1
    assert "matched blocks of 4" in found["rows"][0]
    many = [LINE["candidates"][0] | {"endpoint": f"pod-{at}"} for at in range(100)]
    assert explained(LINE | {"candidates": many})["rows"][-1] == ["and 84 more"]


def test_a_page_says_which_decisions_it_has(tmp_path):
    """Of many requests one in some, with the name of the file that has them all."""
    path, out = written(tmp_path / "long.jsonl", 2_001), tmp_path / "out"
    assert sim("replay", path, "--config", "round-robin", "--out", out) == 0
    page = (out / "report.html").read_text()
    assert "1,001 of 2,001 requests are on this page, one in 2 (0, 2, 4, …)" in page
    assert "decisions.jsonl has all of them" in page
    assert sim("replay", path, "--requests", "9", "--out", tmp_path / "few") == 0
    assert "All 9 requests are on this page" in (tmp_path / "few" / "report.html").read_text()


def test_the_same_seed_writes_the_same_summary(trace, tmp_path):
    """Byte by byte; another seed does not."""
    for name, seed in (("one", "5"), ("again", "5"), ("other", "6")):
        sim(
            "replay",
            trace,
            "--pods",
            "2",
            "--seed",
            seed,
            "--out",
            tmp_path / name,
            "--jitter",
            "1",
        )
    one, again, other = (
        (tmp_path / name / "summary.json").read_bytes() for name in ("one", "again", "other")
    )
    assert one == again != other


def test_decisions_name_candidates_that_have_died_since(tmp_path):
    """Pods that die while an answer is under way keep their names in what was decided before."""
    path, out = written(tmp_path / "long.jsonl", 200, output=(200, 400)), tmp_path / "out"
    assert sim("replay", path, "--pods", "3", "--faults-per-hour", "3000", "--out", out) == 0
    lines = [json.loads(line) for line in (out / "decisions.jsonl").read_text().splitlines()]
    assert {line["outcome"] for line in lines} > {"complete"}
    for line in lines:
        if line["endpoint"] is not None:
            names = [candidate["endpoint"] for candidate in line["candidates"]]
            assert line["endpoint"] in names
            assert len(set(names)) == len(names)


def test_pods_keep_prompts_as_the_flag_says(trace, tmp_path):
    """The report tells how, and vLLM's way is what there is without the flag, and not told."""
    told = {}
    for name, flags in {
        "usual": [],
        "vllm": ["--cache", "vllm"],
        "few": ["--cache", "mlx-memory:entries_max=1"],
    }.items():
        out = tmp_path / name
        assert sim("replay", trace, *flags, "--pods", "2", "--out", out, "--no-decisions") == 0
        told[name] = json.loads((out / "summary.json").read_bytes())
    assert told["usual"]["digest"] == told["vllm"]["digest"] != told["few"]["digest"]
    assert "caches" not in told["vllm"]["conditions"]
    assert told["few"]["conditions"]["caches"] == {"mlx-memory:entries_max=1": 2}
    assert told["few"]["hit_rate"] < told["vllm"]["hit_rate"]
    report = (tmp_path / "few" / "report.md").read_text()
    assert "| prompt caches of the pods | mlx-memory:entries_max=1: 2 |" in report


@pytest.mark.parametrize(
    ("flag", "told"),
    [("lru", "No cache 'lru'"), ("kronk-imc-v1:slots=0", "expected a whole number of at least 1")],
)
def test_a_cache_that_there_is_not_is_refused(trace, capsys, flag, told):
    """In one sentence, before anything runs."""
    with pytest.raises(SystemExit):
        sim("replay", trace, "--cache", flag)
    assert told in capsys.readouterr().err


def test_bytes_give_the_decisions_of_hashes(trace, tmp_path):
    """Production parsing and hashing on the way, or not: the same digest."""
    digests = []
    for through in ("hashes", "bytes"):
        sim("replay", trace, "--through", through, "--out", tmp_path / through, "--no-decisions")
        digests.append(json.loads((tmp_path / through / "summary.json").read_bytes())["digest"])
        assert not (tmp_path / through / "decisions.jsonl").exists()
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("kind", "rate"), [("agent-tree", "1"), ("hot-spot", "10"), ("interactive-chat", "2")]
)
def test_generated_workloads_run_through_bytes_too(tmp_path, kind, rate):
    """Stretches of any length, in groups, conversations and branches: the decisions of hashes."""
    path = tmp_path / "made.jsonl"
    flags = ["--rate", rate, "--duration", "40", "--requests", "80", "--out", str(path)]
    assert main(["trace", "generate", kind, *flags]) == 0
    digests = set()
    for through in ("hashes", "bytes"):
        out = tmp_path / through
        assert main(["replay", str(path), "--through", through, "--out", str(out)]) == 0
        summary = json.loads((out / "summary.json").read_bytes())
        assert summary["hit_rate"] > 0.1
        digests.add(summary["digest"])
    assert len(digests) == 1


def test_odd_blocks_are_refused_by_name(tmp_path, capsys):
    """Blocks of 48 tokens cannot be told apart in bytes by a picker with blocks of 64."""
    path = tmp_path / "odd.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 96, "output_length": 1, "hash_ids": [1, 2]}\n'
    )
    assert main(["replay", str(path), "--block-tokens", "48", "--through", "bytes"]) == 1
    told = capsys.readouterr().err
    assert "odd.jsonl" in told
    assert "48" in told


def test_a_folder_with_something_in_it_is_refused(trace, tmp_path, capsys):
    """Unless forced."""
    (tmp_path / "mine").write_text("")
    assert sim("replay", trace, "--out", tmp_path) == 1
    assert "not empty" in capsys.readouterr().err
    assert sim("replay", trace, "--out", tmp_path, "--force") == 0


def test_a_file_is_no_folder_for_results(trace, tmp_path, capsys):
    """With its path, and what was expected."""
    (tmp_path / "mine").write_text("")
    assert sim("replay", trace, "--out", tmp_path / "mine") == 1
    told = f"sim: --out {tmp_path / 'mine'}: expected a folder, got a file\n"
    assert capsys.readouterr().err == told


def test_a_forced_replay_leaves_nothing_of_the_run_before(trace, tmp_path):
    """Its files go even if this run writes none by that name; what is not ours stays."""
    (tmp_path / "mine").write_text("")
    assert sim("replay", trace, "--requests", "9", "--out", tmp_path, "--force") == 0
    assert (tmp_path / "decisions.jsonl").exists()
    assert sim("replay", trace, "--out", tmp_path, "--force", "--no-decisions") == 0
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"mine", "summary.json", "report.md", "report.html", "requests.parquet"}
    assert (
        sim("sweep", trace, "--config", "default", "--rates", "5", "--out", tmp_path, "--force")
        == 0
    )
    assert not (tmp_path / "requests.parquet").exists()


WORKLOAD = """
load: {type: constant, interval: 1, stages: [{rate: 20, duration: 10}]}
data:
  type: shared_prefix
  shared_prefix: {num_groups: 2, num_prompts_per_group: 4, system_prompt_len: 640,
    question_len: 100, output_len: 5}
"""


@pytest.mark.parametrize(("below", "written"), [(150, False), (250, True)])
def test_decisions_depend_on_the_requests_of_a_workload(tmp_path, monkeypatch, below, written):
    """Not on how many lines describe them: about 200 are below 250 and above 150."""
    path, out = tmp_path / "workload.yaml", tmp_path / "out"
    path.write_text(WORKLOAD)
    monkeypatch.setattr("sim.experiments.replay.DECISIONS_BELOW", below)
    assert main(["replay", str(path), "--out", str(out)]) == 0
    assert json.loads((out / "summary.json").read_bytes())["requests"]["sent"] in range(190, 211)
    assert (out / "decisions.jsonl").exists() == written


def test_a_replay_says_what_took_how_long(trace, tmp_path, capsys):
    """The replay for itself, and what comes after it."""
    assert sim("replay", trace, "--out", tmp_path / "all") == 0
    told = capsys.readouterr().out
    assert re.search(r"^200 requests replayed in [\d.]+ s$", told, re.MULTILINE)
    assert re.search(r"^hit ceilings took [\d.]+ s$", told, re.MULTILINE)
    assert re.search(r"^reports took [\d.]+ s; results are in ", told, re.MULTILINE)
    assert sim("replay", trace, "--out", tmp_path / "few", "--no-decisions") == 0
    assert re.search(r"^reports took [\d.]+ s; results", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), True),
        (("--no-ceilings",), False),
        (("--no-decisions",), False),
        (("--no-decisions", "--ceilings"), True),
    ],
)
def test_hit_ceilings_come_with_decisions_unless_told_otherwise(trace, tmp_path, flags, found):
    """They are another pass over the trace, of no use to who only wants the decisions."""
    out = tmp_path / "out"
    assert sim("replay", trace, *flags, "--out", out) == 0
    assert ("ceilings" in json.loads((out / "summary.json").read_bytes())) == found
    assert (out / "decisions.jsonl").exists() == ("--no-decisions" not in flags)


def test_a_terminal_shows_a_bar_for_the_replay_and_one_for_the_ceilings(trace, tmp_path):
    """Each with as many steps as there are requests."""
    code, _, shown = on_a_terminal(
        "replay", trace, "--out", tmp_path / "out", "--block-tokens", BLOCK_TOKENS
    )
    assert code == 0
    assert re.search(r"replay .*/200\b", shown)
    assert re.search(r"hit ceilings .*/200\b", shown)


def test_a_bad_line_stops_or_is_counted(tmp_path, capsys):
    """It is named by file, line and field, and nothing is written; with --skip-bad the rest runs."""
    path = written(tmp_path / "bad.jsonl", 5)
    path.write_text(path.read_text() + '{"timestamp": 900000, "input_length": "x"}\n')
    for command in (
        ["replay"],
        ["compare", "--config", "default", "--config", "random", "--seeds", "1"],
        ["sweep", "--config", "default", "--rates", "5"],
    ):
        out = tmp_path / "failed"
        assert sim(command[0], path, *command[1:], "--out", out) == 1
        assert not list(out.iterdir()), "the same call works once the line is mended"
        errors = capsys.readouterr().err
        assert errors.startswith("sim: ")
        assert "bad.jsonl:6: input_length" in errors
        assert errors.count("\n") == 1
    for name, *flags in (
        ["replay"],
        ["compare", "--config", "default", "--config", "random", "--seeds", "1"],
        ["sweep", "--config", "default", "--rates", "5"],
    ):
        out = tmp_path / name
        assert sim(name, path, *flags, "--skip-bad", "--out", out) == 0
        summary = json.loads((out / "summary.json").read_bytes())
        runs = summary.get("runs") or summary.get("points") or [summary]
        assert {run["bad_lines"] for run in runs} == {1}
        assert re.search(r"malformed lines .*skipped", (out / "report.md").read_text())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config", "nothing"], "neither a file nor one of"),
        (["--pods", "0"], "not an integer from 1"),
        (["--profile", "nothing"], "nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(trace, arguments, told, capsys):
    """In a sentence, with exit code 2."""
    try:
        code = sim("replay", trace, *arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [["compare"], ["sweep", "--rates", "5"]])
@pytest.mark.parametrize(
    ("configs", "told"),
    [
        (
            ["default", "nothing"],
            "sim: nothing is neither a file nor one of default, ",
        ),
        (
            ["random", "random"],
            "sim: --config random and --config random both have the name random",
        ),
    ],
)
def test_policies_that_are_not_there_or_there_twice_are_a_wrong_call(
    trace, command, configs, told, capsys
):
    """Exit code 2 and a sentence, as for a profile that is not there."""
    flags = [part for config in configs for part in ("--config", config)]
    assert sim(command[0], trace, *command[1:], *flags) == 2
    assert capsys.readouterr().err.startswith(told)


def test_a_configuration_that_is_no_good_is_not_a_wrong_call(trace, tmp_path, capsys):
    """The call is right, the file is not: exit code 1."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: Nothing\n")
    assert sim("replay", trace, "--config", broken) == 1
    assert "broken.yaml" in capsys.readouterr().err
    assert sim("replay", trace, "--config", tmp_path) == 1


def test_a_profile_that_no_engine_has_is_a_wrong_call(trace, tmp_path, capsys):
    """Exit code 2, and the file, the profile and the field by name."""
    path = tmp_path / "mine.toml"
    path.write_text('[x]\nlike = "llama-3.1-8b-h100-tp1"\nmax_num_seqs = 0\n')
    with pytest.raises(SystemExit) as stop:
        sim("replay", trace, "--profile", path)
    assert stop.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "mine.toml: x: max_num_seqs: expected a whole number of at least 1" in told


HEADER = '{"format": "homing-capture", "version": 1}\n'
ONE = '{"time_s": 0, "prompt_tokens": 65, "output_tokens": 1%s}\n'


@pytest.mark.parametrize(
    ("content", "arguments", "told"),
    [
        (HEADER.encode(), [], "The trace is empty, expected at least one request"),
        (b"\n \n\n", [], "The trace is empty, expected at least one request"),
        (
            gzip.compress((HEADER + (ONE % "") * 5_000).encode())[:-20],
            [],
            "Expected a whole gzip file",
        ),
        (
            (HEADER + ONE % ', "adapter": "sql"').encode(),
            [],
            "Expected pods with adapter slots (max_loras)",
        ),
        (
            (HEADER + ONE % ', "parts": [[99999999999, 1], [5, 64]]').encode(),
            ["--through", "bytes"],
            "expected ids below 16777216",
        ),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["replay"],
        ["compare", "--config", "default", "--config", "random", "--seeds", "1"],
        ["sweep", "--config", "default", "--rates", "5"],
    ],
    ids=lambda command: command[0],
)
def test_a_trace_that_cannot_be_replayed_is_one_sentence(
    command, content, arguments, told, tmp_path, capsys
):
    """Which trace, and what was expected of it; exit code 1, also from another process."""
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert main([command[0], str(path), *command[1:], *arguments]) == 1
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if not line.startswith("sim: warning: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"sim: {path}: ")
    assert told in errors[0]


@pytest.mark.parametrize(
    ("later_s", "speed", "days"), [("1.7e9", "1", "19,676"), ("100", "1e-6", "1,157")]
)
def test_a_trace_of_years_is_refused_at_once(tmp_path, later_s, speed, days, capsys):
    """A clock that was set on the way, or a speed too slow: which request, and how late it is."""
    path = tmp_path / "years.jsonl"
    path.write_text(HEADER + ONE % "" + (ONE % "").replace('": 0', f'": {later_s}', 1))
    assert main(["replay", str(path), "--speed", speed]) == 1
    assert capsys.readouterr().err == (
        f"sim: {path}: request 1: Expected an arrival time and a think time of at most 366 days, got {days} days "
        f"(--speed {float(speed):g})\n"
    )


def test_a_file_that_is_no_text_is_one_sentence(trace, tmp_path, capsys):
    """A configuration, a profile and a trace that is not there: each is named."""
    path = tmp_path / "odd.toml"
    path.write_bytes(b"\xff\xfe")
    assert sim("replay", trace, "--config", path) == 1
    assert (
        capsys.readouterr().err == f"sim: {path}: expected YAML in UTF-8, got the byte 0xff at 0\n"
    )
    with pytest.raises(SystemExit):
        sim("replay", trace, "--profile", path)
    assert "odd.toml: expected TOML in UTF-8, got the byte 0xff at 0" in capsys.readouterr().err
    assert sim("replay", tmp_path / "none") == 1
    assert capsys.readouterr().err == f"sim: {tmp_path / 'none'}: No such file or directory\n"


def test_a_comparison_of_nothing_says_so(tmp_path, capsys):
    """No request fits into the cache: nothing was completed, and that is said of each."""
    path = tmp_path / "large.jsonl"
    path.write_text(HEADER + (ONE % "").replace("65", "5000000"))
    code = main(["compare", str(path), "--config", "default", "--config", "random", "--seeds", "1"])
    assert code == 0
    told = capsys.readouterr().out
    assert "random: TTFT mean" in told
    assert "not enough data: some runs do not have this figure" in told
    for name in ("default", "random"):
        assert f"{name} completed no request (1 failed), so there is nothing to compare." in told


@pytest.mark.parametrize(
    ("measure", "difference", "told"),
    [
        ("ttft_mean_s", 1.0, "worse"),
        ("ttft_mean_s", -1.0, "better"),
        ("hit_rate", 1.0, "better"),
        ("output_tokens_per_s", -1.0, "worse"),
    ],
)
def test_more_is_better_or_worse_by_the_measure(measure, difference, told):
    """Latencies are better low, hit rates and throughput high; near 0 is neither."""
    one = Estimate(value=difference, low=difference - 0.5, high=difference + 0.5)
    assert verdict(measure, one) == told
    near = msgspec.structs.replace(one, low=difference - 2.0, high=difference + 2.0)
    assert verdict(measure, near) == "no significant difference"


def test_sizes_of_differences_can_be_read():
    """A multiple where a percentage would have five digits, three places where it has none."""
    differences = {
        "ttft_mean_s": {"value": 56.7, "relative": 245.2, "low": 56.0, "high": 57.0},
        "hit_rate": {"value": -0.5, "relative": -0.625, "low": -0.6, "high": -0.4},
        "output_tokens_per_s": {"value": -0.1, "relative": -0.0001, "low": -0.2, "high": -0.05},
    }
    found = {
        name: filled(DifferenceSummary, verdict="worse", **one) for name, one in differences.items()
    }
    told = comparison_table(
        filled(
            ComparisonSummary,
            configs={"one": compared({}), "other": compared(found)},
            runs=[RUN],
            first_seed=1,
            seeds=5,
            generated=True,
            varied="5 random draws of the traffic",
        )
    )
    assert (
        "other is worse than one in TTFT mean (246 times), hit rate (-62.5%), "
        "output tokens/s (-0.010%)." in told
    )
    assert "-60.0 points to -40.0 points" in told


def test_a_short_comparison_says_how_much_it_lacks(trace, capsys):
    """How many seeds there are, and how many there must be."""
    assert sim("compare", trace, "--config", "default", "--config", "random", "--seeds", "2") == 0
    told = capsys.readouterr().out
    assert "There is not enough data: 2 seeds given, confidence intervals need at least 3." in told
    assert told.lower().count("not enough data") == 1
    assert "verdict" not in told


def test_what_one_measure_lacks_is_a_dash_and_is_told_once():
    """Of two configurations that both lack a tail: what is known is concluded, and why not all."""
    lacking = filled(
        DifferenceSummary,
        value=1.0,
        relative=0.1,
        verdict="not enough data: some runs do not have this figure",
    )
    known = replace(lacking, low=0.5, high=1.5, verdict="worse")
    other = compared(
        {
            "ttft_mean_s": known,
            "e2e_mean_s": replace(known, verdict="no significant difference"),
            "ttft_p99_s": lacking,
        }
    )
    summary = filled(
        ComparisonSummary,
        configs={"one": compared({}), "other": other, "third": other},
        runs=[RUN],
        first_seed=1,
        seeds=4,
    )
    told = comparison_table(summary)
    (row,) = [line for line in told.splitlines() if line.startswith("other: TTFT p99")]
    assert row.split()[-3:] == ["-", "+10.0%", "-"]
    assert told.count("not enough data") == 1
    assert "a dash, there is not enough data: some runs do not have this figure." in told
    assert (
        "other is worse than one in TTFT mean (+10.0%); no significant difference in E2E mean."
        in told
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "-"), (0.0, "0 ms"), (0.048, "48.0 ms"), (0.00805, "8.05 ms"), (0.4804, "480 ms"),
        (0.0000042, "0.00420 ms"), (2.0, "2.00 s"), (56.94, "56.9 s"), (1234.5, "1,234 s"),
        (-0.012, "-12.0 ms"),
    ],
)  # fmt: skip
def test_durations_stand_under_each_other(value, told):
    """As many digits in each row: zeros at the end are shown."""
    assert seconds(value) == told


def test_a_head_of_several_lines_stands_on_its_column():
    """In the terminal; on one line in Markdown."""
    rows = [["name", "requests/s\nsent", "hit\nrate"], ["a", "4", "89.6%"], ["b", "12.5", "9.0%"]]
    assert table(rows).splitlines() == [
        "      requests/s    hit",
        "name        sent   rate",
        "a              4  89.6%",
        "b           12.5   9.0%",
    ]
    assert markdown_table(rows).startswith("| name | requests/s sent | hit rate |\n")


def test_what_no_pod_can_serve_is_named_first(tmp_path, capsys):
    """By the profile and its limit: nothing else shows that long prompts are missing."""
    path = tmp_path / "long.jsonl"
    path.write_text(HEADER + ONE % "" + (ONE % "").replace("65", "40961") + ONE % "")
    flags = ["--profile", "qwen3-32b-h100-tp2", "--pods", "2"]
    both = ["--config", "default", "--config", "random", "--seeds", "1"]
    sentence = (
        "1 of 3 requests (33.3%) exceed the context of qwen3-32b-h100-tp2 (40,960 tokens) "
        "and failed at once. Latencies and throughput do not include these requests."
    )
    for command in (["replay"], ["compare", *both], ["sweep", *both, "--rates", "1"]):
        out = tmp_path / command[0]
        assert main([command[0], str(path), *command[1:], *flags, "--out", str(out)]) == 0
        told = capsys.readouterr().out.splitlines()
        assert told[1] == sentence
        assert f"**{sentence}**" in (out / "report.md").read_text()
        assert sentence in (out / "report.html").read_text()


def test_a_warm_up_is_left_out_and_said(trace, tmp_path, capsys):
    """Of every figure but how requests ended; a short run has none unless asked."""
    found = {}
    for name, flags in (("short", ()), ("warm", ("--warm-up", "5"))):
        out = tmp_path / name
        assert sim("replay", trace, "--pods", "2", *flags, "--out", out) == 0
        found[name] = json.loads((out / "summary.json").read_bytes())
    assert "5.00 s of warm-up" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "warm" / "requests.parquet").to_pylist()
    after = [row for row in rows if row["arrival_s"] >= 5]
    assert 50 < len(after) < 150
    warm, short = found["warm"], found["short"]
    assert warm["requests"] == short["requests"]
    assert warm["digest"] == short["digest"]
    assert warm["prompt_tokens"] == sum(row["prompt_tokens"] for row in after)
    assert warm["hit_rate"] > short["hit_rate"], "caches start cold"
    mean = sum(row["ttft_s"] for row in after) / len(after)
    assert warm["ttft_s"]["mean"] == pytest.approx(mean, rel=1e-5)
    last_s = max(row["arrival_s"] for row in rows)
    assert warm["window"]["end_s"] == pytest.approx(last_s, rel=1e-5)
    assert (warm["window"]["start_s"], short["window"]["start_s"]) == (5, 0)


def test_a_comparison_counts_what_was_not_complete(trace, tmp_path, capsys):
    """In the table, the reports and the summary, since every other measure leaves it out."""
    out = tmp_path / "out"
    code = sim(
        "compare", trace, "--config", "default", "--config", "random", "--seeds", "2",
        "--abort-share", "0.5", "--abort-after", "0.1", "--out", out,
    )  # fmt: skip
    assert code == 0
    summary = json.loads((out / "summary.json").read_bytes())
    requests = summary["configs"]["random"]["requests"]
    sent = requests["sent"]
    assert sent == sum(run["requests"]["sent"] for run in summary["runs"]) / 2 > 300
    assert 0 < requests["aborted"] == sent - requests["complete"]
    aborted = f"{requests['aborted']} of {sent}"
    sentence = f"of its requests ({requests['aborted']} aborted)"
    for text in (capsys.readouterr().out, *map(Path.read_text, out.glob("report.*"))):
        assert "not complete" in text
        assert aborted in text
        assert f"random did not complete {requests['aborted'] / sent:.1%} {sentence}" in text


def test_a_comparison_of_two_alike_names_is_a_wrong_call(trace, capsys):
    """Exit code 2, before anything runs; likewise a sweep, and a comparison of one."""
    same = ["--config", "random"] * 2
    for command in (["compare"], ["sweep", "--rates", "5"]):
        assert sim(command[0], trace, *command[1:], *same) == 2
        assert "both have the name random" in capsys.readouterr().err
    assert sim("compare", trace, "--config", "random") == 2


def test_a_comparison_says_when_there_is_no_difference(trace, tmp_path, capsys):
    """A configuration against itself: not significant; against random: it is, over five seeds."""
    same = tmp_path / "same.yaml"
    same.write_text(DEFAULT_CONFIG)
    out = tmp_path / "out"
    code = sim(
        "compare", trace, "--config", "default", "--config", same, "--config", "random",
        "--seeds", "5", "--jitter", "1", "--pods", "4", "--workers", "2", "--out", out,
    )  # fmt: skip
    assert code == 0
    summary = json.loads((out / "summary.json").read_bytes())
    assert len(summary["runs"]) == 15
    alike = summary["configs"]["same"]["difference"]["ttft_mean_s"]
    assert alike["value"] == 0
    assert alike["verdict"] == "no significant difference"
    worse = summary["configs"]["random"]["difference"]["hit_rate"]
    assert worse["significant"]
    assert worse["high"] < 0
    assert summary["varied"] == "4 resamples of 20 blocks of 0.5124 s"
    assert worse["verdict"] == "worse"
    for text in (capsys.readouterr().out, *map(Path.read_text, out.glob("report.*"))):
        assert "same against default: no significant difference in any measure." in text
        assert re.search(r"random is worse than default in .*hit rate \(-[\d.]+%\)", text)
        assert re.search(r"-[\d.]+ points to -[\d.]+ points", text)
        assert "Seed 1 replays the recorded trace" in text
        assert "over 4 resamples of 20 blocks of 0.5124 s, shows" in text
    page = (out / "report.html").read_text()
    assert "://" not in page
    # A curve a configuration for each of TTFT, TPOT and E2E.
    assert page.count("<polyline") == 9


def test_a_sweep_shows_that_load_costs(trace, tmp_path):
    """TTFT rises with the rate, and the page has a line for each configuration."""
    out = tmp_path / "out"
    code = sim(
        "sweep", trace, "--config", "default", "--config", "random", "--rates", "5,400",
        "--pods", "2", "--out", out,
    )  # fmt: skip
    assert code == 0
    points = json.loads((out / "summary.json").read_bytes())["points"]
    ttft = {(point["config"], point["rate"]): point["figures"]["ttft_mean_s"] for point in points}
    for config in ("default", "random"):
        assert ttft[config, 400.0]["value"] > ttft[config, 5.0]["high"] > 0
    page = (out / "report.html").read_text()
    assert "polyline" in page
    for point in points:
        assert f"<td>{point['figures']['hit_rate']['value']:.1%}</td>" in page
    assert "95 % confidence intervals" in page


def test_a_sweep_tells_the_rate_that_was_sent(tmp_path, capsys):
    """Sessions that wait for answers cannot be hurried: asked and sent stand side by side."""
    path = tmp_path / "session.jsonl"
    turns = [ONE % "", *(ONE % f', "after": {turn}' for turn in range(49))]
    times = [turn.replace('"time_s": 0', f'"time_s": {at}') for at, turn in enumerate(turns)]
    path.write_text(HEADER + "".join(times))
    out = tmp_path / "out"
    flags = ("--config", "random", "--rates", "1,500", "--seeds", "1", "--out", out)
    assert main(["sweep", *map(str, (path, *flags))]) == 0
    slow, fast = json.loads((out / "summary.json").read_bytes())["points"]
    assert (slow["rate"], fast["rate"]) == (1.0, 500.0)
    assert fast["requests_per_s"] < 200
    for text in (capsys.readouterr().out, *map(Path.read_text, out.glob("report.*"))):
        assert "The rates 500 requests/s were not reached, because requests" in text
        assert f"{fast['requests_per_s']:,.4g}" in text
        assert "The only seed is 1: nothing was varied" in text


def test_a_sweep_of_a_trace_that_waits_for_nothing_reaches_its_rates(trace, tmp_path, capsys):
    """Requests that are lost count as sent, and in a column of their own."""
    out = tmp_path / "out"
    code = sim(
        "sweep", trace, "--config", "random", "--rates", "5,400", "--out", out,
        "--abort-share", "1", "--abort-after", "0.01", "--seeds", "1",
    )  # fmt: skip
    assert code == 0
    points = json.loads((out / "summary.json").read_bytes())["points"]
    for point in points:
        assert point["requests_per_s"] == pytest.approx(point["rate"], rel=0.01)
        lost = point["requests"]["sent"] - point["requests"]["complete"]
        assert lost > 100
        assert f"{lost} of 200" in (out / "report.html").read_text()
    told = capsys.readouterr().out
    assert "not complete" in told
    assert "not reached" not in told
    heads = "\n".join(told.splitlines()[1:3])
    for word in ("configuration", "requests/s", "requested", "sent", "within", "targets"):
        assert word in heads
    assert "A request is within targets with TTFT up to 2 s and TPOT up to 50 ms." in told


@pytest.mark.parametrize(
    ("command", "flags", "kept"),
    [
        ("compare", (), 1),
        ("compare", ("--no-cache",), 0),
        ("compare", ("--requests", "20"), 0),
        ("sweep", ("--rates", "10"), 1),
        ("replay", (), 1),
        ("replay", ("--no-cache",), 0),
    ],
)
def test_a_big_trace_is_kept_before_processes_read_it(
    trace, tmp_path, monkeypatch, command, flags, kept
):
    """Here all are big, there none is: so it is this process that has read it."""
    monkeypatch.setattr(reading, "_KEPT_FROM_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    several = () if command == "replay" else ("--seeds", "1", "--workers", "1")
    if command == "compare":
        several += ("--config", "random")
    assert sim(command, trace, "--config", "round-robin", *several, *flags) == 0
    assert len(list((tmp_path / "homing" / "traces").glob("*.arrivals"))) == kept


def test_a_sweep_has_rates_instead_of_a_speed(trace, capsys):
    """Both at once would contradict each other."""
    assert sim("sweep", trace, "--config", "default", "--rates", "5", "--speed", "2") == 2
    assert "--rates" in capsys.readouterr().err


def started(*arguments):
    """`sim` in a process group of its own, as a terminal starts it."""
    command = [sys.executable, "-m", "sim", *map(str, arguments)]
    return subprocess.Popen(
        [*command, "--block-tokens", str(BLOCK_TOKENS)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=dict(os.environ) | {"PYTHONPATH": ":".join([str(ROOT), *sys.path])},
    )  # fmt: skip


def wait_for(process, file):
    """Until it has written something there."""
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize("whom", ["the process", "its group", "its group, twice"])
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("compare", "--config", "default", "--config", "random", "--seeds", "9"), "runs"),
        (("sweep", "--config", "default", "--config", "random", "--rates", "5,10,20"), "points"),
    ],
)
def test_an_interrupted_experiment_leaves_readable_results(command, told, whom, tmp_path):
    """Ctrl-C: 130, one sentence, what had ended by then, and no process that goes on."""
    path = written(tmp_path / "trace.jsonl", 4_000)
    out = tmp_path / "out"
    name, *flags = command
    process = started(name, path, *flags, "--workers", "2", "--out", out)
    wait_for(process, out / "summary.json")
    for _ in range(2 if "twice" in whom else 1):
        (os.kill if whom == "the process" else os.killpg)(process.pid, signal.SIGINT)
    # It returns when nobody is left that could write into these pipes.
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.fullmatch(r"sim: interrupted, \d+ of \d+ runs are done\n", errors)
    summary = json.loads((out / "summary.json").read_bytes())
    assert not summary["complete"]
    assert str(len(summary[told])) in errors
    assert "ot complete" in (out / "report.md").read_text() or not summary.get("configs")


def described(trace, seed=1, policy="random", flags=()):
    """The run that `sim replay TRACE` would do."""
    options = argparse.ArgumentParser()
    add_run_options(options)
    given = options.parse_args([str(trace), "--block-tokens", str(BLOCK_TOKENS), *flags])
    return run_settings(given, policy_source(policy), seed)


@pytest.mark.parametrize(
    ("told", "delay_s", "loss"), [("0.2", 0.2, 0.0), ("0:0.5", 0.0, 0.5), ("1:0", 1.0, 0.0)]
)
def test_engines_tell_pickers_as_the_flag_says(trace, told, delay_s, loss):
    """And conditions say so."""
    settings = described(trace, flags=["--kv-events", told])
    assert settings.cluster.kv_events == KVEventSettings(delay_s=delay_s, loss=loss)
    named = {name: value for name, value in conditions(settings).items() if "kv_events" in name}
    assert named == {"kv_events_delay_s": delay_s, "kv_events_loss": loss}
    assert described(trace).cluster.kv_events is None


@pytest.mark.parametrize("told", ["", "x", "-1", "1:2", "1:0.1:3"])
def test_what_is_no_delay_or_loss_is_refused(trace, told, capsys):
    with pytest.raises(SystemExit):
        described(trace, flags=[f"--kv-events={told}"])
    assert "--kv-events" in capsys.readouterr().err


@pytest.mark.parametrize("through_bytes", [False, True])
def test_an_exact_index_knows_more_than_decisions_do(trace, through_bytes):
    """By hashes and by bytes alike: pods serve the same, and the estimate is nearer."""
    exact = str(ROOT / "docs/examples/exact.yaml")
    off = []
    usual = ["--replicas", "2", *(["--through", "bytes"] if through_bytes else [])]
    for told in ([], ["--kv-events", "0"]):
        run = Run(described(trace, policy=exact, flags=[*usual, *told]))
        run.run()
        off.append(run.summary().prediction.mean_absolute_error_tokens)
    assert off[1] < off[0]


def test_blocks_that_those_of_engines_do_not_fit_are_refused(trace, tmp_path):
    text = (ROOT / "docs/examples/exact.yaml").read_text().replace("64", "24")
    odd = tmp_path / "odd.yaml"
    odd.write_text(text)
    with pytest.raises(ConfigError) as problem:
        Run(described(trace, policy=str(odd), flags=["--kv-events", "0"]))
    assert "expected a multiple of 16" in problem.value.problems[0]
    Run(described(trace, policy=str(odd)))


def test_the_picker_knows_how_fast_the_pods_of_its_profile_prefill(trace, tmp_path):
    """Unless the configuration says otherwise, or pods differ."""
    head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: token-load-scorer}"
    quiet, told = tmp_path / "quiet.yaml", tmp_path / "told.yaml"
    quiet.write_text(f"{head}]\n")
    told.write_text(
        f"{head}, {{type: inflight-load-producer, parameters: {{peakPrefillThroughput: 777}}}}]\n"
    )
    fast, slow = kind(), kind(profile="llama-3.1-8b-a100-tp1")
    assert fast.prefill_tokens_per_s > 2 * slow.prefill_tokens_per_s

    def seen(policy, *pods, **fields):
        settings = described(trace, policy=str(policy))
        cluster = structs.replace(settings.cluster, pods=pods, **fields)
        run = Run(structs.replace(settings, cluster=cluster))
        run.run()
        columns = run.cluster.pickers.policies[0].scheduler.pool.columns
        return set(columns.prefill_tokens_per_s[: len(pods)].tolist())

    for pod in (fast, slow):
        assert seen(quiet, pod, pod) == seen("default", pod) == {pod.prefill_tokens_per_s}
        assert seen(told, pod) == {777.0}
    assert seen(quiet, fast, slow) == {15_928.0}
    slowed = structs.replace(fast, speed=0.5)
    assert seen(quiet, fast, slowed) == {fast.prefill_tokens_per_s}
    wrong = {"believed_prefill_tokens_per_s": 12_345.0}
    assert seen("default", fast, **wrong) == seen(quiet, fast, slow, **wrong) == {12_345.0}
    assert seen(told, fast, **wrong) == {777.0}


def test_a_pod_that_got_nothing_is_part_of_the_imbalance(trace):
    """One request on four pods is as unequal as it can be."""
    run = Run(described(trace, flags=["--pods", "4", "--requests", "1"]))
    run.run()
    summary = run.summary()
    assert sorted(load.requests for load in summary.pods.values()) == [0, 0, 0, 1]
    assert summary.imbalance.requests.max_over_mean == 4.0
    assert summary.imbalance.requests.jain == 0.25


def test_an_interrupt_ends_the_search_for_ceilings_too(trace):
    """It is one more pass over the trace, and what the run has found is there without it."""
    one = Run(described(trace))
    one.run()
    assert one.ceilings().one_cache > 0
    one.stop()
    assert one.ceilings() is None


def test_a_process_that_dies_ends_an_experiment(trace):
    """Killed from outside, for memory say: an error in a sentence, no endless wait."""
    with Crew(2) as crew:
        results = crew.results([described(trace, seed) for seed in range(9)])
        _, first = next(results)
        assert first.summary.requests.complete == 200
        for process in crew._members.values():
            process.kill()
        with pytest.raises(JobError, match="has died"):
            list(results)


@pytest.mark.parametrize(("folder", "times"), [(None, [2]), ("out", [1, 2])])
def test_an_experiment_tells_no_results_twice(folder, times, trace, tmp_path, capsys):
    """With a folder after each run, else once at the end: a Ctrl-C waits for no other telling."""
    told = []

    def summary(results, complete):
        told.append((len(results), complete))
        return filled(ReplicasSummary, complete=complete)

    experiment = Experiment(
        title="test",
        jobs=[described(trace, seed) for seed in (1, 2)],
        summary=summary,
        table=repr,
        reports=lambda *_: {},
    )
    assert experiment.carry_out(folder and tmp_path, workers=1) == 0
    assert told == [(results, results == 2) for results in times]
    assert "complete=True" in capsys.readouterr().out


def test_an_interrupted_replay_leaves_readable_results(tmp_path):
    """Ctrl-C: exit code 130, a table with whole rows, and a summary that says what it is."""
    path = written(tmp_path / "long.jsonl", 99_000)
    out = tmp_path / "out"
    process = started("replay", path, "--out", out)
    decisions = out / "decisions.jsonl"
    wait_for(process, decisions)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "sim: interrupted\n")
    summary = json.loads((out / "summary.json").read_bytes())
    assert not summary["complete"]
    rows = pq.read_table(out / "requests.parquet").num_rows
    assert 0 < rows == summary["requests"]["sent"] < 99_000
    assert all(json.loads(line) for line in decisions.read_text().splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0, "0"), (0.123456, "0.1235"), (999.96, "1000"), (12_826.4, "12,826")],
)
def test_a_number_is_never_shown_as_a_power_of_ten(value, shown):
    """Four digits, or all before the point: people compare them by eye."""
    assert number(value) == shown
