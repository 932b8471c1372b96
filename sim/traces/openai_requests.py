"""Raw OpenAI requests, one a line, parsed as in production, and hashed so without a tokenizer.

A line is a body, or an object with the body under `body`, as the batch API has it (`url`, `method`,
`custom_id`). It optionally has `time_s` or `timestamp` (seconds, or a date and time), `path`,
`output_tokens`, `session`, `priority`, `headers` and `response` with its `usage`.
"""

from array import array
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct, field, structs

from epp.core.journal.lines import Tokens
from epp.core.prompt.parse import parse_request
from epp.core.types import BYTES_PER_TOKEN, Refusal
from sim.traces.arrival import Arrival, FieldError
from sim.traces.headers import headers_of
from sim.traces.moments import seconds_of
from sim.traces.reading import MALFORMED, LineFormat, Parse, ReadOptions
from sim.traces.texts import BLOCK_TOKENS, Tokenize, blocks_of, text_in, tokenizer_at

OUTPUT_TOKENS_DEFAULT: Final = 128
"""Assumed number of answer tokens, if neither the line nor a limit in the request body gives one.
"""
TOKEN_ESTIMATE: Final = (
    f"Prompt tokens are estimated as one for every {BYTES_PER_TOKEN} bytes of text, unless a "
    "--tokenizer counts them. If a line has no count of answer tokens, the answer is as long as the "
    f"request's limit, or {OUTPUT_TOKENS_DEFAULT} tokens without one."
)
_BLOCKS_MAX: Final = 1_000_000
_TERMINATOR_BYTES: Final = 1
"""Number of bytes that the picker's parser counts for an empty prompt: its terminator."""
_PATHS: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}


class _Usage(Struct, frozen=True):
    completion_tokens: int = 0
    output_tokens: int = 0


class _ResponseBody(Struct, frozen=True):
    usage: _Usage = _Usage()


class _Response(Struct, frozen=True):
    usage: _Usage | None = None
    body: _ResponseBody = _ResponseBody()


class _Line(Struct):
    body: Raw
    url: str = ""
    path: str = ""
    time_s: Annotated[float, Meta(ge=0)] | None = None
    timestamp: float | str | None = None
    output_tokens: Tokens | None = None
    response: _Response | None = None
    session: str = ""
    priority: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    def arrival_s(self, unit: str) -> float | None:
        if self.time_s is not None or self.timestamp is None:
            return self.time_s
        return seconds_of(self.timestamp, "timestamp", unit, "s")

    def answered_tokens(self) -> int | None:
        if self.output_tokens is not None or self.response is None:
            return self.output_tokens
        usage = self.response.usage or self.response.body.usage
        return usage.completion_tokens or usage.output_tokens or None


def _parser(first: bytes, options: ReadOptions) -> Parse:
    decode_line = msgspec.json.Decoder(_Line).decode
    decode_body = msgspec.json.Decoder(dict[str, Raw]).decode
    tokenize = tokenizer_at(options.tokenizer)

    def parse(index: int, text: bytes) -> Arrival:
        members = decode_body(text)
        line = decode_line(text) if "body" in members else _Line(body=Raw(text.strip()))
        body = bytes(line.body)
        if body.startswith(b'"'):
            body = msgspec.json.decode(body, type=str).encode()
        headers = headers_of(line.headers)
        arrival = arrival_of_body(
            index, body, line.path or line.url, headers=headers, tokenize=tokenize
        )
        arrival_s = line.arrival_s(options.time_unit)
        return structs.replace(
            arrival,
            time_s=options.at_rate_s(index) if arrival_s is None else arrival_s,
            output_tokens=line.answered_tokens() or arrival.output_tokens,
            session=line.session,
            priority=line.priority,
        )

    return parse


def arrival_of_body(
    index: int,
    body: bytes,
    path: str = "",
    *,
    headers: tuple[tuple[str, str], ...] = (),
    tokenize: Tokenize | None = None,
) -> Arrival:
    """Return the request `body` as an arrival at time 0. Its answer is as long as the request's
    limit, or 128 tokens.

    `path` is the API path of the request, or "" to derive it from the body's members. Raises
    `FieldError` if the picker would reject the request or it does not have exactly one prompt,
    which must not be empty, and msgspec's errors if the body is not a JSON object.
    """
    path = path or _path_of(msgspec.json.decode(body, type=dict[str, Raw]))
    parsed = parse_request(path=path, headers=dict(headers), body=body, request_id=str(index))
    if isinstance(parsed, Refusal):
        member = (parsed.param or "").removeprefix("$").removeprefix(".")
        raise FieldError(member, parsed.message)
    request = parsed.request
    if len(request.prompts) != 1:
        raise FieldError("prompt", f"Expected one prompt, got {len(request.prompts)}")
    if len(request.prompts[0]) <= _TERMINATOR_BYTES:
        raise FieldError("prompt", "Expected at least one token, got an empty prompt")
    text = text_in(body) if tokenize is not None else ""
    if tokenize is not None and text:
        ids = tokenize(text)
        prompt_tokens, blocks = len(ids), blocks_of(ids)
    else:
        [chain] = request.chains_of(BLOCK_TOKENS * BYTES_PER_TOKEN, _BLOCKS_MAX)
        prompt_tokens, blocks = request.prompt_tokens, tuple(array("Q", chain))
    return Arrival(
        index=index,
        time_s=0.0,
        # Production estimates tokens by bytes, which gives 0 for fewer than four.
        prompt_tokens=max(1, prompt_tokens),
        output_tokens=request.output_tokens_max or OUTPUT_TOKENS_DEFAULT,
        output_tokens_max=request.output_tokens_max,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        model=request.model,
        cache_salt=request.cache_salt,
        headers=headers,
        path=path,
        body=body,
    )


def _path_of(body: dict[str, Any]) -> str:
    for member, path in _PATHS.items():
        if member in body:
            return path
    raise FieldError("", f"Expected one of the members {', '.join(_PATHS)} in the body")


def _recognises(line: bytes) -> bool:
    try:
        members = msgspec.json.decode(line, type=dict[str, Raw])
    except MALFORMED:
        # Only the beginning of a long first line is available here.
        return b'"model"' in line and any(f'"{name}"'.encode() in line for name in _PATHS)
    if "body" in members:
        return True
    return "model" in members and any(name in members for name in _PATHS)


OPENAI: Final = LineFormat(
    name="openai",
    recognises=_recognises,
    parser=_parser,
    token_estimate=TOKEN_ESTIMATE,
    takes=frozenset({"time_unit", "tokenizer"}),
)
