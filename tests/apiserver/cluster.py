"""Surroundings of the picker (users, kubelet, model servers), and the picker as installed."""

import os
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from tests import gateway as gw
from tests.apiserver.server import ApiServer
from tests.chart.rendering import CHART, RELEASE, helm, one
from tests.envoy.process import EppProcess
from tests.envoy.rig import free_ports, until
from tests.envoy.upstream import Pod
from tests.streams import Call, channel_to
from tests.test_reload_under_load import Mounted

POOL: Final = "vllm-llama"
LABELS: Final = {"app": "vllm-llama"}
SPEEDY: Final = "--drain-grace=0s", "--drain-timeout=1s", "--secure-serving=false"
PROMPT: Final = gw.prompt("once upon a time " * 100)
_GROUPS: Final = {
    "pods": "/api/v1",
    "configmaps": "/api/v1",
    "events": "/api/v1",
    "secrets": "/api/v1",
    "serviceaccounts": "/api/v1",
    "deployments": "/apis/apps/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "inferencepools": "/apis/inference.networking.k8s.io/v1",
    "inferenceobjectives": "/apis/llm-d.ai/v1alpha2",
    "inferencemodelrewrites": "/apis/llm-d.ai/v1alpha2",
}
_MERGE: Final = "application/merge-patch+json"


class Namespace:
    """One namespace, as an administrator sees it. Objects are JSON."""

    def __init__(self, api: ApiServer, name: str) -> None:
        self.api = api
        self.name = name

    @classmethod
    def made(cls, api: ApiServer, name: str) -> "Namespace":
        api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return cls(api, name)

    def path(self, resource: str, name: str = "", part: str = "") -> str:
        root = f"{_GROUPS[resource]}/namespaces/{self.name}/{resource}"
        return "/".join(filter(None, (root, name, part)))

    def get(self, resource: str, name: str) -> Any:
        return self.api.request("GET", self.path(resource, name))

    def list(self, resource: str) -> list[Any]:
        found: list[Any] = self.api.request("GET", self.path(resource))["items"]
        return found

    def create(self, resource: str, name: str, **members: Any) -> Any:
        """Create an object; the API server takes `kind` and `apiVersion` from the path."""
        metadata = {"name": name, **members.pop("metadata", {})}
        return self.api.request("POST", self.path(resource), {"metadata": metadata, **members})

    def patch(self, resource: str, name: str, part: str = "", **members: Any) -> Any:
        return self.api.request("PATCH", self.path(resource, name, part), members, _MERGE)

    def delete(self, resource: str, name: str, grace_s: int | None = None) -> None:
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        self.api.request("DELETE", self.path(resource, name), options)

    # The users.

    def create_pool(self, *ports: int, labels: Mapping[str, str] = LABELS) -> None:
        """Create the InferencePool; each pod with `labels` is an endpoint at each of `ports`."""
        self.create(
            "inferencepools",
            POOL,
            apiVersion="inference.networking.k8s.io/v1",
            kind="InferencePool",
            spec={
                "selector": {"matchLabels": labels},
                "targetPorts": [{"number": port} for port in ports],
                "endpointPickerRef": {"name": "homing", "port": {"number": 9002}},
            },
        )

    # The scheduler and the kubelet.

    def run_pod(self, engine: Pod, **metadata: Any) -> None:
        """Create a pod on a node, with the address of `engine`, and report it as Ready."""
        container = {"name": "vllm", "image": "example.com/vllm"}
        ports = [{"containerPort": engine.port}]
        self.create(
            "pods",
            engine.name,
            metadata={"labels": LABELS, **metadata},
            # What is on a node is deleted when its kubelet says so.
            spec={"nodeName": "node", "containers": [{**container, "ports": ports}]},
        )
        self.tell_pod(engine)

    def tell_pod(self, engine: Pod, *, ready: bool = True) -> None:
        self.patch(
            "pods",
            engine.name,
            "status",
            status={
                "phase": "Running",
                "podIP": engine.host,
                "podIPs": [{"ip": engine.host}],
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            },
        )


