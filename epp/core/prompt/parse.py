"""Conversion of a request's path, headers and body to a request that can be scheduled, or to a
refusal. JSON is decoded once.

Members that routing does not need are skipped; the engine validates them. The picker refuses (400)
invalid JSON, an unpaired surrogate, a body that is not an object, a model that is not a text, and a
missing model if the API needs one. It places every other body whose path a parser reads. If a
strict parser does not understand it, `core/prompt/lenient` reads it a second time. If reading would
take too long (`core/prompt/outline`), it is placed without its prompt. The body is forwarded byte
for byte; a rewrite of the model changes only that value, or inserts it.
"""

import math
import re
import sys
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.json import Decoder

from epp.core.prompt.blocks import KnownSegments
from epp.core.prompt.canonical import (
    NO_JSON,
    Content,
    Item,
    Message,
    chat_prompt,
    responses_prompt,
    text_prompt,
)
from epp.core.prompt.lenient import Unread, read_leniently
from epp.core.prompt.outline import TooMuchError, admit, is_closing, is_opening, outside_texts
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, ApiKind, Refusal, RefusalReason


class ParserName(StrEnum):
    """The name of a parser that an `EndpointPickerConfig` may enable."""

    OPENAI = "openai-parser"
    ANTHROPIC = "anthropic-parser"
    VLLM_HTTP = "vllmhttp-parser"
    PASSTHROUGH = "passthrough-parser"


ParserSet: TypeAlias = frozenset[ParserName]
ALL_PARSERS: Final[ParserSet] = frozenset(ParserName)


PROMPTS_MAX: Final = 10_000
"""Maximum number of prompts of one request; a request with more is placed without knowledge of its
prompts.
"""
PROMPTS_REMEMBERED_MAX: Final = 2_048
"""Maximum number of prompts of one request that are recorded; OpenAI accepts no more. Each has its
own chain to hash, match and record, which takes about seven microseconds, and may be as short as a
block.
"""
MODEL_MEMBERS_MAX: Final = 5_000
"""Maximum number of members named `model`, at any depth of a body, among which those of the top
level are searched. With more, a request whose model must be rewritten is refused, and the model of
a body that is too costly to decode counts as not named.
"""


class Parsed(Struct, frozen=True, kw_only=True, gc=False):
    """A request that can be scheduled, and its body."""

    request: InferenceRequest
    body: bytes
    """Body to forward to the endpoint: the received object itself, unless the model was rewritten."""
    incoming_model: str
    """Model that the body names, or "" if it names none or is not read."""
    decoded: bytes = b""
    """Body without its content encoding; b"" if it has no content encoding, or was not decoded."""
    unparsed: str = ""
    """Reason why the request is placed without full knowledge of its prompt; "" if everything was
    understood.
    """


# Types of bodies, with the members that matter here; the decoder skips the others.

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Prompts: TypeAlias = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1)]


class Body(Struct, gc=False):
    """The members that the bodies of all APIs have. `Raw` members may have any type; the engine
    validates them.
    """

    model: str | UnsetType | None = UNSET
    cache_salt: str | None = None
    stream: Raw = NO_JSON
    max_tokens: Raw = NO_JSON


class ChatBody(Body, kw_only=True, gc=False):
    messages: Messages
    tools: Raw = NO_JSON
    documents: Raw = NO_JSON
    chat_template_kwargs: Raw = NO_JSON
    max_completion_tokens: Raw = NO_JSON


class CompletionsBody(Body, kw_only=True, gc=False):
    prompt: Prompts | None = None
    prompt_embeds: Raw = NO_JSON


class EmbeddingsBody(Body, kw_only=True, gc=False):
    input: Prompts | None = None
    messages: Messages | None = None
    """Conversation to embed, instead of `input`, as vLLM supports it."""


class ResponsesBody(Body, kw_only=True, gc=False):
    input: str | list[Item]
    instructions: str | None = None
    tools: Raw = NO_JSON
    previous_response_id: Raw = NO_JSON
    max_output_tokens: Raw = NO_JSON


