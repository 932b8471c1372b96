"""Reader of JSON bodies that the strict parsers of `core/prompt/parse` do not understand.

The picker rejects only what it cannot place; the engine judges the rest. Parts that a strict parser
would understand are written as `core/prompt/canonical` writes them. Every other part is canonical
JSON: members sorted by name, without blanks. Two equal requests therefore share their prefix. Two
prompts that are equal up to byte n share every full block before n, in texts and in JSON alike.

The reader runs only after the strict parser has failed, on a body that `outline.admit` accepted.
Its cost is therefore bounded like that of the strict parser.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct, json

from epp.core.prompt.canonical import (
    FIELDS_EACH,
    JSON,
    LABEL,
    MESSAGE,
    ROLE,
    Message,
    admit_fields,
    text_prompt,
    write_content,
    write_item,
    write_messages,
)
from epp.core.types import ApiKind

_encode_sorted = json.Encoder(order="sorted").encode
_EMPTY: Final = frozenset({b"null", b"[]", b"{}", b'""'})


class Unread(StrEnum):
    """The reason why a request with a JSON body is placed although the body was not fully
    understood.
    """

    SHAPE = "unknown-shape"
    """A member of the body has a type or a form that the API does not define."""
    NO_PROMPT = "no-prompt"
    """The body has nothing that could be a prompt."""
    MUCH = "too-much"
    """Reading the body would take too much time for its length."""
    DEEP = "nested-too-deep"


class Lenient(Struct, frozen=True):
    """The prompts and the output limit that were found in a body that the strict parser rejected."""

    api: ApiKind = ApiKind.OPAQUE
    prompts: tuple[bytes, ...] = ()
    output_tokens_max: Any = None


Members = Mapping[str, Any]


def read_leniently(suffix: str, members: Members) -> Lenient:
    """Return the prompts and the output limit in `members`, the decoded body of a request whose
    path ends in `suffix`.

    There are no prompts if the API or the body has none. Raises `RecursionError` if a part is
    nested too deep, and `TooMuchError` if there are too many fields.
    """
    read = _READERS.get(suffix)
    if read is None:
        return Lenient()
    found = read(members)
    return Lenient(found.api, tuple(filter(None, found.prompts)), found.output_tokens_max)


def _read_chat(members: Members) -> Lenient:
    fields = _labelled(members, "tools", "documents", "chat_template_kwargs")
    _write_messages(fields, members.get("messages"))
    limit = members.get("max_completion_tokens")
    limit = members.get("max_tokens") if limit is None else limit
    return Lenient(ApiKind.CHAT, (b"".join(fields),), limit)


def _read_completions(members: Members) -> Lenient:
    prompts = _texts(members.get("prompt"))
    return Lenient(ApiKind.COMPLETIONS, prompts, members.get("max_tokens"))


def _read_embeddings(members: Members) -> Lenient:
    prompts = _texts(members.get("input"))
    if not prompts:
        fields: list[bytes] = []
        _write_messages(fields, members.get("messages"))
        prompts = (b"".join(fields),)
    return Lenient(ApiKind.EMBEDDINGS, prompts)


def _read_responses(members: Members) -> Lenient:
    fields = _labelled(members, "previous_response_id", "tools", "prompt")
    _write_system(fields, members.get("instructions"))
    given = members.get("input")
    items = given if isinstance(given, list) else [] if given is None else [given]
    admit_fields(fields, items)
    for item in items:
        if isinstance(item, str):
            # The API defines a string as one message of the user.
            write_item(fields, {"role": "user", "content": item})
        elif isinstance(item, dict):
            write_item(fields, item)
        else:
            fields += (_encode_sorted(item), JSON)
    return Lenient(ApiKind.RESPONSES, (b"".join(fields),), members.get("max_output_tokens"))


def _read_anthropic(members: Members) -> Lenient:
    fields = _labelled(members, "tools")
    _write_system(fields, members.get("system"))
    _write_messages(fields, members.get("messages"))
    return Lenient(ApiKind.MESSAGES, (b"".join(fields),), members.get("max_tokens"))


def _read_generate(members: Members) -> Lenient:
    """Return the output limit without a prompt, because token ids of an unknown form are neither
    text nor ids.
    """
    sampling = members.get("sampling_params")
    limit = sampling.get("max_tokens") if isinstance(sampling, dict) else None
    return Lenient(ApiKind.OPAQUE, (), limit)


_READERS: Final[Mapping[str, Callable[[Members], Lenient]]] = {
    "chat/completions": _read_chat,
    "completions": _read_completions,
    "embeddings": _read_embeddings,
    "responses": _read_responses,
    "v1/messages": _read_anthropic,
    "inference/v1/generate": _read_generate,
}
"""Function that reads the decoded body, by suffix of the path. Requests with other paths have no
prompt.
"""


def _labelled(members: Members, *names: str) -> list[bytes]:
    """Return the canonical fields of the members `names`, which engines put before the first
    message. Empty members have none.
    """
    fields: list[bytes] = []
    for name in names:
        if name in members and (value := _encode_sorted(members[name])) not in _EMPTY:
            fields += (name.encode(), LABEL, value, JSON)
    return fields


def _write_system(fields: list[bytes], system: Any) -> None:
    if system is None:
        return
    fields += (b"system", LABEL)
    _write_any_content(fields, system)
    fields.append(MESSAGE)


def _write_messages(fields: list[bytes], messages: Any) -> None:
    if messages is None:
        return
    listed = messages if isinstance(messages, list) else [messages]
    admit_fields(fields, listed, FIELDS_EACH)
    for message in listed:
        try:
            write_messages(fields, [msgspec.convert(message, Message)])
        except msgspec.ValidationError:
            _write_unknown_message(fields, message)


def _write_unknown_message(fields: list[bytes], message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        fields += (_encode_sorted(message), JSON, MESSAGE)
        return
    fields += (role.encode(), ROLE)
    others = {name: value for name, value in message.items() if name not in {"role", "content"}}
    if others:
        fields += (_encode_sorted(others), JSON)
    _write_any_content(fields, message.get("content"))
    fields.append(MESSAGE)


def _write_any_content(fields: list[bytes], content: Any) -> None:
    if content is None or isinstance(content, (str, list)):
        write_content(fields, content)
    else:
        fields += (_encode_sorted(content), JSON)


def _texts(value: Any) -> tuple[bytes, ...]:
    """Return the canonical bytes of a prompt for completions or embeddings: a text as such, and any
    other value as JSON. Return () for null, [] and {}.
    """
    if isinstance(value, str):
        return (text_prompt(value),)
    encoded = _encode_sorted(value)
    return () if encoded in _EMPTY else (encoded + JSON,)
