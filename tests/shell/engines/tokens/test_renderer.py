"""A renderer that is slow, lies, hangs, fails or is full costs tokens, and nothing else."""

import asyncio
import datetime as dt
import json
import ssl

import pytest
import structlog

from epp.configuration.document import ConfigError
from epp.configuration.token_producer import (
    EndpointDiscovery,
    PortRule,
    RenderMode,
    Selector,
    VllmRenderer,
)
from epp.core.duration import Duration
from epp.core.moment import PlacedMedia
from epp.core.prompt.parse import parse_request
from epp.core.prompt.token_ids import packed, unpacked
from epp.shell.engines.tokens.answers import ANSWER_BYTES_MAX, PIECE_BYTES
from epp.shell.engines.tokens.breaker import FAILURES_MAX
from epp.shell.engines.tokens.question import (
    PromptTokens,
    Question,
    TokensResult,
    TokensUnknownError,
)
from epp.shell.engines.tokens.renderer import CONNECTIONS_MAX, Renderer, one_token_more, tls_of
from epp.shell.gateway.tls import self_signed
from tests.builders import endpoint
from tests.envoy.rig import until
from tests.shell.engines.tokens.renderers import FakeRenderer, never, rendered, tokenized
from tests.turns import counted_turns

CHAT = "/v1/chat/completions"
CHAT_BODY = b'{"model":"m","tools":[{"z":1,"a":2}],"messages":[{"role":"user","content":"hi"}]}'
COMPLETIONS = "/v1/completions"
TEXT_BODY = b'{"model":"m", "prompt":"hello"}'
SWITCHED_OFF = 403, b'{"error":{"message":"Scale-out endpoints are disabled"}}'


def question(body=CHAT_BODY, path=CHAT, **headers):
    parsed = parse_request(path=path, headers={":path": path} | headers, body=body, request_id="r")
    return Question(parsed.request, parsed.body)


def renderer_at(url, **fields):
    settings = VllmRenderer(url=url, **fields)
    return Renderer(settings, tls_of(settings))


async def found(renderer, asked=None):
    """The ids, or why there are none."""
    asked = asked or question()
    refused = renderer.refuses(asked)
    if refused is not None:
        return refused
    try:
        return [unpacked(ids) for ids in (await renderer.find(asked)).ids]
    except TokensUnknownError as unknown:
        return unknown.result


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (CHAT, CHAT_BODY, rendered(1, 2, 3)),
        (COMPLETIONS, TEXT_BODY, (200, b'[{"token_ids":[1,2,3]}]')),
        ("/v1/messages", CHAT_BODY, rendered(1, 2, 3)),
        ("/v1/responses", b'{"model":"m","input":"hi"}', rendered(1, 2, 3)),
    ],
)
async def test_it_gets_the_very_bytes_that_are_forwarded(path, body, answer):
    """And the client's `Authorization`, as the engine does."""
    async with FakeRenderer({f"{path}/render": answer}) as fake:
        renderer = renderer_at(fake.url)
        asked = question(body, path, authorization="Bearer key")
        assert await found(renderer, asked) == [[1, 2, 3]]
        ((_, headers, got),) = fake.asked
        assert (got, headers["authorization"]) == (body, "Bearer key")
        renderer.close()


async def test_connections_are_kept():
    """Two questions, one connection."""
    async with FakeRenderer({f"{CHAT}/render": rendered(7)}) as fake:
        renderer = renderer_at(fake.url + "/")
        for _ in range(3):
            assert await found(renderer) == [[7]]
        assert len(fake.writers) == 1
        renderer.close()


async def test_several_prompts_have_each_their_ids():
    """In their order; those that are not remembered are left out."""
    answer = 200, b'[{"token_ids":[1]},{"token_ids":[2, 3]}]'
    async with FakeRenderer({f"{COMPLETIONS}/render": answer}) as fake:
        renderer = renderer_at(fake.url)
        body = b'{"model":"m","prompt":["a","b"]}'
        assert await found(renderer, question(body, COMPLETIONS)) == [[1], [2, 3]]
        body = b'{"model":"m","prompt":["a","b","c"]}'
        assert await found(renderer, question(body, COMPLETIONS)) == TokensResult.INVALID
        renderer.close()


