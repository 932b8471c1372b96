"""Raw OpenAI requests, one a line: read and hashed as production does, then without their text.

A line is a body; or an object with the body under `body`, as the batch API has it (`url`, `method`,
`custom_id`), and optionally `time_s` or `timestamp` (seconds, or a date and time), `path`,
`output_tokens`, `session`, `priority`, `headers` and `response` with its `usage`.
"""

from array import array
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct, field

from epp.core.capture.lines import Tokens
from epp.core.prompt.parse import parse_request
from epp.core.types import BYTES_PER_TOKEN, Refusal
from sim.traces.arrival import Arrival, FieldError
from sim.traces.headers import headers_of
from sim.traces.reading import MALFORMED, LineFormat, Parse, ReadOptions

BLOCK_TOKENS: Final = 16
"""Fine enough for the picker's blocks and for those of most engines."""
OUTPUT_TOKENS_DEFAULT: Final = 128
"""Where neither the line nor a limit in the body tells the length of the answer."""
_BLOCKS_MAX: Final = 1_000_000
_TERMINATOR_BYTES: Final = 1
"""What production reads of an empty text: its end."""
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
    timestamp: Annotated[float, Meta(ge=0)] | datetime | None = None
    output_tokens: Tokens | None = None
    response: _Response | None = None
    session: str = ""
    priority: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    def arrival_s(self) -> float | None:
        if self.time_s is not None or self.timestamp is None:
            return self.time_s
        if isinstance(self.timestamp, datetime):
            return (self.timestamp.replace(tzinfo=self.timestamp.tzinfo or UTC)).timestamp()
        return self.timestamp

    def answered_tokens(self) -> int | None:
        if self.output_tokens is not None or self.response is None:
            return self.output_tokens
        usage = self.response.usage or self.response.body.usage
        return usage.completion_tokens or usage.output_tokens or None


def _parser(first: bytes, options: ReadOptions) -> Parse:
    decode_line = msgspec.json.Decoder(_Line).decode
    decode_body = msgspec.json.Decoder(dict[str, Raw]).decode

    def parse(index: int, text: bytes) -> Arrival:
        members = decode_body(text)
        line = decode_line(text) if "body" in members else _Line(body=Raw(text.strip()))
        body = bytes(line.body)
        if body.startswith(b'"'):
            body = msgspec.json.decode(body, type=str).encode()
        path = line.path or line.url or _path_of(decode_body(body))
        headers = headers_of(line.headers)
        parsed = parse_request(path=path, headers=dict(headers), body=body, request_id=str(index))
        if isinstance(parsed, Refusal):
            member = (parsed.param or "").removeprefix("$").removeprefix(".")
            raise FieldError(member, parsed.message)
        request = parsed.request
        if len(request.prompts) != 1:
            raise FieldError("prompt", f"Expected one prompt, got {len(request.prompts)}")
        if len(request.prompts[0]) <= _TERMINATOR_BYTES:
            raise FieldError("prompt", "Expected at least one token, got an empty prompt")
        [chain] = request.chains_of(BLOCK_TOKENS * BYTES_PER_TOKEN, _BLOCKS_MAX)
        arrival_s = line.arrival_s()
        limit = request.output_tokens_max or OUTPUT_TOKENS_DEFAULT
        return Arrival(
            index=index,
            time_s=index / options.rate_per_s if arrival_s is None else arrival_s,
            # Production counts tokens by bytes: of fewer than four there are none.
            prompt_tokens=max(1, request.prompt_tokens),
            output_tokens=line.answered_tokens() or limit,
            output_tokens_max=request.output_tokens_max,
            blocks=tuple(array("Q", chain)),
            block_tokens=BLOCK_TOKENS,
            model=request.model,
            cache_salt=request.cache_salt,
            session=line.session,
            priority=line.priority,
            headers=headers,
            path=path,
            body=body,
        )

    return parse


def _path_of(body: dict[str, Any]) -> str:
    for member, path in _PATHS.items():
        if member in body:
            return path
    raise FieldError("", f"Expected one of the members {', '.join(_PATHS)} in the body")


def _recognises(line: bytes) -> bool:
    try:
        members = msgspec.json.decode(line, type=dict[str, Raw])
    except MALFORMED:
        # Of a long first line only the head is looked at.
        return b'"model"' in line and any(f'"{name}"'.encode() in line for name in _PATHS)
    if "body" in members:
        return True
    return "model" in members and any(name in members for name in _PATHS)


OPENAI: Final = LineFormat(
    name="openai",
    says="raw OpenAI request bodies JSONL, bare or under `body` (batch files)",
    recognises=_recognises,
    parser=_parser,
    token_estimate=f"Prompt tokens are estimated as one for every {BYTES_PER_TOKEN} bytes of text; "
    "where a line has no count of them, answer tokens are its limit, or "
    f"{OUTPUT_TOKENS_DEFAULT} without one.",
)
