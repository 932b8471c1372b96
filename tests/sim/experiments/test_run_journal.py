"""Runs on disk: what was written is there again, and nothing passes for what it is not."""

import subprocess
import sys

import pytest

from sim.experiments.run_journal import RunJournal
from sim.measurement.summaries import RunSummary
from sim.output import OutputError
from tests.sim.made import filled

ABOUT = {"trace": "abc", "pods": "4"}


def told(hit_rate):
    traffic = {"generated": True}
    return filled(
        RunSummary,
        bad_lines=0,
        requests_per_s=None,
        traffic=traffic,
        hit_rate=hit_rate,
        queue_s={"mean": 1.0},
    )


@pytest.fixture
def path(tmp_path):
    """A journal with two runs."""
    path = tmp_path / "runs.jsonl"
    with RunJournal(path, ABOUT) as journal:
        assert len(journal) == 0
        journal.add("first", told(0.25))
        assert journal.add("second", told(None)) == journal.get("second")
    return path


def opened(path, about=ABOUT):
    with RunJournal(path, about) as journal:
        return {key: journal.get(key) for key in ("first", "second", "third")}


def test_what_was_written_is_there_again(path):
    """To the digit, without what nobody asks for later."""
    found = opened(path)
    assert found["first"].hit_rate == 0.25
    assert found["second"].hit_rate is None
    assert found["third"] is None
    assert not hasattr(found["first"], "queue_s")


@pytest.mark.parametrize("left", [b'{"key":"third","ru', b"\xff", b'{"key":"third","run":{}}'])
def test_half_a_line_is_dropped(path, left):
    """As a process leaves it that is killed while it writes; then it goes on behind the whole ones."""
    whole = path.read_bytes()
    path.write_bytes(whole + left)
    with RunJournal(path, ABOUT) as journal:
        assert len(journal) == 2
        journal.add("third", told(0.5))
    assert path.read_bytes().startswith(whole)
    assert opened(path)["third"].hit_rate == 0.5


@pytest.mark.parametrize("content", [b"", b'{"tra'])
def test_one_that_was_killed_before_it_said_anything_begins_anew(tmp_path, content):
    """There is nothing to lose."""
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content)
    opened(path)
    with pytest.raises(OutputError):
        opened(path, {"trace": "other"})


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"trace": "other", "pods": "4"}, "trace abc, not other"),
        ({"trace": "abc", "pods": "5"}, "pods 4, not 5"),
        ({"trace": "abc"}, "pods 4, not none"),
        ({"trace": "abc", "pods": "4", "speed": "2"}, "speed none, not 2"),
    ],
)
def test_runs_of_something_else_are_refused(path, about, said):
    """In one sentence that names the first difference; what is there stays."""
    before = path.read_bytes()
    with pytest.raises(OutputError) as problem:
        opened(path, about)
    assert str(problem.value) == (
        f"{path.parent} was started with {said}; choose another --out or start again with --force"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "content"),
    [(1, b"[]"), (1, b'{"trace": 1}'), (3, b"{}"), (3, b'{"key":"a","run":{}}'), (2, b"\xff\xff")],
)
def test_a_damaged_file_is_named_and_not_guessed_at(path, line, content):
    """Whoever changes it is told where; a figure that is missing would be one that is wrong."""
    lines = path.read_bytes().splitlines()
    lines[line - 1] = content
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(OutputError, match=rf"runs.jsonl:{line} is not a completed run"):
        opened(path)


def test_one_process_at_a_time(path):
    """A second one would repeat the runs of the first and write between its lines."""
    with RunJournal(path, ABOUT):
        code = (
            "import sys; from pathlib import Path; from sim.experiments.run_journal import *\n"
            f"try: RunJournal(Path({str(path)!r}), {ABOUT!r})\n"
            "except OutputError as problem: print(problem)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{path} is in use by another process\n"
    opened(path)