@pytest.mark.parametrize("refusal", [SWITCHED_OFF, (404, b"{}"), (405, b""), (501, b"")])
async def test_who_does_not_render_is_asked_to_tokenize(refusal):
    """With one warning that says how to start it; later at once."""
    answers = {f"{CHAT}/render": refusal, "/tokenize": tokenized(4, 5)}
    async with FakeRenderer(answers) as fake:
        renderer = renderer_at(fake.url)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                assert await found(renderer) == [[4, 5]]
        assert [path for path, _, _ in fake.asked] == [f"{CHAT}/render", *["/tokenize"] * 3]
        assert {body for _, _, body in fake.asked} == {CHAT_BODY}
        (line,) = logs
        assert line["log_level"] == "warning"
        assert "--enable-scale-out" in line["event"]
        (row,) = renderer.rows()
        assert row["does_not_render"] == f"{CHAT}/render"
        renderer.close()


async def test_a_model_that_is_not_there_says_nothing_of_the_renderer():
    """It answers 404 to both: other models go on being rendered."""
    async with FakeRenderer() as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer) == TokensResult.REFUSED
        fake.answers[f"{CHAT}/render"] = rendered(1)
        assert await found(renderer) == [[1]]
        renderer.close()


async def test_an_api_that_is_not_rendered_has_no_other_way():
    """/tokenize would make of it what it is not."""
    async with FakeRenderer({"/tokenize": tokenized(1)}) as fake:
        renderer = renderer_at(fake.url)
        asked = question(path="/v1/messages")
        for _ in range(2):
            assert await found(renderer, asked) == TokensResult.UNSUPPORTED
        assert [path for path, _, _ in fake.asked] == ["/v1/messages/render"]
        renderer.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"model":"m","prompt":["a","b"]}'),
        (CHAT, CHAT_BODY[:-1] + b',"truncate_prompt_tokens":5}'),
    ],
)
async def test_tokenize_is_not_asked_for_what_it_takes_otherwise(path, body):
    """Several texts, and prompts that are cut."""
    async with FakeRenderer({"/tokenize": tokenized(1)}) as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer, question(body, path)) == TokensResult.UNSUPPORTED
        assert len(fake.asked) == 1
        renderer.close()


@pytest.mark.parametrize(
    "mode",
    [{"messages_render_mode": RenderMode.LEGACY}, {"responses_render_mode": RenderMode.LEGACY}],
)
async def test_the_old_way_of_rendering_has_no_tokens(mode):
    """Those of another API are not the engine's."""
    renderer = renderer_at("http://127.0.0.1:1", **mode)
    messages = question(path="/v1/messages")
    responses = question(b'{"model":"m","input":"hi"}', "/v1/responses")
    refused = [renderer.refuses(messages), renderer.refuses(responses)]
    assert sorted(refused, key=str) == [None, TokensResult.UNSUPPORTED]


LIES = {
    "no JSON": b"<html>",
    "no object": b"17",
    "nothing": b"",
    "no ids": b"{}",
    "empty": b'{"token_ids":[]}',
    "null": b'{"token_ids":null}',
    "negative": b'{"token_ids":[1,-2]}',
    "too large": b'{"token_ids":[4294967296]}',
    "fractions": b'{"token_ids":[1.5]}',
    "texts": b'{"token_ids":["1"]}',
    "nested": b'{"token_ids":[[1,2],[3]]}',
    "cut off": b'{"token_ids":[1,2',
    "an object": b'{"token_ids":{"a":1}}',
    "deep": b'{"token_ids":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "none": b"[]",
    "more than there are bytes": b'{"token_ids":[' + b"1," * 66_000 + b"1]}",
    "late lie": b'{"token_ids":[' + b"1," * 40_000 + b"-1]}",
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_no_ids(lie):
    """Whatever it is, it costs this prompt's ids."""
    async with FakeRenderer({f"{CHAT}/render": (200, LIES[lie])}) as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer) == TokensResult.INVALID
        renderer.close()


