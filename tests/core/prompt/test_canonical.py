import json
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.prompt.blocks import chain_seed, hash_blocks
from epp.core.prompt.canonical import (
    MEDIA_ITEMS_MAX,
    Message,
    chat_prompt,
    media_digests,
    responses_prompt,
    text_prompt,
)

TOKEN = re.compile(rb"([^\xf8-\xff]*)([\xf8-\xff])", re.DOTALL)

# Few letters, so that equal and nearly equal conversations turn up; words and characters that look
# like labels and terminators, so that a mix-up would show.
words = st.sampled_from(["", "a", "b", "ab", "name", "tool_call", "user", "ÿ", "\xf8", '{"a":1}'])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
calls = st.tuples(st.just("call"), words, words, words | st.dictionaries(words, values, max_size=2))
unknown = st.tuples(st.just("json"), st.dictionaries(st.sampled_from(["x", "y"]), values))
parts = st.tuples(st.just("text"), words) | st.tuples(st.just("thinking"), words) | unknown
results = st.tuples(st.just("result"), words, st.booleans(), st.lists(parts, max_size=2))
fields = parts | calls | results
"""Fields in a form of their own; `request_part` spells them as a request does."""
messages = st.tuples(words, st.none() | words, st.lists(fields, max_size=3))
conversations = st.lists(messages, max_size=3)


def request_part(field):
    match field:
        case ("text", text):
            return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        case ("thinking", text):
            return {"thinking": text, "type": "thinking", "signature": "s"}
        case ("call", call_id, name, arguments):
            return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        case ("result", call_id, is_error, content):
            inner = [request_part(part) for part in content]
            return {
                "type": "tool_result",
                "tool_use_id": call_id,
                "is_error": is_error,
                "content": inner,
            }
        case ("json", value):
            return value


def request_message(message):
    role, name, content = message
    return {"content": [request_part(part) for part in content], "name": name, "role": role}


def canonical(conversation, tools=None):
    document = json.dumps([request_message(message) for message in conversation])
    preamble = {} if tools is None else {b"tools": msgspec.Raw(json.dumps(tools).encode())}
    return chat_prompt(msgspec.json.decode(document, type=list[Message]), preamble=preamble)


def read_back(prompt):
    """Invert `canonical`: that an inverse exists is what injective means."""
    tokens = [(text.decode(), end[0]) for text, end in TOKEN.findall(prompt)]
    assert sum(len(text.encode()) + 1 for text, _ in tokens) == len(prompt)
    tools = None
    if tokens and tokens[0] == ("tools", 0xFA):
        tools = json.loads(tokens[1][0])
        tokens = tokens[2:]
    tokens.reverse()
    conversation = []
    while tokens:
        role, end = tokens.pop()
        assert end == 0xF9
        name = None
        if tokens[-1] == ("name", 0xFA):
            tokens.pop()
            name = tokens.pop()[0]
        conversation.append((role, name, read_fields(tokens, 0xFF)))
    return conversation, tools


def read_fields(tokens, closing):
    found = []
    while True:
        text, end = tokens.pop()
        if end == closing:
            return found
        if end == 0xF8:
            found.append(("text", text))
        elif end == 0xFC:
            found.append(("json", json.loads(text)))
        elif text == "thinking":
            found.append(("thinking", tokens.pop()[0]))
        elif text == "tool_call":
            call_id, name = tokens.pop()[0], tokens.pop()[0]
            arguments, kind = tokens.pop()
            arguments = json.loads(arguments) if kind == 0xFC else arguments
            found.append(("call", call_id, name, arguments))
        else:
            assert text == "tool_result"
            call_id, flag = tokens.pop()[0], tokens.pop()[0]
            found.append(("result", call_id, flag == "error", read_fields(tokens, 0xFE)))


