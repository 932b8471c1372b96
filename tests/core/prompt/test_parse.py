import json
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.prompt import parse
from epp.core.prompt.canonical import Message, chat_prompt, text_prompt
from epp.core.prompt.parse import ALL_PARSERS, Parsed, ParserName, opaque_request, parse_request
from epp.core.types import ApiKind, Refusal, RefusalReason

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PATHS = [
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/inference/v1/generate",
    "/v1/chat/completions/render",
    "/v1/images/generations",
    "/v2/models/x/infer",
]


def read(path, body, **more):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(
        path=path, headers=more.pop("headers", {}), body=body, request_id="r", **more
    )


def parsed(path, body, **more):
    result = read(path, body, **more)
    assert isinstance(result, Parsed), result
    return result


def refused(path, body, **more):
    result = read(path, body, **more)
    assert isinstance(result, Refusal), result
    assert (result.reason, result.status) == (RefusalReason.BAD_REQUEST, 400)
    return result


def ids(*token_ids):
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def test_a_chat_becomes_a_request():
    """All that scheduling needs is read, and the body is the very object that came in."""
    body = json.dumps(
        HELLO
        | {"stream": True, "max_tokens": 5, "max_completion_tokens": 7, "cache_salt": "s", "n": 2}
    ).encode()
    headers = {"x-session-id": "1"}
    result = parsed(CHAT, body, headers=headers)
    assert result.body is body
    assert result.incoming_model == "m"
    request = result.request
    assert (request.request_id, request.api, request.model) == ("r", ApiKind.CHAT, "m")
    assert (request.stream, request.output_tokens_max, request.cache_salt) == (True, 7, "s")
    assert request.headers is headers
    assert request.prompts == (chat_prompt([Message(role="user", content="hello")], preamble={}),)
    assert request.prompt_tokens == len(request.prompts[0]) // 4


@pytest.mark.parametrize(
    ("prompt", "api", "prompts"),
    [
        ("hi", ApiKind.COMPLETIONS, (text_prompt("hi"),)),
        (["a", "b"], ApiKind.COMPLETIONS, (text_prompt("a"), text_prompt("b"))),
        ([1, 2**32 - 1], ApiKind.TOKENS, (ids(1, 2**32 - 1),)),
        ([[1], [2, 3]], ApiKind.TOKENS, (ids(1), ids(2, 3))),
    ],
)
def test_completions_take_texts_and_token_ids(prompt, api, prompts):
    """Each prompt has its own bytes; ids are four little-endian bytes under their own kind."""
    request = parsed("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 3}).request
    assert (request.api, request.prompts, request.output_tokens_max) == (api, prompts, 3)
    assert request.prompt_tokens == sum(map(len, prompts)) // 4


@pytest.mark.parametrize(
    ("value", "api"), [("hi", ApiKind.EMBEDDINGS), (["a"], ApiKind.EMBEDDINGS), ([1], "tokens")]
)
def test_embeddings_take_the_same_inputs(value, api):
    """Texts have the kind of embeddings, ids that of ids."""
    assert parsed("/v1/embeddings", {"model": "m", "input": value}).request.api == api


def test_embeddings_of_a_conversation():
    """vLLM embeds messages too."""
    request = parsed("/v1/embeddings", HELLO).request
    assert request.api == ApiKind.EMBEDDINGS
    assert len(request.prompts) == 1


def test_embedded_prompts_have_no_prefix():
    """A prompt given as embeddings is served, without prefix information."""
    request = parsed("/v1/completions", {"model": "m", "prompt_embeds": "AAAA"}).request
    assert (request.api, request.prompts, request.model) == (ApiKind.OPAQUE, (), "m")


def test_responses():
    """Instructions, tools and the previous response come before the input."""
    body = {"model": "m", "input": "hi", "max_output_tokens": 9}
    request = parsed("/v1/responses", body).request
    assert (request.api, request.output_tokens_max) == (ApiKind.RESPONSES, 9)
    seen = {request.prompts}
    for more in (
        {"instructions": "be kind"},
        {"previous_response_id": "1"},
        {"tools": [1]},
        {"input": [{"role": "user", "content": "yo"}]},
    ):
        seen.add(parsed("/v1/responses", body | more).request.prompts)
    assert len(seen) == 5


def test_anthropic_messages():
    """System, tools and blocks are read; tools and system come first."""
    body = {
        "model": "m",
        "max_tokens": 8,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "be kind"},
        ],
        "tools": [{"name": "f"}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
        ],
    }
    request = parsed("/v1/messages", body).request
    assert (request.api, request.output_tokens_max) == (ApiKind.MESSAGES, 8)
    assert b"".join(request.prompts) == (
        b'tools\xfa[{"name": "f"}]\xfcsystem\xfabe kind\xf8\xff'
        b"user\xf9q\xf8\xff"
        b'assistant\xf9thinking\xfahm\xfbtool_call\xfa1\xfbf\xfb{"a":1}\xfc\xff'
        b"user\xf9tool_result\xfa1\xfb\xfb\xfe\xff"
    )