async def test_a_huge_answer_is_not_read():
    """Nor held in memory."""
    async with FakeRenderer({f"{CHAT}/render": (200, bytes(ANSWER_BYTES_MAX + 1))}) as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer) == TokensResult.INVALID
        renderer.close()


async def test_a_long_answer_lets_others_have_their_turn():
    """Between pieces of some ten thousand ids."""
    ids = list(range(100_000, 160_000))
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x" * 10_000}]}
    ).encode()
    async with FakeRenderer({f"{CHAT}/render": rendered(*ids)}) as fake:
        renderer = renderer_at(fake.url)
        async with counted_turns() as turns:
            (answer,) = (await renderer.find(question(body))).ids
        assert answer == packed(ids)
        assert turns.count >= len(json.dumps(ids)) // PIECE_BYTES
        renderer.close()


CAT = {"mm_hashes": {"image": ["cat"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}


PARTS = b'[{"type":"image_url","image_url":{"url":"data:,A"}},{"type":"text","text":"hi"}]'


def shown():
    """A question with an image in its prompt."""
    return question(CHAT_BODY.replace(b'"hi"', PARTS) + b" \n")


@pytest.mark.parametrize("omits", [True, False])
async def test_media_are_known_by_what_the_renderer_calls_them(omits):
    """It is asked to keep what it computed of them to itself, unless that is not wanted."""
    asked = shown()
    assert asked.has_media
    async with FakeRenderer({f"{CHAT}/render": rendered(1, 2, 3, features=CAT)}) as fake:
        renderer = renderer_at(fake.url, omit_mm_kwargs=omits)
        told = await renderer.find(asked)
        assert told == PromptTokens((packed([1, 2, 3]),), ((PlacedMedia("cat", 1, 2),),))
        ((_, _, body),) = fake.asked
        told = json.loads(body)
        assert told.pop("return_mm_kwargs", None) is (False if omits else None)
        assert told == json.loads(asked.body)
        assert (body == asked.body) is not omits
        renderer.close()


@pytest.mark.parametrize(
    "answer",
    [
        rendered(1, 2, 3),
        rendered(1, 2, 3, features={"mm_hashes": {"image": ["cat"]}}),
        (404, b""),
    ],
)
async def test_media_that_the_renderer_does_not_name_are_not_told_apart(answer):
    """Nor by /tokenize, which is not asked for them."""
    answers = {f"{CHAT}/render": answer, "/tokenize": tokenized(1, 2, 3)}
    async with FakeRenderer(answers) as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer, shown()) == TokensResult.MEDIA
        assert [path for path, _, _ in fake.asked] == [f"{CHAT}/render"]
        renderer.close()


async def test_media_behind_the_prompt_are_a_lie():
    async with FakeRenderer({f"{CHAT}/render": rendered(1, 2, features=CAT)}) as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer, shown()) == TokensResult.INVALID
        renderer.close()


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ((500, b""), TokensResult.FAILED),
        ((502, b""), TokensResult.FAILED),
        ((503, b""), TokensResult.BUSY),
        ((429, b""), TokensResult.BUSY),
        ((400, b""), TokensResult.REFUSED),
        ((401, b""), TokensResult.REFUSED),
        (None, TokensResult.UNREACHABLE),
    ],
)
async def test_a_server_that_fails_is_left_alone_soon_and_one_that_refuses_is_not(answer, result):
    """What a client asks wrongly is the client's."""
    async with FakeRenderer({f"{CHAT}/render": answer}) as fake:
        renderer = renderer_at(fake.url)
        with structlog.testing.capture_logs() as logs:
            told = [await found(renderer) for _ in range(FAILURES_MAX + 1)]
        assert told[:FAILURES_MAX] == [result] * FAILURES_MAX
        refuses = result is TokensResult.REFUSED
        assert told[-1] == (result if refuses else TokensResult.OPEN)
        assert len(logs) == (0 if refuses else 1)
        renderer.close()


async def test_one_that_is_not_there_is_left_alone_soon():
    """Every question costs a connection."""
    async with FakeRenderer() as fake:
        url = fake.url
    renderer = renderer_at(url)
    told = [await found(renderer) for _ in range(FAILURES_MAX + 1)]
    assert told == [TokensResult.UNREACHABLE] * FAILURES_MAX + [TokensResult.OPEN]