@settings(max_examples=300)
@given(conversations, st.none() | st.lists(words, min_size=1, max_size=2))
def test_a_conversation_can_be_read_back(conversation, tools):
    """The canonical bytes determine the conversation, so different ones never share them."""
    assert read_back(canonical(conversation, tools)) == (conversation, tools)


@settings(max_examples=200)
@given(conversations, conversations)
def test_equal_bytes_mean_equal_conversations(one, other):
    """Two conversations have the same bytes exactly if they are the same."""
    assert (canonical(one) == canonical(other)) == (json.dumps(one) == json.dumps(other))


@settings(max_examples=200)
@given(conversations, conversations, st.none() | st.lists(words, max_size=2))
def test_a_growing_conversation_keeps_its_prefix(begin, more, tools):
    """The bytes of the first messages are a prefix of the bytes of all."""
    assert canonical(begin + more, tools).startswith(canonical(begin, tools))


@settings(max_examples=50)
@given(st.integers(0, 1500), st.integers(0, 1500), st.sampled_from(["é", "a", "語"]))
def test_shared_text_shares_every_full_block(shared, rest, letter):
    """Two prompts equal up to some byte of one text share all full blocks before it."""
    text = letter * shared
    one = chat([{"role": "user", "content": text + "x" * rest}])
    other = chat([{"role": "user", "content": text + "y" * 700}, {"role": "user", "content": "z"}])
    before = len(b"user\xf9") + len(text.encode())
    seed = chain_seed("chat", "m", "")
    chains = [hash_blocks(p, seed=seed, block_bytes=256, blocks_max=100) for p in (one, other)]
    head = before // 256 * 8
    assert chains[0][:head] == chains[1][:head]
    assert len(chains[0][:head]) == head


def chat(conversation, **more):
    return chat_prompt(msgspec.convert(conversation, list[Message]), preamble={}, **more)


