"""Simulated vLLM pods as real HTTP servers: the engine in step with the clock, OpenAI in front.

The engine is told the time; this module reads the clock. All pods of a process share one event loop;
each has its own engine, port, metrics registry and task. Simulated time runs `speed` times as fast
as real time. A step that the loop finished late is not made longer for it: the next one begins when
the last should have ended, so a busy event loop does not slow the simulated engine down.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from aiohttp import web
from msgspec import Struct

from epp import __version__
from epp.core.types import Seconds
from sim.engine import Engine, EngineRequest, EngineSettings, Step
from sim.exposition import MetricsPage
from sim.openai import (
    AdapterBody,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    Dialect,
    Json,
    decode_adapter,
    decode_body,
    model_card,
    usage_of,
)
from sim.profiles import Profile
from sim.tokens import TOKEN_BYTES, Answer, chain_seed, hash_chain

_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_STOP_S: Final = 0.5
"""How long open answers may take to notice that the server stops."""
_PORT_MAX: Final = 65535
_JSON: Final = "application/json"

log = structlog.get_logger("sim")


class PodSettings(Struct, frozen=True, kw_only=True):
    """What all pods of one `sim serve` have in common."""

    profile: Profile
    engine: EngineSettings
    model: str
    adapters: tuple[str, ...] = ()
    speed: float = 1.0
    seed: int = 1
    """Decides the answers, together with the prompt."""
    max_num_queued_reqs: int = 0
    """Requests inside the server, waiting or running, before it answers 503; 0: no limit."""

    @property
    def max_model_len_tokens(self) -> int:
        """The model's context, or less if the cache could not hold one such request."""
        return min(self.profile.max_model_len_tokens, self.engine.kv_tokens)


class Generation:
    """One answer on its way: the engine's pump says how far it is, the HTTP handler follows."""

    __slots__ = ("answer", "produced", "progress", "request", "tokens_max")

    def __init__(self, request: EngineRequest, answer: Answer, tokens_max: int) -> None:
        self.request = request
        self.answer = answer
        self.tokens_max = tokens_max
        self.produced = 0
        self.progress = asyncio.Event()

    @property
    def finish_reason(self) -> str:
        return "stop" if self.answer.stopped else "length"

    @property
    def done(self) -> bool:
        return self.produced >= self.answer.tokens

    async def parts(self) -> AsyncIterator[str]:
        """The text as it is produced; what came while the reader was busy comes as one part."""
        sent = 0
        while not self.done or sent < self.produced:
            await self.progress.wait()
            self.progress.clear()
            until = self.produced
            if until > sent:
                yield self.answer.part(sent, until)
                sent = until


