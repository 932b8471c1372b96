"""Convert bodies of the Messages and Responses APIs to the chats that vLLM makes of them.

This module is used only in the worker process. vLLM has one chat template per model and renders
these APIs as chats. The conversions here are those of vLLM 0.32. Members and parts whose conversion
varies between releases are not converted, and their requests have no tokens.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from epp.core.types import ApiKind

Json = dict[str, Any]

_BILLING: Final = "x-anthropic-billing-header"
"""Prefix of a system block in a Messages request that changes with each request. vLLM omits this
block, and so does the conversion.
"""
_NOT_IN_THE_PROMPT: Final[Mapping[ApiKind, frozenset[str]]] = {
    ApiKind.MESSAGES: frozenset(
        {
            *("model", "max_tokens", "metadata", "stream", "stop_sequences"),
            *("temperature", "top_k", "top_p", "tool_choice", "kv_transfer_params"),
        }
    ),
    ApiKind.RESPONSES: frozenset(
        {
            *(
                "model",
                "max_output_tokens",
                "max_tool_calls",
                "metadata",
                "stream",
                "store",
                "user",
            ),
            *("temperature", "top_k", "top_p", "top_logprobs", "seed", "stop", "text", "include"),
            *("service_tier", "prompt_cache_key", "safety_identifier", "priority", "cache_salt"),
            *("parallel_tool_calls", "tool_choice", "request_id"),
        }
    ),
}
_TURNS: Final = frozenset({"user", "assistant"})
_GIVEN: Final = frozenset({"user", "system", "developer"})


class UnknownChatError(Exception):
    """Raised if the chat that vLLM makes of a request is unknown, because its body has members or
    parts that are invalid or that this module does not convert.
    """


def as_chat(api: ApiKind, body: Json) -> Json:
    """Convert the body of a Messages or Responses request to the chat request from which vLLM
    renders the prompt. A body of another API is returned unchanged. Raises `UnknownChatError`.
    """
    make = _MAKERS.get(api)
    if make is None:
        return body
    members = {name: value for name, value in body.items() if value is not None}
    for name in _NOT_IN_THE_PROMPT[api]:
        members.pop(name, None)
    try:
        chat = make(members)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnknownChatError from error
    if members:
        raise UnknownChatError
    return chat


def _of_messages(members: Json) -> Json:
    """Convert the body of a Messages request to chat messages, removing the converted members from
    `members`.
    """
    messages: list[Json] = []
    system = _system(members.pop("system", ""))
    if system:
        messages.append({"role": "system", "content": system})
    for message in _objects(members.pop("messages")):
        messages += _turns(message)
    chat: Json = {"messages": messages}
    if "tools" in members:
        chat["tools"] = [_tool(tool) for tool in _objects(members.pop("tools"))]
    if "chat_template_kwargs" in members:
        chat["chat_template_kwargs"] = members.pop("chat_template_kwargs")
    return chat


def _system(system: Any) -> str:
    if isinstance(system, str):
        return system
    texts = [_text(block, "text") for block in _objects(system)]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _turns(message: Json) -> Iterable[Json]:
    """Convert one message of the Messages API to messages of the Chat Completions API. Results of
    tools in it become separate messages before it. Raises `UnknownChatError`.
    """
    role, content = message["role"], message["content"]
    if role not in _TURNS:
        raise UnknownChatError
    if isinstance(content, str):
        return ({"role": role, "content": content},)
    results: list[Json] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in _objects(content):
        kind = block["type"]
        if kind == "text":
            texts += filter(None, [_text(block, "text")])
        elif kind == "tool_result" and role == "user":
            results.append(_result(block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_text(block, "thinking"))
        elif kind != "redacted_thinking":
            raise UnknownChatError
    turn: Json = {"role": role}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if texts:
        turn["content"] = (
            texts[0] if len(texts) == 1 else [{"type": "text", "text": t} for t in texts]
        )
    if role == "user" and not texts:
        return results
    return (*results, turn)


def _result(block: Json) -> Json:
    content = block.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        if any(part["type"] != "text" for part in _objects(content)):
            raise UnknownChatError
        text = "\n".join(_text(part, "text") for part in content)
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id"), "content": text}


def _call(block: Json) -> Json:
    given = block.get("input") or {}
    if not isinstance(given, dict):
        raise UnknownChatError
    function = {"name": _text(block, "name"), "arguments": given}
    return {"id": _text(block, "id"), "type": "function", "function": function}


def _tool(tool: Json) -> Json:
    if tool.get("defer_loading") or tool.get("type", "custom") != "custom":
        # These are tools that are shown later, or that Anthropic itself runs.
        raise UnknownChatError
    schema = tool["input_schema"]
    if not isinstance(schema, dict):
        raise UnknownChatError
    function = {
        "name": _text(tool, "name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    return {"type": "function", "function": function}


def _of_responses(members: Json) -> Json:
    """Convert the body of a Responses request to chat messages, removing the converted members from
    `members`. Raises `UnknownChatError`.
    """
    if members.pop("tools", None) or members.pop("truncation", "disabled") != "disabled":
        raise UnknownChatError
    messages: list[Json] = []
    instructions = members.pop("instructions", "")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = members.pop("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += map(_item, _objects(given))
    chat: Json = {"messages": messages}
    effort = members.pop("reasoning", {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat


def _item(item: Json) -> Json:
    role, content = item["role"], item["content"]
    if item.get("type", "message") != "message" or item.get("status", "completed") != "completed":
        raise UnknownChatError
    if role not in _GIVEN and role != "assistant":
        raise UnknownChatError
    if isinstance(content, str):
        return {"role": role, "content": content}
    kind = "output_text" if role == "assistant" else "input_text"
    texts = [_text(part, "text") for part in _objects(content) if part["type"] == kind]
    # vLLM reads only the first part of an assistant's message.
    if not texts or len(texts) != len(content) or (role == "assistant" and len(texts) > 1):
        raise UnknownChatError
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def _objects(value: Any) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise UnknownChatError
    return value


def _text(value: Json, name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise UnknownChatError
    return text


_MAKERS: Final[Mapping[ApiKind, Callable[[Json], Json]]] = {
    ApiKind.MESSAGES: _of_messages,
    ApiKind.RESPONSES: _of_responses,
}
