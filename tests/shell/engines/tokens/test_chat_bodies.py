"""Which chat vLLM makes of requests of other APIs, and of which it is not known."""

import pytest

from epp.core.types import ApiKind
from epp.shell.engines.tokens.chat_bodies import UnknownChatError, as_chat

SCHEMA = {"type": "object", "properties": {"zone": {}, "city": {}}}
TOOL = {"name": "weather", "description": "Of a place", "input_schema": SCHEMA}
FUNCTION = {"name": "weather", "description": "Of a place", "parameters": SCHEMA}


def text(said):
    return {"type": "text", "text": said}


def messages_of(*messages, **members):
    return as_chat(ApiKind.MESSAGES, {"model": "m", "max_tokens": 9, "messages": list(messages)} | members)  # fmt: skip


def responses_of(given, **members):
    return as_chat(ApiKind.RESPONSES, {"model": "m", "input": given} | members)


def test_a_chat_is_what_it_is():
    body = {"messages": [], "anything": 1}
    assert as_chat(ApiKind.CHAT, body) is body


def test_messages_are_a_chat_with_its_system_prompt_first():
    """Blocks of text one after the other, without what a client puts there for accounting."""
    billed = [text("x-anthropic-billing-header: cch=1"), text("You"), text(" help.")]
    said = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "You help."}
    assert messages_of(said) == {"messages": [said]}
    assert messages_of(said, system="You help.") == {"messages": [system, said]}
    assert messages_of(said, system=billed) == {"messages": [system, said]}
    assert messages_of(said, system=billed[:1]) == {"messages": [said]}


def test_what_does_not_shape_a_prompt_of_messages_does_not_matter():
    said = {"role": "user", "content": "Hi"}
    given = {
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "stream": True,
        "temperature": 0.5,
        "tool_choice": {"type": "auto"},
        "top_k": 3,
        "top_p": 0.5,
        "thinking": None,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert messages_of(said, **given) == {
        "messages": [said],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_blocks_become_messages_calls_and_results():
    """Results of tools come before what the user says besides; empty texts are left out."""
    asked = {"role": "user", "content": [text("Weather?"), text(""), text("Now")]}
    called = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"zone": "CET"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
        ],
    }
    told = {
        "role": "user",
        "content": [
            text("Go on"),
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("sun"), text("wind")]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        ],
    }
    only_told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3", "content": "x"}]}  # fmt: skip
    chat = messages_of(asked, called, told, only_told, tools=[TOOL])
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"zone": "CET"}}},
        {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]  # fmt: skip
    assert chat["messages"] == [
        {"role": "user", "content": [text("Weather?"), text("Now")]},
        {"role": "assistant", "reasoning": "Hm", "tool_calls": calls, "content": "I look."},
        {"role": "tool", "tool_call_id": "t1", "content": "sun\nwind"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "Go on"},
        {"role": "tool", "tool_call_id": "t3", "content": "x"},
    ]
    assert chat["tools"] == [{"type": "function", "function": FUNCTION}]


def test_a_schema_without_a_type_is_that_of_an_object():
    """The type comes last; the rest keeps its order."""
    (tool,) = messages_of({"role": "user", "content": "Hi"}, tools=[{"name": "f", "input_schema": {"a": 1}}])["tools"]  # fmt: skip
    assert list(tool["function"]["parameters"].items()) == [("a", 1), ("type", "object")]
    assert tool["function"]["description"] is None


USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image", "source": {}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER], "thinking": {"type": "enabled"}},
        {"messages": [USER], "output_config": {"effort": "high"}},
        {"messages": [USER], "cache_salt": "s"},
        {"messages": [USER], "mcp_servers": []},
        {"messages": [USER, {"role": "system", "content": "Now"}]},
        {"messages": [{"role": "ctx", "content": "Now"}]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ["Hi"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
            ]
        },
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}],
                }
            ]
        },
        {"messages": [USER], "tools": [TOOL | {"defer_loading": True}]},
        {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [USER], "tools": [{"name": "f", "input_schema": []}]},
        {"messages": [USER], "system": [IMAGE]},
        {},
    ],
)
def test_messages_that_may_be_another_chat_are_none(body):
    """By release, or because they have what no chat has."""
    with pytest.raises(UnknownChatError):
        as_chat(ApiKind.MESSAGES, body)


def test_responses_are_a_chat_with_its_instructions_first():
    """Contents of one part are those of a text."""
    assert responses_of("Hi") == {"messages": [USER]}
    given = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "id": "i",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        },
        {"role": "developer", "content": "Be short"},
    ]
    assert responses_of(given, instructions="You help.", reasoning={"effort": "low"}) == {
        "messages": [
            {"role": "system", "content": "You help."},
            {"role": "user", "content": [text("Hi")]},
            {"role": "assistant", "content": [text("Hello")]},
            {"role": "developer", "content": "Be short"},
        ],
        "reasoning_effort": "low",
    }


def test_what_does_not_shape_a_prompt_of_responses_does_not_matter():
    given = {
        "store": True,
        "tools": [],
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "previous_response_id": None,
        "reasoning": {"summary": "auto"},
        "cache_salt": "s",
    }
    assert responses_of("Hi", **given) == {"messages": [USER]}


def said(role, *parts, **members):
    return {"role": role, "content": [{"type": kind, "text": "a"} for kind in parts]} | members


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi", "previous_response_id": "r"},
        {"input": "Hi", "tools": [{"type": "function", "name": "f"}]},
        {"input": "Hi", "truncation": "auto"},
        {"input": "Hi", "chat_template_kwargs": {}},
        {"input": "Hi", "reasoning": "low"},
        {"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}]},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [said("user", "input_text", "input_image")]},
        {"input": [said("user")]},
        {"input": [said("user", "output_text")]},
        {"input": [said("assistant", "output_text", "output_text")]},
        {"input": [said("assistant", "output_text", status="in_progress")]},
        {"input": [7]},
    ],
)
def test_responses_that_may_be_another_chat_are_none(body):
    """What is kept elsewhere, tools, and what goes on with an answer that was begun."""
    with pytest.raises(UnknownChatError):
        as_chat(ApiKind.RESPONSES, body)
