"""A root file system of our own, outside of which commands see nothing, as in a container.

In a mount namespace the machine's programs and libraries are bound into a folder, read-only, and
commands run with that folder as their root. Root of the machine may do so; anybody else where the
kernel lets them have a user namespace.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

USER: Final = 65532
_SHARED: Final = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt/wheels")
"""Folders of the machine that a root shows; links of the machine are links in the root."""
_KERNEL: Final = ("/proc", "/dev", "/sys")
_ENTER: Final = """\
set -eu
root=$1 sealed=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount --bind "$root/tmp" "$root/tmp"
while [ "$1" != -- ]; do
  mount --rbind "$1" "$root$1"
  case "$1" in
    /proc | /dev | /sys) ;;
    *) mount -o remount,ro,bind "$root$1" ;;
  esac
  shift
done
shift
if [ "$sealed" = sealed ]; then mount -o remount,ro,bind "$root"; fi
exec "$@"
"""


class RootError(Exception):
    """The reason, in one sentence, why there can be no root."""


class Root:
    """The folder `path`, which is made, and the folders of the machine that are seen in it."""

    def __init__(self, path: Path, *, also: Sequence[Path] = ()) -> None:
        """Make the folder; `also`: more folders of the machine, seen in place, read-only."""
        self.path = path
        self._bound: list[str] = []
        prefix = Path(sys.base_prefix)
        python = () if prefix.is_relative_to("/usr") else (prefix,)
        path.mkdir(parents=True)
        for shared in (*map(Path, (*_SHARED, *_KERNEL)), *python, *also):
            place = self.at(shared)
            if shared.is_symlink():
                place.symlink_to(shared.readlink())
            elif shared.exists():
                place.mkdir(parents=True)
                self._bound.append(str(shared))
        self.at("/tmp").mkdir()
        self.at("/tmp").chmod(0o1777)

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the environment of a base image that has this Python.

        It reaches registries as this machine does.
        """
        found = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.lower().endswith("_proxy") or "SSL_" in name
        }
        folders = (f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin")
        return found | {"PATH": ":".join(folders), "HOME": "/tmp"}

    def at(self, path: str | Path) -> Path:
        """Return the path outside of a `path` inside."""
        return self.path / str(path).lstrip("/")

    def command(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str = "/",
        contained: bool = False,
    ) -> list[str]:
        """Return the command line that runs `command` inside, in its own process.

        `command` replaces that process, so that signals reach it.

        `contained`: as Kubernetes runs it, by `USER`, without capabilities or new privileges, and
        with nothing to write to but /tmp.
        """
        real = os.geteuid() == 0
        variables = ["env", "-i", f"--chdir={folder}"]
        variables += [f"{name}={value}" for name, value in environment.items()]
        enter = ["chroot", str(self.path)]
        if contained and real:
            enter += ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
            enter += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        elif contained:
            # In one go: whoever has another root already may not have a user namespace.
            enter = ["unshare", "--user", f"--map-user={USER}", f"--map-group={USER}"]
            enter += [f"--root={self.path}", "setpriv", "--no-new-privs", "--inh-caps=-all"]
        namespaces = ["--mount"] if real else ["--user", "--map-root-user", "--mount"]
        return [
            *("unshare", *namespaces),
            *("sh", "-c", _ENTER, "root", str(self.path), "sealed" if contained else "open"),
            *(*self._bound, "--", *enter, *variables, *command),
        ]

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str = "/",
        contained: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` inside to its end. Raises `subprocess.CalledProcessError`."""
        done = subprocess.run(
            self.command(command, environment=environment, folder=folder, contained=contained),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(done.stdout, done.stderr)
            done.check_returncode()
        return done


def check(folder: Path) -> None:
    """Check that a root works; raise `RootError` if the machine does not let us have one."""
    try:
        root = Root(folder / "try")
        root.run(["true"], environment=Root.environment(), contained=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise RootError(f"no root of our own: {told.strip().splitlines()[-1]}") from error
