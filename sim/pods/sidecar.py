"""The sidecar of a simulated decode pod: a proxy that sends stages to other pods before decode.

It speaks the serial connector of llm-d-router's sidecar for vLLM (`nixlv2`), and the encode
connector `ec-example`. It only knows HTTP, so it also works in front of a real engine.

1. If the request names encode pods, the sidecar sends each image, audio or video to one of them.
2. If it names a prefill pod, the sidecar sends the request there with an answer of one token.
3. The sidecar sends the request to its own engine, or to that of the rank that the request names,
   with the member `kv_transfer_params` of the prefill pod's answer as it came.

A prefill pod that fails ends the request with its status and body, as in llm-d-router since v0.9.
If its answer has no `kv_transfer_params`, the own engine computes the prompt again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from uuid import uuid4

import aiohttp
import msgspec
import structlog
from aiohttp import web
from msgspec import Raw, Struct

PREFILL_HEADER: Final = "x-prefiller-host-port"
ENCODE_HEADER: Final = "x-encoder-hosts-ports"
RANK_HEADER: Final = "x-data-parallel-host-port"
STAGE_HEADERS: Final = frozenset(
    {PREFILL_HEADER, ENCODE_HEADER, RANK_HEADER, "x-kv-cache-source-host-port"}
)
"""Names of request headers that are meant for a sidecar, which does not send them on to engines."""
KV_TRANSFER_PARAMS: Final = "kv_transfer_params"
_CHAT: Final = "/v1/chat/completions"
_LIMITS: Final[dict[str, tuple[str, ...]]] = {
    _CHAT: ("max_tokens", "max_completion_tokens", "min_tokens"),
    "/v1/completions": ("max_tokens", "max_completion_tokens", "min_tokens"),
    "/v1/messages": ("max_tokens", "max_completion_tokens", "min_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/inference/v1/generate": ("max_tokens", "min_tokens"),
}
"""Members of a request body that limit the length of the answer, by request path. The sidecar sets
them to 1 in requests to prefill and encode pods. It passes requests with other paths to its own
engine only.
"""
_PARAMETERS_PATH: Final = "/inference/v1/generate"
"""Path whose requests have the limits in the member `sampling_params`."""
_REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_MEDIA: Final = frozenset({"image_url", "audio_url", "video_url", "input_audio"})
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_CONNECT_S_MAX: Final = 5.0
"""Time in seconds within which a connection to a pod must be established. An answer may take any
time, as in llm-d-router.
"""
_OWN_HEADERS: Final = frozenset(
    {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"}
)
"""Names of headers that belong to one connection and are not passed on, in requests and responses.
"""

_Members: TypeAlias = dict[str, Raw]
_Headers: TypeAlias = list[tuple[str, str]]
"""Headers by name; a name may occur several times."""

log = structlog.get_logger("sim")


class _Answer(Struct, frozen=True):
    """The complete HTTP answer of another pod to the sidecar's request."""

    status: int
    body: bytes
    content_type: str

    @property
    def failed(self) -> bool:
        return not HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    def response(self) -> web.Response:
        """Return the HTTP response that sends this answer to the client."""
        headers = {"content-type": self.content_type}
        return web.Response(status=self.status, body=self.body, headers=headers)


