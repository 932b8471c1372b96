"""`sim tune`: what is planted is found, what is best stays, and it goes on where it was stopped."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from epp.configuration.config import DEFAULT_CONFIG
from sim.__main__ import main
from sim.cluster.policies import policy_source
from sim.experiments.measured_runs import Half
from sim.experiments.search import BATCH
from tests.sim.experiments.test_replay import started, wait_for
from tests.sim.made import BLOCK_TOKENS
from tests.sim.terminal import on_a_terminal

ROOT = Path(__file__).parents[3]
WEIGHTS = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: prefix-cache-scorer, weight: {prefix}}}
  - {{pluginRef: active-request-scorer, weight: {active}}}
"""
SPACE = """\
defaults = false
[[weights]]
plugin = "prefix-cache-scorer"
[[weights]]
plugin = "active-request-scorer"
"""
WORKLOAD = """\
data:
  type: shared_prefix
  shared_prefix:
    {num_groups: 8, num_prompts_per_group: 100, system_prompt_len: 4500, question_len: 60, output_len: 3}
load: {type: poisson, stages: [{rate: 60, duration: 2}]}
"""
TRIALS = 6
RUN = ("--pods", "4", "--block-tokens", str(BLOCK_TOKENS))
SEEDS = ("--seeds", "4")
SMALL = (*RUN, "--trials", str(TRIALS), *SEEDS, "--workers", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Traffic that caches decide, a configuration that ignores them, and one that does not."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "made.yml").write_text(WORKLOAD)
    (folder / "blind.yaml").write_text(WEIGHTS.format(prefix=0.1, active=10))
    (folder / "good.yaml").write_text(WEIGHTS.format(prefix=10, active=3))
    (folder / "space.toml").write_text(SPACE)
    return folder


def tune(folder, *arguments, config="blind.yaml"):
    return main(
        ["tune", str(folder / "made.yml"), "--config", str(folder / config), "--space",
         str(folder / "space.toml"), *map(str, arguments)]
    )  # fmt: skip


@pytest.fixture(scope="module")
def planted(folder):
    """The folder of a tuning that had something to find."""
    out = folder / "planted"
    assert tune(folder, *SMALL, "--workers", "2", "--out", out) == 0
    return out


def summary_of(out):
    return json.loads((out / "summary.json").read_bytes())


def test_what_is_planted_is_found(planted):
    """A prefix that must count more than it does; found on one half, better on the other."""
    summary = summary_of(planted)
    assert summary["complete"]
    assert summary["beats"]
    profile = policy_source(str(planted / "tuned.yaml")).load().profile
    prefix, active = (scorer.weight for scorer in profile.scorers)
    assert prefix > active, "0.1 and 10 before"
    first = summary["hold_out"][0]["differences"]["ttft_p90_s"]
    assert first["verdict"] == "better"
    assert first["high"] < 0
    assert [one["load"] for one in summary["hold_out"]] == [1.0, 0.7, 1.3]


def test_guards_stand_and_can_be_changed_or_dropped(folder, planted, capsys):
    """Two unless told otherwise; on the same runs."""
    assert summary_of(planted)["guards"] == {"e2e_mean_s": 0.0, "itl_mean_s": 0.0}
    for one in summary_of(planted)["hold_out"]:
        assert set(one["guards"]) == {"e2e_mean_s", "itl_mean_s"}
        assert not one["stopped_by"]
    told = {
        "changed": (("--guard", "itl_p99_s=0.05", "--guard", "hit_rate"),
                    {"itl_p99_s": 0.05, "hit_rate": 0.0}),
        "dropped": (("--guard", "none"), {}),
        "objective": (("--objective", "itl"), {"e2e_mean_s": 0.0}),
    }  # fmt: skip
    for name, (arguments, guards) in told.items():
        out = folder / f"guards-{name}"
        shutil.copytree(planted, out)
        assert tune(folder, *SMALL, *arguments, "--out", out) == 0
        assert summary_of(out)["guards"] == guards


def test_what_can_be_confirmed_is_told_before_the_search(folder, planted, capsys):
    """In the line after the seeds, and in the report."""
    assert tune(folder, *SMALL, "--out", planted) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a tuning may fail to confirm these gains: TTFT p90 below" in lines[1]
    assert lines[1] in (planted / "report.md").read_text()
    assert set(summary_of(planted)["power"]["gains"]) <= {"ttft_p90_s", "output_tokens_per_s"}


def test_the_config_map_is_ready(planted):
    """The real command accepts it; it says what was measured, and holds what it says."""
    file = planted / "tuned-configmap.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "epp", "check-config", str(file)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    summary = summary_of(planted)
    digest = summary["chosen"]["hash"]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file}: config.yaml: valid, hash {digest}\n"
    manifest = yaml.safe_load(file.read_text())
    text = manifest["data"]["config.yaml"]
    assert text == (planted / "tuned.yaml").read_text()
    told = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line[0] == "#")
    for part in (
        "trace made.yml", summary["trace"]["sha256"][:12], "requests: tuned on",
        f"first {summary['trace']['tuning']}, judged on the other", "against blind, hash",
        "4 of llama-3.1-8b-h100-tp1; 1 picker", "TTFT p90", "95 % interval", "1.3 times the load",
        "The confidence intervals are over 4 random draws of the traffic", "weight of prefix-cache-scorer 0.1 to 10 or off", f"The search of {TRIALS} trials",
    ):  # fmt: skip
        assert part in told


