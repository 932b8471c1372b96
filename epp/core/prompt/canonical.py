r"""Conversion of messages to canonical prompt bytes, from which block hashes are computed (design D4).

Every field *ends* with a terminator, a byte that UTF-8 cannot contain; no field has a length before
it. The bytes can therefore be split into fields in only one way, and the terminator shows the kind of
a field:

    prompt  := (label LABEL json JSON)* system? message*    label: tools, documents, ...
    system  := "system" LABEL field* MESSAGE                or the instructions of Responses
    message := role ROLE field* MESSAGE | field             a bare field: other Responses items
    field   := text TEXT
             | label LABEL text VALUE                       name, tool_call_id, reasoning, ...
             | label LABEL digest DIGEST                    image, audio, file: by content
             | "tool_call" LABEL id VALUE name VALUE (arguments VALUE | json JSON)
             | "tool_result" LABEL id VALUE flag VALUE field* CLOSE
             | json JSON                                    any other value

Different conversations therefore have different bytes. The first k messages of a conversation are a
prefix of the first k + 1. Two prompts that are equal up to byte n share every full block before n.

By definition, the bytes are equal for content as a string and as one text part, and for a field that
is null and one that is missing. Members that do not reach the model have no bytes (`cache_control`,
`detail`, ids and states of Responses items). A tool call or result without an id or arguments has
empty ones.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import xxhash
from msgspec import Raw, Struct, json

from epp.core.prompt.outline import TooMuchError

TEXT: Final = b"\xf8"
ROLE: Final = b"\xf9"
LABEL: Final = b"\xfa"
VALUE: Final = b"\xfb"
JSON: Final = b"\xfc"
DIGEST: Final = b"\xfd"
CLOSE: Final = b"\xfe"
MESSAGE: Final = b"\xff"
TERMINATORS: Final = (TEXT, ROLE, LABEL, VALUE, JSON, DIGEST, CLOSE, MESSAGE)

Item: TypeAlias = dict[str, Any]
"""A JSON object in the body of a request, such as a content part, a tool call or a Responses item.
It was decoded but not checked.
"""
Content: TypeAlias = str | list[Any] | None
"""Content of a message: a text, a list of parts (objects or texts), or None."""

_USER: Final = b"user"
_BEFORE: Final = frozenset({b"", *TERMINATORS})
"""Bytes that may precede a field in canonical prompt bytes: none at the start of the prompt, or a
terminator.
"""

_BILLING: Final = "x-anthropic-billing-header"
"""Beginning of the text of a system block that changes with each request and is not part of the
prompt.
"""
_TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text"})
_MEDIA_TYPES: Final = frozenset(
    {
        *("image_url", "image_embeds", "video_url", "audio_url", "input_audio", "file"),  # chat
        *("input_image", "input_file", "input_video"),  # Responses
        *("image", "document"),  # Anthropic
    }
)
_NOT_CONTENT: Final = frozenset({"type", "cache_control", "detail"})
"""Names of members of a media part that do not change what the model receives."""
_BLOCK_TYPES: Final = frozenset({"thinking", "tool_use", "tool_result"})
_EMPTY: Final = frozenset({b"null", b"[]", b"{}"})

NO_JSON: Final = Raw(b"")
"""Value that stands for a member that the body of a request does not have."""

FIELDS_MAX: Final = 100_000
"""Maximum number of fields, terminators included, in the canonical bytes of one prompt. Each takes
Python half a microsecond. A body could have as many empty ones as bytes, and block the event loop.
"""

FIELDS_EACH: Final = 3
"""Number of fields that a message, part or call is assumed to add, before it is written: a message
has at least its role, a terminator and an end.
"""
_FIELDS_PER_MEMBER: Final = 8
"""Number of empty fields that are added for each member of a media part, which takes as much time
as these. The number of fields of a prompt is limited.
"""

MEDIA_ITEMS_MAX: Final = 256
"""Maximum number of distinct media items of one request that `media_digests` returns."""
_MEDIA: Final = re.compile(rb"\xfa([0-9a-f]{32})\xfd")

_encode = json.Encoder().encode


class Message(Struct, gc=False):
    """One message of a chat, or of an Anthropic conversation, with the members that reach the
    model.
    """

    role: str
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Item | None = None
    tool_calls: list[Item] | None = None
    function_call: Item | None = None


def media_digests(prompts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return a 16-byte digest of each distinct image or other media item in `prompts`, in order, at
    most `MEDIA_ITEMS_MAX`.
    """
    found: dict[bytes, None] = {}
    for prompt in prompts:
        if DIGEST not in prompt:
            continue
        for media in _MEDIA.finditer(prompt):
            found.setdefault(bytes.fromhex(media[1].decode()))
            if len(found) >= MEDIA_ITEMS_MAX:
                return tuple(found)
    return tuple(found)


def text_prompt(text: str) -> bytes:
    """Return the canonical bytes of a prompt that consists of one plain text."""
    return text.encode() + TEXT


