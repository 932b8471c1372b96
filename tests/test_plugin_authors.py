"""A stranger follows docs/plugins.md: writes the package, installs it, checks it, runs it live and simulated."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")


def blocks(language):
    return [content for name, content in FENCE.findall(PAGE) if name == language]


def ran(folder, *command, code=0):
    """Standard output of a command of the page, in the folder of the stranger."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True, text=True, timeout=55, check=False, cwd=folder,
        env=dict(os.environ) | {"PYTHONPATH": f"{folder / 'site'}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The package as it is on the page, installed by pip beside Homing."""
    folder = tmp_path_factory.mktemp("stranger")
    classes, tests = [], []
    for block in blocks("python"):
        (tests if "epp.testing" in block else classes).append(block)
    (folder / "homing_near.py").write_text("\n".join(classes), encoding="utf-8")
    (folder / "test_near.py").write_text("\n".join(["from homing_near import *", *tests]))
    project, strategies, pods = blocks("toml")
    # The entry point of the page, and those of its other classes.
    others = ("ShortQueue", "TwoChoices", "UserIndexSettings", "SameUser")
    project += "".join(f'{name} = "homing_near:{name}"\n' for name in others)
    (folder / "pyproject.toml").write_text(f"{project}\n{strategies}")
    (folder / "zones.toml").write_text(pods)
    (document,) = blocks("yaml")
    (folder / "near.yaml").write_text(document)
    ran(
        folder, "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
        "--no-deps", "--no-build-isolation", f"--target={folder / 'site'}", folder,
    )  # fmt: skip
    (folder / "homing_near.py").unlink()
    return folder


def test_the_contract_test_of_the_page_passes(folder):
    """As pytest runs it for a stranger."""
    said = ran(folder, "pytest", "-q", "-p", "no:cacheprovider", "test_near.py")
    assert "1 passed" in said


def test_the_picker_takes_the_configuration(folder):
    """By its own command, which `epp serve` agrees with."""
    said = ran(folder, "epp", "check-config", "near.yaml", "--explain")
    assert "near-scorer" in said
    assert "far = 0.5" in said


def test_the_simulator_runs_it_on_labels_and_headers(folder):
    """Requests go to their zone, with the one configuration that is also live."""
    (line,) = [json.loads(block) for block in blocks("json")]
    lines = [
        line
        | {
            "time_s": number / 5,
            "session": f"user-{number}",
            "headers": {"x-zone": "ab"[number % 2]},
            "body": {"model": "m", "prompt": f"{number} " * 200},
        }
        for number in range(40)
    ]
    (folder / "zones.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    command = next(each for each in blocks("sh") if "sim replay" in each)
    words = next(each.split()[1:] for each in command.splitlines() if each.startswith("sim replay"))
    ran(folder, "sim", *words, "--out", "out")
    decisions = [
        json.loads(each) for each in (folder / "out" / "decisions.jsonl").read_text().splitlines()
    ]
    assert len(decisions) == 40
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["warnings"] == []
    zones = {"pod-0": "a", "pod-1": "a", "pod-2": "b", "pod-3": "b"}
    went = {each["request"]: zones[each["endpoint"]] for each in decisions}
    assert went == {number: "ab"[number % 2] for number in range(40)}