class AnthropicBody(Body, kw_only=True, gc=False):
    messages: Messages
    system: Content = None
    tools: Raw = NO_JSON


class SamplingParams(Struct, gc=False):
    max_tokens: Raw = NO_JSON


class GenerateBody(Body, kw_only=True, gc=False):
    token_ids: list[TokenId]
    sampling_params: SamplingParams | None = None


def _fraction(text: str) -> float:
    """Return the number in `text`, which has a point or an exponent. Raises `ValueError` if it is
    infinite.

    msgspec calls this where Lemire's algorithm has no result, such as for 1e300; its own parser
    takes eight microseconds.
    """
    value = float(text)
    if -math.inf < value < math.inf:
        return value
    raise ValueError("Number out of range")


_decode_chat = Decoder(ChatBody, float_hook=_fraction).decode
_decode_completions = Decoder(CompletionsBody).decode
_decode_embeddings = Decoder(EmbeddingsBody, float_hook=_fraction).decode
_decode_responses = Decoder(ResponsesBody, float_hook=_fraction).decode
_decode_anthropic = Decoder(AnthropicBody, float_hook=_fraction).decode
_decode_generate = Decoder(GenerateBody).decode
_decode_body = Decoder(Body).decode
_decode_any = Decoder(float_hook=_fraction).decode


_TRUE: Final = Raw(b"true")
_NULL: Final = Raw(b"null")
_CHAT: Final = ApiKind.CHAT
"""Member of `ApiKind`, which takes a tenth of the time to read as a constant (`core/types`)."""


class _Members(Struct, gc=False):
    """The members of a body that show to which API it belongs."""

    prompt: Raw = NO_JSON
    messages: Raw = NO_JSON
    input: Raw = NO_JSON


_decode_members = Decoder(_Members).decode


class _Reading(Struct, gc=False):
    """The result of reading the body of a request for one API."""

    body: Body
    api: ApiKind = ApiKind.OPAQUE
    prompts: tuple[bytes, ...] = ()
    output_tokens_max: Raw = NO_JSON
    tokens_forgotten: int = 0
    """Approximate number of tokens of those prompts beyond `PROMPTS_REMEMBERED_MAX`, which are not
    recorded.
    """


def _read_chat(body: bytes) -> _Reading:
    chat = _decode_chat(body)
    preamble = {
        b"tools": chat.tools,
        b"documents": chat.documents,
        b"chat_template_kwargs": chat.chat_template_kwargs,
    }
    prompt = chat_prompt(chat.messages, preamble=preamble)
    output_tokens_max = chat.max_completion_tokens
    if output_tokens_max is NO_JSON or output_tokens_max == _NULL:
        output_tokens_max = chat.max_tokens
    return _Reading(chat, _CHAT, (prompt,), output_tokens_max)


def _read_completions(body: bytes) -> _Reading:
    completions = _decode_completions(body)
    if completions.prompt is not None:
        api, prompts, forgotten = _prompts(completions.prompt, ApiKind.COMPLETIONS, "$.prompt")
        return _Reading(completions, api, prompts, completions.max_tokens, forgotten)
    if completions.prompt_embeds is NO_JSON:
        raise msgspec.ValidationError("Expected `str | array`, got nothing - at `$.prompt`")
    return _Reading(completions, output_tokens_max=completions.max_tokens)


def _read_embeddings(body: bytes) -> _Reading:
    embeddings = _decode_embeddings(body)
    if embeddings.input is not None:
        api, prompts, forgotten = _prompts(embeddings.input, ApiKind.EMBEDDINGS, "$.input")
        return _Reading(embeddings, api, prompts, tokens_forgotten=forgotten)
    if embeddings.messages is None:
        raise msgspec.ValidationError("Expected `str | array`, got nothing - at `$.input`")
    prompt = chat_prompt(embeddings.messages, preamble={})
    return _Reading(embeddings, ApiKind.EMBEDDINGS, (prompt,))