class Pod:
    """One engine with its page, in step with the clock."""

    def __init__(self, name: str, settings: PodSettings) -> None:
        self.name = name
        self.settings = settings
        self.engine = Engine(settings.engine, settings.profile)
        self.page = MetricsPage(
            model=settings.model,
            settings=settings.engine,
            max_model_len_tokens=settings.max_model_len_tokens,
        )
        self.adapters: dict[str, str] = dict.fromkeys(settings.adapters, "")
        """Name -> path, in the order of loading."""
        self._generations: dict[str, Generation] = {}
        self._work = asyncio.Event()
        self._started_at = time.monotonic()
        self._submitted_at = 0.0
        self._requests = 0

    def clock(self) -> Seconds:
        """Simulated seconds since the pod was made."""
        return (time.monotonic() - self._started_at) * self.settings.speed

    async def run(self) -> None:
        """Step the engine while there is work, for ever."""
        ended_at = 0.0
        while True:
            await self._work.wait()
            self._work.clear()
            ended_at = max(ended_at, self.clock())
            # A step never begins before what it may admit was submitted.
            while (step := self.engine.step(max(ended_at, self._submitted_at))) is not None:
                ended_at = step.ends_at
                await self._sleep_until(ended_at)
                self._publish(step)
            self.page.show(self.engine.snapshot(), time.time())

    def check_room(self) -> None:
        """ApiError 503 when the server already has as many requests as it may."""
        limit = self.settings.max_num_queued_reqs
        if limit and len(self._generations) >= limit:
            self.page.reject("max_num_queued_reqs")
            raise ApiError(
                503,
                f"The server has {len(self._generations)} unfinished requests, its limit is "
                f"{limit}; try again later.",
                kind="ServiceUnavailableError",
            )

    def prepare(self, body: Body, prompt: bytes) -> Generation:
        """The answer that `prompt` will get; ApiError 400 if it does not fit the context."""
        prompt_tokens = len(prompt) // TOKEN_BYTES
        context = self.settings.max_model_len_tokens
        wanted = body.tokens_max()
        if not prompt_tokens:
            raise ApiError(400, "The prompt is empty; expected at least one token.", param="prompt")
        if prompt_tokens + (wanted or 1) > context:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens; the request has "
                f"{prompt_tokens} in the prompt and asks for {wanted or 1}.",
                param="max_tokens",
            )
        tokens_max = wanted or context - prompt_tokens
        answer = Answer(
            prompt, tokens_max=tokens_max, ignore_eos=body.ignore_eos, seed=self.settings.seed
        )
        adapter = body.model if body.model in self.adapters else ""
        self._requests += 1
        request = EngineRequest(
            f"{self.name}-{self._requests}",
            prompt_tokens=prompt_tokens,
            output_tokens=answer.tokens,
            chain=hash_chain(
                prompt + answer.text.encode(),
                block_size_tokens=self.settings.engine.block_size_tokens,
                seed=chain_seed(adapter, body.cache_salt),
            ),
            adapter=adapter,
        )
        return Generation(request, answer, tokens_max)

    @contextlib.contextmanager
    def following(self, generations: Sequence[Generation]) -> Iterator[None]:
        """Inside, the pod tells `generations` how far they are; what is unfinished is aborted."""
        for generation in generations:
            self._generations[generation.request.request_id] = generation
        try:
            yield
        finally:
            for generation in generations:
                request = generation.request
                del self._generations[request.request_id]
                reason = generation.finish_reason if generation.done else "abort"
                if not generation.done:
                    self.engine.abort(request.request_id)
                self.page.finish(request, reason, generation.tokens_max)

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Into the engine's queue, after what the front end of a real server takes."""
        arrived_at = self.clock()
        tokens = sum(generation.request.prompt_tokens for generation in generations)
        await self._sleep_until(arrived_at + self.settings.profile.frontend_delay_s(tokens))
        for generation in generations:
            self.engine.submit(generation.request, arrived_at)
        self._submitted_at = self.clock()
        self._work.set()

    def load_adapter(self, body: AdapterBody) -> str:
        """Serve `lora_name` from now on."""
        if not self.settings.engine.max_loras:
            raise ApiError(400, "LoRA is off; start with --max-loras of at least 1.")
        if body.lora_name in self.adapters or body.lora_name == self.settings.model:
            raise ApiError(400, f"The lora adapter '{body.lora_name}' has already been loaded.")
        self.adapters[body.lora_name] = body.lora_path
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    def unload_adapter(self, body: AdapterBody) -> str:
        """Do not serve `lora_name` any more; requests that have begun are finished."""
        if body.lora_name not in self.adapters:
            raise ApiError(
                404,
                f"The lora adapter '{body.lora_name}' cannot be found.",
                kind="NotFoundError",
            )
        del self.adapters[body.lora_name]
        self.engine.forget_adapter(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _publish(self, step: Step) -> None:
        self.page.observe(step, time.time())
        for request in step.outputs:
            generation = self._generations.get(request.request_id)
            if generation is not None:
                generation.produced += 1
                generation.progress.set()

    async def _sleep_until(self, at: Seconds) -> None:
        # Even a deadline that has passed gives way to the other pods and handlers.
        await asyncio.sleep(max(0.0, at - self.clock()) / self.settings.speed)


class PodServer:
    """The HTTP side of one pod."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._created = int(time.time())

    def application(self) -> web.Application:
        """All routes of the pod."""
        application = web.Application(
            client_max_size=_BODY_BYTES_MAX, middlewares=[_errors_as_objects]
        )
        application.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.post("/v1/load_lora_adapter", self.load_adapter),
                web.post("/v1/unload_lora_adapter", self.unload_adapter),
                web.get("/metrics", self.metrics),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
            ]
        )
        return application

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionBody)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatBody)

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
        return _json({"version": "0.32.0", "simulator": f"homing-epp {__version__}"})

    async def _answer(
        self, request: web.Request, kind: type[CompletionBody] | type[ChatBody]
    ) -> web.StreamResponse:
        pod = self.pod
        body = decode_body(await request.read(), kind)
        if body.model != pod.settings.model and body.model not in pod.adapters:
            raise ApiError(
                404,
                f"The model `{body.model}` does not exist.",
                kind="NotFoundError",
                param="model",
            )
        pod.check_room()
        generations = [pod.prepare(body, prompt) for prompt in body.prompts()]
        if not generations:
            raise ApiError(400, "`prompt` is empty; expected at least one prompt.", param="prompt")
        chat = kind is ChatBody
        dialect = Dialect(
            chat=chat,
            model=body.model,
            created=int(time.time()),
            answer_id=("chatcmpl-" if chat else "cmpl-") + generations[0].request.request_id,
        )
        if body.stream:
            return await self._stream(request, body, generations, dialect)
        with pod.following(generations):
            await pod.submit(generations)
            answers = [
                ("".join([part async for part in generation.parts()]), generation.finish_reason)
                for generation in generations
            ]
        return _json(dialect.whole(answers, _usage(generations)))

    async def _stream(
        self,
        request: web.Request,
        body: Body,
        generations: Sequence[Generation],
        dialect: Dialect,
    ) -> web.StreamResponse:
        """Server-sent events, one prompt after the other.

        The headers go at once, before the engine has seen the request.
        """
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        # A client that leaves while we write is no error; `following` aborts its request.
        with contextlib.suppress(ConnectionResetError), self.pod.following(generations):
            await response.prepare(request)
            await self.pod.submit(generations)
            for index, generation in enumerate(generations):
                await _write_parts(response, dialect, index, generation)
            if body.stream_options is not None and body.stream_options.include_usage:
                await response.write(_event(dialect.usage_chunk(_usage(generations))))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response


async def _write_parts(
    response: web.StreamResponse, dialect: Dialect, index: int, generation: Generation
) -> None:
    opening = dialect.opening(index)
    async for part in generation.parts():
        if opening is not None:
            await response.write(_event(opening))
            opening = None
        finish_reason = generation.finish_reason if generation.done else None
        await response.write(_event(dialect.chunk(index, part, finish_reason)))


class PodAddress(Struct, frozen=True, kw_only=True):
    """Where one pod listens."""

    name: str
    address: str
    """An ip, without brackets; the loopback one where all were bound."""
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


def listen(host: str, port: int, pods: int) -> list[socket.socket]:
    """Listening sockets on `pods` consecutive ports, or free ones for port 0.

    OSError with one sentence if an address cannot be had; then none is kept.
    """
    if port + pods - 1 > _PORT_MAX:
        raise OSError(f"{pods} pods from port {port} need ports above {_PORT_MAX}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets: list[socket.socket] = []
    for index in range(pods):
        wanted = port + index if port else 0
        try:
            sockets.append(socket.create_server((host, wanted), family=family, backlog=1024))
        except OSError as problem:
            for opened in sockets:
                opened.close()
            reason = os.strerror(problem.errno) if problem.errno else str(problem)
            raise OSError(f"Cannot listen on {host} port {wanted}: {reason}.") from None
    return sockets


def write_endpoints(path: Path, addresses: Sequence[PodAddress]) -> None:
    """The file that `epp serve --endpoints-file` reads, replaced in one go."""
    content = {"endpoints": [msgspec.to_builtins(address) for address in addresses]}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


async def serve(
    settings: PodSettings,
    sockets: Sequence[socket.socket],
    ready: Callable[[Sequence[PodAddress]], None],
) -> None:
    """Serve one pod a socket until SIGINT or SIGTERM; `ready` is called once all listen."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    pods = [Pod(f"pod-{index}", settings) for index in range(len(sockets))]
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as open_servers:
        addresses = []
        for pod, listener in zip(pods, sockets, strict=True):
            pump = tasks.create_task(pod.run(), name=pod.name)
            open_servers.callback(pump.cancel)
            runner = web.AppRunner(
                PodServer(pod).application(),
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=_STOP_S,
            )
            await runner.setup()
            open_servers.push_async_callback(runner.cleanup)
            await web.SockSite(runner, listener).start()
            addresses.append(_address(pod.name, listener))
        ready(addresses)
        log.info("pods are listening", pods=len(pods), first=addresses[0].url)
        await stop.wait()
        log.info("stopping")


def _address(name: str, listener: socket.socket) -> PodAddress:
    host, port = listener.getsockname()[:2]
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return PodAddress(name=name, address=everywhere.get(host, host), port=port)


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
        sum(request.cached_tokens for request in requests),
    )


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Json, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=_JSON)