async def test_who_hangs_is_cut():
    """After the field's own limits, where ours is longer."""
    async with FakeRenderer({f"{COMPLETIONS}/render": never}) as fake:
        renderer = renderer_at(fake.url, timeout=Duration(0.05))
        assert await found(renderer, question(TEXT_BODY, COMPLETIONS)) == TokensResult.TIMEOUT
        await until(lambda: fake.left == 1, "the connection to go")
        renderer.close()


async def test_who_leaves_cuts_the_connection():
    """The next question gets another one."""
    async with FakeRenderer({f"{CHAT}/render": never}) as fake:
        renderer = renderer_at(fake.url)
        task = asyncio.create_task(renderer.find(question()))
        await until(lambda: fake.asked, "the question")
        task.cancel()
        await until(lambda: fake.left == 1, "the connection to go")
        fake.answers[f"{CHAT}/render"] = rendered(1)
        assert await found(renderer) == [[1]]
        renderer.close()


@pytest.mark.parametrize("expired", [False, True])
async def test_only_the_deadline_speaks_against_the_renderer(expired):
    """A client that leaves says nothing of it."""
    async with FakeRenderer({f"{CHAT}/render": never}) as fake:
        renderer = renderer_at(fake.url)
        for count in range(FAILURES_MAX):
            asked = question()
            task = asyncio.create_task(renderer.find(asked))
            await until(lambda count=count: len(fake.asked) == count + 1, "the question")
            asked.expired = expired
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert renderer.refuses(question()) is (TokensResult.OPEN if expired else None)
        renderer.close()


async def test_so_many_questions_at_once_and_no_more():
    """The others are placed by their bytes."""
    async with FakeRenderer({f"{CHAT}/render": never}) as fake:
        renderer = renderer_at(fake.url)
        tasks = [asyncio.create_task(renderer.find(question())) for _ in range(CONNECTIONS_MAX)]
        await until(lambda: len(fake.asked) == CONNECTIONS_MAX, "the questions")
        assert await found(renderer) == TokensResult.BUSY
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert renderer.refuses(question()) is None
        renderer.close()


async def test_a_header_cannot_forge_another():
    """It is left out."""
    async with FakeRenderer({f"{CHAT}/render": rendered(1)}) as fake:
        renderer = renderer_at(fake.url)
        assert await found(renderer, question(authorization="a\r\nX-Evil: 1")) == [[1]]
        ((_, headers, _),) = fake.asked
        assert not {"authorization", "x-evil"} & headers.keys()
        renderer.close()


def pods_of(*fakes, labels=None):
    return [
        endpoint(
            number,
            address=f"127.0.0.1:{fake.port}",
            endpoint_id=f"uid-{number}:{fake.port}",
            labels=labels or {},
        )
        for number, fake in enumerate(fakes)
    ]


def discovering(**fields):
    return Renderer(VllmRenderer(endpoint_discovery=EndpointDiscovery(**fields)), None)


async def test_endpoints_of_the_pool_render_in_turn():
    """Those that are there."""
    answers = {f"{CHAT}/render": rendered(1)}
    async with FakeRenderer(answers) as one, FakeRenderer(answers) as other:
        renderer = discovering()
        assert await found(renderer) == TokensResult.UNREACHABLE
        renderer.replace(pods_of(one, other))
        for _ in range(4):
            assert await found(renderer) == [[1]]
        assert (len(one.asked), len(other.asked)) == (2, 2)
        renderer.replace(pods_of(one))
        for _ in range(2):
            assert await found(renderer) == [[1]]
        assert (len(one.asked), len(other.asked)) == (4, 2)
        renderer.close()


@pytest.mark.parametrize("answer", [(500, b""), (503, b""), None, never, (200, b"no")])
async def test_another_one_is_asked_where_one_fails(answer):
    """Once, and within the time of both."""
    async with (
        FakeRenderer({f"{CHAT}/render": answer}) as bad,
        FakeRenderer({f"{CHAT}/render": rendered(1)}) as good,
    ):
        renderer = discovering(attempt_timeout=Duration(0.1))
        renderer.replace(pods_of(bad, good))
        for _ in range(3):
            assert await found(renderer) == [[1]]
        assert bad.asked
        renderer.close()