def _read_responses(body: bytes) -> _Reading:
    responses = _decode_responses(body)
    preamble = {
        b"previous_response_id": responses.previous_response_id,
        b"tools": responses.tools,
    }
    prompt = responses_prompt(
        responses.input, preamble=preamble, instructions=responses.instructions
    )
    return _Reading(responses, ApiKind.RESPONSES, (prompt,), responses.max_output_tokens)


def _read_anthropic(body: bytes) -> _Reading:
    anthropic = _decode_anthropic(body)
    prompt = chat_prompt(
        anthropic.messages, preamble={b"tools": anthropic.tools}, system=anthropic.system
    )
    return _Reading(anthropic, ApiKind.MESSAGES, (prompt,), anthropic.max_tokens)


def _read_generate(body: bytes) -> _Reading:
    generate = _decode_generate(body)
    limit = generate.sampling_params.max_tokens if generate.sampling_params else NO_JSON
    return _Reading(generate, ApiKind.TOKENS, (_token_bytes(generate.token_ids),), limit)


def _read_model(body: bytes) -> _Reading:
    """Return the model that a JSON body names, without any prompt."""
    return _Reading(_decode_body(body))


def _prompts(value: Any, text_api: ApiKind, where: str) -> tuple[ApiKind, tuple[bytes, ...], int]:
    """Return the prompts in `value`, a `Prompts`: one text, several texts, the token ids of one
    prompt, or those of several.

    The result is the API kind, the prompts to record, and the approximate number of tokens of the
    others. `where` is the place of `value` for errors. Raises `ValidationError` for mixed types,
    and `TooMuchError` for more than `PROMPTS_MAX` prompts.
    """
    if isinstance(value, str):
        return text_api, (text_prompt(value),), 0
    kind = type(value[0])
    if kind is int:
        with suppress(TypeError):  # the list has other types too
            return ApiKind.TOKENS, (_token_bytes(value),), 0
    elif len(value) > PROMPTS_MAX:
        raise TooMuchError(f"Expected at most {PROMPTS_MAX:,} prompts - at `{where}`")
    elif set(map(type, value)) == {kind}:
        remembered, forgotten = value[:PROMPTS_REMEMBERED_MAX], value[PROMPTS_REMEMBERED_MAX:]
        tokens = sum(map(len, forgotten))
        if kind is str:
            return text_api, tuple(map(text_prompt, remembered)), tokens // BYTES_PER_TOKEN
        return ApiKind.TOKENS, tuple(map(_token_bytes, remembered)), tokens
    raise msgspec.ValidationError(
        f"Expected only strings, only token ids or only arrays of token ids - at `{where}`"
    )