def user(*content):
    return [{"role": "user", "content": list(content)}]


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_a_text_is_alike_as_string_and_as_part():
    """One text part and a plain string are one prompt; absent and null are one too."""
    assert chat(user({"type": "text", "text": "hi"})) == chat([{"role": "user", "content": "hi"}])
    assert chat([{"role": "user", "content": None}]) == chat([{"role": "user"}])
    assert chat(user("hi")) == chat(user({"type": "text", "text": "hi"}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("ab"), user("a", "b")),
        (user("hi") + user("yo"), user("hi", "yo")),
        ([{"role": "user", "content": "a"}], [{"role": "user", "content": "", "name": "a"}]),
        ([{"role": "tool", "tool_call_id": "1"}], [{"role": "tool", "tool_call_id": "2"}]),
        ([{"role": "a", "refusal": "x"}], [{"role": "a", "content": "x"}]),
        ([{"role": "a", "reasoning": "x"}], [{"role": "a", "content": "x"}]),
        ([{"role": "a", "audio": {"id": "1"}}], [{"role": "a", "audio": {"id": "2"}}]),
        ([{"role": "a", "function_call": {"name": "f"}}], [{"role": "a"}]),
        ([{"role": "a", "function_call": {"x": 1}}], [{"role": "a"}]),
        ([{"role": "a", "tool_calls": [{"x": 1}]}], [{"role": "a", "tool_calls": [{"x": 2}]}]),
        (user(image("a")), user(image("b"))),
        (user(image("a")), user("a")),
        (user(image("a")), user({"type": "video_url", "video_url": {"url": "a"}})),
        (user({"type": "hologram", "x": 1}), user({"type": "hologram", "x": 2})),
        (user({"type": "text", "text": 5}), user({"type": "text", "text": "5"})),
        (user(5), user("5")),
    ],
)
def test_what_differs_for_the_model_differs_in_bytes(one, other):
    """Boundaries, roles, names, ids, calls and media all count."""
    assert chat(one) != chat(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "f", "arguments": "{}"}, {"name": "f", "arguments": {}}),
        ({"name": "f", "arguments": "a"}, {"name": "g", "arguments": "a"}),
        ({"name": "fa", "arguments": ""}, {"name": "f", "arguments": "a"}),
    ],
)
def test_tool_calls_count(one, other):
    """Name and arguments of a call count, and text is not an object."""

    def call(function):
        return [{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]

    assert chat(call(one)) != chat(call(other))


def test_what_the_model_is_not_shown_does_not_count():
    """Cache marks move as a conversation grows and must not break its prefix."""
    mark = {"cache_control": {"type": "ephemeral"}}
    for part in ({"type": "text", "text": "x"}, image("a"), {"type": "new", "x": 1}):
        assert chat(user(part)) == chat(user({**part, **mark}))
    assert chat(user(image("a"))) == chat(user(image("a", detail="high")))


def test_media_enter_by_content():
    """However large an image is, it becomes a few bytes, the same whatever the order of members."""
    data = "A" * 100_000
    one = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    other = {"source": {"data": data, "media_type": "image/png", "type": "base64"}, "type": "image"}
    assert chat(user(one)) == chat(user(other))
    assert len(chat(user(one))) < 100
    changed = {**one, "source": {**one["source"], "data": data + "B"}}
    assert chat(user(changed)) != chat(user(one))


def test_a_system_prompt_is_not_a_message():
    """A system prompt beside the messages comes first and is told from a system message."""
    outside = chat(user("hi"), system="be kind")
    assert outside != chat([{"role": "system", "content": "be kind"}, *user("hi")])
    assert outside == chat(user("hi"), system=[{"type": "text", "text": "be kind"}])
    assert outside.endswith(chat(user("hi")))


def test_billing_blocks_are_dropped():
    """A system block that changes with each request would share nothing."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    kept = {"type": "text", "text": "be kind"}
    assert chat(user("hi"), system=[billing, kept]) == chat(user("hi"), system=[kept])


def test_a_preamble_that_is_not_utf8_is_an_error():
    """Raw JSON is kept undecoded, and a terminator must not come in with it."""
    with pytest.raises(UnicodeDecodeError):
        chat_prompt([], preamble={b"tools": msgspec.Raw(b'["\xff"]')})


def test_no_tools_and_empty_tools_are_alike():
    """An empty list of tools leaves no trace."""
    assert chat_prompt([], preamble={b"tools": msgspec.Raw(b"[]")}) == b""


def test_responses_items():
    """A string is one user message; calls, outputs and unknown items all count."""

    def responses(items):
        return responses_prompt(items, preamble={}, instructions="i")

    assert responses("hi") == responses(user({"type": "input_text", "text": "hi"}))
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "x"}
    output = {"type": "function_call_output", "call_id": "1", "output": "42"}
    other = {"type": "reasoning", "summary": []}
    prompts = [responses([*user("q"), item]) for item in (call, output, other)]
    assert len(set(prompts)) == 3
    assert prompts[0] == responses([*user("q"), {**call, "id": "y", "status": "completed"}])
    assert all(prompt.startswith(responses("q")) for prompt in prompts)


def test_a_text_prompt_ends_with_its_terminator():
    """A plain prompt is its UTF-8 and one terminator."""
    assert text_prompt("hé") == b"h\xc3\xa9\xf8"


def with_images(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    document = json.dumps([{"role": "user", "content": parts}])
    return chat_prompt(msgspec.json.decode(document, type=list[Message]), preamble={})


def test_images_are_told_apart_by_their_content():
    """Each once, in their order, whatever the text says."""
    cat, dog = media_digests([with_images("cat", "dog", "cat")])
    assert media_digests([with_images("dog"), with_images("cat")]) == (dog, cat)
    assert len(cat) == 16
    assert media_digests([text_prompt("image_url " + cat.hex())]) == ()


def test_images_of_one_prompt_are_bounded():
    shown = with_images(*map(str, range(MEDIA_ITEMS_MAX + 5)))
    assert len(media_digests([shown])) == MEDIA_ITEMS_MAX
