"""The list of what the image is installed from."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from epp import __version__

ROOT = Path(__file__).parents[2]
TOOL = Path(os.environ.get("RELEASE_TOOLS", ROOT / ".venv-release")) / "bin/cyclonedx-py"


@pytest.fixture(scope="module", params=["runtime", "sim"])
def lock(request):
    return request.param


@pytest.fixture(scope="module")
def make(tmp_path_factory, lock):
    """Runs the command of `make sbom` that reads `lock`; the bytes."""
    if not TOOL.exists():
        pytest.skip(f"no {TOOL}: run `make tools`, or name its folder in RELEASE_TOOLS")
    recipe = re.search(
        r"^sbom:.*?\n(.*?)\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL
    )[1]
    commands = recipe.replace("\\\n", " ").split("$(TOOLS)/bin/cyclonedx-py")[1:]
    (command,) = (each.split() for each in commands if f"lock/{lock}.txt" in each)

    def made():
        file = tmp_path_factory.mktemp("sbom") / "homing.cdx.json"
        subprocess.run(
            [TOOL, *command[:-1], file], cwd=ROOT, check=True, capture_output=True, timeout=50
        )
        return file.read_bytes()

    return made


def locked(lock):
    """Name -> (version, hashes) of the lock file."""
    text = (ROOT / f"lock/{lock}.txt").read_text()
    found = {}
    for pinned in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]:
        name, version = re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!]+)", pinned).groups()
        found[name] = version, set(re.findall(r"sha256:([0-9a-f]{64})", pinned))
    return found


def test_it_lists_what_is_locked_with_its_hashes(make, lock):
    """All of it and nothing else, each found by its package URL."""
    document = json.loads(make())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    component = document["metadata"]["component"]
    assert (component["name"], component["version"]) == ("homing-epp", __version__)
    wanted = locked(lock)
    listed = {}
    for each in document["components"]:
        assert each["purl"] == f"pkg:pypi/{each['name'].lower()}@{each['version']}"
        hashes = {
            told["content"]
            for reference in each["externalReferences"]
            for told in reference.get("hashes", ())
        }
        listed[each["name"]] = each["version"], hashes
    assert listed == wanted
    assert len(listed) > 50


def test_it_is_the_same_each_time(make):
    """No time, no serial number, no order of a run."""
    assert hashlib.sha256(make()).digest() == hashlib.sha256(make()).digest()
