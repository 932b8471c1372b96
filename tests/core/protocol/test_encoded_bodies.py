"""Requests whose bodies have a content encoding, in every mode, through both codecs."""

import gzip
import zlib
from random import Random
from string import ascii_letters

import brotli
import pytest

from epp.core.prompt.encodings import CONTENT_ENCODING, TURN_BYTES_MAX, Unparsed, zstd
from epp.core.prompt.parse import ParserName
from epp.core.protocol.budget import BodyBudget
from epp.core.protocol.session import SessionSettings
from epp.core.types import ApiKind
from tests import gateway as gw
from tests.core.protocol.test_waiting import Later
from tests.test_hermetic import pods

ENCODERS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstd.compress,
}
MODES = [gw.FULL_DUPLEX, gw.BUFFERED, gw.BUFFERED_PARTIAL]
BODY = gw.prompt("once upon a time " * 60)
LONG = gw.prompt("".join(Random(1).choices(ascii_letters, k=2 * TURN_BYTES_MAX)))
"""Decoded in several turns, and read."""


def stream_of(**fields):
    return gw.Stream(pods((0, 0.1), (5, 0.5)), **fields)


def head(encoding, mode=gw.FULL_DUPLEX, path="/v1/completions"):
    fields = gw.COMPLETIONS | {":path": path, CONTENT_ENCODING: encoding}
    return gw.request_headers(fields, modes=gw.protocol(mode, gw.NONE))


def sent(stream, encoding, body, mode=gw.FULL_DUPLEX):
    """The answers to a whole request."""
    answers = stream.send(head(encoding, mode), gw.request_body(body))
    if mode in (gw.BUFFERED, gw.BUFFERED_PARTIAL):
        assert gw.kinds(answers[:1]) == ["request_headers"]
        return answers[1:]
    return answers


def forwarded(answers, body, mode):
    """The body that the endpoint gets; None of a buffered one: as it came."""
    if mode is gw.FULL_DUPLEX:
        return gw.streamed(answers)[0]
    mutation = gw.common(answers[-1]).body_mutation
    return body if mutation is None else mutation.body


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("encoding", "encode"), ENCODERS.items())
@pytest.mark.parametrize("body", [BODY, LONG], ids=["one turn", "several turns"])
def test_an_encoded_body_has_the_prefix_of_the_plain_one(encoding, encode, mode, body):
    """It is decoded for the decision, and forwarded as it came, without another header."""
    plain, other = stream_of(), stream_of()
    sent(plain, "identity", body, mode)
    encoded = encode(body)
    answers = sent(other, encoding, encoded, mode)
    assert forwarded(answers, encoded, mode) == encoded
    assert CONTENT_ENCODING not in gw.removed_headers(answers[0])
    assert "content-length" not in gw.set_headers(answers[0])
    exchange = other.told.exchange
    assert exchange.request.chains == plain.told.exchange.request.chains
    assert any(exchange.request.chains.values())
    assert (exchange.unparsed, exchange.incoming_model) == ("", "my-model")
    assert exchange.request_bytes == len(encoded)
    other.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("suffix", "encoding"), [("gz", "gzip"), ("zst", "zstd")])
def test_the_responses_of_a_coding_agent_have_the_prefix_of_the_plain_ones(
    suffix, encoding, mode, shared_data
):
    """The files of the bug report."""
    files = shared_data / "reports"
    chains = []
    for name, value in (("responses.json", "identity"), (f"responses.json.{suffix}", encoding)):
        stream = stream_of()
        body = (files / name).read_bytes()
        answers = stream.send(head(value, mode, "/v1/responses"), gw.request_body(body))
        assert forwarded(answers, body, mode) == body
        assert stream.told.exchange.request.api is ApiKind.RESPONSES
        chains.append(stream.told.exchange.request.chains)
    assert chains[0] == chains[1] != {}


