"""Requests whose tokens two libraries must agree on."""

from typing import Any

WEATHER_PARAMETERS = {
    "type": "object",
    "required": ["zone", "city"],
    "properties": {
        "zone": {"type": "string", "description": "Time zone, é"},
        "city": {"description": "City <name> & more", "type": "string"},
        "altitude": {"type": "number", "default": 1.5},
    },
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": WEATHER_PARAMETERS,
    },
}
UNSORTED = {
    "function": {
        "parameters": WEATHER_PARAMETERS,
        "description": "The weather of a place",
        "name": "weather",
    },
    "type": "function",
}
"""The same tool with its members in another order. Only the order of the parameters counts."""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def call(arguments: Any) -> dict[str, Any]:
    return {
        "id": "call-123",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


SYSTEM = {"role": "system", "content": "You help."}
ASKED = [SYSTEM, user("Weather in Örebro?")]
RESULT = {"role": "tool", "tool_call_id": "call-123", "content": '{"temperature": -3.5}'}
ARGUMENTS = {"zone": "CET", "city": "Örebro", "altitude": 2}

CONVERSATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({"messages": [user("Hello!")]}, {}),
    "system": ({"messages": [SYSTEM, user("Hello!")]}, {}),
    "turns": (
        {"messages": [SYSTEM, user("Hi"), assistant("Hello.\n\nWhat is it?"), user("  Bye\n")]},
        {},
    ),
    "scripts": (
        {"messages": [user("Größe 我能吞下玻璃 🙂👩‍👩‍👧 e\u0301 ﬁ مرحبا\u2028 नमस्ते\t\r\n  x")]},
        {},
    ),
    "special tokens in a text": (
        {"messages": [user("a<|im_end|>\n<|im_start|>system\nb<|eot_id|>c<|begin_of_text|>")]},
        {},
    ),
    "code": ({"messages": [user("def f(x):\n\treturn {'a': [1, 2.5e-3], \"b\": x**2}\n\n\n")]}, {}),
    "thoughts": (
        {
            "messages": [
                user("Think"),
                assistant("<think>\nlong\n</think>\n\nDone"),
                user("Again"),
            ]
        },
        {},
    ),
    "no prompt to go on": (
        {"messages": [user("Hi"), assistant("Hello")], "add_generation_prompt": False},
        {},
    ),
    "tools": ({"messages": ASKED, "tools": [WEATHER]}, {}),
    "tools in another order": (
        {"messages": ASKED, "tools": [UNSORTED]},
        {"tools": [WEATHER]},
    ),
    "a call and its result": (
        {
            "messages": [
                *ASKED,
                assistant(
                    "", tool_calls=[call('{"zone": "CET", "city": "Örebro", "altitude": 2}')]
                ),
                RESULT,
                user("Thanks"),
            ],
            "tools": [UNSORTED],
        },
        {
            "messages": [
                *ASKED,
                assistant("", tool_calls=[call(ARGUMENTS)]),
                RESULT,
                user("Thanks"),
            ],
            "tools": [WEATHER],
        },
    ),
    "parts": (
        {"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]},
        {"messages": [user("one\ntwo")]},
    ),
    "long": ({"messages": [SYSTEM, *[user("word " * 50 + str(n)) for n in range(1)]]}, {}),
}
"""Request body by name, and the members that vLLM passes to a template in another form."""

PROMPTS = ["Hello, world", "  two  blanks ", "<|im_end|>x", "Größe\n我"]
"""Prompts of completion requests."""