def chat_prompt(
    messages: list[Message], *, preamble: Mapping[bytes, Raw], system: Content = None
) -> bytes:
    """Return the canonical bytes of a conversation; `messages` is empty afterwards.

    `preamble` has, by label, JSON that templates put before the first message, such as the tools.
    `system` is a system prompt outside the messages. Raises `UnicodeDecodeError` if `preamble` is
    not UTF-8, `RecursionError` if a part is nested too deeply, and `TooMuchError` if there are more
    than `FIELDS_MAX` fields.
    """
    fields = _open(preamble, system)
    admit_fields(fields, messages)
    write_messages(fields, messages)
    return b"".join(fields)


def responses_prompt(
    items: str | Sequence[Item], *, preamble: Mapping[bytes, Raw], instructions: str | None
) -> bytes:
    """Return the canonical bytes of a Responses input. Raises the errors of `chat_prompt`."""
    fields = _open(preamble, instructions)
    if isinstance(items, str):
        # The API defines a string as one message of the user.
        items = [{"role": "user", "content": items}]
    admit_fields(fields, items)
    for item in items:
        write_item(fields, item)
    return b"".join(fields)


def opening_of(prompt: bytes) -> tuple[int, int] | None:
    """Return (start, end) of the user's first message in canonical bytes, or None if there is no
    such message.

    All bytes up to that end are the same at every turn of a conversation.
    """
    role_end = prompt.find(ROLE)
    while role_end >= 0:
        start = role_end - len(_USER)
        # A position after nothing or a terminator is not the end of another role.
        if start >= 0 and prompt.startswith(_USER, start) and prompt[start - 1 : start] in _BEFORE:
            end = prompt.find(MESSAGE, role_end) + 1
            return (start, end) if end else None
        role_end = prompt.find(ROLE, role_end + 1)
    return None


def admit_fields(fields: list[bytes], more: Collection[Any], each: int = FIELDS_EACH) -> None:
    """Raise `TooMuchError` if `fields` would be longer than `FIELDS_MAX` with `each` more fields
    for every member of `more`. The function is called before each loop over members that a client
    sent.
    """
    if len(fields) + each * len(more) > FIELDS_MAX:
        what = f"{FIELDS_MAX // each:,} messages, parts and their members"
        raise TooMuchError(f"Expected at most {what}")


def _open(preamble: Mapping[bytes, Raw], system: Content) -> list[bytes]:
    fields: list[bytes] = []
    for label, raw in preamble.items():
        if raw is NO_JSON:
            continue
        value = bytes(raw)
        if value not in _EMPTY:
            # Raw JSON was not decoded, so it has not been checked for UTF-8 yet.
            value.decode()
            fields += (label, LABEL, value, JSON)
    if system is not None:
        fields += (b"system", LABEL)
        if isinstance(system, list):
            admit_fields(fields, system)
            system = [block for block in system if not _is_billing(block)]
        write_content(fields, system)
        fields.append(MESSAGE)
    return fields


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else block
    return isinstance(text, str) and text.startswith(_BILLING)


def write_messages(fields: list[bytes], messages: list[Message]) -> None:
    """Append the canonical fields of each message to `fields`, in order; `messages` is empty
    afterwards.
    """
    messages.reverse()
    while messages:
        # A written message is dropped, so that the join finds only one other copy of its text.
        message = messages.pop()
        content = message.content
        if (
            isinstance(content, str)
            and message.name is None
            and message.tool_call_id is None
            and message.reasoning is None
            and message.reasoning_content is None
            and message.refusal is None
            and message.audio is None
            and message.tool_calls is None
            and message.function_call is None
        ):
            # Nearly every message is only a text. The branch has no call, because a conversation
            # has hundreds.
            fields += (message.role.encode(), ROLE, content.encode(), TEXT, MESSAGE)
        else:
            _write_message(fields, message)


def _write_message(fields: list[bytes], message: Message) -> None:
    fields += (message.role.encode(), ROLE)
    _write_value(fields, b"name", message.name)
    _write_value(fields, b"tool_call_id", message.tool_call_id)
    _write_value(fields, b"reasoning", message.reasoning)
    _write_value(fields, b"reasoning_content", message.reasoning_content)
    write_content(fields, message.content)
    _write_value(fields, b"refusal", message.refusal)
    if message.audio is not None:
        _write_media(fields, b"audio", message.audio)
    admit_fields(fields, message.tool_calls or ())
    for call in message.tool_calls or ():
        _write_function(fields, call, call.get("function"), call.get("id"))
    if message.function_call is not None:
        _write_function(fields, message.function_call, message.function_call, None)
    fields.append(MESSAGE)


def _write_function(fields: list[bytes], call: Item, function: Any, call_id: Any) -> None:
    """Append the canonical fields of a tool call with `function`, or those of `call` as JSON if
    `function` is malformed.
    """
    if isinstance(function, dict) and isinstance(name := function.get("name"), str):
        _write_call(fields, call_id, name, function.get("arguments"))
    else:
        _write_json(fields, call)


