"""HTTP servers of simulated pods: vLLM's OpenAI API, metrics page and probes.

One process serves any number of pods, each on its own port.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from aiohttp import web
from msgspec import Struct, structs

from epp import __version__
from epp.plugins.filters import ROLE_LABEL
from sim.engine.legs import KVConnector
from sim.pods.kv_event_sockets import KVEventSource, publishing
from sim.pods.kv_transfers import ROUTE
from sim.pods.openai import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    Dialect,
    Json,
    decode_adapter,
    decode_body,
    decode_tokenize,
    model_card,
    usage_of,
)
from sim.pods.pods import Generation, Pod, PodSettings
from sim.pods.roles import decodes, names_of, transfers
from sim.pods.sidecar import Sidecar
from sim.pods.tokens import TOKEN_BYTES, decode_ids

_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_VLLM_VERSION: Final = "0.32.0"
"""Version of vLLM whose metrics page and error messages the pods imitate."""
_STOP_S: Final = 0.5
"""Time in seconds that unfinished answers may still take when the server stops."""
_PORT_MAX: Final = 65535
_RANK_HEADER: Final = "X-data-parallel-rank"

log = structlog.get_logger("sim")


class PodServer:
    """The HTTP server of one simulated pod."""

    def __init__(self, pod: Pod, sources: Sequence[KVEventSource] = ()) -> None:
        """Create the server. `sources` are the ports of the pod's KV events, by rank; empty if it
        publishes none.
        """
        self.pod = pod
        self._sources = sources
        self._created = int(pod.wall_clock())

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes of the pod."""
        application = web.Application(
            client_max_size=_BODY_BYTES_MAX, middlewares=[_errors_as_objects]
        )
        application.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions/render", self.render_completion),
                web.post("/v1/chat/completions/render", self.render_chat),
                web.post("/tokenize", self.tokenize),
                web.post("/reset_prefix_cache", self.reset_cache),
                web.get("/v1/models", self.models),
                web.post("/v1/load_lora_adapter", self.load_adapter),
                web.post("/v1/unload_lora_adapter", self.unload_adapter),
                web.get("/metrics", self.metrics),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
            ]
        )
        if self._sources:
            application.router.add_get("/kv_event_sources", self.kv_event_sources)
        if self.pod.held is not None:
            application.router.add_post(ROUTE, self.transfer)
        return application

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionBody)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatBody)

    async def render_completion(self, request: web.Request) -> web.Response:
        return _json(await self._render(request, CompletionBody))

    async def render_chat(self, request: web.Request) -> web.Response:
        (only,) = await self._render(request, ChatBody)
        return _json(only)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode_tokenize(await request.read())
        if body.model is not None:
            self._check_model(body.model)
        tokens = body.tokens()
        return _json(
            {
                "count": len(tokens) // TOKEN_BYTES,
                "max_model_len": self.pod.settings.max_model_len_tokens,
                "tokens": decode_ids(tokens),
                "token_strs": None,
            }
        )

    async def reset_cache(self, request: web.Request) -> web.Response:
        self.pod.reset_cache()
        return web.Response()

    async def kv_event_sources(self, request: web.Request) -> web.Response:
        sources = enumerate(self._sources)
        return _json({str(rank): source.config() for rank, source in sources})

    async def transfer(self, request: web.Request) -> web.Response:
        """Answer a decode engine that renews the lease of held KV blocks, reads or releases
        them.
        """
        asked = request.match_info
        held = self.pod.held
        if held is None or not held.answer(
            asked["engine_id"], asked["request_id"], asked["action"]
        ):
            raise ApiError(
                404,
                f"The engine holds no KV blocks of request {asked['request_id']}, or cannot "
                f"{asked['action']} them.",
                kind="NotFoundError",
            )
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        pod = self.pod
        length = pod.settings.max_model_len_tokens
        base = pod.settings.model
        cards = [
            model_card(
                base, created=self._created, root=base, parent=None, max_model_len_tokens=length
            ),
            *(
                model_card(
                    name,
                    created=self._created,
                    root=path or name,
                    parent=base,
                    max_model_len_tokens=length,
                )
                for name, path in pod.adapters.items()
            ),
        ]
        return _json({"object": "list", "data": cards})

    async def load_adapter(self, request: web.Request) -> web.Response:
        return web.Response(text=self.pod.load_adapter(decode_adapter(await request.read())))

    async def unload_adapter(self, request: web.Request) -> web.Response:
        return web.Response(text=self.pod.unload_adapter(decode_adapter(await request.read())))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self.pod.page.render(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": _VLLM_VERSION, "simulator": f"homing-epp {__version__}"})

    async def _render(
        self, request: web.Request, kind: type[CompletionBody] | type[ChatBody]
    ) -> list[Json]:
        """Return the tokens of each prompt, as vLLM answers a render request."""
        body = await self._read(request, kind)
        return [
            {
                "request_id": f"render-{index}",
                "model": body.model,
                "token_ids": decode_ids(prompt),
                "sampling_params": {"max_tokens": body.tokens_max()},
            }
            for index, prompt in enumerate(body.prompts())
        ]

    async def _read(
        self, request: web.Request, kind: type[CompletionBody] | type[ChatBody]
    ) -> Body:
        """Return the parsed body of a request.

        Raises `ApiError` 400 if it is malformed, and 404 if it names an unknown model.
        """
        body = decode_body(await request.read(), kind)
        self._check_model(body.model)
        return body

    def _check_model(self, model: str) -> None:
        pod = self.pod
        if model != pod.settings.model and model not in pod.adapters:
            raise ApiError(
                404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model"
            )

    async def _answer(
        self, request: web.Request, kind: type[CompletionBody] | type[ChatBody]
    ) -> web.StreamResponse:
        pod = self.pod
        body = await self._read(request, kind)
        pod.check_room()
        rank = pod.rank_named(request.headers.get(_RANK_HEADER))
        generations = [pod.prepare(body, prompt) for prompt in body.prompts()]
        if not generations:
            raise ApiError(400, "`prompt` is empty; expected at least one prompt.", param="prompt")
        chat = kind is ChatBody
        dialect = Dialect(
            chat=chat,
            model=body.model,
            created=int(pod.wall_clock()),
            answer_id=("chatcmpl-" if chat else "cmpl-") + generations[0].request.request_id,
        )
        if body.stream:
            return await self._stream(request, body, generations, dialect, rank)
        with pod.following(generations):
            await pod.submit(generations, rank)
            answers = [
                ("".join([part async for part in generation.parts()]), generation.finish_reason)
                for generation in generations
            ]
        answer = dialect.whole(answers, _usage(generations))
        params = pod.transfer_params(generations)
        return _json(answer if params is None else answer | {"kv_transfer_params": params})

    async def _stream(
        self,
        request: web.Request,
        body: Body,
        generations: Sequence[Generation],
        dialect: Dialect,
        rank: int | None,
    ) -> web.StreamResponse:
        """Answer a streaming request with server-sent events, one prompt after another.

        The response headers are sent at once, before the engine receives the request.
        """
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        # A client that leaves during a write is not an error; `following` aborts its request.
        with contextlib.suppress(ConnectionResetError), self.pod.following(generations):
            await response.prepare(request)
            await self.pod.submit(generations, rank)
            try:
                for index, generation in enumerate(generations):
                    interval_tokens = self.pod.settings.stream_interval_tokens
                    await _write_parts(response, dialect, index, generation, interval_tokens)
            except ApiError as problem:
                # The status has been sent, so the error is an event, as in vLLM.
                await response.write(_event(problem.body))
            if body.stream_options is not None and body.stream_options.include_usage:
                await response.write(_event(dialect.usage_chunk(_usage(generations))))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response


async def _write_parts(
    response: web.StreamResponse,
    dialect: Dialect,
    index: int,
    generation: Generation,
    interval_tokens: int,
) -> None:
    opening = dialect.opening(index)
    async for part in generation.parts(interval_tokens):
        if opening is not None:
            await response.write(_event(opening))
            opening = None
        finish_reason = generation.finish_reason if generation.done else None
        await response.write(_event(dialect.chunk(index, part, finish_reason)))


class PodAddress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Name, IP address and port of one simulated pod."""

    name: str
    address: str
    """IP address without brackets; the loopback address if the pod listens on all addresses."""
    port: int
    labels: dict[str, str] = {}
    """Labels of the pod: its role, if it has one."""

    @classmethod
    def of(cls, listener: socket.socket, name: str = "", role: str = "") -> "PodAddress":
        """Return the address at which this machine reaches the pod that listens at `listener`."""
        host, port = _reached_at(listener)
        labels = {ROLE_LABEL: role} if role else {}
        return cls(name=name, address=host, port=port, labels=labels)

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


def listen(host: str, port: int, pods: int) -> list[socket.socket]:
    """Return listening sockets for `pods` pods, on consecutive ports from `port` on, or on free
    ports if `port` is 0.

    Raises `OSError` with one sentence if an address is not available; all sockets are then closed.
    """
    if port + pods - 1 > _PORT_MAX:
        raise OSError(f"{pods} ports from port {port} on would exceed port {_PORT_MAX}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets: list[socket.socket] = []
    for index in range(pods):
        wanted = port + index if port else 0
        try:
            sockets.append(socket.create_server((host, wanted), family=family, backlog=1024))
        except OSError as problem:
            for opened in sockets:
                opened.close()
            # Error numbers of the resolver are negative and not an errno.
            number = problem.errno or 0
            told = os.strerror(number) if number > 0 else problem.strerror or str(problem)
            reason = told.partition(" (while")[0]
            raise OSError(f"Cannot listen on {host} port {wanted}: {reason}.") from None
    return sockets


def write_endpoints(path: Path, addresses: Sequence[PodAddress]) -> None:
    """Write the endpoints file for `epp serve --endpoints-file`. A reader never sees an incomplete
    file.

    Raises `OSError` with one sentence if the file cannot be written.
    """
    content = {"endpoints": [msgspec.to_builtins(address) for address in addresses]}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as problem:
        raise OSError(f"{path} cannot be written: {problem.strerror}.") from problem


@contextlib.asynccontextmanager
async def serving(
    server: PodServer, listener: socket.socket, tasks: asyncio.TaskGroup
) -> AsyncIterator[None]:
    """Serve one pod at the socket `listener`, which is also its side channel for KV transfers, and
    run its engines as one of `tasks`, until the context ends.
    """
    server.pod.side_channel = _reached_at(listener)
    pump = tasks.create_task(server.pod.run(), name=server.pod.name)
    try:
        async with listening(server.application(), listener):
            yield
    finally:
        pump.cancel()


@contextlib.asynccontextmanager
async def serving_role(
    server: PodServer,
    listener: socket.socket,
    tasks: asyncio.TaskGroup,
    role: str,
    ranks: dict[str, str],
) -> AsyncIterator[None]:
    """Serve one pod of a role as `serving` does. A pod that decodes has a sidecar at `listener`,
    and its engine listens on a free port of loopback.

    The engine of such a pod is added to `ranks`, from which all sidecars of a process choose (see
    `Sidecar`).
    """
    async with contextlib.AsyncExitStack() as opened:
        if decodes(role):
            (own,) = listen("127.0.0.1", 0, 1)
            await opened.enter_async_context(serving(server, own, tasks))
            engine = PodAddress.of(own).url
            ranks[PodAddress.of(listener).url.removeprefix("http://")] = engine
            sidecar = await opened.enter_async_context(Sidecar.opened(engine, ranks))
            await opened.enter_async_context(listening(sidecar.application(), listener))
        else:
            await opened.enter_async_context(serving(server, listener, tasks))
        yield


@contextlib.asynccontextmanager
async def listening(application: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `application` at the socket `listener` until the context ends."""
    runner = web.AppRunner(
        application, access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_S
    )
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


async def serve(
    settings: PodSettings,
    sockets: Sequence[socket.socket],
    ready: Callable[[Sequence[PodAddress]], None],
    event_sockets: Sequence[socket.socket] = (),
    roles: tuple[str, ...] = (),
) -> None:
    """Serve one pod for each socket until SIGINT or SIGTERM. `ready` is called with the addresses
    once all pods listen.

    `event_sockets` has one socket for the KV events of each rank, followed by as many sockets for
    replays of old events. `roles` has the role of each pod, or is empty if pods have none.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if roles:
        pods = [
            Pod(name, with_role(settings, role))
            for name, role in zip(names_of(roles), roles, strict=True)
        ]
    else:
        pods = [Pod(f"pod-{index}", settings) for index in range(len(sockets))]
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as open_servers:
        addresses = []
        ranks: dict[str, str] = {}
        for place, (pod, listener) in enumerate(zip(pods, sockets, strict=True)):
            role = roles[place] if roles else ""
            address = PodAddress.of(listener, pod.name, role)
            topic = f"kv@{address.address}:{address.port}@{settings.model}"
            sources = []
            for rank, events in enumerate(pod.kv_events, place * settings.ranks):
                live, replay = event_sockets[rank], event_sockets[len(event_sockets) // 2 + rank]
                publisher = publishing(events, live, replay, topic)
                sources.append(await open_servers.enter_async_context(publisher))
            server = PodServer(pod, sources)
            await open_servers.enter_async_context(
                serving_role(server, listener, tasks, role, ranks)
            )
            addresses.append(address)
        ready(addresses)
        log.info("simulated pods are listening", pods=len(pods), first=addresses[0].url)
        await stop.wait()
        log.info("simulated pods are stopping")


def with_role(settings: PodSettings, role: str) -> PodSettings:
    """Return `settings` for a pod of a role, whose engine has a KV connector if it needs one."""
    if not transfers(role):
        return settings
    engine = structs.replace(settings.engine, kv_connector=KVConnector())
    return structs.replace(settings, engine=engine)


def _reached_at(listener: socket.socket) -> tuple[str, int]:
    """Return the address and port at which this machine reaches `listener`."""
    host, port = listener.getsockname()[:2]
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return everywhere.get(host, host), port


@web.middleware
async def _errors_as_objects(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as problem:
        return _json(problem.body, status=problem.status)
    except web.HTTPException as problem:
        kind = "NotFoundError" if problem.status == web.HTTPNotFound.status_code else "Error"
        return _json(ApiError(problem.status, problem.reason, kind=kind).body, problem.status)


def _usage(generations: Sequence[Generation]) -> Json:
    requests = [generation.request for generation in generations]
    return usage_of(
        sum(request.prompt_tokens for request in requests),
        sum(request.output_tokens for request in requests),
        sum(request.cached_tokens + request.fetched_tokens for request in requests),
    )


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Json | list[Json], status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )
