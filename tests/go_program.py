"""Programs that tests need and that are built from the Go module proxy, whose checksum database
vouches for their source: where one is, and how it comes there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class GoProgramError(Exception):
    """Why it cannot be had: one sentence."""


@dataclass(frozen=True, kw_only=True)
class GoProgram:
    """`target` of make builds it; "" is the target of its name."""

    name: str
    package: str
    version: str
    target: str = ""

    @property
    def variable(self) -> str:
        """What names another one in the environment."""
        return self.name.upper().replace("-", "_")

    def place(self, environment: Mapping[str, str]) -> Path:
        """Where it is built, outside the tree."""
        caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
        folder = f"{self.name}-{self.version}"
        return Path(caches).expanduser() / "homing" / folder / self.name

    def find(self, environment: Mapping[str, str]) -> Path:
        """What the environment names, else what was built. Raises `GoProgramError`."""
        told = environment.get(self.variable)
        path = Path(told).absolute() if told else self.place(environment)
        if not os.access(path, os.X_OK):
            raise GoProgramError(
                f"{self.variable} names {path}, which is no program"
                if told
                else f"no {self.name}: set {self.variable} or run `make {self.target or self.name}`"
            )
        return path

    def build(self, environment: Mapping[str, str]) -> Path:
        """Build it if it is not built yet. Raises `GoProgramError`, `subprocess.CalledProcessError`."""
        path = self.place(environment)
        if not path.exists():
            go = shutil.which("go", path=environment.get("PATH"))
            if go is None:
                raise GoProgramError(f"there is no go on PATH: install it, or set {self.variable}")
            subprocess.run(
                [go, "install", f"{self.package}@{self.version}"],
                env={**environment, "GOBIN": str(path.parent)},
                check=True,
            )
        return path

    def command(self) -> int:
        """Build it, say where it is, and give the exit code."""
        try:
            print(self.build(os.environ))
        except (GoProgramError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 1
        return 0