@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED])
@pytest.mark.parametrize(("encoding", "encode"), ENCODERS.items())
def test_a_rewritten_body_loses_its_encoding(encoding, encode, mode):
    """The endpoint gets the decoded body with the new model, and headers that fit it."""
    stream = stream_of(settings=SessionSettings(rewrite={"my-model": "other"}.get))
    answers = sent(stream, encoding, encode(BODY), mode)
    changed = BODY.replace(b"my-model", b"other")
    assert forwarded(answers, None, mode) == changed
    assert CONTENT_ENCODING in gw.removed_headers(answers[0])
    assert gw.set_headers(answers[0])["content-length"] == str(len(changed))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("encoding", "body", "reason"),
    [
        ("compress", b"anything", Unparsed.UNKNOWN),
        ("gzip, zstd", zstd.compress(gzip.compress(BODY)), Unparsed.STACKED),
        ("zstd", zstd.compress(gzip.compress(BODY)), Unparsed.STACKED),
        ("gzip", b"\x1f\x8b nothing of the kind", Unparsed.CORRUPT),
        ("zstd", zstd.compress(BODY)[:-1], Unparsed.CORRUPT),
        ("zstd", b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00", Unparsed.WINDOW),
        ("gzip", gzip.compress(b" " * 2_000_000 + BODY), Unparsed.RATIO),
    ],
    ids=["unknown", "stacked", "two headers", "no gzip", "truncated", "window", "ratio"],
)
def test_a_body_that_cannot_be_read_is_placed_and_forwarded(encoding, body, reason, mode):
    """The engine judges it. A rule for the model cannot apply, so nothing is changed."""
    stream = stream_of(settings=SessionSettings(rewrite={"my-model": "other"}.get))
    answers = sent(stream, encoding, body, mode)
    assert gw.destination(answers[0]) == "192.168.1.1:8000"
    assert forwarded(answers, body, mode) == body
    assert CONTENT_ENCODING not in gw.removed_headers(answers[0])
    exchange = stream.told.exchange
    assert (exchange.unparsed, exchange.unparsed_api) == (reason, "completions")
    assert not any(exchange.request.chains.values())


def test_a_body_that_no_parser_reads_is_not_decoded():
    """Whatever its encoding, it is placed as if it had none, and is no news."""
    stream = stream_of()
    answers = stream.send(head("gzip", path="/tokenize"), gw.request_body(b"no gzip"))
    assert gw.streamed(answers) == (b"no gzip", [True])
    assert stream.told.exchange.unparsed == ""


def test_a_gateway_that_tells_no_path_may_send_encoded_bodies():
    """The decoded body decides which API it is for."""
    stream = stream_of()
    fields = {":method": "POST", CONTENT_ENCODING: "gzip"}
    stream.send(gw.request_headers(fields), gw.request_body(gzip.compress(BODY)))
    assert stream.told.exchange.request.api is ApiKind.COMPLETIONS
    stream = stream_of()
    stream.send(gw.request_headers(fields), gw.request_body(b"no gzip"))
    assert stream.told.exchange.unparsed_api == "unknown"


def test_without_a_parser_for_the_path_the_request_is_refused_as_ever():
    """No parser takes the path, whether the body is encoded or not."""
    settings = SessionSettings(parsers=frozenset({ParserName.ANTHROPIC}))
    stream = stream_of(settings=settings)
    (answer,) = sent(stream, "zstd", zstd.compress(BODY))
    assert gw.kind(answer) == "immediate_response"
    assert stream.told.events == ["refused 400"]


def test_what_is_wrong_with_the_decoded_body_is_refused_as_ever():
    """An encoding excuses nothing."""
    stream = stream_of()
    (answer,) = sent(stream, "gzip", gzip.compress(b"{"))
    assert answer.immediate_response.status.code == 400


@pytest.mark.parametrize("mode", [gw.FULL_DUPLEX, gw.BUFFERED])
@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_body_that_decodes_to_more_than_the_limit_is_refused(encoding, mode):
    """The message says that the decoded body is meant, and what was held is given back."""
    budget = BodyBudget(100_000_000)
    settings = SessionSettings(request_body_bytes_max=4_000_000)
    stream = stream_of(settings=settings, budget=budget)
    bomb = ENCODERS[encoding](bytes(8_000_000))
    (answer,) = sent(stream, encoding, bomb, mode)
    assert answer.immediate_response.status.code == 413
    assert (
        b"the decoded request body is larger than 4000000 bytes" in answer.immediate_response.body
    )
    assert budget.held_bytes == 0
    assert not stream.session.undecoded


def test_what_is_decoded_counts_against_the_budget_of_all_bodies():
    """A small body that becomes a large one is refused where there is no room, and gives back."""
    budget = BodyBudget(300_000)
    stream = stream_of(budget=budget)
    (answer,) = sent(stream, "gzip", gzip.compress(bytes(400_000)))
    assert answer.immediate_response.status.code == 503
    assert budget.held_bytes == 0
    stream = stream_of(budget=budget)
    stream.send(head("gzip"), gw.request_body(gzip.compress(bytes(100_000)), end=False))
    assert budget.held_bytes > 100_000
    stream.close()
    assert budget.held_bytes == 0


def one_by_one(stream, *messages):
    """Send messages without a turn between them."""
    receive = stream.session.receive
    return [answer for message in messages for answer in receive(gw.decode(message), 0.0)]


def turns_until_decoded(stream):
    """How many turns the body takes, and the answers after the last of them."""
    turns, answers = 0, []
    while stream.session.undecoded:
        assert answers == []
        answers = stream.session.carry_on(0.0)
        turns += 1
    return turns, answers


