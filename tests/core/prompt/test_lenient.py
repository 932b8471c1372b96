"""Bodies that the strict parsers do not understand: every one is placed, unless vLLM refuses it too."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.prompt.canonical import Message, chat_prompt
from epp.core.prompt.parse import Parsed, parse_request
from epp.core.types import ApiKind, Refusal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "x"}
MISSING = object()
WRONG = {
    "null": None,
    "true": True,
    "int": 7,
    "negative": -1,
    "huge": 10**200,
    "float": 1.5,
    "text": "text",
    "empty text": "",
    "array": [1, "a", None],
    "empty array": [],
    "nested array": [[["a"]]],
    "object": {"b": 1, "a": [2]},
    "empty object": {},
    "missing": MISSING,
}
"""A value of every JSON type, for members that expect another one."""
VALID = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETIONS: {"model": "m", "prompt": "x"},
    "/v1/embeddings": {"model": "m", "input": "x"},
    RESPONSES: {"model": "m", "input": "x"},
    MESSAGES: {"model": "m", "max_tokens": 5, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [USER]},
    "/v1/conversations": {},
    "/v1/images/generations": {"model": "m", "prompt": "x"},
    "/v1/chat/completions/render": {"model": "m", "messages": [USER]},
    "/v1/completions/render": {"model": "m", "prompt": "x"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3]},
}
MEMBERS = (
    *("model", "cache_salt", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("messages", "prompt", "prompt_embeds", "input", "instructions", "previous_response_id"),
    *("system", "tools", "documents", "chat_template_kwargs", "token_ids", "sampling_params"),
)
OF_MESSAGE = (
    *("role", "content", "name", "tool_call_id", "reasoning", "reasoning_content", "refusal"),
    *("audio", "tool_calls", "function_call"),
)
OF_PART = ("type", "text", "image_url", "content", "id", "name", "input", "thinking")
READ_UNREAD = frozenset({"/v1/messages/count_tokens"})
"""Paths whose bodies the picker forwards unread."""
MODEL_OPTIONAL = frozenset(
    {
        "/v1/conversations",
        "/v1/images/generations",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/inference/v1/generate",
    }
)


def refused_by_vllm(path, body):
    """Whether vLLM answers 400 as well, and the picker may: the rule of design D33.

    The `model` of vLLM's requests is a string, and a request without one names no model to route to.
    """
    model = body.get("model")
    if path in READ_UNREAD:
        return False
    if model is None or model == "":
        return path not in MODEL_OPTIONAL
    return not isinstance(model, str)


def read(path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(path=path, headers={}, body=content, request_id="r")


def placed(path, body):
    found = read(path, body)
    assert isinstance(found, Parsed), found
    assert found.body == (body if isinstance(body, bytes) else json.dumps(body).encode())
    return found


def with_member(body, name, value):
    changed = {member: one for member, one in body.items() if member != name}
    return changed if value is MISSING else changed | {name: value}


def bodies(path):
    """Yield the valid body of `path` with each member that the parser reads of each wrong type."""
    valid = VALID[path]
    for value in WRONG.values():
        for name in MEMBERS:
            yield with_member(valid, name, value)
        for name in OF_MESSAGE:
            message = with_member(USER, name, value)
            yield valid | {"messages": [message]}
            yield valid | {"input": [message]}
        for name in OF_PART:
            for kind in ("text", "image_url", "tool_use", "tool_result", "thinking", "other"):
                part = with_member({"type": kind, "text": "x"}, name, value)
                yield valid | {"messages": [{"role": "user", "content": [part]}]}
                yield valid | {"input": [{"role": "user", "content": [part]}]}
                yield valid | {"system": [part]}
        if value is not MISSING:
            yield valid | {"messages": [value], "input": [value], "prompt": [value]}
            yield valid | {"sampling_params": {"max_tokens": value}, "unknown": value}


@pytest.mark.parametrize("path", VALID)
def test_a_request_is_refused_only_where_vllm_refuses_it(path):
    """Every path, every wrong type of every member that the parser reads."""
    count = 0
    for body in bodies(path):
        count += 1
        found = read(path, body)
        if isinstance(found, Refusal):
            assert found.status == 400
            assert refused_by_vllm(path, body), (body, found.message)
        else:
            assert not refused_by_vllm(path, body), body
    assert count > 1_000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(path=st.sampled_from(sorted(VALID)), member=st.sampled_from(MEMBERS), value=JSON)
def test_any_value_of_any_member_is_placed_or_refused_like_vllm(path, member, value):
    body = VALID[path] | {member: value}
    found = read(path, body)
    assert isinstance(found, Refusal) == refused_by_vllm(path, body)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model":"m","messages":"\\ud800"}', b"[]"])
@pytest.mark.parametrize("path", sorted(VALID.keys() - READ_UNREAD))
def test_a_body_that_is_no_json_object_is_refused(path, body):
    assert read(path, body).status == 400


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, {"model": "m"}, "no-prompt"),
        (CHAT, {"model": "m", "messages": []}, "no-prompt"),
        (CHAT, {"model": "m", "messages": "hi"}, "unknown-shape"),
        (CHAT, {"model": "m", "messages": [{"role": "u", "content": 5}]}, "unknown-shape"),
        (CHAT, {"model": "m", "messages": [{"content": "x"}]}, "unknown-shape"),
        (CHAT, {"model": "m", "messages": [USER], "cache_salt": 5}, "unknown-shape"),
        (COMPLETIONS, {"model": "m"}, "no-prompt"),
        (COMPLETIONS, {"model": "m", "prompt": []}, "no-prompt"),
        (COMPLETIONS, {"model": "m", "prompt": {"text": "x"}}, "unknown-shape"),
        (RESPONSES, {"model": "m", "previous_response_id": "r1"}, "unknown-shape"),
        (RESPONSES, {"model": "m", "prompt": {"id": "p", "version": "2"}}, "unknown-shape"),
        (RESPONSES, {"model": "m"}, "no-prompt"),
        (MESSAGES, {"model": "m", "messages": [USER], "system": {"a": 1}}, "unknown-shape"),
        ("/inference/v1/generate", {"token_ids": ["a"]}, "no-prompt"),
    ],
)
def test_the_reason_is_told(path, body, reason):
    found = placed(path, body)
    assert found.unparsed == reason
    assert bool(found.request.prompts) == (reason == "unknown-shape")


@pytest.mark.parametrize("path", VALID)
def test_what_is_understood_has_no_reason(path):
    assert placed(path, VALID[path]).unparsed == ""


def test_a_body_that_is_nested_too_deep_is_placed_without_its_prompt():
    body = b'{"model":"m","messages":[{"role":"u","content":' + b"[" * 9_999
    found = placed(CHAT, body)
    assert (found.unparsed, found.request.model) == ("nested-too-deep", "m")
    assert found.request.prompts == ()


def test_only_a_model_at_the_top_level_is_the_model_of_an_unread_body():
    deep = b"[" * 99_999
    nested = b'{"messages":[{"model":"inner","content":' + deep
    assert read(CHAT, nested).param == "$.model"
    both = b'{"messages":[{"model":"inner"}],"model":"outer","x":' + deep
    assert placed(CHAT, both).request.model == "outer"


def test_an_understood_message_beside_an_unknown_one_is_written_as_ever():
    """A conversation shares the blocks before the part that is not understood."""
    known = [{"role": "system", "content": "s" * 2_000}, USER]
    found = placed(
        CHAT, {"model": "m", "messages": [*known, {"role": "user", "content": {"a": 1}}]}
    )
    understood = chat_prompt([Message("system", "s" * 2_000), Message("user", "x")], preamble={})
    assert found.request.prompts[0].startswith(understood)


def test_equal_unknown_prompts_share_their_blocks_whatever_the_order_of_members():
    text = "long text " * 500
    one = placed(CHAT, {"model": "m", "messages": {"b": text, "a": 1}})
    other = placed(CHAT, {"model": "m", "messages": {"a": 1, "b": text + "more"}})
    first, second = (found.request.chains_of(256, 100)[0] for found in (one, other))
    blocks = len(first) // 8
    assert blocks > 10
    assert first[: 8 * (blocks - 1)] == second[: 8 * (blocks - 1)]


def test_a_template_and_its_variables_are_part_of_the_prompt():
    """Two templates of /v1/responses do not share a prefix."""
    one, other = (
        placed(RESPONSES, {"model": "m", "prompt": {"id": name}}).request.prompts[0]
        for name in ("a", "b")
    )
    assert one != other


def test_limits_and_streams_are_read_of_an_unknown_body():
    body = {"model": "m", "messages": "hi", "stream": True, "max_tokens": 9, "cache_salt": "s"}
    request = placed(CHAT, body).request
    assert (request.stream, request.output_tokens_max, request.cache_salt) == (True, 9, "s")
    assert request.api is ApiKind.CHAT
    assert placed(CHAT, body | {"max_tokens": True}).request.output_tokens_max is None


def test_the_model_of_an_unknown_body_can_be_rewritten():
    body = json.dumps({"messages": 5, "model": "m"}).encode()
    found = parse_request(
        path=CHAT, headers={}, body=body, request_id="r", rewrite=lambda model: f"{model}-tuned"
    )
    assert found.request.model == "m-tuned"
    assert json.loads(found.body) == {"messages": 5, "model": "m-tuned"}


def test_the_ids_of_a_prompt_stay_ids():
    """The second reading must not change what the first one understands."""
    request = placed(COMPLETIONS, {"model": "m", "prompt": [1, 2]}).request
    assert request.prompts == (struct.pack("<2I", 1, 2),)
