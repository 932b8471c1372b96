"""The OpenAI API of a simulated vLLM server: request bodies in, JSON values out. This module does
no I/O.

Sampling parameters such as `temperature` are accepted and have no effect on the simulated answer.
"""

from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct

from sim.pods.kv_transfers import KVTransferParams
from sim.pods.tokens import encode_ids, encode_text, render_chat

Json: TypeAlias = dict[str, Any]

_MAX_TOKENS_DEFAULT: Final = 16
"""Default of `max_tokens` in requests to /v1/completions, as the OpenAI API defines it."""


class ApiError(Exception):
    """An error of a request that the simulated server answers with an HTTP status and an error
    object.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {
            "error": {"message": message, "type": kind, "param": param, "code": status}
        }


class StreamOptions(Struct):
    include_usage: bool = False


class _Part(Struct):
    type: str
    text: str = ""


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()

    def text(self) -> str:
        """Return all text of the message as the chat template renders it; other parts appear as
        `<type>`.
        """
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text or f"<{part.type}>" for part in content)
        return content + bytes(self.tool_calls).decode()


class _Body(Struct, kw_only=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str = ""
    n: int = 1
    kv_transfer_params: KVTransferParams | None = None


class CompletionBody(_Body, kw_only=True):
    """Body of a request to POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None

    def prompts(self) -> list[bytes]:
        """Return the tokens of each prompt, 4 bytes a token.

        Raises `ApiError` 400 if the prompt mixes token ids with other kinds, or has an invalid
        token id.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [encode_text(prompt)]
        ids = [item for item in prompt if isinstance(item, int)]
        if ids:
            if len(ids) != len(prompt):
                raise ApiError(
                    400,
                    "`prompt` mixes token ids with prompts; expected one kind.",
                    param="prompt",
                )
            return [_ids(ids)]
        return [
            encode_text(item) if isinstance(item, str) else _ids(item)
            for item in prompt
            if not isinstance(item, int)
        ]

    def tokens_max(self) -> int | None:
        return _MAX_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens


class ChatBody(_Body, kw_only=True):
    """Body of a request to POST /v1/chat/completions."""

    messages: list[_Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()

    def prompts(self) -> list[bytes]:
        """Return the tokens of the rendered conversation as the only prompt.

        Raises `ApiError` 400 if there are no messages.
        """
        if not self.messages:
            raise ApiError(
                400, "`messages` is empty; expected at least one message.", param="messages"
            )
        return [_rendered(self.messages, self.tools)]

    def tokens_max(self) -> int | None:
        """Return the limit of answer tokens that the request sets, or None if only the context
        limits the answer.
        """
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TokenizeBody(Struct, kw_only=True):
    """Body of a request to POST /tokenize, with `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    tools: msgspec.Raw = msgspec.Raw()

    def tokens(self) -> bytes:
        """Return the tokens of the prompt or conversation, 4 bytes a token.

        Raises `ApiError` 400 if the body has neither.
        """
        if self.prompt is not None:
            return encode_text(self.prompt)
        if self.messages:
            return _rendered(self.messages, self.tools)
        raise ApiError(400, "There is neither `prompt` nor a message in `messages`.")


class AdapterBody(Struct):
    """Body of a request to POST /v1/load_lora_adapter or /v1/unload_lora_adapter."""

    lora_name: str
    lora_path: str = ""


Body: TypeAlias = CompletionBody | ChatBody


def decode_body(raw: bytes, kind: type[CompletionBody] | type[ChatBody]) -> Body:
    """Return the parsed body of a completion or chat request. Raises `ApiError` 400 if it is
    invalid or requests several answers to a prompt.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ApiError(400, f"The request body is not valid: {problem}.") from None
    if body.n != 1:
        raise ApiError(
            400,
            f"`n` is {body.n}; the simulated server generates 1 answer for each prompt.",
            param="n",
        )
    tokens_max = body.tokens_max()
    if tokens_max is not None and tokens_max < 1:
        raise ApiError(
            400,
            f"The limit of answer tokens is {tokens_max}; expected at least 1.",
            param="max_tokens",
        )
    return body


def decode_tokenize(raw: bytes) -> TokenizeBody:
    """Return the parsed body of a tokenize request. Raises `ApiError` 400 if it is invalid."""
    try:
        return msgspec.json.decode(raw, type=TokenizeBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ApiError(400, f"The request body is not valid: {problem}.") from None


def decode_adapter(raw: bytes) -> AdapterBody:
    """Return the parsed body of a request about a LoRA adapter. Raises `ApiError` 400 if it is
    invalid.
    """
    try:
        body = msgspec.json.decode(raw, type=AdapterBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise ApiError(400, f"The request body is not valid: {problem}.") from None
    if not body.lora_name:
        raise ApiError(400, "`lora_name` is empty; expected the adapter's name.", param="lora_name")
    return body


class Dialect:
    """A formatter of the answers to one request, in the chat or the completions format."""

    def __init__(self, *, chat: bool, model: str, created: int, answer_id: str) -> None:
        self._chat = chat
        self._model = model
        self._created = created
        self._id = answer_id

    def opening(self, index: int) -> Json | None:
        """Return the chunk that a streamed answer sends before its first text; None if the format
        has no such chunk.
        """
        if not self._chat:
            return None
        return self._envelope([_choice(index, {"delta": {"role": "assistant", "content": ""}})])

    def chunk(self, index: int, text: str, finish_reason: str | None) -> Json:
        """Return a chunk of a streamed answer. `finish_reason` is None except in the last chunk."""
        part: Json = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._envelope([_choice(index, part, finish_reason)])

    def usage_chunk(self, usage: Json) -> Json:
        """Return the chunk with token counts that ends a streamed answer if the client requests it."""
        return self._envelope([]) | {"usage": usage}

    def whole(self, answers: list[tuple[str, str]], usage: Json) -> Json:
        """Return the answer to a request without streaming. `answers` has (text, finish reason) for
        each prompt.
        """
        choices = []
        for index, (text, finish_reason) in enumerate(answers):
            part: Json = {"text": text}
            if self._chat:
                part = {"message": {"role": "assistant", "content": text}}
            choices.append(_choice(index, part, finish_reason))
        answer = self._envelope(choices) | {"usage": usage}
        if self._chat:
            answer["object"] = "chat.completion"
        return answer

    def _envelope(self, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Json:
    """Return the member `usage` of an answer; it always includes the number of cached tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def model_card(
    name: str, *, created: int, root: str, parent: str | None, max_model_len_tokens: int
) -> Json:
    """Return one entry of the answer to GET /v1/models.

    `parent` is the base model of an adapter, or None for the base model itself.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": None if parent else max_model_len_tokens,
    }


def _rendered(messages: list[_Message], tools: msgspec.Raw) -> bytes:
    """Return the tokens of a conversation as the chat template renders it."""
    turns = [(message.role, message.text()) for message in messages]
    return render_chat(turns, preamble=bytes(tools).decode())


def _choice(index: int, part: Json, finish_reason: str | None = None) -> Json:
    return {"index": index, **part, "logprobs": None, "finish_reason": finish_reason}


def _ids(token_ids: list[int]) -> bytes:
    try:
        return encode_ids(token_ids)
    except ValueError as problem:
        raise ApiError(400, str(problem), param="prompt") from None
