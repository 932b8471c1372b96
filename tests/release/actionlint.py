"""actionlint: where it is, and `make actionlint`, which builds it.

It is in no registry of Python packages as a binary, but its source is in the Go module proxy, whose
checksum database vouches for it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VERSION: Final = "v1.7.7"
VARIABLE: Final = "ACTIONLINT"


class ActionlintError(Exception):
    """Why it cannot be had: one sentence."""


def place(environment: Mapping[str, str]) -> Path:
    """Where it is built, outside the tree."""
    caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
    return Path(caches).expanduser() / "homing" / f"actionlint-{VERSION}" / "actionlint"


def find(environment: Mapping[str, str]) -> Path:
    """What the environment names, else what was built. Raises `ActionlintError`."""
    told = environment.get(VARIABLE)
    path = Path(told).absolute() if told else place(environment)
    if not os.access(path, os.X_OK):
        raise ActionlintError(
            f"{VARIABLE} names {path}, which is no program"
            if told
            else f"no actionlint: set {VARIABLE} or run `make actionlint`"
        )
    return path


def build(environment: Mapping[str, str]) -> Path:
    """Build it if it is not built yet. Raises `ActionlintError`, `subprocess.CalledProcessError`."""
    path = place(environment)
    if not path.exists():
        go = shutil.which("go", path=environment.get("PATH"))
        if go is None:
            raise ActionlintError(f"there is no go on PATH: install it, or set {VARIABLE}")
        subprocess.run(
            [go, "install", f"github.com/rhysd/actionlint/cmd/actionlint@{VERSION}"],
            env={**environment, "GOBIN": str(path.parent)},
            check=True,
        )
    return path


def main() -> int:
    try:
        print(build(os.environ))
    except (ActionlintError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"actionlint: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
