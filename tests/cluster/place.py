"""Folders of what the cluster makes, and the addresses that it has inside its namespace."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NETWORK: Final = "homing-cluster"
"""Network namespace that all of the cluster lives in; no interface of it leads out."""
NODE: Final = "node1"
NODE_ADDRESS: Final = "10.77.0.1"
NODE_PREFIX: Final = 24
POD_NETWORK: Final = "10.78.0.0/24"
SERVICE_NETWORK: Final = "10.96.0.0/16"
SERVICE_ADDRESS: Final = "10.96.0.1"
"""Address of the API server, the first of `SERVICE_NETWORK`."""
DOMAIN: Final = "cluster.local"
REGISTRY: Final = "registry.example.com"
"""Registry that nobody asks: images are there before anything wants one."""


class ClusterError(Exception):
    """Error that says in one sentence why there is no cluster."""


@dataclass(frozen=True)
class Place:
    """Folders of the cluster. `run` goes with it; the others stay, logs until the next one."""

    root: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place":
        """Return the place that `HOMING_CLUSTER` names, else a folder of the cache."""
        told = environment.get("HOMING_CLUSTER")
        caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
        return cls(Path(told) if told else Path(caches).expanduser() / "homing" / "cluster")

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def certificates(self) -> Path:
        return self.run / "certificates"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.run / "admin.yaml"

    @property
    def containerd_socket(self) -> Path:
        # A path of a socket has 107 bytes at most.
        return Path(f"/run/{NETWORK}/containerd.sock")

    def existing(self, *folders: Path) -> None:
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
