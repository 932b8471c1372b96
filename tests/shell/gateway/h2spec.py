"""h2spec: where it is, and `make h2spec`, which builds it.

It is in no registry of Python packages, but its source is in the Go module proxy, whose checksum
database vouches for it. What it needs beside that is taken as its authors left it: it pins nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VERSION: Final = "v2.2.1+incompatible"
"""The newest that the proxy has."""
VARIABLE: Final = "H2SPEC"


class H2specError(Exception):
    """Why it cannot be had: one sentence."""


def place(environment: Mapping[str, str]) -> Path:
    """Where it is built, outside the tree."""
    caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
    return Path(caches).expanduser() / "homing" / f"h2spec-{VERSION}" / "h2spec"


def find(environment: Mapping[str, str]) -> Path:
    """What the environment names, else what was built. Raises `H2specError`."""
    told = environment.get(VARIABLE)
    path = Path(told).absolute() if told else place(environment)
    if not os.access(path, os.X_OK):
        raise H2specError(
            f"{VARIABLE} names {path}, which is no program"
            if told
            else f"no h2spec: set {VARIABLE} or run `make h2spec`"
        )
    return path


def build(environment: Mapping[str, str]) -> Path:
    """Build it if it is not built yet. Raises `H2specError`, `subprocess.CalledProcessError`."""
    path = place(environment)
    if not path.exists():
        go = shutil.which("go", path=environment.get("PATH"))
        if go is None:
            raise H2specError(f"there is no go on PATH: install it, or set {VARIABLE}")
        subprocess.run(
            [go, "install", f"github.com/summerwind/h2spec/cmd/h2spec@{VERSION}"],
            env={**environment, "GOBIN": str(path.parent)},
            check=True,
        )
    return path


def main() -> int:
    try:
        print(build(os.environ))
    except (H2specError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"h2spec: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
