"""One node with its control plane: up, down, and ready to be asked."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.apiserver import binaries
from tests.chart.tools import HELM_3, tools_of
from tests.cluster import network
from tests.cluster.daemons import INSIDE, Daemon
from tests.cluster.images import Images, Tell
from tests.cluster.parts import commands, write_files
from tests.cluster.place import NODE, ClusterError, Place

PROGRAMS: Final = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "nsenter": "util-linux",
    "ip": "iproute2",
}
"""Program -> package of Debian."""
PLUGINS: Final = Path("/usr/lib/cni")
READY_S_MAX: Final = 60.0
POLL_S: Final = 0.25
GRACE_S: Final = 3.0
_BUILT: Final = (*binaries.NAMES, *binaries.NODE_NAMES)
_CAP_NET_ADMIN: Final = 12
_PARTS: Final = (
    *("kubelet", "kube-proxy", "coredns", "kube-scheduler", "kube-controller-manager"),
    *("containerd", "kube-apiserver", "etcd"),
)
"""Parts in the order in which they end.

An API server without its store takes a minute to end.
"""


def missing() -> str:
    """Return what this machine lacks, in one sentence; "" if it lacks nothing."""
    if os.geteuid() != 0:
        return "a cluster needs root: namespaces, mounts and cgroups are made"
    (told,) = [
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff:")
    ]
    if not int(told, 16) & 1 << _CAP_NET_ADMIN:
        return "a cluster needs CAP_NET_ADMIN: a network namespace is made"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    packages = {package for name, package in PROGRAMS.items() if not shutil.which(name, path=path)}
    if not (PLUGINS / "ptp").exists():
        packages.add("containernetworking-plugins")
    if packages:
        return f"a cluster needs what Debian has as {', '.join(sorted(packages))}: apt-get install them"
    return ""


class Node:
    """Cluster of `place`: none, one that runs, or the ruins of one."""

    def __init__(self, place: Place, environment: Mapping[str, str], tell: Tell) -> None:
        self.place = place
        self.environment = {**environment, "KUBECONFIG": str(place.kubeconfig)}
        """Environment of commands that ask the cluster."""
        self._environment = environment
        self._tell = tell
        self._daemons = {name: Daemon(name, place.run, place.logs) for name in _PARTS}

    @property
    def runs(self) -> bool:
        return network.exists() and all(one.number for one in self._daemons.values())

    @property
    def built(self) -> bool:
        """True if everything that takes long to build is there."""
        folder = binaries.cache_folder(self._environment)
        return all((folder / name).exists() for name in (*_BUILT, "coredns"))

    def up(self) -> None:
        """Bring the cluster up, until the node is Ready and has the images.

        Raises `ClusterError`. A cluster that does not start leaves nothing behind.
        """
        if not self.runs:
            self.down()
            built = self._built()
            try:
                self._start(*built)
            except BaseException:
                self.down()
                raise
        self.load()

    @contextlib.contextmanager
    def kept_up(self) -> Iterator[None]:
        """Bring the cluster up for the block, and take it away afterwards unless it ran before.

        Raises `ClusterError`.
        """
        ran = self.runs
        self.up()
        try:
            yield
        finally:
            if not ran:
                self.down()

    def load(self) -> None:
        """Give the node the images that it does not have."""
        known = set(self._ctr("images", "ls", "-q").split())
        marks = self.place.root / "loaded"
        self.place.existing(marks)
        for name, archive in Images(self.place, self._environment, self._tell).archives().items():
            mark = marks / archive.name
            if name not in known or not mark.exists():
                self._tell(f"loading {name}")
                self._ctr("images", "import", "--digests=false", str(archive))
                mark.touch()

    def down(self) -> None:
        """End all of the cluster, and put back what was the machine's; also after a crash."""
        for name in _PARTS[:-3]:
            self._daemons[name].end(GRACE_S)
        if self._daemons["containerd"].number:
            for task in self._ctr("tasks", "ls", "-q", check=False).split():
                self._ctr("tasks", "kill", "--all", "-s", "KILL", task, check=False)
            for container in self._ctr("containers", "ls", "-q", check=False).split():
                self._ctr("tasks", "rm", "-f", container, check=False)
                self._ctr("containers", "rm", container, check=False)
        for name in _PARTS[-3:]:
            self._daemons[name].end(GRACE_S)
        _unmount(self.place.run, self.place.containerd_socket.parent)
        network.remove()
        for group in Path("/sys/fs/cgroup").glob("*/kubepods"):
            _remove_groups(group)
        network.put_settings_back(self.place.run / "settings.json")
        shutil.rmtree(self.place.run, ignore_errors=True)
        shutil.rmtree(self.place.containerd_socket.parent, ignore_errors=True)

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints.

        Raises `ClusterError` with its last words if it fails and `check` is set.
        """
        command = [*INSIDE, str(tools_of(HELM_3) / "kubectl"), *arguments]
        done = subprocess.run(
            command,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Return objects, as JSON."""
        return json.loads(self.kubectl("get", "-o", "json", *arguments))

    def kill(self, container: str) -> None:
        """Send SIGKILL to the first process of the container of this id."""
        self._ctr("tasks", "kill", "-s", "KILL", container)

    def stop_api_server(self, *, resume: bool = False) -> None:
        """Suspend the process of the API server, or `resume` it.

        Connections to it stay open meanwhile, and nothing is answered.
        """
        self._daemons["kube-apiserver"].signal(signal.SIGCONT if resume else signal.SIGSTOP)

    def _built(self) -> tuple[Path, Path]:
        """Return the folder of Kubernetes' binaries, and CoreDNS; build what is missing."""
        if not self.built:
            self._tell("building Kubernetes with Go: a quarter of an hour to half an hour, once")
        built = binaries.build(self._environment, _BUILT)
        coredns = built / "coredns"
        if not coredns.exists():
            self._tell("building CoreDNS with Go: minutes, once")
            beside = built / "coredns.new"
            subprocess.run(
                ["go", "build", "-p", "2", "-trimpath", "-ldflags", "-s -w", "-o", beside, "."],
                cwd=Path(__file__).with_name("coredns"),
                env={**self._environment, "CGO_ENABLED": "0"},
                check=True,
            )
            beside.rename(coredns)
        return built, coredns

    def _start(self, built: Path, coredns: Path) -> None:
        self._tell("starting the control plane")
        shutil.rmtree(self.place.logs, ignore_errors=True)
        self.place.existing(self.place.run)
        network.remember_settings(self.place.run / "settings.json")
        network.create()
        write_files(self.place)
        for name, command in commands(self.place, built, coredns).items():
            self._daemons[name].start(command)
            if name == "kube-apiserver":
                self._until(self._serves, "the API server")
            elif name == "containerd":
                # A kubelet that does not find it ends.
                self._until(self._has_containerd, "containerd")
        self._until(self._is_ready, "the node to be Ready")

    def _serves(self) -> bool:
        return self.kubectl("get", "--raw", "/readyz", check=False) == "ok"

    def _has_containerd(self) -> bool:
        return self.place.containerd_socket.exists()

    def _is_ready(self) -> bool:
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "node", NODE, "-o", path, check=False) == "True"

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + READY_S_MAX
        while not condition():
            for daemon in self._daemons.values():
                if daemon.log.exists():
                    daemon.must_run()
            if time.monotonic() > deadline_s:
                raise ClusterError(
                    f"waited {READY_S_MAX:.0f} s in vain for {what}: logs are in {self.place.logs}"
                )
            time.sleep(POLL_S)

    def _ctr(self, *arguments: str, check: bool = True) -> str:
        command = ["ctr", f"--address={self.place.containerd_socket}", "--namespace=k8s.io"]
        done = subprocess.run(
            [*INSIDE, *command, *arguments], capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise ClusterError(f"ctr {' '.join(arguments)}: {done.stderr.strip()[-500:]}")
        return done.stdout


def _unmount(*folders: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted(mounted, reverse=True):
        if any(Path(path).is_relative_to(folder) for folder in folders):
            subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)


def _remove_groups(folder: Path) -> None:
    """Remove cgroups, folder by folder: they have files that nobody may remove.

    Processes of the inner ones are killed.
    """
    for inner in sorted(folder.rglob("*"), reverse=True):
        if inner.is_dir():
            _end_processes(inner)
            _remove_group(inner)
    _remove_group(folder)


def _end_processes(group: Path) -> None:
    for line in (group / "cgroup.procs").read_text().splitlines():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line), signal.SIGKILL)


def _remove_group(group: Path) -> None:
    # A process of it may not be buried yet: an empty group does no harm.
    with contextlib.suppress(OSError):
        group.rmdir()
