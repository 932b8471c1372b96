"""`sim leaderboard`: what it runs, keeps, leaves out and says."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sim.cluster.policies import BASELINES, built_in
from sim.commands import run
from sim.experiments.jobs import Crew, JobError
from sim.experiments.leaderboard import command
from sim.experiments.leaderboard.cases import CASES
from sim.experiments.leaderboard.cell import run_cell
from sim.experiments.leaderboard.command import Board, cells_of
from tests.sim.experiments.leaderboard.test_cell import cell

ROOT = Path(__file__).parents[4]
SMALL = ("--cases=pickers-1,zero-reuse", "--strategies=default,random", "--requests=30")


def board(*arguments):
    return run(["leaderboard", *SMALL, "--workers=1", *map(str, arguments)])


@pytest.fixture
def ran(monkeypatch):
    """The names of the cells that are run, in this process."""
    names = []

    class Here:
        def outcomes(self, task, jobs):
            for number, job in enumerate(jobs):
                names.append(job.name)
                try:
                    yield number, task(job)
                except JobError as problem:
                    yield number, problem

        def stop(self):
            raise AssertionError

    @contextlib.contextmanager
    def here(named, size):
        yield Here()

    monkeypatch.setattr(command, "workers_at", here)
    return names


def test_a_full_board_runs_the_leading_strategies_unless_others_are_named(ran):
    """Without names a small board has all strategies, and a full board those that take an hour."""
    leading = [name for name in built_in() if name in command.LEADING]
    assert len(leading) == len(command.LEADING)
    for arguments, expected in (
        (("--size=full",), leading),
        (("--size=full", "--strategies=all"), [name for name in built_in() if name != "default"]),
        ((), [name for name in built_in() if name != "default"]),
        (("--size=full", "--strategies=random,homing"), ["random", "homing"]),
    ):
        ran.clear()
        wanted = ("--cases=pickers-1", "--requests=2", "--seeds=1", "--workers=1")
        assert run(["leaderboard", *wanted, *arguments]) == 0
        assert sorted(name.split(", ")[1] for name in ran) == sorted(expected)


def summary_in(folder):
    return json.loads((folder / "summary.json").read_bytes())


def test_every_strategy_meets_every_case_and_the_results_are_told(ran, tmp_path, capsys):
    """On the screen, for people and for programs."""
    out = tmp_path / "out"
    assert board("--seeds=3", "--out", out) == 0
    assert len(ran) == 2 * 2 * 3
    told = summary_in(out)
    assert told["complete"]
    assert [(row["case"], row["strategy"], row["seeds"]) for row in told["rows"]] == [
        ("pickers-1", "default", 3), ("pickers-1", "random", 3),
        ("zero-reuse", "default", 3), ("zero-reuse", "random", 3),
    ]  # fmt: skip
    assert {total["strategy"] for total in told["totals"]} == {"default", "random"}
    printed = capsys.readouterr().out
    assert "2 cases, 2 strategies, seeds 1 to 3: 12 cells" in printed
    assert "times the best" in printed
    report = (out / "report.md").read_text()
    assert "### pickers-1" in report
    assert re.search(r"\| default \|.* ± .*\|", report)
    assert "<table" in (out / "report.html").read_text()


def test_what_has_been_run_is_not_run_again(ran, tmp_path):
    """A seed, a strategy or a case more is run alone; the results are the same to the byte."""
    out = tmp_path / "out"
    assert board("--seeds=2", "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.glob("*.*")}
    ran.clear()
    assert board("--seeds=2", "--out", out) == 0
    assert ran == []
    assert {path.name: path.read_bytes() for path in out.glob("*.*")} == before
    assert board("--seeds=3", "--out", out) == 0
    assert sorted(ran) == sorted(
        f"{case}, {name}, seed 3"
        for case in ("pickers-1", "zero-reuse")
        for name in ("default", "random")
    )
    ran.clear()
    assert board("--seeds=2", "--requests=31", "--out", out) == 0
    assert len(ran) == 8, "these are other inputs"
    ran.clear()
    assert board("--seeds=2", "--requests=31", "--out", out, "--force") == 0
    assert len(ran) == 8


def test_a_cell_that_fails_is_named_and_counted_and_the_rest_goes_on(
    ran, tmp_path, monkeypatch, capsys
):
    """Exit 1 at the end; what failed is run again the next time."""
    out = tmp_path / "out"

    def failing(given):
        if given.policy.name == "random" and given.case.name == "zero-reuse" and given.seed == 2:
            raise JobError("it cannot be done")
        return run_cell(given)

    monkeypatch.setattr(command, "run_cell", failing)
    assert board("--seeds=3", "--out", out) == 1
    errors = capsys.readouterr().err
    assert errors == (
        "sim: zero-reuse, random, seed 2: it cannot be done\nsim: 1 of 12 cells failed\n"
    )
    told = summary_in(out)
    assert not told["complete"]
    assert told["failed"] == [
        {"case": "zero-reuse", "strategy": "random", "seed": 2, "problem": "it cannot be done"}
    ]
    assert [row["strategy"] for row in told["rows"]] == ["default", "random", "default"]
    assert "it cannot be done" in (out / "report.md").read_text()
    monkeypatch.setattr(command, "run_cell", run_cell)
    ran.clear()
    assert board("--seeds=3", "--out", out) == 0
    assert ran == ["zero-reuse, random, seed 2"]
    assert summary_in(out)["failed"] == []


def dying(given):
    if given.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_cell(given)


def test_a_process_that_dies_of_a_cell_is_replaced():
    """For want of memory say: that cell failed, the others did not."""
    cells = [cell(seed=seed) for seed in (1, 2, 3, 4)]
    with Crew(1) as crew:
        found = dict(crew.outcomes(dying, cells))
    assert isinstance(found[1], JobError)
    assert "has died" in str(found[1])
    assert [found[at].inputs for at in (0, 2, 3)] == [cells[at].inputs for at in (0, 2, 3)]


def test_a_trace_of_ones_own_is_one_more_case(ran, tmp_path, capsys):
    """It is replayed as it is, then resampled; its name must be free."""
    path = tmp_path / "mine.jsonl"
    arguments = ["trace", "generate", "shared-prefix", "--rate=20", "--requests=40"]
    assert run([*arguments, f"--out={path}"]) == 0
    out = tmp_path / "out"
    assert board("--seeds=1", "--trace", path, "--out", out) == 0
    assert {row["case"] for row in summary_in(out)["rows"]} == {"pickers-1", "zero-reuse", "mine"}
    taken = path.rename(tmp_path / "zero-reuse.jsonl")
    capsys.readouterr()
    assert board("--trace", taken) == 1
    assert "there is a case zero-reuse already" in capsys.readouterr().err
    assert board("--trace", tmp_path / "absent.jsonl") == 1
    assert (
        capsys.readouterr().err == f"sim: {tmp_path / 'absent.jsonl'}: No such file or directory\n"
    )


def test_with_a_trace_only_the_cases_that_are_named_are_run(ran, tmp_path, monkeypatch):
    """Or all of them, if that is said."""
    path = tmp_path / "mine.jsonl"
    arguments = ["trace", "generate", "shared-prefix", "--rate=20", "--requests=40"]
    assert run([*arguments, f"--out={path}"]) == 0
    alone = ["leaderboard", "--strategies=default", "--seeds=1", "--trace", str(path)]
    assert run([*alone, f"--out={tmp_path / 'alone'}"]) == 0
    assert [row["case"] for row in summary_in(tmp_path / "alone")["rows"]] == ["mine"]
    monkeypatch.setattr(command, "CASES", {"pickers-1": CASES["pickers-1"]})
    assert run([*alone, "--cases=all", "--requests=30", f"--out={tmp_path / 'both'}"]) == 0
    assert [row["case"] for row in summary_in(tmp_path / "both")["rows"]] == ["pickers-1", "mine"]


def test_what_there_is_not_is_refused(capsys):
    """With what there is."""
    assert run(["leaderboard", "--cases=nowhere"]) == 1
    assert "expected some of mooncake-conversation," in capsys.readouterr().err
    assert run(["leaderboard", "--strategies=nothing"]) == 2
    assert "neither a file nor one of default," in capsys.readouterr().err
    assert board("--executor=spark://host:1") == 1
    assert "expected local, dask://HOST:PORT or ray://HOST:PORT" in capsys.readouterr().err


def test_the_list_has_everything_that_can_be_run(capsys):
    """Strategies and baselines as the tables have them, cases with what they are."""
    assert run(["leaderboard", "--list"]) == 0
    words = capsys.readouterr().out.split()
    assert set(words) >= {*BASELINES, *built_in(), *CASES}


def test_a_board_goes_seed_by_seed_through_each_case():
    """So that an interrupted one has whole rows of the cases that it reached."""
    cells = cells_of(
        [CASES["pickers-1"], CASES["zero-reuse"]],
        [cell(policy=name).policy for name in ("default", "random")],
        range(1, 3),
        30,
    )
    assert [one.name for one in cells[:4]] == [
        f"pickers-1, {name}, seed {seed}" for seed in (1, 2) for name in ("default", "random")
    ]
    partly = Board(cells, None)
    assert partly.summary().rows == []
    assert len({one.inputs for one in cells}) == len(cells)


def test_an_interrupted_board_keeps_what_is_done_and_goes_on(tmp_path):
    """Ctrl-C: 130, one sentence, readable results; the next run takes them from the folder."""
    out = tmp_path / "out"
    arguments = ["--cases=pickers-1,b2b,rag", "--strategies=default,random", "--requests=60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sim", "leaderboard", *arguments, "--workers=1", f"--out={out}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=dict(os.environ) | {"PYTHONPATH": ":".join([str(ROOT), *sys.path])},
    )  # fmt: skip
    while not list(out.glob("cells/*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    done = len(list(out.glob("cells/*.json")))
    assert errors == f"sim: interrupted, {done} of 18 cells are done\n"
    assert 1 <= done < 18
    assert not summary_in(out)["complete"]
    kept = {path: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    assert run(["leaderboard", *arguments, "--workers=1", f"--out={out}"]) == 0
    assert summary_in(out)["complete"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.filterwarnings("default")
def test_a_dask_cluster_gives_the_same_results_to_the_digit(scheduler, tmp_path):
    """Two worker processes against this machine's: every byte of every file."""
    here, there = tmp_path / "here", tmp_path / "there"
    assert board("--seeds=2", "--out", here) == 0
    assert board("--seeds=2", "--executor", f"dask://{scheduler}", "--out", there) == 0
    names = sorted(str(path.relative_to(here)) for path in here.rglob("*.*"))
    assert len(names) == 8 + 3
    assert names == sorted(str(path.relative_to(there)) for path in there.rglob("*.*"))
    for name in names:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