def test_ports_go_by_rules_and_ranks():
    """The first rule that selects the endpoint, and its number among those of its pod."""
    decode = PortRule(base_port=8200, selector=Selector(match_labels={"role": "decode"}))
    prefill = PortRule(base_port=65_535, selector=Selector(match_labels={"role": "prefill"}))
    renderer = discovering(port_rules=(decode, prefill))
    renderer.replace(
        [
            endpoint(address=f"10.0.0.{number}:{8000 + rank}", endpoint_id=f"{role}:{8000 + rank}", labels={"role": role})
            for number, role in enumerate(("decode", "prefill", "none"))
            # As sources tell them, in no order.
            for rank in (1, 0)
        ]
    )  # fmt: skip
    urls = [row["renderer"] for row in renderer.rows()]
    assert urls == ["http://10.0.0.0:8200", "http://10.0.0.0:8201", "http://10.0.0.1:65535"]


def test_renderers_need_the_room_that_is_asked_for():
    """As their label says."""
    renderer = discovering(min_model_len=100, context_limit_label="room")
    renderer.replace(
        [
            endpoint(number, address=f"10.0.0.{number}:80", labels={"room": room} if room else {})
            for number, room in enumerate(("100", "99", "", "many", "-1", "1000"))
        ]
    )  # fmt: skip
    assert [row["renderer"] for row in renderer.rows()] == [
        "http://10.0.0.0:80",
        "http://10.0.0.5:80",
    ]


def test_one_token_of_output_needs_no_room():
    """All else stays byte for byte; where the prompt is to be cut, everything does."""
    body = b'{"model":"m","max_completion_tokens":500,"min_tokens":9,"tools":[{"z":1e0,"a":2}]}'
    told = json.loads(one_token_more(body))
    assert (told["max_tokens"], told["max_completion_tokens"], told["min_tokens"]) == (1, 1, 0)
    assert b'[{"z":1e0,"a":2}]' in one_token_more(body)
    cut = b'{"model":"m","max_tokens":500,"truncate_prompt_tokens":-1}'
    assert one_token_more(cut) is cut


async def test_the_copy_for_the_renderer_asks_for_one_token():
    """If it is to."""
    async with FakeRenderer({f"{CHAT}/render": rendered(1)}) as fake:
        renderer = renderer_at(fake.url, prefill_only=True)
        assert await found(renderer) == [[1]]
        ((_, _, body),) = fake.asked
        assert json.loads(body) == json.loads(CHAT_BODY) | {"max_tokens": 1}
        renderer.close()


@pytest.mark.parametrize("file", ["ca_cert_path", "client_cert_path"])
def test_tls_files_that_cannot_be_used_are_a_problem_of_the_configuration(file, tmp_path):
    """It names the file's fault."""
    fields = {file: str(tmp_path / "none.pem")}
    if file == "client_cert_path":
        fields["client_key_path"] = fields[file]
    with pytest.raises(ConfigError, match="TLS cannot be used"):
        tls_of(VllmRenderer(url="https://renderer", **fields))


@pytest.fixture
def certificate(tmp_path):
    pair = self_signed("localhost", dt.datetime.now(dt.UTC))
    files = tmp_path / "tls.crt", tmp_path / "tls.key"
    files[0].write_bytes(pair.certificate_chain)
    files[1].write_bytes(pair.private_key)
    return files


async def test_a_renderer_speaks_tls(certificate):
    """Checked against the authority that is given, or not at all if that is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    fake = FakeRenderer({f"{CHAT}/render": rendered(1)})
    fake.tls = context
    async with fake:
        trusting = renderer_at(fake.url, ca_cert_path=str(certificate[0]))
        assert await found(trusting) == [[1]]
        careless = renderer_at(fake.url, insecure_skip_verify=True)
        assert await found(careless) == [[1]]
        assert await found(renderer_at(fake.url)) == TokensResult.UNREACHABLE
        trusting.close()
        careless.close()
