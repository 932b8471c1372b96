"""Programs that tests need: their places, and how they are built from the Go module proxy, whose
checksum database vouches for their source.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class GoProgramError(Exception):
    """The reason, in one sentence, why a program cannot be had."""


@dataclass(frozen=True, kw_only=True)
class GoProgram:
    """A program that `make TARGET` builds; the `target` "" stands for the name of the program."""

    name: str
    package: str
    version: str
    target: str = ""

    @property
    def variable(self) -> str:
        """Return the name of the environment variable that can name another program."""
        return self.name.upper().replace("-", "_")

    def place(self, environment: Mapping[str, str]) -> Path:
        """Return the path at which the program is built, outside the tree."""
        caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
        folder = f"{self.name}-{self.version}"
        return Path(caches).expanduser() / "homing" / folder / self.name

    def find(self, environment: Mapping[str, str]) -> Path:
        """Return the program that the environment names, or else the one that was built.

        Raises `GoProgramError` if it is not an executable file.
        """
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
        """Build the program unless it is built already, and return its path.

        Raises `GoProgramError`, `subprocess.CalledProcessError`.
        """
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
        """Build the program, print its path, and return the exit code."""
        try:
            print(self.build(os.environ))
        except (GoProgramError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 1
        return 0