class Sidecar:
    """The sidecar of a decode pod: an HTTP proxy in front of one engine."""

    def __init__(
        self, engine_url: str, client: aiohttp.ClientSession, ranks: Mapping[str, str]
    ) -> None:
        """Create a sidecar for the engine at `engine_url`, which has no path.

        `ranks` has the URL of the engine of each data-parallel rank, by the `ip:port` of its
        sidecar. A request may name one of these ranks, whichever sidecar it reaches.
        """
        self._engine_url = engine_url
        self._client = client
        self._ranks = ranks

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, engine_url: str, ranks: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator["Sidecar"]:
        """Yield a sidecar with its connections, which are closed at the end of the context."""
        client = aiohttp.ClientSession(
            # A request that waits for its prefill must not delay another, so there is no limit.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S_MAX),
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            auto_decompress=False,
        )
        async with client:
            yield cls(engine_url, client, ranks)

    def application(self) -> web.Application:
        """Return the aiohttp application of the sidecar, which passes on all requests except
        GET /health.
        """
        application = web.Application(client_max_size=_BODY_BYTES_MAX)
        application.router.add_get("/health", self.health)
        application.router.add_route("*", "/{path:.*}", self.handle)
        return application

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200, whatever the state of the engine is, as llm-d-router's sidecar does."""
        return web.Response()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Run the stages that the headers of a request name, and then the engine. Only POST
        requests with a path in `_LIMITS` have stages, and only chats an encode stage.

        Answers 400 if the headers name an unknown rank, or if the body of a request with stages is
        not a JSON object, and 502 if an encode pod fails.
        """
        headers = _passed(request.headers, _OWN_HEADERS | STAGE_HEADERS)
        prefill = _hosts(request.headers.getall(PREFILL_HEADER, []))
        encode = _hosts(request.headers.getall(ENCODE_HEADER, []))
        body = await request.read()
        rank = request.headers.get(RANK_HEADER)
        if rank is not None and rank not in self._ranks:
            return _error(400, f"{RANK_HEADER} names {rank}, which is no rank of these pods.")
        if request.method != "POST" or request.path not in _LIMITS or not (prefill or encode):
            return await self._decode(request, headers, body)
        try:
            members = msgspec.json.decode(body, type=_Members)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            return _error(400, f"The request body is not a JSON object: {problem}.")
        request_id = uuid4().hex
        if encode and request.path == _CHAT:
            failure = await self._encode(encode, members, request_id)
            if failure:
                return _error(502, failure)
        if not prefill:
            return await self._decode(request, headers, body)
        headers.append(("x-request-id", request_id))
        return await self._prefill(request, headers, members, prefill[0])

    async def _prefill(
        self, request: web.Request, headers: _Headers, members: _Members, prefill: str
    ) -> web.StreamResponse:
        """Send a request to its prefill pod, and then to the engine. An error of the prefill pod
        becomes the answer to the client, and the engine does not get the request.
        """
        answer = await self._post(
            prefill, request.path_qs, headers, _first_token(request.path, members)
        )
        if answer.failed:
            log.warning("prefill failed", pod=prefill, status=answer.status)
            return answer.response()
        try:
            found = msgspec.json.decode(answer.body, type=_Members)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            return _error(502, f"The answer of the prefill pod {prefill} is not JSON: {problem}.")
        params = found.get(KV_TRANSFER_PARAMS, Raw(b"null"))
        if bytes(params) == b"null":
            log.warning("prefill without kv_transfer_params", pod=prefill)
        body = msgspec.json.encode(members | {KV_TRANSFER_PARAMS: params})
        return await self._decode(request, headers, body, cached_tokens=_cached_tokens(found))

    async def _encode(self, pods: list[str], members: _Members, request_id: str) -> str:
        """Send each media item of a chat to one of the encode pods. Return why that failed, or
        "".
        """
        items = _media(members)

        async def encode(at: int, item: Raw) -> str:
            pod = pods[at % len(pods)]
            body = _first_token(_CHAT, members | {"messages": _message(item)}, encode=True)
            headers = [
                ("content-type", "application/json"),
                ("x-request-id", f"{request_id}-enc-{at}"),
            ]
            answer = await self._post(pod, _CHAT, headers, body)
            if answer.failed:
                return f"The encode pod {pod} answered item {at} with status {answer.status}."
            return ""

        failures = await asyncio.gather(*(encode(at, item) for at, item in enumerate(items)))
        return next(filter(None, failures), "")

    async def _post(self, pod: str, path: str, headers: _Headers, body: bytes) -> _Answer:
        """Return the answer of another pod; 502 if it cannot be reached or breaks off."""
        try:
            async with self._client.post(
                f"http://{pod}{path}", headers=headers, data=body
            ) as response:
                content_type = response.headers.get("content-type", "application/json")
                return _Answer(response.status, await response.read(), content_type)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as problem:
            failure = _error(502, f"The pod {pod} gave no answer: {_reason(problem)}.")
            assert isinstance(failure.body, bytes), "an error has a body of bytes"
            return _Answer(failure.status, failure.body, failure.content_type)

    async def _decode(
        self,
        request: web.Request,
        headers: _Headers,
        body: bytes,
        cached_tokens: int | None = None,
    ) -> web.StreamResponse:
        """Pass a request to the engine and its answer to the client.

        If `cached_tokens` is not None, it replaces the number of cached tokens in the answer. The
        client gets 503 if the engine cannot be reached, 502 if it gives no answer, and a broken
        connection if its answer breaks off.
        """
        engine_url = self._ranks.get(request.headers.get(RANK_HEADER, ""), self._engine_url)
        url = f"{engine_url}{request.path_qs}"
        sent: web.StreamResponse | None = None
        try:
            async with self._client.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                sent = web.StreamResponse(
                    status=answer.status, headers=_passed(answer.headers, _OWN_HEADERS)
                )
                await sent.prepare(request)
                async for part in _parts(answer, cached_tokens):
                    await sent.write(part)
                await sent.write_eof()
                return sent
        except (aiohttp.ClientError, TimeoutError) as problem:
            if isinstance(problem, aiohttp.ClientConnectorError):
                return _error(503, f"The engine cannot be reached: {_reason(problem)}.")
            if sent is None:
                return _error(502, f"The engine gave no answer: {_reason(problem)}.")
            if isinstance(problem, ConnectionResetError):
                return sent  # the client has left
            log.warning("answer of the engine broke off", reason=_reason(problem))
            if request.transport is not None:
                request.transport.abort()  # so that the client does not take it for complete
            return sent


async def _parts(answer: aiohttp.ClientResponse, cached_tokens: int | None) -> AsyncIterator[bytes]:
    """Yield the body of the engine's answer, with `cached_tokens` as its number of cached tokens if
    that is not None.
    """
    if cached_tokens is None:
        async for part in answer.content.iter_any():
            yield part
    elif answer.content_type != "text/event-stream":
        yield _with_cached_tokens(await answer.read(), cached_tokens)
    else:
        async for line in answer.content:
            prefix = b"data: "
            if line.startswith(prefix + b"{") and b'"usage"' in line:
                told = _with_cached_tokens(line.removeprefix(prefix).strip(), cached_tokens)
                line = prefix + told + b"\n"  # noqa: PLW2901
            yield line


def _first_token(path: str, members: _Members, *, encode: bool = False) -> bytes:
    """Return the body of a request with these members, for an answer of one token that is not
    streamed. Unless `encode`, it tells the engine to hold its KV blocks for another engine.
    """
    limits = dict.fromkeys(_LIMITS[path], 1)
    changed: dict[str, Any] = {
        name: value for name, value in members.items() if name != "stream_options"
    }
    changed["stream"] = False
    if path == _PARAMETERS_PATH:
        parameters = msgspec.json.decode(members.get("sampling_params", Raw(b"{}")))
        given = parameters if isinstance(parameters, dict) else {}
        changed["sampling_params"] = {**given, **limits}
    else:
        changed |= limits
    if not encode:
        changed[KV_TRANSFER_PARAMS] = _REMOTE_DECODE
    return msgspec.json.encode(changed)


def _media(members: _Members) -> list[Raw]:
    """Return the media items of a chat; items of the same type with the same URL count once."""
    items: dict[bytes, Raw] = {}
    for raw in _items(members):
        item = msgspec.json.decode(raw)
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in _MEDIA:
            continue
        source = item.get(kind)
        url = source.get("url") if isinstance(source, dict) else None
        # Items without a URL are all different.
        key = f"{kind} {url}" if url else f"{len(items)}"
        items.setdefault(key.encode(errors="replace"), raw)
    return list(items.values())


class _Message(Struct):
    content: Raw = Raw(b"null")


def _items(members: _Members) -> Iterator[Raw]:
    """Yield each item of the contents of a chat's messages."""
    with contextlib.suppress(msgspec.DecodeError):
        for message in msgspec.json.decode(
            members.get("messages", Raw(b"[]")), type=list[_Message]
        ):
            if bytes(message.content).lstrip().startswith(b"["):
                yield from msgspec.json.decode(message.content, type=list[Raw])