@asynccontextmanager
async def running_engines(*names: str) -> AsyncIterator[list[Pod]]:
    """Yield running model servers: each has its own address and all have one port, as pods do."""
    (port,) = free_ports(1)
    async with AsyncExitStack() as opened:
        engines = [Pod(name, f"127.0.0.{10 + n}", port) for n, name in enumerate(names)]
        for engine in engines:
            opened.push_async_callback(engine.stop)
            await engine.start()
        yield engines


class Release:
    """The objects that `helm install` puts into a namespace."""

    def __init__(self, binary: Path, namespace: Namespace, values: Path, folder: Path) -> None:
        self.namespace = namespace
        self._folder = folder
        done = helm(
            *(binary, "install", RELEASE, CHART, "--namespace", namespace.name),
            *("--values", values),
            *("--kubeconfig", namespace.api.kubeconfig(folder / "administrator.yaml")),
        )
        assert done.returncode == 0, done.stderr
        self.notes = done.stdout.partition("NOTES:\n")[2]
        (deployment,) = namespace.list("deployments")
        self.pod = deployment["spec"]["template"]["spec"]
        self.account = self.pod["serviceAccountName"]

    def container(self) -> Any:
        return one([{"kind": at["name"], **at} for at in self.pod["containers"]], "epp")

    def config_map(self) -> str:
        """Return the name of the mounted ConfigMap."""
        (name,) = (at["configMap"]["name"] for at in self.pod["volumes"] if at["name"] == "config")
        return str(name)

    def config_text(self) -> str:
        (text,) = self.namespace.get("configmaps", self.config_map())["data"].values()
        return str(text)

    def token(self) -> str:
        """Request a token of the ServiceAccount, as the kubelet does."""
        path = self.namespace.path("serviceaccounts", self.account, "token")
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.namespace.api.request("POST", path, request)["status"]["token"])

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace.name}:{self.account}"

    def refused(self) -> set[str]:
        """Return the URIs that the picker requested and was refused (status 401 or 403)."""
        events = self.namespace.api.requests_of(self.user)
        return {at["requestURI"] for at in events if at["responseStatus"]["code"] in {401, 403}}

    def flags(self, mounted: Mounted, folder: Path) -> list[str]:
        """Return the flags of the Deployment without its ports, adapted to run in this machine.

        Paths of mounted volumes become folders below `folder`, the configuration is the file of
        `mounted`, and `SPEEDY` is added.
        """
        command, *told = self.container()["args"]
        assert command == "serve"
        ports = ("--grpc-port=", "--grpc-health-port=", "--metrics-port=")
        kept = [flag for flag in told if not flag.startswith((*ports, "--config-file="))]
        for path, place in self._volumes(folder).items():
            kept = [flag.replace(f"={path}", f"={place}", 1) for flag in kept]
        return [*kept, f"--config-file={mounted.file}", *SPEEDY]

    def _volumes(self, folder: Path) -> dict[str, Path]:
        """Return, by path in the container, a folder that stands for the volume mounted there.

        A folder has the files of the Secret if the volume is one; otherwise it is empty.
        """
        secrets = {at["name"]: at.get("secret") for at in self.pod["volumes"]}
        places = {}
        for mount in self.container()["volumeMounts"]:
            place = places[mount["mountPath"]] = folder / mount["name"]
            place.mkdir(exist_ok=True)
            if secret := secrets[mount["name"]]:
                for name, value in self.secret(secret["secretName"]).items():
                    (place / name).write_bytes(value)
        return places

    def secret(self, name: str) -> dict[str, bytes]:
        data = self.namespace.get("secrets", name)["data"]
        return {key: b64decode(value) for key, value in data.items()}

    def debug_token(self) -> str:
        """Return the token that the debug pages ask for; "" means that they ask for none."""
        for at in self.pod["volumes"]:
            if at["name"] == "debug-token":
                return self.secret(at["secret"]["secretName"])["token"].decode()
        return ""


