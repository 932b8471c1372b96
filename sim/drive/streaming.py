"""A client for one streamed answer of the OpenAI API, for chats and completions."""

import asyncio
from array import array
from typing import Final

import msgspec
from aiohttp import ClientError, ClientSession
from msgspec import Struct, field

from epp.core.types import Seconds

ERROR_CHARACTERS_MAX: Final = 200
PROBLEMS: Final = (ClientError, TimeoutError, msgspec.DecodeError, ValueError)
"""Exceptions that `ask` raises if a gateway or an engine fails."""


class StreamError(ClientError):
    """The response to a streamed request has a status other than 200, breaks off, or has another
    number of tokens than expected.
    """


class Streamed(Struct, kw_only=True):
    """The part of one streamed answer that a client has received. `ask` fills it during the stream,
    so that it has the first part of an answer that breaks off.
    """

    status: int = 0
    """HTTP status of the response, or 0 if there was none."""
    served_by: str = ""
    """Value of the response header that the caller of `ask` named; "" if it named none, or the
    response lacks it.
    """
    ttft_s: Seconds = 0.0
    """Time in seconds from sending the request to the first chunk with text, or 0 if there was
    none.
    """
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Times in seconds between consecutive chunks with text."""
    duration_s: Seconds = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    text: str = ""
    delta: _Delta = field(default_factory=_Delta)


class _CachedTokens(Struct):
    cached_tokens: int = 0


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def ask(
    session: ClientSession,
    url: str,
    body: bytes,
    headers: dict[str, str],
    found: Streamed,
    *,
    served_by: str = "",
    output_tokens: int | None = None,
) -> str:
    """Send a request with `body`, read the streamed answer to its end, and return the answer's
    text.

    `body` must ask for a stream with usage. `served_by` names a response header to record. If
    `output_tokens` is given, an answer with another number of tokens is an error. Raises the
    exceptions in `PROBLEMS`; `found` then has the part that was received.
    """
    clock = asyncio.get_running_loop().time
    sent_at = last_at = clock()
    parts: list[str] = []
    whole = False
    try:
        async with session.post(
            url,
            data=body,
            headers={"content-type": "application/json", **headers},
            # Redirects are not followed, because keys in the headers are only for the named
            # gateway.
            allow_redirects=False,
        ) as response:
            found.status = response.status
            found.served_by = response.headers.get(served_by, "") if served_by else ""
            if response.status != 200:
                text = await response.content.read(ERROR_CHARACTERS_MAX)
                raise StreamError(f"status {response.status}: {text.decode(errors='replace')}")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    whole = True
                    continue
                chunk = _decode(line[6:])
                text_of = "".join(one.text or one.delta.content or "" for one in chunk.choices)
                if text_of:
                    now = clock()
                    if found.ttft_s:
                        found.gaps_s.append(now - last_at)
                    else:
                        found.ttft_s = now - sent_at
                    last_at = now
                    parts.append(text_of)
                if chunk.usage is not None:
                    _take(chunk.usage, found)
    finally:
        found.duration_s = clock() - sent_at
    if not whole or output_tokens not in {None, found.output_tokens}:
        of = "" if output_tokens is None else f" of {output_tokens}"
        raise StreamError(f"the stream ended after {found.output_tokens}{of} tokens")
    return "".join(parts)


def _take(usage: _Usage, found: Streamed) -> None:
    found.prompt_tokens = usage.prompt_tokens
    found.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        found.cached_tokens = usage.prompt_tokens_details.cached_tokens
