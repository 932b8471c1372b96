"""`make apiserver`, and what the other tests of this folder find of it; nothing is built here."""

import re
import subprocess
import sys

import pytest

from tests.apiserver import binaries
from tests.chart.rendering import ROOT


def environment(tmp_path, **more):
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path), **more}


def run(**variables):
    return subprocess.run(
        [sys.executable, "-m", "tests.apiserver.binaries"],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
        env=variables,
    )


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o755)
    return path


def test_what_is_missing_is_told_with_both_ways_to_it(tmp_path):
    """It is the reason that skipped tests show."""
    with pytest.raises(binaries.BinariesError) as error:
        binaries.find(environment(tmp_path))
    assert str(error.value) == (
        "no kube-apiserver: set KUBE_APISERVER and ETCD or run `make apiserver`"
    )


def test_what_the_environment_names_comes_first(tmp_path):
    """Each by itself; a name that leads nowhere is an error, not a reason to look elsewhere."""
    there = environment(tmp_path)
    for name in binaries.NAMES:
        program(binaries.cache_folder(there) / name)
    mine = program(tmp_path / "my-etcd")
    found = binaries.find(there | {"ETCD": str(mine)})
    assert found == (binaries.cache_folder(there) / "kube-apiserver", mine)
    with pytest.raises(binaries.BinariesError, match="ETCD names /nowhere, which is no program"):
        binaries.find(there | {"ETCD": "/nowhere"})


def test_without_go_one_sentence_says_so(tmp_path):
    """Exit 2: nothing went wrong, something is missing."""
    done = run(**environment(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"there is no go on PATH: .*KUBE_APISERVER and ETCD.*\n", done.stderr)


def test_what_was_built_is_not_built_again(tmp_path):
    """Without Go either; what is printed can be given to a shell."""
    there = environment(tmp_path)
    folder = binaries.cache_folder(there)
    for name in binaries.NAMES:
        program(folder / name)
    done = run(**there)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"export KUBE_APISERVER={folder}/kube-apiserver",
        f"export ETCD={folder}/etcd",
    ]


def test_all_of_kubernetes_is_of_one_version():
    """Its libraries are numbered v0.x.y where it is v1.x.y; checksums pin what go.mod names."""
    module = (binaries.SOURCES / "go.mod").read_text(encoding="utf-8")
    (version,) = re.findall(r"^\tk8s.io/kubernetes v1\.(\S+)$", module, re.MULTILINE)
    replaced = re.findall(r"^\t(\S+) => (\S+) v0\.(\S+)$", module, re.MULTILINE)
    assert len(replaced) > 30
    assert all(name == by and of == version for name, by, of in replaced)
    sums = (binaries.SOURCES / "go.sum").read_text(encoding="utf-8")
    assert f"k8s.io/kubernetes v1.{version} h1:" in sums
