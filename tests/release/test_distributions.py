"""The wheel and the sdist: the same bytes wherever and whenever they are built."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from epp import __version__

ROOT = Path(__file__).parents[2]
COMMITTED_S = int(datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC).timestamp())
BUILD = """\
import os, sys
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
os.umask(int(sys.argv[2], 8))
for builder in (WheelBuilder, SdistBuilder):
    print(next(builder(".").build(directory=sys.argv[1])))
"""


def sources(target):
    """What a clone has of the distribution, copied; new files are built before they are committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
            (target / name).chmod((ROOT / name).stat().st_mode & 0o777)
    return target


def built(tree, folder, *, umask="022", **environment):
    """(wheel, sdist), by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, folder, umask],
        cwd=tree,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(COMMITTED_S)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return [Path(line) for line in done.stdout.split()]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module", params=[".", "rivals"])
def project(request):
    """The folder of a distribution: Homing's own, and that of the rivals."""
    return request.param


@pytest.fixture(scope="module")
def first(tmp_path_factory, project):
    """A tree and what was built of it."""
    folder = tmp_path_factory.mktemp("first")
    tree = sources(folder / "tree")
    return tree, built(tree / project, folder / "dist")


def test_built_twice_they_are_the_same_bytes(first, tmp_path, project):
    """At another place and time, by another user with other habits, in another time zone."""
    _, found = first
    tree = sources(tmp_path / "elsewhere" / "another-name")
    for path in sorted(tree.rglob("*"), reverse=True):
        os.utime(path, (10**9, 10**9))
    others = {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "7", "HOME": "/nowhere"}
    again = built(tree / project, tmp_path / "dist", umask="077", **others)
    assert [path.name for path in again] == [path.name for path in found]
    assert list(map(digest, again)) == list(map(digest, found))


def test_the_sdist_makes_the_same_wheel(first, tmp_path):
    """Who packages from it has what we publish."""
    _, (wheel, sdist) = first
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    again, _ = built(tree, tmp_path / "dist")
    assert digest(again) == digest(wheel)


def test_every_file_is_as_old_as_the_commit(first):
    """`SOURCE_DATE_EPOCH` is obeyed: no clock of a machine is in them."""
    _, (wheel, sdist) = first
    stamps = {entry.date_time for entry in zipfile.ZipFile(wheel).infolist()}
    assert stamps == {tuple(datetime.fromtimestamp(COMMITTED_S, UTC).timetuple()[:6])}
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive} == {COMMITTED_S}
        assert {(member.uid, member.gid, member.uname) for member in archive} == {(0, 0, "")}


def test_they_hold_nothing_of_the_machine(first):
    """No caches, no environments, no byte code, and no path of the tree that they were built in."""
    tree, (wheel, sdist) = first
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    names += zipfile.ZipFile(wheel).namelist()
    unwanted = {".venv", "__pycache__", ".git", ".mypy_cache", "bench-report", "dist"}
    assert not [name for name in names if unwanted & set(name.split("/")[:-1])]
    assert not [name for name in names if name.endswith((".pyc", ".so"))]
    held = zipfile.ZipFile(wheel)
    assert not [name for name in held.namelist() if str(tree).encode() in held.read(name)]


def test_they_are_of_this_version_and_say_what_they_are(first, project):
    _, (wheel, sdist) = first
    name = "homing_epp" if project == "." else "homing_rivals"
    assert wheel.name == f"{name}-{__version__}-py3-none-any.whl"
    assert sdist.name == f"{name}-{__version__}.tar.gz"
    held = zipfile.ZipFile(wheel)
    told = held.read(f"{name}-{__version__}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in told
    assert ("Provides-Extra: otel" in told) == (project == ".")
    assert f"{name}-{__version__}.dist-info/licenses/LICENSE" in held.namelist()