def _message(item: Raw) -> Raw:
    """Return the messages of a chat that has only this item."""
    return Raw(msgspec.json.encode([{"role": "user", "content": [item]}]))


def _cached_tokens(members: _Members) -> int:
    """Return the number of cached tokens in the usage of an answer; 0 if it has none."""
    try:
        return int(msgspec.json.decode(members["usage"])["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError, ValueError, msgspec.DecodeError):
        return 0


def _with_cached_tokens(body: bytes, cached_tokens: int) -> bytes:
    """Return an answer with this number of cached tokens; unchanged if it has no usage."""
    try:
        members = msgspec.json.decode(body, type=_Members)
        usage = msgspec.json.decode(members["usage"], type=_Members)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
        return body
    details = {"cached_tokens": cached_tokens}
    usage["prompt_tokens_details"] = Raw(msgspec.json.encode(details))
    members["usage"] = Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(members)


def _hosts(values: list[str]) -> list[str]:
    """Return the hosts that a header names, which may be repeated or have a list."""
    return [host for value in values for part in value.split(",") if (host := part.strip())]


def _passed(headers: Mapping[str, str], dropped: frozenset[str]) -> _Headers:
    """Return the headers of a request or an answer that are passed on, without those in
    `dropped`. Their names are in lower case, because the HTTP client would replace a header by a
    second one whose name has another case.
    """
    lower = ((name.lower(), value) for name, value in headers.items())
    return [(name, value) for name, value in lower if name not in dropped]


def _reason(problem: BaseException) -> str:
    return str(problem) or type(problem).__name__


def _error(status: int, message: str) -> web.Response:
    """Return an error object in the form of the OpenAI API."""
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "SidecarError"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