def _token_bytes(token_ids: list[int]) -> bytes:
    """Return four little-endian bytes for each token id."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class _Claim(Struct, frozen=True):
    """A parser for the bodies of requests whose URL paths end in one suffix."""

    parser: ParserName
    read: Callable[[bytes], _Reading] | None
    """Function that reads the body of a request, or None to forward the body unread."""
    model_required: bool = True


_CLAIMS: Final[Mapping[str, _Claim]] = {
    "chat/completions": _Claim(ParserName.OPENAI, _read_chat),
    "completions": _Claim(ParserName.OPENAI, _read_completions),
    "embeddings": _Claim(ParserName.OPENAI, _read_embeddings),
    "responses": _Claim(ParserName.OPENAI, _read_responses),
    "conversations": _Claim(ParserName.OPENAI, _read_model, model_required=False),
    "images/generations": _Claim(ParserName.OPENAI, _read_model, model_required=False),
    # Rendering computes a prompt without running it, so the pod caches nothing of it.
    "chat/completions/render": _Claim(ParserName.OPENAI, _read_model, model_required=False),
    "completions/render": _Claim(ParserName.OPENAI, _read_model, model_required=False),
    "v1/messages": _Claim(ParserName.ANTHROPIC, _read_anthropic),
    "v1/messages/count_tokens": _Claim(ParserName.ANTHROPIC, None),
    "inference/v1/generate": _Claim(ParserName.VLLM_HTTP, _read_generate, model_required=False),
}
"""Parser of request bodies by suffix of the URL path, in whole segments; the longest suffix wins.
"""
_USUAL_PATHS: Final[Mapping[str, str]] = {
    f"/v1/{suffix.removeprefix('v1/')}": suffix for suffix in _CLAIMS
}
"""Suffix of the URL path, by path, for the paths that nearly all requests have."""
_SEGMENTS_MAX: Final = max(suffix.count("/") for suffix in _CLAIMS) + 1
_PATH_HEADERS: Final = ("x-original-path", "x-forwarded-path")
_DEFAULT_PATH: Final = "/v1/completions"


def parse_request(
    *,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    request_id: str,
    model_rewrite: str = "",
    rewrite: Callable[[str], str | None] | None = None,
    parsers: ParserSet = ALL_PARSERS,
    segments: KnownSegments | None = None,
) -> Parsed | Refusal:
    """Return the request in `body`, or the refusal of a request that cannot be placed. No bytes or
    headers raise an error.

    `path` is `:path`, or "" if the gateway does not send it; other headers or the body then decide.
    `model_rewrite`, unless it is "", replaces the model of the body. A result of `rewrite` for the
    model of the body, unless it is None, takes precedence over both. `segments` become a field of
    the request.
    """
    path = path or _path_of(headers) or _usual_path(body)
    suffix = _suffix(path, parsers)
    claim = _CLAIMS.get(suffix)
    if claim is None and ParserName.PASSTHROUGH not in parsers:
        claimed = sorted(known for known in _CLAIMS if _CLAIMS[known].parser in parsers)
        return _refusal(
            f"No parser takes this path; expected one that ends in {', '.join(claimed) or 'none'}"
        )
    if claim is None or claim.read is None:
        request = opaque_request(headers=headers, request_id=request_id)
        return Parsed(request=request, body=body, incoming_model="")
    unparsed = ""
    try:
        admit(body)
        reading = claim.read(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        again = _read_again(suffix, body, problem)
        if isinstance(again, Refusal):
            return again
        reading, unparsed = again

    incoming_model = reading.body.model or ""
    model = model_rewrite or incoming_model
    if rewrite is not None and (incoming_model or claim.model_required):
        model = rewrite(incoming_model) or model
    if claim.model_required and not model:
        return _refusal(f"The body for {suffix} names no model; expected a string", "$.model")
    if model != incoming_model:
        try:
            body = rewrite_model(body, model, present=reading.body.model is not UNSET)
        except (msgspec.ValidationError, UnicodeEncodeError) as problem:
            return _invalid(suffix, problem)
    prompts = reading.prompts
    prompt_bytes = len(prompts[0]) if len(prompts) == 1 else sum(map(len, prompts))
    request = InferenceRequest(
        request_id=request_id,
        api=reading.api,
        model=model,
        prompts=prompts,
        prompt_tokens=prompt_bytes // BYTES_PER_TOKEN + reading.tokens_forgotten,
        cache_salt=reading.body.cache_salt or "",
        headers=headers,
        stream=reading.body.stream == _TRUE,
        output_tokens_max=_limit(reading.output_tokens_max),
        segments=segments,
    )
    return Parsed(request=request, body=body, incoming_model=incoming_model, unparsed=unparsed)


def _read_again(suffix: str, body: bytes, problem: Exception) -> tuple[_Reading, str] | Refusal:
    """Read a body that the strict parser rejected with `problem`, by a parser that accepts more.
    Return the result and the reason why the body is not fully understood, or a refusal if it is
    invalid.
    """
    if isinstance(problem, (TooMuchError, RecursionError)):
        return _unread(suffix, body, problem)
    if not isinstance(problem, msgspec.ValidationError):
        return _invalid(suffix, problem)
    try:
        members = _decode_any(body)
        if not isinstance(members, dict):
            return _invalid(suffix, problem)
        model = members.get("model")
        if model is not None and not isinstance(model, str):
            return _invalid_model(suffix)
        found = read_leniently(suffix, members)
    except (TooMuchError, RecursionError) as costly:
        return _unread(suffix, body, costly)
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        return _invalid(suffix, broken)
    salt = members.get("cache_salt")
    limit = found.output_tokens_max
    reading = _Reading(
        Body(
            model=members.get("model", UNSET),
            cache_salt=salt if isinstance(salt, str) else None,
            stream=Raw(b"true") if members.get("stream") is True else NO_JSON,
        ),
        found.api if found.prompts else ApiKind.OPAQUE,
        found.prompts,
        Raw(str(limit).encode()) if type(limit) is int else NO_JSON,
    )
    return reading, (Unread.SHAPE if found.prompts else Unread.NO_PROMPT).value


def _unread(suffix: str, body: bytes, problem: Exception) -> tuple[_Reading, str] | Refusal:
    """Return the model of a body that is too costly to decode, found by fast searches over its
    bytes, and the reason. Return a refusal if it does not begin as a JSON object.
    """
    if _OPENING.match(body) is None:
        return _invalid(suffix, problem)
    model: str | UnsetType = UNSET
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        for start, end in _top_level_models(body, one_is_certain=False):
            model = msgspec.json.decode(body[start:end], type=str)
    reason = Unread.DEEP if isinstance(problem, RecursionError) else Unread.MUCH
    return _Reading(Body(model=model)), reason.value


def opaque_request(
    *, headers: Mapping[str, str], request_id: str, model: str = ""
) -> InferenceRequest:
    """Return a request whose body is not read, so that it is routed without its prompt."""
    return InferenceRequest(request_id=request_id, model=model, headers=headers)


def claim_of(path: str, headers: Mapping[str, str], parsers: ParserSet) -> str | None:
    """Return the suffix of the path by which a parser reads the body, such as "chat/completions".

    Return "" if the gateway sends the path in no header, so that the body decides. Return None if
    no parser reads the body.
    """
    path = path or _path_of(headers)
    if not path:
        return ""
    suffix = _suffix(path, parsers)
    claim = _CLAIMS.get(suffix)
    return None if claim is None or claim.read is None else suffix


def _path_of(headers: Mapping[str, str]) -> str:
    """Return the path that the gateway sends in a header other than `:path`, or "" if there is
    none.
    """
    return next(filter(None, map(headers.get, _PATH_HEADERS)), "")


def _usual_path(body: bytes) -> str:
    """Return the URL path on which clients usually send a body with these members. NGINX Gateway
    Fabric does not send the path.

    A body with `input` may be for responses or embeddings, which are read differently. The path
    that is returned for it makes the parser read only its model.
    """
    try:
        members = _decode_members(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The read function reports the error.
        return _DEFAULT_PATH
    if members.prompt is NO_JSON and members.messages is not NO_JSON:
        return "/v1/chat/completions"
    if members.prompt is NO_JSON and members.input is not NO_JSON:
        return "/v1/conversations"
    return _DEFAULT_PATH


def _suffix(path: str, parsers: ParserSet) -> str:
    """Return the longest suffix of `path` for which `parsers` has a parser, or "" if there is none."""
    usual = _USUAL_PATHS.get(path)
    if usual is not None and _CLAIMS[usual].parser in parsers:
        return usual
    segments = path.partition("?")[0].rsplit("/", _SEGMENTS_MAX)[-_SEGMENTS_MAX:]
    for start in range(len(segments)):
        suffix = "/".join(segments[start:])
        claim = _CLAIMS.get(suffix)
        if claim is not None and claim.parser in parsers:
            return suffix
    return ""


_COUNT: Final = re.compile(rb"-?0|[1-9][0-9]{0,17}")


def _limit(output_tokens_max: Raw) -> int | None:
    if output_tokens_max is NO_JSON:
        return None
    count = _COUNT.fullmatch(output_tokens_max)
    return int(count[0]) if count else None


# Creation of refusals.

_AT: Final = re.compile(r" - at `([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def _refusal(message: str, param: str | None = None) -> Refusal:
    return Refusal(reason=RefusalReason.BAD_REQUEST, status=400, message=message, param=param)


def _invalid_model(suffix: str) -> Refusal:
    return _refusal(
        f"The body for {suffix} has a model of another type; expected a string", "$.model"
    )


def _invalid(suffix: str, problem: Exception) -> Refusal:
    """Return the refusal of an invalid body, with the problem and its place but without any content
    of the body.

    msgspec's errors name types, paths and offsets, but never values. Other errors would quote the
    body.
    """
    begin = f"The body for {suffix} is not valid"
    if isinstance(problem, RecursionError):
        return _refusal(f"{begin}: expected JSON that is nested less deeply")
    if isinstance(problem, UnicodeEncodeError):
        return _refusal("The model that replaces the requested one is not valid Unicode")
    if not isinstance(problem, msgspec.DecodeError):
        return _refusal(f"{begin}: expected UTF-8")
    what = str(problem)
    at = _AT.search(what)
    param = at[1] if at else None
    if missing := _MISSING.search(what):
        param = f"{param or '$'}.{missing[1]}"
    return _refusal(f"{begin}: {what}", param)


# Rewriting of the model.

_BLANK: Final = rb"[ \t\n\r]*"
# The first quote of a member's name never follows a backslash, but quotes inside texts always do.
# The look-behind is second, because a pattern that begins with a byte is searched faster.
_MODEL_MEMBER: Final = re.compile(
    rb'"(?<!\\")(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"'
    + (_BLANK + rb":" + _BLANK)
    + rb'("(?:[^"\\]|\\.)*+"|null)'
)
_OPENING: Final = re.compile(_BLANK + rb"\{" + _BLANK + rb"(\}?)")


def rewrite_model(body: bytes, model: str, *, present: bool) -> bytes:
    """Return `body` with the value of each top-level member `model` replaced by `model`, and all
    else unchanged byte for byte.

    `body` is a valid JSON object. `present` is True if it has such a member; otherwise one is
    inserted first. Raises `UnicodeEncodeError` if `model` has unpaired surrogates, and
    `ValidationError` if there are more than `MODEL_MEMBERS_MAX` members to check.
    """
    value = msgspec.json.encode(model)
    view = memoryview(body)
    if not present:
        opening = _OPENING.match(body)
        assert opening is not None, "a JSON object begins with a brace"
        first = body.index(b"{") + 1
        comma = b"" if opening[1] else b","
        return b"".join((view[:first], b'"model":', value, comma, view[first:]))
    pieces: list[bytes | memoryview] = []
    done = 0
    for start, end in _top_level_models(body, one_is_certain=True):
        pieces += (view[done:start], value)
        done = end
    pieces.append(view[done:])
    return b"".join(pieces)


def _top_level_models(body: bytes, *, one_is_certain: bool) -> list[tuple[int, int]]:
    """Return (start, end) of the value of each top-level member `model` in `body`. Raises
    `TooMuchError` if there are too many members of that name.

    `one_is_certain` is True if a decoder has found one at the top level.
    """
    members = islice(_MODEL_MEMBER.finditer(body), MODEL_MEMBERS_MAX + 1)
    spans = [member.span(1) for member in members]
    if not spans or (one_is_certain and len(spans) == 1):
        return spans
    if len(spans) > MODEL_MEMBERS_MAX:
        raise TooMuchError(f"Expected at most {MODEL_MEMBERS_MAX:,} members `model`")
    depths = _depths(body, np.array([start for start, _ in spans]))
    return [span for span, depth in zip(spans, depths, strict=True) if depth == 1]


def _depths(body: bytes, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the nesting depth of each of `positions`, byte positions in the valid JSON `body`.

    The function counts opening and closing brackets outside texts without a Python step for each
    one, because a client may send millions.
    """
    symbols = outside_texts(body)
    opened, closed = np.flatnonzero(is_opening(symbols)), np.flatnonzero(is_closing(symbols))
    return np.searchsorted(opened, positions) - np.searchsorted(closed, positions)
