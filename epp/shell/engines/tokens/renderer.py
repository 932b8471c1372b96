"""Request the tokens of a prompt from the engine's render and tokenize APIs.

A renderer gets the body of the request, changed only as far as `prefill_only` and `omit_mm_kwargs`
demand, and the client's `Authorization`, so that it returns the engine's tokens. Requests to a
renderer are limited in time, connections and bytes.
"""

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec
import structlog
from msgspec import Raw

from epp.configuration.token_producer import EndpointDiscovery, RenderMode, VllmRenderer
from epp.core.address import address_of
from epp.core.moment import PlacedMedia
from epp.core.types import ApiKind, Endpoint, Seconds, ranks_of
from epp.shell.engines.loop_share import Account, LoopShare
from epp.shell.engines.page_client import (
    BadResponseError,
    Connection,
    ResponseReader,
    StaleConnectionError,
)
from epp.shell.engines.tokens.answers import (
    ANSWER_BYTES_MAX,
    BadAnswerError,
    UnidentifiedMediaError,
    check_placed,
    ids_of,
    pieces_of,
    rendered_prompts,
    too_many,
)
from epp.shell.engines.tokens.breaker import CircuitBreaker
from epp.shell.engines.tokens.question import (
    PromptTokens,
    Question,
    TokensResult,
    TokensUnknownError,
)
from epp.shell.engines.trust import client_context

CONNECTIONS_MAX: Final = 16
"""Maximum number of connections to one renderer, each with one request at a time."""
NOT_RENDERED_S: Final[Seconds] = 60.0
"""Time in seconds for which a path that a renderer does not have is not requested again. After it
the server may be a newer one.
"""
ATTEMPTS_MAX: Final = 2

_TOKENIZE: Final = "/tokenize"
_PATHS: Final[Mapping[ApiKind, str]] = {
    ApiKind.CHAT: "/v1/chat/completions/render",
    ApiKind.COMPLETIONS: "/v1/completions/render",
    ApiKind.MESSAGES: "/v1/messages/render",
    ApiKind.RESPONSES: "/v1/responses/render",
}
_TOKENIZED: Final = frozenset({ApiKind.CHAT, ApiKind.COMPLETIONS})
"""APIs whose request bodies a renderer's /tokenize accepts unchanged."""
_NOT_THERE: Final = frozenset({403, 404, 405, 501})
"""HTTP statuses of a server that cannot render, or does not support the API of the request."""
_FULL: Final = frozenset({408, 429, 503})
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_tokens")

_log = structlog.get_logger(__name__)
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


def tls_of(settings: VllmRenderer) -> ssl.SSLContext | None:
    """Return the TLS context for connections to renderers by https, or None for http and for
    renderers that are discovered in the pool. Reads files. Raises `ConfigError`.
    """
    if settings.endpoint_discovery is not None or urlsplit(settings.url).scheme != "https":
        return None
    return client_context(
        "token-producer: files of the renderer's TLS",
        ca_cert_path=settings.ca_cert_path,
        client_cert_path=settings.client_cert_path,
        client_key_path=settings.client_key_path,
        insecure_skip_verify=settings.insecure_skip_verify,
    )


