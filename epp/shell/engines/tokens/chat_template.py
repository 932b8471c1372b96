"""Render a model's chat template as vLLM does.

This module is used only in the worker process. Templates are untrusted programs: they run in
jinja2's immutable sandbox, and their output is limited. Templates in requests are not run at all.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from epp.configuration.token_producer import ContentFormat

TEXT_CHARACTERS_MAX: Final = 8 * 1024 * 1024
MESSAGES_MAX: Final = 4_096
_MADE_BY_US: Final = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "return_dict", "conversation"}
)
"""Names of template variables that a request cannot set, because vLLM rejects them or uses them
differently.
"""

Json = dict[str, Any]


class NotRenderedError(Exception):
    """Raised if the chat template, or vLLM's preparation for it, rejects the request or fails, or
    if there are too many messages or too much text.
    """


class _Generation(Extension):
    """An extension of jinja2 for the tag `{% generation %}`, which marks the model's output in
    training. The tag renders its content.
    """

    tags = {"generation"}  # noqa: RUF012  as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    known = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii")), indent=indent, **known)


class ChatTemplate:
    """A model's chat template. `special` contains the texts of the tokenizer's special tokens by
    name, such as `bos_token`.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, Any],
        content_format: ContentFormat = ContentFormat.AUTO,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile the template's `source`. Raises `jinja2.TemplateError`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special = dict(special)
        self._variables = dict(variables or {})
        parts = content_format is ContentFormat.OPENAI
        if content_format is ContentFormat.AUTO:
            parts = reads_parts(environment.parse(source))
        self._parts = parts
        """True if the template gets the contents of messages as lists of parts; otherwise it gets
        texts.
        """

    def render(self, body: Json) -> str:
        """Return the prompt that the template renders for a chat request. Raises
        `NotRenderedError`.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or len(messages) > MESSAGES_MAX:
            raise NotRenderedError
        own = body.get("chat_template_kwargs") or {}
        refused = body.get("chat_template") or body.get("continue_final_message")
        if refused or not isinstance(own, dict) or not _MADE_BY_US.isdisjoint(own):
            raise NotRenderedError
        try:
            variables = {
                **self._special,
                "add_generation_prompt": bool(body.get("add_generation_prompt", True)),
                **self._variables,
                **own,
                "messages": [_conversed(message, parts=self._parts) for message in messages],
                "tools": _tools(body.get("tools")),
                "documents": body.get("documents"),
            }
            if body.get("reasoning_effort") is not None:
                variables.setdefault("reasoning_effort", body["reasoning_effort"])
            return _bounded(self._template.generate(variables))
        except NotRenderedError:
            raise
        except (RecursionError, MemoryError) as error:
            raise NotRenderedError from error
        except Exception as error:  # a template may raise anything
            raise NotRenderedError from error


def _bounded(pieces: Any) -> str:
    written: list[str] = []
    characters = 0
    for piece in pieces:
        characters += len(piece)
        if characters > TEXT_CHARACTERS_MAX:
            raise NotRenderedError
        written.append(piece)
    return "".join(written)


def _conversed(message: Json, *, parts: bool) -> Json:
    """Convert a message of a chat request to the form that vLLM passes to a template."""
    role = message["role"]
    conversed: Json = {"role": role, "content": _content(message.get("content"), parts=parts)}
    if role == "assistant":
        if message.get("tool_calls"):
            conversed["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        reasoning = message.get("reasoning")
        if reasoning is not None:
            conversed["reasoning"] = conversed["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            conversed["tool_call_id"] = message["tool_call_id"]
        if isinstance(conversed["content"], list):
            conversed["content"] = "\n".join(part["text"] for part in conversed["content"])
    if isinstance(message.get("name"), str):
        conversed["name"] = message["name"]
    if role == "developer":
        conversed["tools"] = message.get("tools")
    return conversed


def _content(content: Any, *, parts: bool) -> Any:
    if content is None:
        texts: list[str] = []
    elif isinstance(content, str):
        texts = [content]
    else:
        texts = [_text(part) for part in content]
    if parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in {"text", "input_text", "output_text"} or not isinstance(text, str):
        raise NotRenderedError
    return text


def _tool_call(call: Json) -> Json:
    """Return a tool call of a chat message with its arguments decoded from JSON, as templates
    expect them.
    """
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not arguments:
        function["arguments"] = {}
    elif isinstance(arguments, str):
        function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def _tools(tools: Sequence[Json] | None) -> list[Json] | None:
    """Return the tools of a chat request as vLLM's types serialise them: known members in order,
    then all others.
    """
    if tools is None:
        return None
    spelt: list[Json] = []
    for tool in tools:
        function = dict(tool["function"])
        known = {
            "name": function.pop("name"),
            "description": function.pop("description", None),
            "parameters": function.pop("parameters", None),
        }
        others = {name: value for name, value in tool.items() if name not in {"type", "function"}}
        kind = tool.get("type", "function")
        spelt.append({"type": kind, "function": {**known, **function}, **others})
    return spelt


def reads_parts(template: nodes.Template) -> bool:
    """Return True if a chat template iterates over the parts of messages' contents. By this vLLM
    selects the form of contents.
    """
    conversations = {"messages"}
    for assigned in template.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and _named(assigned.node) in conversations:
            conversations.add(assigned.target.name)
    loops = list(template.find_all(nodes.For))
    messages = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and _named(loop.iter) in conversations
    }
    return any(_content_of(loop.iter) in messages for loop in loops)


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Return the expression of a template without filters, tests and slices around it."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _named(node: nodes.Node | None) -> str:
    bare = _bare(node)
    return bare.name if isinstance(bare, nodes.Name) else ""


def _content_of(node: nodes.Node | None) -> str:
    """Return the variable whose `content` a template's expression reads, or "" if it reads
    something else.
    """
    bare = _bare(node)
    if isinstance(bare, nodes.Getattr) and bare.attr == "content":
        return _named(bare.node)
    if isinstance(bare, nodes.Getitem) and isinstance(bare.arg, nodes.Const):
        return _named(bare.node) if bare.arg.value == "content" else ""
    return ""