def test_a_long_body_is_decoded_in_several_turns_and_what_follows_it_waits():
    """The stream waits, trailers are held, and everything is answered in its order."""
    stream = stream_of()
    body = gw.prompt("".join(map(str, range(700_000))))
    encoded = gzip.compress(body)
    assert one_by_one(stream, head("gzip"), gw.request_body(encoded, end=False)) == []
    assert one_by_one(stream, gw.request_trailers()) == []
    assert stream.session.waiting
    assert stream.session.incomplete
    turns, answers = turns_until_decoded(stream)
    assert turns >= len(body) // (2 * TURN_BYTES_MAX)
    kinds = [type(answer).__name__ for answer in answers]
    assert kinds[0] == "RequestHeadersAnswer"
    assert kinds[-1] == "RequestTrailersAnswer"
    assert b"".join(bytes(answer.body) for answer in answers[1:-1]) == encoded
    assert stream.told.events == ["decided"]


def test_messages_after_a_whole_body_are_answered_after_it():
    """A gateway may say the end of a body twice; here while it is decoded."""
    stream = stream_of()
    encoded = gzip.compress(gw.prompt("".join(map(str, range(300_000)))))
    assert one_by_one(stream, head("gzip"), gw.request_body(encoded), gw.request_body(b"")) == []
    _, answers = turns_until_decoded(stream)
    assert b"".join(bytes(answer.body) for answer in answers[1:]) == encoded


@pytest.mark.parametrize("end", ["closed", "time_out"])
def test_a_stream_may_end_while_its_body_is_decoded(end):
    """Everything that it held is given back, and no turn follows."""
    budget = BodyBudget(100_000_000)
    stream = stream_of(budget=budget)
    encoded = gzip.compress(bytes(8_000_000))
    one_by_one(stream, head("gzip"), gw.request_body(encoded), gw.request_body(b"late"))
    assert stream.session.undecoded
    assert budget.held_bytes > TURN_BYTES_MAX
    getattr(stream.session, end)(0.0)
    assert not stream.session.undecoded
    assert stream.session.carry_on(0.0) == []
    assert budget.held_bytes == 0


def test_a_half_closed_stream_is_answered_once_its_body_is_decoded():
    """NGINX half-closes right behind the body and announces no mode."""
    stream = stream_of()
    encoded = gzip.compress(gw.prompt("".join(map(str, range(300_000)))))
    fields = gw.COMPLETIONS | {CONTENT_ENCODING: "gzip"}
    one_by_one(stream, gw.request_headers(fields), gw.request_body(encoded, end=False))
    assert stream.session.half_closed(0.0) == []
    assert stream.session.waiting
    _, answers = turns_until_decoded(stream)
    assert b"".join(bytes(answer.body) for answer in answers[1:]) == encoded


def test_a_resolver_reads_the_decoded_body_and_may_let_it_wait():
    """First the body is decoded, then the request waits for what the resolver finds out."""
    later = Later()
    stream = stream_of(resolver=later)
    encoded = gzip.compress(LONG)
    assert one_by_one(stream, head("gzip"), gw.request_body(encoded), gw.request_body(b"")) == []
    _, answers = turns_until_decoded(stream)
    assert answers == []
    assert later.bodies == [LONG]
    later.resolve()
    assert gw.streamed(stream.resumed)[0] == encoded


def test_where_memory_is_scarce_a_body_that_decodes_to_much_passes_unread():
    """What counts is how much is held."""
    budget = BodyBudget(100_000_000)
    stream = stream_of(settings=SessionSettings(pass_from_bytes=65_536), budget=budget)
    encoded = gzip.compress(bytes(200_000))
    answers = stream.send(head("gzip"), gw.request_body(encoded, end=False), gw.request_body(b"x"))
    assert gw.streamed(answers) == (encoded + b"x", [False, True])
    assert stream.told.exchange.passed_unread
    assert budget.held_bytes == 0


@pytest.mark.parametrize("mode", [gw.STREAMED, gw.NONE])
def test_a_body_that_comes_after_the_decision_is_not_decoded(mode):
    """It is scheduled at its headers, as any other."""
    stream = stream_of()
    answers = stream.send(head("gzip", mode), gw.request_body(b"no gzip"))
    assert gw.destination(answers[0]) == "192.168.1.1:8000"
    assert stream.told.exchange.unparsed == ""
    assert not stream.session.undecoded


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_a_compressed_response_only_has_no_usage(encoding):
    """It passes as it is, and the request is completed."""
    stream = stream_of(settings=SessionSettings(parse_response_usage=True))
    stream.send(head("identity"), gw.request_body(BODY))
    usage = b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'
    body = gzip.compress(usage) if encoding == "gzip" else usage
    modes = gw.protocol(gw.FULL_DUPLEX, gw.FULL_DUPLEX)
    answers = stream.send(
        gw.response_headers(modes=modes, content_encoding=encoding), gw.response_body(body)
    )
    assert gw.kinds(answers) == ["response_headers", "response_body"]
    assert (stream.told.exchange.usage is None) == (encoding == "gzip")
    assert stream.told.events[-1] == "completed complete"
