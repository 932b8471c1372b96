"""A model's chat template, rendered as vLLM renders it. Used in the worker process alone.

Templates are programs of strangers: they run in jinja2's immutable sandbox, and what they write is
bounded. Those that a request brings are not run at all.
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
"""What a request cannot give among its own variables: vLLM refuses it, or means something else."""

Json = dict[str, Any]


class NotRenderedError(Exception):
    """The template, or what vLLM does before it, does not take the request."""


class _Generation(Extension):
    """`{% generation %}`, by which trainers mark what the model says; it writes what is in it."""

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
    """`special` are the tokenizer's own texts by name: `bos_token` and such."""

    def __init__(
        self,
        source: str,
        special: Mapping[str, Any],
        content_format: ContentFormat = ContentFormat.AUTO,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `jinja2.TemplateError`."""
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
        """Contents are lists of parts; else one text each."""

    def render(self, body: Json) -> str:
        """The prompt of a chat request. Raises `NotRenderedError`."""
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
        except Exception as error:  # what a template may raise is anything
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
    """A message as vLLM hands it to a template."""
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
    """With its arguments as values: templates expect no JSON in a text."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not arguments:
        function["arguments"] = {}
    elif isinstance(arguments, str):
        function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def _tools(tools: Sequence[Json] | None) -> list[Json] | None:
    """As vLLM's own types spell them: known members in their order, all others behind them."""
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
    """Whether a template goes through the parts of contents, by which vLLM chooses their form."""
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
    """Without filters, tests and slices."""
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
    """The variable of whose `content` this is; "" if it is none."""
    bare = _bare(node)
    if isinstance(bare, nodes.Getattr) and bare.attr == "content":
        return _named(bare.node)
    if isinstance(bare, nodes.Getitem) and isinstance(bare.arg, nodes.Const):
        return _named(bare.node) if bare.arg.value == "content" else ""
    return ""