def test_the_half_that_judges_is_not_used_for_tuning(planted):
    """By the requests of every run: none of the second half before somebody was chosen."""
    keys = [
        json.loads(line)["key"] for line in (planted / "runs.jsonl").read_text().splitlines()[1:]
    ]
    halves = [Half.TUNING if Half.TUNING in key else Half.HOLD_OUT for key in keys]
    judging = halves.index(Half.HOLD_OUT)
    assert set(halves[judging:]) == {Half.HOLD_OUT}
    chosen = summary_of(planted)
    hashes = {key.split()[0] for key in keys[judging:]}
    assert hashes == {chosen["config_hash"], chosen["chosen"]["hash"]}
    assert len(keys) == len(set(keys)), "nothing is run twice"


def test_it_tells_people_too(planted):
    """A page that opens offline, Markdown, and the same words."""
    report = (planted / "report.md").read_text()
    page = (planted / "report.html").read_text()
    assert report.startswith("# Tuning on made.yml\n\nTrial ")
    assert "beats blind on the hold-out half, which was not used for tuning: TTFT p90 -" in report
    for heading in ("Results on the hold-out half", "What was varied", "What was run"):
        assert heading in report
        assert heading in page
    assert "<svg" in page
    assert "://" not in page


def test_the_answer_is_the_same_on_any_number_of_processes(folder, planted):
    """To the byte; where it was stopped before does not matter either."""
    out = folder / "one-process"
    assert tune(folder, *SMALL, "--out", out) == 0
    for name in ("summary.json", "tuned.yaml", "tuned-configmap.yaml", "report.md", "report.html"):
        assert (out / name).read_bytes() == (planted / name).read_bytes()


def test_what_is_best_already_stays(folder, capsys):
    """It says so, exits with 0, and writes no configuration, nor leaves one of an earlier start."""
    out = folder / "good"
    assert tune(folder, *SMALL, "--out", out, config="good.yaml") == 0
    told = capsys.readouterr().out
    assert "Nothing beats good: " in told
    assert "No configuration is written." in told
    assert not [*out.glob("*.yaml")]
    assert not summary_of(out)["beats"]
    (out / "tuned.yaml").write_text("of an earlier start")
    assert tune(folder, *SMALL, "--out", out, config="good.yaml") == 0
    assert "resuming after" in capsys.readouterr().out
    assert not [*out.glob("*.yaml")]


def test_it_goes_on_where_it_was_stopped(folder, planted, capsys):
    """Ctrl-C: 130, the best so far; the same command then repeats no run and gives the same."""
    out = folder / "stopped"
    process = started(
        "tune", folder / "made.yml", "--config", folder / "blind.yaml", "--space",
        folder / "space.toml", *RUN[:2], *SEEDS, "--workers", "2", "--out", out,
    )  # fmt: skip
    runs = out / "runs.jsonl"
    wait_for(process, runs)
    # The first rung of the first batch, the present configuration being in it: one is best.
    while runs.read_bytes().count(b" tuning 0.25 at ") < BATCH:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    kept = runs.read_bytes().splitlines()
    assert errors == (
        f"sim: interrupted, {len(kept) - 1} runs are stored: the same command resumes from there\n"
    )
    assert "Not finished: " in printed
    summary = summary_of(out)
    assert not summary["complete"]
    assert not summary["hold_out"]
    best = policy_source(str(out / "best-so-far.yaml"))
    assert best.hash == summary["best_so_far"]["hash"]
    tried = len(summary["trials"])
    assert f"# Not finished: {tried} configurations tried so far" in best.text
    assert "Not finished" in (out / "report.md").read_text()
    assert tune(folder, *SMALL, "--out", out) == 0
    assert f"resuming after {len(kept) - 1} runs" in capsys.readouterr().out
    assert runs.read_bytes().splitlines()[: len(kept)] == kept
    keys = [json.loads(line)["key"] for line in runs.read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys))
    assert (out / "summary.json").read_bytes() == (planted / "summary.json").read_bytes()
    assert not (out / "best-so-far.yaml").exists()


def test_another_objective_goes_on_from_the_same_runs(folder, planted, capsys):
    """What runs have shown does not depend on what is asked of them."""
    out = folder / "other-objective"
    shutil.copytree(planted, out)
    before = (out / "runs.jsonl").read_bytes()
    assert tune(folder, *SMALL, "--objective", "itl", "--trials", "2", "--out", out) == 0
    assert (out / "runs.jsonl").read_bytes().startswith(before)
    assert "resuming after" in capsys.readouterr().out
    summary = summary_of(out)
    assert summary["objective"] == ["ttft_p90_s", "itl_mean_s"]
    assert len(summary["trials"]) == 2


