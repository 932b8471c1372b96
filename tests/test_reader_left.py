"""`epp … | head`, `sim … | head` and `python -m docs.evidence … | head` end as Unix tools do."""

import os
import subprocess
import sys

import pytest

from sim.__main__ import main

CHECK = ("epp", "check-config", "--explain")
COMMANDS = [
    CHECK,
    ("epp", "envoy-config"),
    ("epp", "--help"),
    ("epp", "serve", "--help"),
    ("epp", "--version"),
    ("sim", "--help"),
    ("sim", "trace", "inspect", "{trace}"),
    ("sim", "trace", "inspect", "{trace}", "--json"),
    ("sim", "replay", "{trace}", "--pods=2"),
    ("sim", "compare", "{trace}", "--config=default", "--config=random", "--seeds=2"),
    ("docs.evidence", "check"),
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "short.jsonl"
    assert main(["trace", "generate", "b2b", "--requests=20", "--rate=5", f"--out={path}"]) == 0
    return path


def ended(command, unbuffered=""):
    """(exit code, standard error) of a command whose output nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
            env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": unbuffered},
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_that_left_ends_a_command_without_a_word(command, trace):
    """141 as shells count SIGPIPE; no traceback, no "Exception ignored"."""
    assert ended([part.format(trace=trace) for part in command]) == (141, "")


def test_it_is_the_same_where_every_line_is_written_at_once(trace):
    """As in containers, where Python is told not to buffer."""
    assert ended(CHECK, unbuffered="1") == (141, "")
    assert ended(("sim", "trace", "inspect", str(trace)), unbuffered="1") == (141, "")
    # argparse itself keeps silent about it.
    assert ended(("sim", "--help"), unbuffered="1") == (0, "")


def test_what_is_wrong_is_still_told(tmp_path):
    """Only standard output has nobody; problems have their own stream and their own code."""
    code, errors = ended(("epp", "check-config", str(tmp_path / "none.yaml")))
    assert code == 2
    assert errors.startswith(f"{tmp_path}/none.yaml: cannot be read")
