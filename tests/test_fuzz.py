"""100,000 mutated messages and bodies: always a legal answer, never an exception, never a hang."""

from random import Random

import pytest

from epp.core.decision.inputs import Tick
from epp.core.prompt.parse import parse_request
from epp.core.protocol.session import Gateway, Session, SessionSettings
from epp.core.types import Refusal
from epp.shell.gateway.codec import MalformedMessageError, decode, encode
from tests import gateway as gw
from tests.test_hermetic import pods

SEED = 20261121
TOKENS = [
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"1e999", b"-1", b'"messages"', b'"prompt"',
    b'"model"', b'"content"', b'"role"', b'"tools"', b"\\ud800", b"\\u0000", b"\xff\xfe", b"\x00",
    b'"type"', b'"image_url"', b"[[[[[[[[[[", b'{"text":', b"4294967296", b"true", b'""',
]  # fmt: skip
CHAT = (
    b'{"model":"m","messages":[{"role":"system","content":"You are kind."},{"role":"user",'
    b'"content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"data:x"}}]},'
    b'{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":'
    b'{"name":"f","arguments":"{}"}}]}],"tools":[{"type":"function"}],"stream":true}'
)
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", b'{"model":"m","prompt":["one","two"],"max_tokens":3}'),
    ("/v1/completions", b'{"model":"m","prompt":[[1,2,3],[4]],"cache_salt":"s"}'),
    ("/v1/embeddings", b'{"model":"m","input":[1,2,3]}'),
    ("/v1/responses", b'{"model":"m","instructions":"i","input":[{"role":"user","content":"x"}]}'),
    (
        "/v1/messages",
        (
            b'{"model":"m","max_tokens":1,"system":[{"type":"text","text":"s"}],"messages":[{"role"'
            b':"user","content":[{"type":"tool_result","tool_use_id":"t","content":"r"}]}]}'
        ),
    ),
]


def mutated(random, data):
    data = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                data[at:at] = random.choice(TOKENS)
            case 1:
                del data[at : at + random.randint(1, 9)]
            case 2:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 3:
                data[at : at + random.randint(0, 9)] = random.choice(TOKENS)
    return bytes(data)


def test_50_000_mutated_bodies_are_parsed_or_refused():
    """A refusal is a 400 with a sentence."""
    random = Random(SEED)
    refused = 0
    for _ in range(50_000):
        path, body = random.choice(BODIES)
        rewrite = random.choice(["", "", "other"])
        found = parse_request(
            path=path,
            headers={},
            body=mutated(random, body),
            request_id="r",
            model_rewrite=rewrite,
        )
        if isinstance(found, Refusal):
            refused += 1
            assert found.status == 400
            assert found.message
        else:
            found.request.chains_of(256, 2_048)
    assert 1_000 < refused < 49_000


@pytest.mark.parametrize("part", range(2))
def test_50_000_mutated_messages_get_legal_answers(part):
    """Each stream ends, and gives back what it holds."""
    random = Random(f"{SEED}:{part}")
    pool = pods((0, 0.1), (5, 0.5))
    modes = [None, gw.protocol(), gw.protocol(gw.BUFFERED, gw.NONE), gw.protocol(gw.STREAMED)]
    originals = [
        *(gw.request_headers(modes=m) for m in modes),
        gw.request_headers(end=True, hint=gw.subset(gw.strings("192.168.1.1:8000"))),
        *(gw.request_body(body, end=True) for _, body in BODIES),
        gw.request_body(CHAT[:50], end=False),
        gw.request_trailers(),
        gw.response_headers(200, by="192.168.1.2:8000"),
        gw.response_body(b'data: {"usage":{"prompt_tokens":1}}\n\n', end=False),
        gw.response_body(b"", end=True),
        gw.response_trailers(),
    ]
    malformed = answered = sent = 0
    while sent < 25_000:
        session = Session(
            pool,
            SessionSettings(parse_response_usage=True, request_body_bytes_max=2_000),
            Gateway(),
            gw.Told(),
            lambda: "generated",
        )
        start = random.randrange(5)
        path = [originals[start], *random.choices(originals, k=random.randint(1, 5))]
        for message in path:
            sent += 1
            try:
                event = decode(mutated(random, message) if random.random() < 0.7 else message)
            except MalformedMessageError:
                malformed += 1
                break
            for answer in session.receive(event, float(sent)):
                answered += 1
                assert encode(answer)
            if session.finished:
                break
        session.closed(float(sent))
    pool.take(Tick(), 1e9)
    assert pool.ledger.open_leases == 0
    assert pool.pool.columns.inflight_requests[:2].tolist() == [0, 0]
    assert malformed > 100
    assert answered > 1_000
