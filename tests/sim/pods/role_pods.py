"""Simulated pods with roles, in the event loop of a test, that record what their ports receive."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web
from msgspec import Struct, structs

from epp.plugins.filters import ROLE_LABEL
from sim.engine.engine import EngineSettings
from sim.engine.legs import KVConnector
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.pods.pods import Pod, PodSettings
from sim.pods.roles import decodes, names_of
from sim.pods.server import PodServer, listen, listening, serving, with_role
from sim.pods.sidecar import Sidecar

MODEL = "m"
SEEN_MAX = 10_000
_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})


class Seen(Struct, frozen=True):
    """A request that a port received."""

    port: str
    """Name of the pod, with "sidecar" or "engine"."""
    path: str
    headers: dict[str, str]
    """Headers by name in lower case; several values of one name are joined by a comma."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RolePod:
    """A simulated pod with a role, and its sidecar if it decodes."""

    def __init__(self, name: str, role: str, settings: PodSettings) -> None:
        self.name = name
        self.role = role
        self.labels = {ROLE_LABEL: role}
        self.pod = Pod(name, settings)
        self.status = 0
        """Status with which the engine answers generations; 0 if it serves them."""
        self.port = 0
        self._open = AsyncExitStack()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(
        self, tasks: asyncio.TaskGroup, seen: list[Seen], ranks: dict[str, str]
    ) -> None:
        (own,) = listen("127.0.0.1", 0, 1)
        self.port = own.getsockname()[1]
        server = _Recorded(self, seen)
        if not decodes(self.role):
            await self._open.enter_async_context(serving(server, own, tasks))
            return
        (inner,) = listen("127.0.0.1", 0, 1)
        await self._open.enter_async_context(serving(server, inner, tasks))
        url = f"http://127.0.0.1:{inner.getsockname()[1]}"
        ranks[self.address] = url
        sidecar = await self._open.enter_async_context(Sidecar.opened(url, ranks))
        application = sidecar.application()
        application.middlewares.append(_recorder(f"{self.name} sidecar", seen))
        await self._open.enter_async_context(listening(application, own))

    async def stop(self) -> None:
        """Close the ports of the pod, and cut what it serves."""
        await self._open.aclose()

    async def metric(self, name: str, **labels: str) -> float:
        """Return a value of the pod's metrics page."""
        told = {"engine": "0", "model_name": MODEL, **labels}
        value = self.pod.page.registry.get_sample_value(f"vllm:{name}", told)
        assert value is not None, name
        return value


class _Recorded(PodServer):
    """The server of an engine that records requests, and fails them if its pod has a status."""

    def __init__(self, pod: RolePod, seen: list[Seen]) -> None:
        super().__init__(pod.pod)
        self._pod = pod
        self._seen = seen

    def application(self) -> web.Application:
        application = super().application()
        application.middlewares.append(_recorder(f"{self._pod.name} engine", self._seen))
        application.middlewares.append(self._fail)
        return application

    @web.middleware
    async def _fail(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._pod.status and request.path in _GENERATING:
            return web.json_response({"error": "told to fail"}, status=self._pod.status)
        answer: web.StreamResponse = await handler(request)
        return answer


def _recorder(
    port: str, seen: list[Seen]
) -> Callable[[web.Request, Any], Awaitable[web.StreamResponse]]:
    @web.middleware
    async def record(request: web.Request, handler: Any) -> web.StreamResponse:
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            before = headers.get(name.lower())
            headers[name.lower()] = value if before is None else f"{before},{value}"
        assert len(seen) < SEEN_MAX
        seen.append(Seen(port, request.path, headers, await request.read()))
        answer: web.StreamResponse = await handler(request)
        return answer

    return record


class RolePods:
    """Running pods, a client for them, and what their ports received, in order."""

    def __init__(self, pods: list[RolePod], client: ClientSession, seen: list[Seen]) -> None:
        self.pods = pods
        self.client = client
        self.seen = seen

    def __getitem__(self, name: str) -> RolePod:
        return next(pod for pod in self.pods if pod.name == name)

    def generations(self) -> list[Seen]:
        """Return the received requests that generate something."""
        return [seen for seen in self.seen if seen.path in _GENERATING]

    def ports(self) -> list[str]:
        """Return the ports that received requests that generate something, in order."""
        return [seen.port for seen in self.generations()]

    async def post(
        self, pod: str, body: Any, *, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any]:
        """Return the status and the parsed answer of a pod. A `_` in a header's name is a `-`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://{self[pod].address}{path}"
        async with self.client.post(url, json=body, headers=sent) as response:
            text = await response.text()
            if response.content_type != "application/json":
                return response.status, text
            return response.status, json.loads(text)


@asynccontextmanager
async def running_roles(
    *roles: str,
    speed: float = 200.0,
    blocks: int = 2000,
    lease_s: float = 30.0,
    without_connector: tuple[str, ...] = (),
) -> AsyncIterator[RolePods]:
    """Yield running pods with these roles, named like those of `sim serve --roles`.

    Pods in `without_connector` have an engine without a KV connector.
    """
    settings = PodSettings(
        profile=find_profile(DEFAULT_PROFILE),
        engine=EngineSettings(blocks_total=blocks),
        model=MODEL,
        speed=speed,
    )
    pods = []
    for name, role in zip(names_of(roles), roles, strict=True):
        own = with_role(settings, role)
        if own.engine.kv_connector is not None:
            lent = None if name in without_connector else KVConnector(lease_s=lease_s)
            own = structs.replace(own, engine=structs.replace(own.engine, kv_connector=lent))
        pods.append(RolePod(name, role, own))
    seen: list[Seen] = []
    async with ClientSession() as client, asyncio.TaskGroup() as tasks:
        try:
            ranks: dict[str, str] = {}
            for pod in pods:
                await pod.start(tasks, seen, ranks)
            yield RolePods(pods, client, seen)
        finally:
            for pod in pods:
                await pod.stop()