class _Server:
    """One renderer with its connections, each of which has at most one request at a time."""

    def __init__(
        self, host: str, port: int, base: str, tls: ssl.SSLContext | None, account: Account
    ) -> None:
        scheme = "http" if tls is None else "https"
        self.authority = address_of(host, port)
        self.url = f"{scheme}://{self.authority}{base}"
        self._host = host
        self._port = port
        self._base = quote(base, safe="/%:@!$&'()*+,;=~-._")
        self._tls = tls
        self._account = account
        self._idle: list[Connection] = []
        self._under_way = 0
        self.breaker = CircuitBreaker()
        self._not_there: dict[str, Seconds] = {}
        """Time until which a path that the renderer does not have is not requested, by path."""
        self.asked = 0

    @property
    def full(self) -> bool:
        return self._under_way >= CONNECTIONS_MAX

    def has(self, path: str, now: Seconds) -> bool:
        return now >= self._not_there.get(path, now)

    def has_not(self, path: str, now: Seconds) -> None:
        self._not_there[path] = now + NOT_RENDERED_S

    def row(self, now: Seconds) -> dict[str, object]:
        without = sorted(path for path in self._not_there if not self.has(path, now))
        return {
            "renderer": self.url,
            "circuit": "open" if self.breaker.is_open(now) else "closed",
            "asked": self.asked,
            "under_way": self._under_way,
            "does_not_render": ", ".join(without),
        }

    async def post(self, path: str, body: bytes, authorization: str, timeout_s: Seconds) -> bytes:
        """Send a request to the renderer and return the body of its answer.

        Raises the errors of `PageClient.fetch`; an error closes the connection.
        """
        self.asked += 1
        self._under_way += 1
        lines = [
            f"POST {self._base}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "User-Agent: homing",
            "Accept: application/json",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if authorization and _HEADER_VALUE.fullmatch(authorization):
            lines.append(f"Authorization: {authorization}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        try:
            return await self._exchange(head + body, timeout_s)
        finally:
            self._under_way -= 1

    async def _exchange(self, request: bytes, timeout_s: Seconds) -> bytes:
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + timeout_s
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is None:
                continue
            try:
                return await self._ask(connection, request, timeout_s)
            except StaleConnectionError:
                pass  # an idle connection may close at any time
        async with asyncio.timeout_at(ends_at_s):
            _, connection = await loop.create_connection(
                lambda: Connection(self._account),
                self._host,
                self._port,
                ssl=self._tls,
                server_hostname=None if self._tls is None else self._host,
            )
            return await self._ask(connection, request, timeout_s)

    async def _ask(self, connection: Connection, request: bytes, timeout_s: Seconds) -> bytes:
        try:
            answer = await connection.ask(request, ResponseReader(ANSWER_BYTES_MAX), timeout_s)
        except BaseException:
            connection.abort()
            raise
        if connection.transport is not None:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()


class Renderer:
    """The backend `vllm`, which requests the tokens of prompts from renderers: vLLM servers with a
    render API.
    """

    name = "vllm"

    def __init__(self, settings: VllmRenderer, tls: ssl.SSLContext | None) -> None:
        self._settings = settings
        self._tls = tls
        self._account = LoopShare(time.thread_time).open()
        self._servers: dict[str, _Server] = {}
        self._turns: deque[_Server] = deque()
        self._warned = False
        discovery = settings.endpoint_discovery
        if discovery is None:
            parts = urlsplit(settings.url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            self._set({(parts.hostname or "", port, parts.path.rstrip("/"))})

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints of the pool. They are the renderers if the configuration discovers
        renderers in the pool.
        """
        discovery = self._settings.endpoint_discovery
        if discovery is not None:
            self._set(_places(endpoints, discovery))

    def _set(self, places: set[tuple[str, int, str]]) -> None:
        before, self._servers = self._servers, {}
        for host, port, base in sorted(places):
            key = f"{host} {port} {base}"
            known = before.pop(key, None)
            self._servers[key] = known or _Server(host, port, base, self._tls, self._account)
        for gone in before.values():
            gone.close()
        self._turns = deque(self._servers.values())

    def refuses(self, question: Question) -> TokensResult | None:
        api = question.request.api
        if api not in _PATHS or not self._may_render(api):
            return TokensResult.UNSUPPORTED
        now = time.monotonic()
        if not self._servers:
            return TokensResult.UNREACHABLE
        able = [server for server in self._servers.values() if server.breaker.allows(now)]
        if not able:
            return TokensResult.OPEN
        return TokensResult.BUSY if all(server.full for server in able) else None

    def _may_render(self, api: ApiKind) -> bool:
        modes = {
            ApiKind.MESSAGES: self._settings.messages_render_mode,
            ApiKind.RESPONSES: self._settings.responses_render_mode,
        }
        return modes.get(api, RenderMode.NATIVE) is not RenderMode.LEGACY

    async def find(self, question: Question) -> PromptTokens:
        settings = self._settings
        limit_s: Seconds = settings.timeout
        if question.request.api is not ApiKind.COMPLETIONS:
            limit_s = max(settings.timeout, settings.mm_timeout)
        discovery = settings.endpoint_discovery
        attempt_s = (discovery and discovery.attempt_timeout) or limit_s
        ends_at_s = time.monotonic() + limit_s
        tried: set[str] = set()
        failure = TokensUnknownError(TokensResult.BUSY)
        for _ in range(ATTEMPTS_MAX if discovery is not None else 1):
            server = self._next(tried)
            if server is None:
                break
            tried.add(server.url)
            left_s = min(attempt_s, ends_at_s - time.monotonic())
            try:
                return await self._ask(server, question, max(left_s, 0.0))
            except TokensUnknownError as error:
                failure = error
                if error.result not in _WORTH_ANOTHER:
                    break
        raise failure

    def _next(self, tried: set[str]) -> _Server | None:
        """Return the next renderer in round robin that was not tried, is not full and is not
        failing, or None if there is none.
        """
        now = time.monotonic()
        for _ in range(len(self._turns)):
            server = self._turns[0]
            self._turns.rotate(-1)
            if server.url not in tried and not server.full and server.breaker.allows(now):
                return server
        return None

    async def _ask(self, server: _Server, question: Question, timeout_s: Seconds) -> PromptTokens:
        """Request the tokens from one renderer, and record for its circuit breaker whether it
        failed. Log when the circuit opens. Raises `TokensUnknownError`.
        """
        server.breaker.asked(time.monotonic())
        failed = True
        try:
            found = await self._render(server, question, timeout_s)
            failed = False
        except asyncio.CancelledError:
            # The client left, which says nothing about the server, or the server was too slow.
            failed = question.expired
            raise
        except TimeoutError as error:
            raise TokensUnknownError(TokensResult.TIMEOUT) from error
        except BadAnswerError as error:
            raise TokensUnknownError(TokensResult.INVALID) from error
        except UnidentifiedMediaError as error:
            failed = False
            raise TokensUnknownError(TokensResult.MEDIA) from error
        except BadResponseError as error:
            result = _result_of(error)
            failed = result is not TokensResult.REFUSED
            raise TokensUnknownError(result) from error
        except TokensUnknownError:
            failed = False
            raise
        except OSError as error:
            raise TokensUnknownError(TokensResult.UNREACHABLE) from error
        finally:
            if not failed:
                server.breaker.succeeded()
            elif server.breaker.failed(time.monotonic()):
                _log.warning(
                    "renderer disabled temporarily after repeated failures", renderer=server.url
                )
        return found

    async def _render(
        self, server: _Server, question: Question, timeout_s: Seconds
    ) -> PromptTokens:
        request, path = question.request, _PATHS[question.request.api]
        authorization = request.headers.get("authorization", "")
        now = time.monotonic()
        ends_at_s = now + timeout_s
        if server.has(path, now):
            try:
                answer = await server.post(path, self._body_of(question), authorization, timeout_s)
                return await _read(answer, question)
            except BadResponseError as bad:
                if bad.status not in _NOT_THERE:
                    raise
                if request.api not in _TOKENIZED:
                    # The model may be missing, so a request for another model tries again.
                    server.has_not(path, now)
                    raise TokensUnknownError(TokensResult.UNSUPPORTED) from bad
        if request.api not in _TOKENIZED or not _can_be_tokenized(question):
            raise TokensUnknownError(TokensResult.UNSUPPORTED)
        if question.has_media:
            raise UnidentifiedMediaError
        left_s = max(ends_at_s - time.monotonic(), 0.0)
        answer = await server.post(_TOKENIZE, question.body, authorization, left_s)
        found = await _read(answer, question)
        if server.has(path, now):
            # The server knows the model and tokenizes it, so it only cannot render.
            server.has_not(path, now)
            self._warn(server)
        return found

    def _body_of(self, question: Question) -> bytes:
        body = question.body
        if self._settings.prefill_only:
            body = one_token_more(body)
        if self._settings.omit_mm_kwargs and question.has_media:
            body = without_tensors(body)
        return body

    def _warn(self, server: _Server) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "renderer has no render API, /tokenize is used instead: start vLLM with "
                "--enable-scale-out, or `vllm launch render`",
                renderer=server.url,
            )

    async def run(self) -> None:
        await asyncio.Event().wait()

    def rows(self) -> list[dict[str, object]]:
        now = time.monotonic()
        return [server.row(now) for server in self._servers.values()]

    def totals(self) -> dict[str, object]:
        return {"asked": sum(server.asked for server in self._servers.values())}

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


_WORTH_ANOTHER: Final = frozenset(
    {
        TokensResult.TIMEOUT,
        TokensResult.BUSY,
        TokensResult.UNREACHABLE,
        TokensResult.FAILED,
        TokensResult.INVALID,
    }
)
"""Results of a request to a renderer after which another renderer of the pool may succeed."""


def _result_of(error: BadResponseError) -> TokensResult:
    if error.kind == "page":
        return TokensResult.INVALID
    if error.status in _FULL:
        return TokensResult.BUSY
    return TokensResult.FAILED if error.status >= 500 else TokensResult.REFUSED


def _places(
    endpoints: Sequence[Endpoint], discovery: EndpointDiscovery
) -> set[tuple[str, int, str]]:
    ranks = ranks_of(endpoints)
    found: set[tuple[str, int, str]] = set()
    for endpoint in endpoints:
        port = discovery.port_of(endpoint, ranks[endpoint.endpoint_id])
        if port is not None:
            found.add((endpoint.host, port, ""))
    return found


async def _read(answer: bytes, question: Question) -> PromptTokens:
    """Parse the token ids of each prompt in a renderer's answer. The event loop runs between two
    pieces of the answer. Raises `BadAnswerError` and `UnidentifiedMediaError`.
    """
    found: list[bytes] = []
    media: list[tuple[PlacedMedia, ...]] = []
    for prompt in rendered_prompts(answer, len(question.request.prompts)):
        ids: list[bytes] = []
        for piece in pieces_of(prompt.ids):
            if ids:
                await asyncio.sleep(0)
            ids.append(ids_of(piece))
        found.append(b"".join(ids))
        if too_many(found[-1], question.body):
            raise BadAnswerError("has more ids than the request has bytes")
        check_placed(prompt.media, found[-1])
        media.append(prompt.media)
    if not any(media):
        if question.has_media:
            raise UnidentifiedMediaError
        media.clear()
    return PromptTokens(tuple(found), tuple(media))


def _can_be_tokenized(question: Question) -> bool:
    """Return True if /tokenize returns the engine's tokens for a request: it has one prompt, which
    is not truncated.
    """
    return len(question.request.prompts) == 1 and not _is_set(question, "truncate_prompt_tokens")


def _is_set(question: Question, member: str) -> bool:
    if member.encode() not in question.body:
        return False
    return bytes(_decode_members(question.body).get(member, b"null")) != b"null"


def without_tensors(body: bytes) -> bytes:
    """Return a request body that asks the renderer for no computed tensors of media, and is
    otherwise unchanged.
    """
    members, _, blanks = body.rpartition(b"}")
    return members + b',"return_mm_kwargs":false}' + blanks


def one_token_more(body: bytes) -> bytes:
    """Return a request body that asks for one output token, so that the longest possible prompt is
    rendered.

    A body with truncation is unchanged, because the truncation depends on the room that is left.
    """
    members = _decode_members(body)
    if bytes(members.get("truncate_prompt_tokens", b"null")) != b"null":
        return body
    one = Raw(b"1")
    members["max_tokens"] = one
    for limit in _OUTPUT_LIMITS:
        if limit in members:
            members[limit] = one
    if "min_tokens" in members:
        members["min_tokens"] = Raw(b"0")
    return msgspec.json.encode(members)
