"""Conversion of text prompts in traces to OpenAI request bodies, and counting of their tokens.

A local tokenizer counts tokens if the user names one; otherwise every four bytes count as a token,
as in the picker. No chat template is applied, so its few tokens for each message are not counted.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from epp.core.prompt.blocks import chained
from epp.core.prompt.token_ids import ID_BYTES, packed
from epp.core.types import BYTES_PER_TOKEN
from sim.traces.arrival import FieldError, TraceError
from sim.traces.prompts import COMPLETIONS_PATH, DEFAULT_MODEL

CHAT_PATH: Final = "/v1/chat/completions"
BLOCK_TOKENS: Final = 16
"""Block size in tokens of prompts that are given as text. It divides the block sizes of the picker
and of most engines.
"""
_FILE: Final = "tokenizer.json"
_ROLES: Final = {"human": "user", "user": "user", "system": "system"}
"""OpenAI's roles for the speakers in ShareGPT conversations; every other speaker is the assistant.
"""

Tokenize = Callable[[str], Sequence[int]]


class TextPrompt(Struct, frozen=True):
    """A prompt that a row of a trace contains as text, as an OpenAI request."""

    path: str
    """API path of the request, or "" if the row has a whole request, to which nothing but a missing
    model name is added.
    """
    body: Mapping[str, Any]
    """Members of the OpenAI request body, including the prompt."""
    answer: str | None = None
    """Text of the recorded answer, or None if the row has none."""


def tokenizer_at(place: str) -> Tokenize | None:
    """Return a function from text to token ids that uses the `tokenizer.json` at or in `place`;
    None if `place` is "".

    Raises `OSError`, and `TraceError` if the file is not a tokenizer or the package `tokenizers` is
    missing.
    """
    if not place:
        return None
    path = Path(place)
    path = path / _FILE if path.is_dir() else path
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  an extra, and slow to import
    except ImportError:
        expected = "Expected the package tokenizers: pip install 'homing-epp[sim,tokens]'"
        raise TraceError(place, 0, "", expected) from None
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception:  # noqa: BLE001  the library raises no other type
        raise TraceError(str(path), 0, "", "Expected a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def ids_of(prompt: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids

    return ids_of


def blocks_of(ids: Sequence[int]) -> tuple[int, ...]:
    """Return the chained hash of each full block of 16 token ids."""
    return tuple(chained(packed(ids), 0, BLOCK_TOKENS * ID_BYTES))


def tokens_in(text: str, tokenize: Tokenize | None) -> int:
    """Return the number of tokens of an answer, at least 1. If `tokenize` is None, four bytes count
    as one.
    """
    if tokenize is not None:
        return max(1, len(tokenize(text)))
    return max(1, len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def text_in(body: bytes) -> str:
    """Return all text in the prompt of an OpenAI body, joined by newlines; "" if there is none."""
    request = msgspec.json.decode(body, type=dict[str, Any])
    parts: list[str] = []
    for name in ("system", "instructions", "prompt", "input", "messages"):
        _collect(request.get(name), parts)
    return "\n".join(parts)


def _collect(value: Any, parts: list[str]) -> None:
    if isinstance(value, str):
        parts.append(value)
    elif isinstance(value, list):
        for one in value:
            _collect(one, parts)
    elif isinstance(value, dict):
        for name in ("content", "text"):
            _collect(value.get(name), parts)


def prompt_in(row: Mapping[str, Any], name: str, model: str) -> TextPrompt | None:
    """Return the prompt in the member `name` of `row`; None if the member is an empty list, or a
    ShareGPT conversation without question or answer.

    The member is a text, messages as OpenAI or ShareGPT write them, or a whole request. The prompt
    of a ShareGPT conversation has the messages of user and system before the first answer to the
    user, as in the benchmarks of vLLM and SGLang. Raises `FieldError`.
    """
    value = row.get(name)
    model = model or DEFAULT_MODEL
    if value == []:
        return None
    if isinstance(value, str):
        return TextPrompt(COMPLETIONS_PATH, {"model": model, "prompt": value})
    if isinstance(value, dict):
        return TextPrompt("", {"model": model, **value})
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        got = "none" if value is None else type(value).__name__
        raise FieldError(name, f"Expected a text, messages or a request, got {got}")
    if any("from" in one for one in value):
        return _shared_conversation(value, name, model)
    body: dict[str, Any] = {"model": model, "messages": value}
    if row.get("tools"):
        body["tools"] = row["tools"]
    return TextPrompt(CHAT_PATH, body)


def _shared_conversation(turns: list[Any], name: str, model: str) -> TextPrompt | None:
    messages: list[dict[str, str]] = []
    for turn in turns:
        text, who = turn.get("value"), turn.get("from")
        if not isinstance(text, str) or not isinstance(who, str):
            raise FieldError(name, "Expected texts under `from` and `value`")
        role = _ROLES.get(who, "assistant")
        if role == "assistant" and any(one["role"] == "user" for one in messages):
            body = {"model": model, "messages": messages}
            return TextPrompt(CHAT_PATH, body, answer=text)
        if role != "assistant":
            messages.append({"role": role, "content": text})
    return None