def test_generate_needs_no_model():
    """vLLM's own API takes ids, and its model is optional."""
    body = {"token_ids": [7], "sampling_params": {"max_tokens": 2}, "stream": True}
    request = parsed("/inference/v1/generate", body).request
    assert (request.api, request.prompts, request.model) == (ApiKind.TOKENS, (ids(7),), "")
    assert (request.output_tokens_max, request.stream, request.prompt_tokens) == (2, True, 1)


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v2/models/x/infer", "/score", "/"])
def test_unread_bodies_pass_through(path):
    """No model, no prefix, no rewrite, not even a look at the body."""
    body = b"not json"
    result = parsed(path, body, model_rewrite="other")
    assert result.body is body
    assert (result.request.api, result.request.model, result.incoming_model) == ("opaque", "", "")


def test_render_leaves_no_prefix_behind():
    """Rendering is rewritten and routed by load, but the pod will hold nothing of it."""
    result = parsed(CHAT + "/render", HELLO, model_rewrite="n")
    assert (result.request.api, result.request.prompts) == (ApiKind.OPAQUE, ())
    assert json.loads(result.body) == HELLO | {"model": "n"}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/openai/v1/chat/completions?api-version=1", {}),
        ("chat/completions", {"x-original-path": "/v1/completions"}),
        ("", {"x-original-path": CHAT, "x-forwarded-path": "/v1/completions"}),
        ("", {"x-forwarded-path": CHAT + "?a=/v1/completions"}),
    ],
)
def test_the_longest_suffix_of_the_path_decides(path, headers):
    """Query and front of the path do not matter; headers count when there is no path."""
    assert parsed(path, HELLO, headers=headers).request.api == ApiKind.CHAT


@pytest.mark.parametrize("path", parse._USUAL_PATHS)
@pytest.mark.parametrize("parsers", [ALL_PARSERS, frozenset()])
def test_a_usual_path_is_read_as_any_other(path, parsers):
    """With a query behind it the same path is not among them."""
    assert parse._suffix(path, parsers) == parse._suffix(path + "?", parsers)


@pytest.mark.parametrize(
    ("members", "api"),
    [
        ({"prompt": "x"}, ApiKind.COMPLETIONS),
        ({"prompt": "x", "messages": []}, ApiKind.COMPLETIONS),
        ({"messages": HELLO["messages"]}, ApiKind.CHAT),
        ({"input": [[1, 2]]}, ApiKind.OPAQUE),
        ({"input": [{"role": "user", "content": "x"}]}, ApiKind.OPAQUE),
    ],
)
def test_without_a_path_the_body_tells_what_it_is_for(members, api):
    """NGINX Gateway Fabric sends none; a completion is the field's default."""
    request = parsed("", {"model": "m", **members}).request
    assert (request.api, request.model) == (api, "m")


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000, {"prompt": "x"}])
def test_without_a_path_a_body_that_tells_nothing_is_refused_as_a_completion(body):
    """With what is wrong with it."""
    assert "completions" in refused("", body).message


