"""`sim replay CAPTURE --check-decisions`: printed, written, refused."""

import json

import pytest

from sim.__main__ import main
from tests.core.journal.traffic import document
from tests.journal.test_reenacting import write


def sim(*arguments):
    return main(["replay", *map(str, arguments), "--check-decisions"])


def test_the_decisions_of_a_live_picker_are_the_same_again(tmp_path, capsys):
    """On the screen and in the folder."""
    (tmp_path / "capture").mkdir()
    write(tmp_path / "capture", 120)
    assert sim(tmp_path / "capture", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert (
        "decided by the configuration in force\n120 decisions, 120 repeated (100.00%)\n" in printed
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert (summary["schema"], summary["decisions"], summary["changed"]) == (1, 120, 0)
    assert "120 repeated" in (tmp_path / "out" / "report.md").read_text()


def test_another_configuration_decides_otherwise(tmp_path, capsys):
    """Why, and the first of them."""
    write(tmp_path, 120)
    (tmp_path / "new.yaml").write_text(document(weight=0))
    assert sim(tmp_path, "--config", tmp_path / "new.yaml") == 0
    printed = capsys.readouterr().out
    assert "differ, the same was known" in printed
    assert printed.count("  request ") == 10


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["capture", "--config", "round-robin"], "is not a configuration"),
        (["file"], "Expected the directory of a live capture"),
        (["empty"], "expected files of `epp serve --capture`"),
        (["capture", "--config", "nothing.yaml"], "neither a file nor"),
    ],
)
def test_what_cannot_be_checked_is_told(given, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("capture", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("{}")
    write(tmp_path / "capture", 20)
    assert sim(*given) != 0
    assert problem in capsys.readouterr().err


def test_the_capture_is_a_trace_too(tmp_path, capsys):
    """Replayed over simulated pods, by whatever configuration."""
    (tmp_path / "capture").mkdir()
    write(tmp_path / "capture", 60)
    arguments = ["replay", str(tmp_path / "capture"), "--pods", "2", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["requests"]["sent"] == 60