def write_item(fields: list[bytes], item: Item) -> None:
    """Append the canonical fields of `item`, one item of a Responses input, to `fields`."""
    role, content = item.get("role"), item.get("content")
    if isinstance(role, str) and isinstance(content, (str, list)):
        fields += (role.encode(), ROLE)
        write_content(fields, content)
        fields.append(MESSAGE)
        return
    match item.get("type"):
        case "function_call" if isinstance(name := item.get("name"), str):
            _write_call(fields, item.get("call_id"), name, item.get("arguments"))
        case "function_call_output" if isinstance(output := item.get("output"), (str, list)):
            _write_result(fields, item.get("call_id"), None, output)
        case _:
            _write_json(fields, item)


def write_content(fields: list[bytes], content: Content) -> None:
    """Append the canonical fields of `content`, a text or a list of parts, to `fields`; None has no
    fields.
    """
    if isinstance(content, str):
        fields += (content.encode(), TEXT)
        return
    admit_fields(fields, content or ())
    for part in content or ():
        if isinstance(part, dict):
            _write_part(fields, part)
        elif isinstance(part, str):
            fields += (part.encode(), TEXT)
        else:
            _write_json(fields, part)


def _write_part(fields: list[bytes], part: Item) -> None:
    kind = part.get("type")
    if not isinstance(kind, str):
        _write_json(fields, part)
    elif kind in _TEXT_TYPES and isinstance(text := part.get("text"), str):
        fields += (text.encode(), TEXT)
    elif kind in _MEDIA_TYPES:
        _write_media(fields, kind.encode(), part)
    elif kind in _BLOCK_TYPES:
        _write_block(fields, kind, part)
    else:
        _write_json(fields, part)


def _write_block(fields: list[bytes], kind: str, block: Item) -> None:
    """Append the canonical fields of an Anthropic content block that is neither text nor media."""
    content = block.get("content")
    match kind:
        case "thinking" if isinstance(thinking := block.get("thinking"), str):
            _write_value(fields, b"thinking", thinking)
        case "tool_use" if isinstance(name := block.get("name"), str):
            _write_call(fields, block.get("id"), name, block.get("input"))
        case "tool_result" if content is None or isinstance(content, (str, list)):
            _write_result(fields, block.get("tool_use_id"), block.get("is_error"), content)
        case _:
            _write_json(fields, block)


def _write_call(fields: list[bytes], call_id: Any, name: str, arguments: Any) -> None:
    fields += (b"tool_call", LABEL, _id(call_id), VALUE, name.encode(), VALUE)
    if isinstance(arguments, str):
        fields += (arguments.encode(), VALUE)
    elif arguments is None:
        fields += (b"", VALUE)
    else:
        fields += (_encode(arguments), JSON)


def _write_result(fields: list[bytes], call_id: Any, is_error: Any, content: Content) -> None:
    flag = b"error" if is_error is True else b""
    fields += (b"tool_result", LABEL, _id(call_id), VALUE, flag, VALUE)
    write_content(fields, content)
    fields.append(CLOSE)


def _write_value(fields: list[bytes], label: bytes, text: str | None) -> None:
    if text is not None:
        fields += (label, LABEL, text.encode(), VALUE)


def _write_json(fields: list[bytes], value: Any) -> None:
    if isinstance(value, dict) and "cache_control" in value:
        # `cache_control` moves from block to block as a conversation grows, and is not part of the
        # prompt.
        value = {name: member for name, member in value.items() if name != "cache_control"}
    fields += (_encode(value), JSON)


def _write_media(fields: list[bytes], label: bytes, part: Item) -> None:
    digest = xxhash.xxh3_128()
    _digest_members(fields, digest, part)
    fields += (label, LABEL, digest.hexdigest().encode(), DIGEST)


def _digest_members(fields: list[bytes], digest: xxhash.xxh3_128, members: Item) -> None:
    names = sorted(members.keys() - _NOT_CONTENT)
    admit_fields(fields, names, _FIELDS_PER_MEMBER)
    # Members are not fields, but each takes as long as some and is counted as such.
    fields += [b""] * (_FIELDS_PER_MEMBER * len(names))
    for name in names:
        digest.update(name.encode() + VALUE)
        _digest(fields, digest, members[name])


def _digest(fields: list[bytes], digest: xxhash.xxh3_128, value: Any) -> None:
    """Add `value` to the digest of a media item. Texts and objects are added without building their
    JSON, because an image has megabytes of base64 text.
    """
    if isinstance(value, str):
        digest.update(value.encode())
        digest.update(VALUE)
    elif isinstance(value, dict):
        if value:
            _digest_members(fields, digest, value)
        digest.update(CLOSE)
    else:
        digest.update(_encode(value))
        digest.update(JSON)


def _id(call_id: Any) -> bytes:
    if isinstance(call_id, str):
        return call_id.encode()
    return b"" if call_id is None else _encode(call_id)
