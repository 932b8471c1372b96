import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from epp import __version__
from sim.__main__ import main

FREE = ["serve", "--port=0"]


def refused(arguments, capsys):
    """The one line on standard error of a command line that is wrong."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    shown, errors = capsys.readouterr()
    assert shown == ""
    (line,) = errors.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["nonsense"], "'nonsense'"),
        (["serve", "--pods=0"], "'0' is not an integer from 1 to 1000"),
        (["serve", "--port=x"], "'x' is not an integer from 0 to 65535"),
        (["serve", "--speed=0"], "'0' is not a number above 0"),
        (["serve", "--nonsense"], "--nonsense"),
        (["replay", "x.jsonl", "--pods"], "sim replay: --pods: expected a value, got none"),
        (["replay", "x.jsonl", "y.jsonl"], "sim: expected nothing more, got y.jsonl"),
        (["trace", "generate"], "sim trace generate: KIND and --out are missing;"),
        (["replay", "x.jsonl", "--speed", "0"], "is not a number from 0.000001 to 1,000,000,000"),
        (["replay"], "sim replay: TRACE is missing; see `sim replay --help`"),
        (["replay", "x.jsonl", "--seed", "x"], "--seed: expected a whole number, got 'x'"),
        (
            ["replay", "x.jsonl", "--through", "air"],
            "--through: expected hashes or bytes, got 'air'",
        ),
        (
            ["tune", "x.jsonl", "--objective", "itll"],
            "sim tune: --objective: expected throughput or itl, got 'itll', did you mean `itl`?",
        ),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(arguments, said, capsys):
    """Without the usage, under which nobody would find it; exit code 2."""
    assert said in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replya", "x.jsonl"], "did you mean `replay`?"),
        (["replay", "--seeed", "3", "x.jsonl"], "unknown flag --seeed, did you mean `--seed`?"),
        (["replay", "--seeed=3"], "unknown flag --seeed, did you mean `--seed`?"),
        (["trace", "inspct", "x.jsonl"], "did you mean `inspect`?"),
        (["trace", "generate", "mult-turn", "--out=x"], "did you mean `multi-turn`?"),
        (["--versoin", "serve"], "unknown flag --versoin, did you mean `--version`?"),
        (["trace", "--jsn", "inspect"], "unknown flag --jsn"),
        (
            ["size", "x.jsonl", "--ttft-p90=0.3"],
            "unknown flag --ttft-p90, write it as `--slo ttft-p90=0.3`",
        ),
        (
            ["size", "x.jsonl", "--itl_p99", "0.1", "--out", "y"],
            "unknown flag --itl_p99, write it as `--slo itl-p99=0.1`",
        ),
        (["size", "--goodput"], "unknown flag --goodput, write it as `--slo goodput=SHARE`"),
        (["replay", "--ttft-p90=0.3"], "unknown flag --ttft-p90"),
    ],
)
def test_what_is_misspelt_is_told_with_the_nearest(arguments, said, capsys):
    """Flags, commands and values out of a list."""
    assert refused(arguments, capsys).endswith(said)


def test_what_looks_like_a_flag_after_two_dashes_is_none(capsys):
    """As everywhere."""
    assert main(["trace", "inspect", "--", "--none.jsonl"]) == 1
    assert "--none.jsonl: No such file" in capsys.readouterr().err


def test_the_version_is_one_line(capsys):
    """That of the package, exit code 0."""
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr() == (f"sim {__version__}\n", "")


def test_help_names_every_command(capsys):
    """On standard output, exit code 0."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    shown, errors = capsys.readouterr()
    assert "serve" in shown
    assert errors == ""


@pytest.mark.parametrize(
    ("problem", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "sim: interrupted\n"),
        (
            ModuleNotFoundError(name="pyarrow"),
            1,
            "sim: pyarrow is missing; install homing-epp[sim]\n",
        ),
    ],
)
def test_what_ends_a_command_anywhere_is_no_traceback(problem, code, told, monkeypatch, capsys):
    """Ctrl-C where nothing waits for it, and an installation without the extra."""

    def ends(_):
        raise problem

    monkeypatch.setattr("sim.commands.run", ends)
    assert main(["validate"]) == code
    assert capsys.readouterr().err == told


def test_no_command_but_serve_pays_for_what_serves():
    """HTTP, its metrics and logs take half a second to import: more than a tenth of a replay."""
    serving = {"aiohttp", "prometheus_client", "structlog", "sim.pods.serving"}
    told = subprocess.run(
        [sys.executable, "-c", "import sim.commands, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    imported = set(told.stdout.split())
    assert "sim.experiments.replay" in imported
    assert not serving & imported


def ended(*arguments):
    """A process of its own, because it sets up logs and signals: (code, standard error)."""
    done = subprocess.run(
        [sys.executable, "-m", "sim", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_what_cannot_be_done_is_one_sentence_and_1(tmp_path):
    """A port that is taken, an endpoints file that cannot be written; no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"sim: Cannot listen on 127.0.0.1 port {port}: Address already in use.\n"
        assert ended("serve", f"--port={port}") == (1, said)
    out = tmp_path / "none" / "endpoints.json"
    code, errors = ended(*FREE, f"--endpoints-out={out}")
    assert code == 1
    assert errors.splitlines()[-1] == f"sim: {out} cannot be written: No such file or directory."
    assert "Traceback" not in errors


def test_pods_are_announced_and_end_with_a_signal(tmp_path):
    """The announcement and the endpoints file name the same pods."""
    out = tmp_path / "endpoints.json"
    with subprocess.Popen(
        [sys.executable, "-m", "sim", *FREE, "--pods=2", "--json", f"--endpoints-out={out}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as process:
        pods = json.loads(process.stdout.readline())["pods"]
        written = json.loads(out.read_text())["endpoints"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    assert [pod["port"] for pod in pods] == [endpoint["port"] for endpoint in written]
    assert len(pods) == 2