def test_a_stop_before_anything_is_known_can_be_read(folder):
    """Nothing to compare with has run: no best, and reports that say so."""
    out = folder / "at-once"
    process = started(
        "tune", folder / "made.yml", "--config", folder / "blind.yaml", "--pods", "4", "--workers",
        "1", "--out", out,
    )  # fmt: skip
    runs = out / "runs.jsonl"
    wait_for(process, runs)
    # The head and one run: before, Ctrl-C may find a process that only begins.
    while len(runs.read_bytes().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith("sim: interrupted")
    assert "Not finished: " in printed
    assert summary_of(out)["best_so_far"] is None
    assert not [*out.glob("*.yaml")]
    assert "Not finished: " in (out / "report.html").read_text()


def test_a_terminal_shows_a_bar(folder, planted):
    """And a pipe none."""
    code, printed, shown = on_a_terminal(
        "tune", folder / "made.yml", "--config", folder / "blind.yaml", "--space",
        folder / "space.toml", *SMALL, "--out", planted,
    )  # fmt: skip
    assert code == 0
    assert "beats blind" in printed
    assert re.search(r"tune.*\d+/\d+", shown)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--pods", "5"), "started with pods 4, not 5"),
        (("--seed", "2"), "started with first seed 1, not 2"),
        (("--config", "weighted-scores"), "started with configuration "),
        (("--requests", "200"), "started with requests_max none, not 200"),
    ],
)
def test_a_folder_of_another_tuning_is_refused(folder, planted, change, told, capsys):
    """In one sentence; nothing in it is touched."""
    before = {path.name: path.read_bytes() for path in planted.iterdir()}
    assert tune(folder, *SMALL, *change, "--out", planted) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.endswith("choose another --out or start again with --force\n")
    assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in planted.iterdir()} == before


def test_a_folder_of_another_trace_is_refused(folder, planted, capsys):
    """By its content, whatever it is called."""
    other = folder / "other" / "made.yml"
    other.parent.mkdir()
    other.write_text(WORKLOAD.replace("4500", "4600"))
    arguments = ["--config", folder / "blind.yaml", *SMALL, "--out", planted]
    assert main(["tune", str(other), *map(str, arguments)]) == 1
    assert "started with trace " in capsys.readouterr().err
    (other.parent / "something").write_text("of somebody else")
    arguments[-1] = other.parent
    assert main(["tune", str(other), *map(str, arguments)]) == 1
    assert "is not empty; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 2, "--out DIR is needed"),
        (
            ("--seeds", "2", "--out", "x"),
            2,
            "--seeds is 2; expected at least 3, which confidence intervals need",
        ),
        (("--config", "random", "--out", "x"), 1, "random has no configuration"),
        (("--config", "nowhere.yaml", "--out", "x"), 2, "nowhere.yaml is neither a file nor"),
        (("--space", "nowhere.toml", "--out", "x"), 1, "nowhere.toml: No such file"),
        (
            ("--requests", "39", "--out", "x"),
            1,
            "at least 40 requests, to tune on one half and judge on the other",
        ),
        (("--trials", "0", "--out", "x"), 2, "'0' is not an integer from 1 to"),
        (("--config-map", "Homing", "--out", "x"), 2, "'Homing' is not a name of a ConfigMap"),
        (("--tolerance", "1", "--out", "x"), 2, "'1' is not a share from 0 to below 1"),
        (("--objective", "speed", "--out", "x"), 2, "speed"),
        (("--guard", "e2e_means", "--out", "x"), 2, "did you mean `e2e_mean_s`?"),
        (("--guard", "e2e_mean_s=2", "--out", "x"), 2, "'2' is not a share from 0 to below 1"),
        (("--guard", "none", "--guard", "e2e_mean_s", "--out", "x"), 2, "expected no other"),
        (("--guard", "ttft_p90_s", "--out", "x"), 2, "it is an objective"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder, tmp_path, monkeypatch, arguments, code, told, capsys
):
    """Before anything runs, and without leaving a folder."""
    monkeypatch.chdir(tmp_path)
    try:
        found = main(["tune", str(folder / "made.yml"), *RUN, *arguments])
    except SystemExit as problem:
        found = problem.code
    assert found == code
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_scenario_that_configures_pickers_would_undo_what_is_tried(folder, tmp_path, capsys):
    """The one event that cannot be tuned under."""
    scenario = tmp_path / "scenario.toml"
    (tmp_path / "next.yaml").write_text(DEFAULT_CONFIG)
    scenario.write_text('[[events]]\nkind = "configure"\nat_s = 1\nconfig = "next.yaml"\n')
    assert tune(folder, *SMALL, "--scenario", scenario, "--out", tmp_path / "x") == 2
    assert "scenario.toml configures pickers, which would overwrite" in capsys.readouterr().err