def test_only_whole_segments_match():
    """A path that merely ends in the same letters is not claimed."""
    assert parsed("/v1/mycompletions", b"x").request.api == ApiKind.OPAQUE


def test_parsers_that_are_not_configured_claim_nothing():
    """Without its parser a path passes through, and without that too it is refused."""
    anthropic = frozenset({ParserName.ANTHROPIC})
    both = anthropic | {ParserName.PASSTHROUGH}
    assert parsed(CHAT, HELLO, parsers=both).request.api == ApiKind.OPAQUE
    assert "v1/messages" in refused(CHAT, HELLO, parsers=anthropic).message
    assert "none" in refused(CHAT, HELLO, parsers=frozenset()).message
    assert parsed("/v1/messages", HELLO, parsers=anthropic).request.api == ApiKind.MESSAGES


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, b"", None),
        (CHAT, b"no healthy upstream", None),
        (CHAT, b"[]", None),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', None),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\\ud800\\u0041"}]}', None),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}', None),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"x":"\\udc00"}', None),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"tools":["\xff"]}', None),
        (CHAT, HELLO | {"model": 5}, "$.model"),
        (CHAT, HELLO | {"model": ""}, "$.model"),
        (CHAT, HELLO | {"model": None}, "$.model"),
        (CHAT, {"messages": HELLO["messages"]}, "$.model"),
        ("/v1/completions", {"prompt": "hello world"}, "$.model"),
    ],
)
def test_bad_bodies_are_refused_with_their_place(path, body, param):
    """400, one sentence, and the member at fault where there is one."""
    refusal = refused(path, body)
    assert refusal.param == param
    assert refusal.message
    assert "\n" not in refusal.message


USER = {"role": "user", "content": "x"}
MANY = 200_001


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user"}] * MANY}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 1_000}] * 201}),
        (CHAT, {"messages": [{"role": "user", "tool_calls": [{}] * MANY}]}),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": dict.fromkeys(range(MANY))}],
                    }
                ]
            },
        ),
        ("/v1/responses", {"input": [{}] * MANY}),
        ("/v1/messages", {"messages": [USER], "system": [""] * MANY}),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [1] * MANY}]}
                ]
            },
        ),
        ("/v1/completions", {"prompt": [""] * 10_001}),
        ("/v1/embeddings", {"input": [[1]] * 10_001}),
    ],
)
def test_no_body_holds_more_pieces_than_can_be_read_in_time(path, body):
    """A few megabytes could hold millions of empty ones, and all other requests would wait."""
    placed = parsed(path, {"model": "m"} | body)
    assert placed.unparsed == "too-much"
    assert placed.request.model == "m"
    assert placed.request.prompts == ()