class Picker:
    """A running `epp serve` of a release."""

    def __init__(
        self, process: EppProcess, mounted: Mounted, kubeconfig: Path, debug_token: str
    ) -> None:
        self._debug_token = debug_token
        self.process = process
        self.mounted = mounted
        self.kubeconfig = kubeconfig
        self._channel: grpc.aio.Channel | None = None
        self._pages: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Picker"]:
        url = f"http://127.0.0.1:{self.process.metrics_port}"
        told = {"authorization": f"Bearer {self._debug_token}"} if self._debug_token else {}
        async with (
            channel_to(self.process.address) as self._channel,
            aiohttp.ClientSession(
                url, timeout=aiohttp.ClientTimeout(total=10), headers=told
            ) as self._pages,
        ):
            yield self

    async def page(self, name: str) -> Any:
        """Return the content of the page /debug/`name`."""
        assert self._pages is not None
        async with self._pages.get(f"/debug/{name}?format=json") as response:
            return await response.json()

    async def metric(self, name: str, **labels: str) -> float | None:
        """Return the sample of homing_`name` with exactly `labels`; None means there is none."""
        assert self._pages is not None
        async with self._pages.get("/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (sample.name, sample.labels) == (f"homing_{name}", labels):
                    return float(sample.value)
        return None

    async def addresses(self) -> set[str]:
        """Return the addresses of all endpoints, ready or not."""
        return {row["address"] for row in (await self.page("endpoints"))["endpoints"]}

    async def ready_addresses(self) -> set[str]:
        rows = (await self.page("endpoints"))["endpoints"]
        return {row["address"] for row in rows if row["state"] == "ready"}

    async def knows(self, *engines: Pod, timeout_s: float = 15.0) -> None:
        """Wait until these are the endpoints, no more and no fewer, and all are ready."""
        wanted = {engine.address for engine in engines}

        async def equal() -> bool:
            return await self.addresses() == await self.ready_addresses() == wanted

        await until(equal, f"the endpoints to be {sorted(wanted)}", timeout_s)

    async def answers(self, *messages: bytes, answers: int) -> list[Any]:
        """Send the messages of one request and return the first `answers` answers to them.

        Unless the first answer is an immediate response, a response follows that ends at its
        headers.
        """
        call = Call(self._channel)
        found = await call.exchange(*messages, answers=answers)
        if gw.kind(found[0]) != "immediate_response":
            await call.exchange(gw.response_headers(end=True), answers=1)
        await call.grpc.done_writing()
        return found

    async def pick(self, body: bytes = PROMPT) -> str:
        """Return the destination of a request with this body."""
        head, *_ = await self.answers(gw.request_headers(), gw.request_body(body), answers=2)
        return str(gw.destination(head))

    async def refused(self, **headers: str) -> tuple[int, Any]:
        """Send a request that must be refused and return its (status, error)."""
        named = gw.COMPLETIONS | {name.replace("_", "-"): at for name, at in headers.items()}
        messages = gw.request_headers(named), gw.request_body(PROMPT)
        (answer,) = await self.answers(*messages, answers=1)
        status, error = gw.refusal(answer)
        return status, error

    def log_text(self) -> str:
        return self.process.log_text()


@asynccontextmanager
async def running_picker(
    release: Release, folder: Path, *flags: str, pod_name: str = "picker-0", ready: bool = True
) -> AsyncIterator[Picker]:
    """Yield a picker that runs as under the kubelet, with only its ServiceAccount's rights.

    `ready`: wait until the picker reports that it is ready.
    """
    folder.mkdir()
    mounted = Mounted(folder / "mounted", release.config_text())
    kubeconfig = release.namespace.api.kubeconfig(folder / "kubeconfig.yaml", release.token())
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")
    }
    process = EppProcess(
        folder / "epp.log",
        environment={
            **environment,
            "KUBECONFIG": str(kubeconfig),
            "NAMESPACE": release.namespace.name,
            "POD_NAME": pod_name,
        },
    )
    begin = process.start if ready else process.launch
    try:
        await begin(*release.flags(mounted, folder), *flags)
        async with Picker(process, mounted, kubeconfig, release.debug_token()).open() as picker:
            yield picker
    finally:
        if process.alive:
            await process.kill()
        print(f"--- the log of {pod_name}\n{process.log_text()[-8000:]}")


def messages(events: Sequence[Any], reason: str) -> list[str]:
    return [event["message"] for event in events if event["reason"] == reason]
