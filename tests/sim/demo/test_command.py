"""The demo as a user runs it: with a real Envoy, to the end, interrupted, and where it cannot."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from rich.console import Console

from sim.demo import arm as demo_arm
from sim.demo import command as demo
from sim.demo.client import RequestOutcome
from sim.demo.report import SCHEMA, ArmSummary, Summary

MARK = "HOMING_DEMO_TEST"
SHORT = ["--seconds", "1.5", "--turns-max", "2", "--seed", "3"]

needs_envoy = pytest.mark.skipif(
    not demo.runs_here(), reason="the packaged Envoy is Linux x86-64 only"
)


def marked(mark):
    """Command lines of the living processes that inherited `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@contextlib.asynccontextmanager
async def running_demo(*arguments, cwd):
    """`python -m sim.demo` in a session of its own; (process, mark of all it starts)."""
    mark = uuid.uuid4().hex
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sim.demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=cwd,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(Path(demo.__file__).parents[2])},
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_make_runs_a_module_that_does_something():
    """The one that the Makefile names, as a page names it for running the same again."""
    root = Path(demo.__file__).parents[2]
    recipe = (root / "Makefile").read_text()
    module = re.search(r"^demo:.*\n\t@\$\(BIN\)/python (-m \S+)$", recipe, re.MULTILINE)[1]
    done = subprocess.run(
        [sys.executable, *module.split(), "--help"], capture_output=True, text=True, cwd=root,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"usage: python {module} ")
    told = dict(demo._conditions(demo._parse([]), ()))
    assert told["Repeat with"] == f"python {module} --seed 1"


def test_the_figures_of_the_table_stand_under_each_other():
    """To the right, as numbers do."""
    counts = (({"p50": 224.0, "p90": 1669.0}, 0.583), ({"p50": 23.0, "p90": 80.0}, 0.089))
    arms = {
        name: ArmSummary(
            requests=4, errors=0, ttft_ms=ttft_ms, prefix_hit_rate=rate, requests_per_pod=[2, 2]
        )
        for name, (ttft_ms, rate) in zip(("round_robin", "homing"), counts, strict=True)
    }
    console = Console(record=True, width=100)
    console.print(demo._table(Summary(schema=SCHEMA, seed=1, arms=arms)))
    rows = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert [row.split("│")[1:-2] for row in rows] == [
        [" Round robin ", "   224 ms ", " 1,669 ms ", "       58.3% ", "            2 2 "],
        [" Homing      ", "    23 ms ", "    80 ms ", "        8.9% ", "            2 2 "],
    ]


@needs_envoy
@pytest.mark.envoy
async def test_a_short_run_writes_both_arms(tmp_path):
    """What is done and its seed first, then both arms; the files are there, the requests add up, nothing is left."""
    async with running_demo(*SHORT, cwd=tmp_path) as (process, mark):
        said, _ = await process.communicate()
        text = said.decode()
        assert process.returncode == 0, text
        first = " ".join(text.partition("Round")[0].split())
        assert first.startswith("The demo sends the same ")
        assert "seed 3." in first
        assert not marked(mark)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "report.html",
        "summary.json",
    ]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert (summary["schema"], summary["seed"]) == (1, 3)
    arms = summary["arms"]
    assert list(arms) == ["round_robin", "homing"]
    for arm in arms.values():
        assert arm["errors"] == 0
        assert len(arm["requests_per_pod"]) == 4
        assert sum(arm["requests_per_pod"]) == arm["requests"] > 0
        assert 0 < arm["ttft_ms"]["p50"] <= arm["ttft_ms"]["p90"]
    assert arms["round_robin"]["requests"] == arms["homing"]["requests"]
    in_turn = arms["round_robin"]["requests_per_pod"]
    assert max(in_turn) - min(in_turn) <= 1
    assert arms["homing"]["prefix_hit_rate"] > arms["round_robin"]["prefix_hit_rate"]


@needs_envoy
@pytest.mark.envoy
@pytest.mark.parametrize("when", ["sim serve", "envoy --config-path"])
async def test_an_interrupt_stops_everything(when, tmp_path):
    """Ctrl-C while the pods start, or while requests run: exit 130, no process left, no files."""
    async with running_demo(cwd=tmp_path) as (process, mark):
        while not any(when in line for line in marked(mark)):
            assert process.returncode is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, _ = await process.communicate()
        assert process.returncode == 130, said.decode()
        assert "Traceback" not in said.decode()
        assert not marked(mark)
    assert not (tmp_path / "demo").exists()


def test_elsewhere_it_says_what_it_needs(monkeypatch, capsys):
    """On another platform: one sentence, exit 2, nothing started."""
    monkeypatch.setattr(demo.platform, "machine", lambda: "aarch64")
    assert demo.main([]) == 2
    assert "Linux x86-64" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--turns-max", "1"], ["--nonsense"]])
def test_a_wrong_command_line_exits_2(arguments):
    """Usage errors are told before anything starts."""
    with pytest.raises(SystemExit) as exit_info:
        demo.main(arguments)
    assert exit_info.value.code == 2


async def test_a_program_that_ends_is_an_error_with_its_last_words(tmp_path):
    """What a program said last is in the sentence that ends the demo."""
    command = [sys.executable, "-c", "import sys; sys.exit('no configuration')"]
    async with demo_arm.Child.running("picker", command, tmp_path / "log") as child:
        problem = await child.ended()
    assert str(problem) == "picker ended with code 1: no configuration"


async def test_a_program_that_ignores_the_signal_is_killed_with_its_children(tmp_path, monkeypatch):
    """A group that does not stop when asked is gone anyway."""
    monkeypatch.setattr(demo_arm, "_STOP_S_MAX", 0.2)
    script = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    command = [sys.executable, "-c", script]
    async with demo_arm.Child.running(
        "stubborn", command, tmp_path / "log", announces=True
    ) as child:
        assert await child.announcement() == b"ready\n"
        # A process that just started has no readable environment for a moment.
        while len([line for line in marked(mark) if "-c" in line]) < 2:
            await asyncio.sleep(0.01)
    while marked(mark):
        await asyncio.sleep(0.01)


async def test_a_failed_request_is_an_error(capsys):
    """The verdict is 1 and names the first reason."""
    outcome = RequestOutcome(conversation=0, turn=0, sent_at_s=0.0, error="status 503: full")
    result = demo_arm.ArmResult(outcomes=[outcome], requests_per_pod=[0])
    assert demo._verdict({demo_arm.HOMING: result}, 1, Console()) == 1
    assert "status 503: full" in capsys.readouterr().out


async def test_a_request_that_no_pod_counted_is_an_error(capsys):
    """What the client sent and what the pods served must agree."""
    outcome = RequestOutcome(conversation=0, turn=0, sent_at_s=0.0)
    result = demo_arm.ArmResult(outcomes=[outcome], requests_per_pod=[0])
    assert demo._verdict({demo_arm.HOMING: result}, 1, Console()) == 1
    assert "counted by the pods 0" in capsys.readouterr().out