def test_of_a_long_conversation_no_text_is_held_once_it_is_written():
    """Beside the body: what is written, and that in one piece."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 10_000}] * 100})
    tracemalloc.start()
    try:
        made = parse_request(path=CHAT, headers={}, body=body.encode(), request_id="r")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(made, Parsed)
    # The body is one of them.
    assert most < 3.3 * len(body)


def test_long_conversations_and_lists_of_token_ids_are_read():
    """The limits are far from what engines take."""
    chat = parsed(CHAT, {"model": "m", "messages": [USER] * 10_000})
    assert chat.request.prompts[0] == chat_prompt([Message("user", "x")] * 10_000, preamble={})
    completion = parsed("/v1/completions", {"model": "m", "prompt": [7] * 300_000})
    assert completion.request.prompt_tokens == 300_000
    millions = parsed("/inference/v1/generate", {"token_ids": list(range(1_000_000))})
    assert millions.request.prompt_tokens == 1_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": '[1.5,{},"a"]\n' * 500_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "Ünicode, " * 800_000}]}),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is this?"},
                            {
                                "type": "image_url",
                                "image_url": {"url": "data:," + "A" * 20_000_000},
                            },
                        ],
                    }
                ]
            },
        ),
        (
            CHAT,
            {
                "messages": [
                    *[USER, {"role": "assistant", "content": [{"type": "text", "text": "x" * 9}]}]
                    * 3_000
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": f"f{number}",
                            "parameters": {
                                "type": "object",
                                "properties": {
                                    f"p{name}": {"type": "string", "description": "word " * 20}
                                    for name in range(10)
                                },
                            },
                        },
                    }
                    for number in range(400)
                ],
            },
        ),
        ("/v1/completions", {"prompt": "long " * 1_600_000}),
        ("/v1/completions", {"prompt": [list(range(100_000, 100_500))] * 2_048}),
        ("/v1/embeddings", {"input": ["word " * 100] * 2_048}),
        (CHAT, {"messages": [USER], "allowed_token_ids": list(range(128_000))}),
    ],
    ids=["code", "text", "image", "agent", "prompt", "batch of ids", "batch of texts", "tokens"],
)
def test_what_clients_send_at_most_is_read(path, body):
    """Long texts, images, agents with hundreds of tools, and batches as large as OpenAI takes."""
    body = json.dumps({"model": "m"} | body).encode()
    assert parsed(path, body).body is body


def test_a_body_that_holds_more_than_its_length_excuses_is_placed_undecoded():
    """On every path, with its model."""
    for path in PATHS:
        unread = path in {"/v1/messages/count_tokens", "/v2/models/x/infer"}
        body = b'{"model":"m","x":[' + b"[]," * 200_000 + b"1]}"
        placed = parsed(path, body)
        assert placed.unparsed == ("" if unread else "too-much")
        assert placed.request.model == ("" if unread else "m")


def test_of_a_large_batch_the_first_prompts_leave_a_prefix():
    """All of them are counted as work."""
    texts = [f"{number:05}aé" for number in range(5_000)]
    request = parsed("/v1/embeddings", {"model": "m", "input": texts}).request
    assert request.prompts == tuple(map(text_prompt, texts[:2_048]))
    assert request.prompt_tokens == 2_048 * 9 // 4 + 2_952 * 7 // 4
    token_ids = [[number] * 5 for number in range(5_000)]
    request = parsed("/v1/completions", {"model": "m", "prompt": token_ids}).request
    assert request.prompts == tuple(ids(*prompt) for prompt in token_ids[:2_048])
    assert request.prompt_tokens == 25_000


@pytest.mark.parametrize(
    "prompt", [["a", 1], [1, [1]], [[1], "a"], [["a"]], [1.5], [None], [[], 1]]
)
def test_prompts_of_several_kinds_are_placed_by_their_json(prompt):
    """Equal lists share a prefix, although they are neither texts nor ids."""
    one, other = (
        parsed("/v1/completions", {"model": "m", "prompt": [*prompt, "x" * length]})
        for length in (3_000, 3_001)
    )
    assert one.unparsed == "unknown-shape"
    assert one.request.prompts[0][:3_000] == other.request.prompts[0][:3_000]


def test_short_prompts_have_no_chain():
    """Only full blocks count."""
    request = parsed("/v1/completions", {"model": "m", "prompt": ["a", "b" * 600, ""]}).request
    assert [len(chain) // 8 for chain in request.chains_of(256, 100)] == [0, 2, 0]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("0", 0),
        ("-0", 0),
        ("7", 7),
        ("999999999999999999", 999_999_999_999_999_999),
        ("1" + "0" * 18, None),
        ("9" * 4_000, None),
        ("-1", None),
        ("5.0", None),
        ("1e3", None),
        ("true", None),
        ('"7"', None),
        ("[7]", None),
        ('{"a": 7}', None),
        ("null", None),
    ],
)
def test_a_limit_on_the_output_is_an_integer(limit, expected):
    """All else, and more than any engine can have, is as if none was told."""
    body = f'{{"model":"m","messages":[{{"role":"user"}}],"max_tokens": {limit} }}'.encode()
    assert parsed(CHAT, body).request.output_tokens_max == expected
    generate = f'{{"token_ids":[1],"sampling_params":{{"max_tokens":{limit}}}}}'.encode()
    assert parsed("/inference/v1/generate", generate).request.output_tokens_max == expected


def test_the_newer_limit_of_a_chat_goes_first_unless_it_is_null():
    """OpenAI renamed it."""
    limits = {"max_tokens": 5, "max_completion_tokens": None}
    assert parsed(CHAT, HELLO | limits).request.output_tokens_max == 5
    limits["max_completion_tokens"] = "many"
    assert parsed(CHAT, HELLO | limits).request.output_tokens_max is None


@pytest.mark.parametrize(
    ("one", "other"),
    [("1e300", "10.0e299"), ("5e-324", "0.5e-323"), ("0.1", "1.0e-1"), ("-0.0", "-0e0")],
)
def test_the_same_number_is_the_same_prompt(one, other):
    """Also where a decoder has to be exact."""
    body = '{"model":"m","messages":[{"role":"u","content":[{"type":"new","x":%s}]}]}'
    prompts = {parsed(CHAT, (body % number).encode()).request.prompts for number in (one, other)}
    assert len(prompts) == 1
    assert "out of range" in refused(CHAT, (body % "-1e400").encode()).message


def test_refusals_do_not_repeat_the_prompt():
    """What a client wrote stays out of answers and logs."""
    secret = "swordfish"
    for body in (
        {"model": [secret], "messages": [{"role": secret, "content": {secret: secret}}]},
        {"model": {secret: 1}, "messages": secret},
        f'{{"model":"m","messages":"{secret}'.encode(),
        f'{{"model":"m","messages":[{{"role":"{secret}'.encode() + b'\xff"}]}',
    ):
        refusal = refused(CHAT, body)
        assert secret not in refusal.message + (refusal.param or "")


def test_what_routing_does_not_need_is_the_engines_business():
    """Odd types of members that only the engine uses do not refuse a request."""
    odd = {"stream": "yes", "max_tokens": "many", "temperature": [], "tools": 5, "n": None}
    request = parsed(CHAT, HELLO | odd).request
    assert (request.stream, request.output_tokens_max) == (False, None)
    assert parsed(CHAT, HELLO | {"max_tokens": -1}).request.output_tokens_max is None


def test_spelling_does_not_matter():
    """The same text with and without escapes, members in any order: one prompt."""
    one = '{"model":"m","messages":[{"role":"user","content":"é\\n"}]}'.encode()
    other = b'{"messages": [{"content": "\\u00e9\\u000a", "role": "\\u0075ser"}], "model": "m"}'
    assert parsed(CHAT, one).request.prompts == parsed(CHAT, other).request.prompts


def test_an_opaque_request_is_routed_by_load_alone():
    """It has headers and an identity, and no prompt."""
    request = opaque_request(headers={"a": "b"}, request_id="r")
    assert (request.api, request.prompts, request.model) == (ApiKind.OPAQUE, (), "")
    assert (request.headers, request.request_id) == ({"a": "b"}, "r")


def test_a_rewrite_looks_for_the_model_among_so_many_members():
    """More than anybody sends are refused, also if they are not at the top level."""
    for one in (b'"model":"a"', b'"x":{"model":null}'):
        body = b'{"model":"m",' + b",".join([one] * 4_999) + b"}"
        expected = body.replace(b'"a"', b'"n"').replace(b'"m"', b'"n"')
        assert parsed("/v1/conversations", body, model_rewrite="n").body == expected
        body = b'{"model":"m",' + b",".join([one] * 5_000) + b"}"
        message = refused("/v1/conversations", body, model_rewrite="n").message
        assert "at most 5,000 members `model`" in message
        assert parsed("/v1/conversations", body).body is body


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":"m",%s}', b'{"model":"n\\"",%s}'),
        (b' {\n"x": {"model": "m"}, %s, "model" : "m" } ', None),
        (b'{"model":"a","tools":[{"model":"m"}],%s,"model":"b\\"c\\\\"}', None),
        (b'{"\\u006d\\u006fd\\u0065\\u006C":"m",%s}', None),
        (b'{"a\\"model":"x","\\\\":"]}","b":"\\\\\\"[{",%s,"model":null,"model":"m"}', None),
        (b"{%s}", b'{"model":"n\\"",%s}'),
    ],
)
def test_only_the_model_changes(before, after):
    """Escapes, blanks, duplicates and nested members stay byte for byte."""
    messages = b'"messages":[{"role":"user","content":"\\"model\\": \\"m\\" \\u00e9"}]'
    if after is None:
        expected = {
            b' {\n"x': b' {\n"x": {"model": "m"}, %s, "model" : "n\\"" } ',
            b'{"model"': b'{"model":"n\\"","tools":[{"model":"m"}],%s,"model":"n\\""}',
            b'{"\\u006d': b'{"\\u006d\\u006fd\\u0065\\u006C":"n\\"",%s}',
            b'{"a\\"mod': (
                b'{"a\\"model":"x","\\\\":"]}","b":"\\\\\\"[{",%s,"model":"n\\"","model":"n\\""}'
            ),
        }
        after = next(value for begin, value in expected.items() if before.startswith(begin))
    result = parsed(CHAT, before % messages, model_rewrite='n"')
    assert result.body == after % messages
    assert result.request.model == 'n"'


def test_an_empty_object_gets_its_model_without_a_comma():
    """What comes out is JSON again."""
    assert parsed("/v1/images/generations", b" { } ", model_rewrite="n").body == b' {"model":"n" } '


def test_a_rule_for_the_model_goes_before_the_header():
    """A rule that has nothing to say leaves it to the header; without a model no rule is asked."""
    body = json.dumps(HELLO).encode()
    tuned = parsed(CHAT, body, rewrite={"m": "m-tuned"}.get, model_rewrite="header")
    assert (tuned.request.model, tuned.incoming_model) == ("m-tuned", "m")
    assert json.loads(tuned.body) == HELLO | {"model": "m-tuned"}
    assert parsed(CHAT, body, rewrite={}.get, model_rewrite="header").request.model == "header"
    assert parsed(CHAT, body, rewrite={}.get).body is body
    silent = parsed("/v1/images/generations", b"{}", rewrite=lambda model: "tuned")
    assert silent.request.model == ""


def test_the_same_model_is_no_rewrite():
    """The body that comes out is the one that went in."""
    body = json.dumps(HELLO).encode()
    assert parsed(CHAT, body, model_rewrite="m").body is body


def test_a_rewrite_that_is_not_unicode_is_refused():
    """Headers may hold anything; a body may not."""
    assert "Unicode" in refused(CHAT, HELLO, model_rewrite="\ud800").message


names = st.sampled_from(["model", "mode", "a", "", "\\", '"', "[", "ü", "messages"])
texts = st.text(alphabet='ab/?:,[]{}"\\\n\x7fé語😀', max_size=8)
values = st.recursive(
    st.none() | st.integers() | names | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300)
@given(
    st.dictionaries(names, values, max_size=4),
    st.none() | names,
    names.filter(bool),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_a_rewrite_changes_the_model_and_nothing_else(members, model, target, ascii_only, indent):
    """Decoding what comes out equals decoding what came in with the model replaced."""
    members = members | {"model": model} if model is not None else members
    document = members if isinstance(members.get("model", ""), str) else members | {"model": "m"}
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    result = parsed("/v1/conversations", body, model_rewrite=target)
    assert json.loads(result.body) == document | {"model": target}
    assert len(result.body) - len(body) < 40
    if document.get("model") == target:
        assert result.body is body


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = (
    texts
    | anything
    | st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["text", "image_url", "tool_use", "tool_result", "thinking", "x"]
            )
        },
        optional=dict.fromkeys(
            ("text", "image_url", "name", "input", "content", "thinking", "cache_control"),
            texts | anything,
        ),
    )
)
chats = st.fixed_dictionaries(
    {
        "model": texts.filter(bool),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": texts},
                optional={
                    "content": st.none() | texts | st.lists(parts, max_size=3),
                    "name": st.none() | texts,
                    "tool_calls": st.lists(
                        st.dictionaries(st.sampled_from(["id", "function"]), anything), max_size=2
                    ),
                    "audio": st.dictionaries(texts, anything, max_size=2),
                },
            ),
            min_size=1,
            max_size=3,
        ),
    },
    optional={
        "stream": anything,
        "max_tokens": anything,
        "max_completion_tokens": anything,
        "temperature": anything,
        "cache_salt": st.none() | texts,
    },
)


@settings(max_examples=300)
@given(chats, st.booleans(), st.sampled_from([None, 1]))
def test_a_chat_is_read_as_by_the_standard_library(chat, ascii_only, indent):
    """What is kept raw, counted first or decoded by a hook of ours means what it says."""
    body = json.dumps(chat, ensure_ascii=ascii_only, indent=indent).encode()
    chat = json.loads(body)
    request = parsed(CHAT, body).request
    messages = msgspec.convert(chat["messages"], list[Message])
    assert request.prompts == (chat_prompt(messages, preamble={}),)
    assert (request.model, request.cache_salt) == (chat["model"], chat.get("cache_salt") or "")
    assert request.stream is (chat.get("stream") is True)
    limit = chat.get("max_completion_tokens")
    limit = chat.get("max_tokens") if limit is None else limit
    is_limit = type(limit) is int and 0 <= limit < 10**18
    assert request.output_tokens_max == (limit if is_limit else None)


@st.composite
def mutated(draw):
    """A body that was valid until some bytes of it were cut, doubled or replaced."""
    body = draw(
        st.sampled_from(
            [
                json.dumps(HELLO | {"tools": [{"model": "x"}], "input": "x", "prompt": [1, 2]}),
                json.dumps({"model": "m", "prompt": [[1, 2], [3]], "token_ids": [1]}),
                json.dumps(
                    {
                        "model": 'm\\"é',
                        "system": [{"type": "text", "text": "s"}],
                        "messages": [
                            {
                                "role": "user",
                                "content": [
                                    {"type": "tool_result", "content": [{"type": "image"}]},
                                    {"type": "image_url", "image_url": {"url": "d"}},
                                ],
                                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                            }
                        ],
                        "input": [{"type": "function_call", "name": "f"}],
                    }
                ),
            ]
        )
    ).encode()
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(len(body), start + 8)))
        new = draw(st.sampled_from([b"", b'"', b"\\", b"[", b"}", b"null", b"5", b"\\ud800"]))
        new = draw(st.just(new) | st.binary(max_size=3) | st.just(body[start:end] * 2))
        body = body[:start] + new + body[end:]
    return body


@settings(max_examples=500)
@given(
    st.sampled_from(PATHS) | texts,
    st.dictionaries(st.sampled_from(["x-original-path", "a"]), texts, max_size=2),
    mutated() | st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["", "n", 'é"\\']),
    st.sampled_from([ALL_PARSERS, ALL_PARSERS - {ParserName.PASSTHROUGH}, frozenset()]),
)
def test_any_bytes_give_a_request_or_a_refusal(path, headers, body, model_rewrite, parsers):
    """Nothing a client can send raises."""
    result = read(path, body, headers=headers, model_rewrite=model_rewrite, parsers=parsers)
    if isinstance(result, Refusal):
        assert result.status == 400
    else:
        assert isinstance(result, Parsed)
        if not model_rewrite:
            assert result.body is body


@pytest.mark.parametrize("depth", [300, 490, 700, 900, 990, 5_000])
@pytest.mark.parametrize("kind", ["x", "image_url"])
def test_deep_parts_never_raise(depth, kind):
    """Wherever the depth is too much, decoding, encoding or hashing, the answer is a 400."""
    part = b'{"type":"%s","x":' % kind.encode() + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    body = b'{"model":"m","messages":[{"role":"user","content":[' + part + b"]}]}"
    assert isinstance(read(CHAT, body), Parsed | Refusal)
