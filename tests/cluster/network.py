"""Network namespace without a way out, and what is to be put back when it goes."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster.daemons import INSIDE
from tests.cluster.place import NETWORK, NODE_ADDRESS, NODE_PREFIX

_OF_THE_MACHINE: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""Settings that the kubelet changes for everybody."""


def exists() -> bool:
    return Path(f"/run/netns/{NETWORK}").exists()


def create() -> None:
    """Create the namespace with a pair of links, both ends inside: some kernels have no dummy.

    The other end drops what it gets.
    """
    _run("ip", "netns", "add", NETWORK)
    for command in (
        "ip link set lo up",
        "ip link add node0 type veth peer name node0-end",
        "ip link set node0-end up",
        f"ip addr add {NODE_ADDRESS}/{NODE_PREFIX} dev node0",
        "ip link set node0 up",
        # A route for addresses of Services.
        "ip route add default dev node0",
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1",
    ):
        _run(*INSIDE, *command.split())


def remove() -> None:
    """Remove the namespace of the cluster and those of pods."""
    found = Path("/run/netns")
    names = sorted(path.name for path in found.iterdir()) if found.exists() else []
    for name in names:
        if name == NETWORK or name.startswith("cni-"):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def remember_settings(file: Path) -> None:
    """Write settings of the whole machine to `file`.

    They are kept as they were before the first of several starts.
    """
    if not file.exists():
        kept = {name: Path("/proc/sys", name).read_text() for name in _OF_THE_MACHINE}
        file.write_text(json.dumps(kept))


def put_settings_back(file: Path) -> None:
    if file.exists():
        for name, value in json.loads(file.read_text()).items():
            path = Path("/proc/sys", name)
            if path.read_text() != value:
                path.write_text(value)
        file.unlink()


def _run(*command: str) -> None:
    done: Sequence[str] = command
    subprocess.run(done, check=True, capture_output=True, text=True)
