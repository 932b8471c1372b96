"""Kubernetes and etcd: where they are, and `make apiserver`, which builds what its tests need.

They are in no registry of Python packages, but their sources are in the Go module proxy; `go/`
beside this file is a module of their commands that pins them. The build takes minutes and
gigabytes of cache, so it is asked for, and done once for each pair of versions. `make cluster`
builds the rest (`NODE_NAMES`) to the same place.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SOURCES: Final = Path(__file__).with_name("go")
NAMES: Final = ("kube-apiserver", "etcd")
NODE_NAMES: Final = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
"""Commands that turn an API server into a cluster of one node."""
VARIABLES: Final = ("KUBE_APISERVER", "ETCD")
NICENESS: Final = 19


class BinariesError(Exception):
    """The reason, in one sentence, why the binaries cannot be had."""


class Binaries(NamedTuple):
    """Paths of the two commands that the tests run."""

    kube_apiserver: Path
    etcd: Path


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of built commands, outside the tree, one for each pair of versions."""
    caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
    kubernetes, etcd = _pinned("k8s.io/kubernetes"), _pinned("go.etcd.io/etcd/server/v3")
    return Path(caches).expanduser() / "homing" / f"kubernetes-{kubernetes}-etcd-{etcd}"


def find(environment: Mapping[str, str]) -> Binaries:
    """Return the commands that the environment names, or else those that were built.

    Raises `BinariesError` if one of them is not an executable file.
    """
    built = cache_folder(environment)
    found = []
    for name, variable in zip(NAMES, VARIABLES, strict=True):
        told = environment.get(variable)
        path = Path(told).absolute() if told else built / name
        if not os.access(path, os.X_OK):
            raise BinariesError(
                f"{variable} names {path}, which is no program"
                if told
                else f"no {name}: set {' and '.join(VARIABLES)} or run `make apiserver`"
            )
        found.append(path)
    return Binaries(*found)


def build(environment: Mapping[str, str], names: Sequence[str] = NAMES) -> Path:
    """Build the commands in `names` that are missing and return the folder of all of them.

    Raises `BinariesError`, `subprocess.CalledProcessError`.
    """
    folder = cache_folder(environment)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        go = shutil.which("go", path=environment.get("PATH"))
        if go is None:
            raise BinariesError(
                "there is no go on PATH: install Go 1.25 or newer, or set "
                f"{' and '.join(VARIABLES)} to binaries of yours"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _compile(go, missing, Path(scratch), environment)
            for name in missing:
                Path(scratch, name).rename(folder / name)
    return folder


def _compile(go: str, names: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    version = _pinned("k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".", 2)
    # Clients look at the version; a server that was built without one says v0.0.0.
    stamp = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    linked = [f"-X k8s.io/component-base/version.{name}={at}" for name, at in stamp.items()]
    # Two compilers at a time: each may take a gigabyte.
    command = [go, "build", "-p", "2", "-trimpath", "-ldflags", " ".join(["-s", "-w", *linked])]
    command += ["-o", f"{folder}/", *(f"./{name}" for name in names)]
    subprocess.run(
        command,
        cwd=SOURCES,
        env={**environment, "CGO_ENABLED": "0"},
        check=True,
    )


def _pinned(module: str) -> str:
    """Return the version of `module` that go.mod asks for."""
    text = (SOURCES / "go.mod").read_text(encoding="utf-8")
    (version,) = set(re.findall(rf"^\t{re.escape(module)} (v\S+)", text, re.MULTILINE))
    return str(version)


def main() -> int:
    """Carry out `make apiserver`; return 2 if there is no Go, and 1 if the build failed."""
    os.nice(NICENESS)
    try:
        folder = build(os.environ)
    except BinariesError as error:
        print(error, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"go build failed with {error.returncode}, see above", file=sys.stderr)
        return 1
    for variable, name in zip(VARIABLES, NAMES, strict=True):
        print(f"export {variable}={shlex.quote(str(folder / name))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
