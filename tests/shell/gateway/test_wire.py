"""What the scan reads is what protobuf reads, and what protobuf refuses the scan does not read."""

from collections import deque
from random import Random

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy_data_plane.envoy.service.ext_proc import v3
from hypothesis import given
from hypothesis import strategies as st

from epp.core.protocol.messages import BodyMode, BodyModes, RequestBody, RequestHeaders
from epp.shell.gateway import wire
from epp.shell.gateway.codec import (
    BESIDE_BODY_BYTES_MAX,
    HEADERS_MAX,
    MalformedMessageError,
    decode,
)
from epp.shell.gateway.wire import HEADERS_KEPT_MAX, VIEWED_BYTES_MIN, Decoder, Unscanned
from tests import gateway as gw
from tests.test_gateways import TRANSCRIPTS, load, play

SEED = 20261121
BROWSER = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    ":authority": "llm.example.com",
    ":scheme": "https",
    "user-agent": "OpenAI/Python 1.99.0",
    "content-type": "application/json",
    "authorization": "Bearer " + "a1b2" * 40,
    "cookie": "c" * 9_000,
    "x-request-id": "7c9e6679-7425-40de-944b-e07fc1f90ae7",
}


def outcome(read, message):
    """The event, with its headers in their order, or the sentence."""
    try:
        event = read(message)
    except MalformedMessageError as error:
        return str(error)
    return type(event), event, list(getattr(event, "headers", {}).items())


def check(decoder, message):
    """Both ways of reading it agree; returns whether it was scanned."""
    before = decoder.scanned
    assert outcome(decoder.decode, message) == outcome(decode, message), message[:99].hex()
    return decoder.scanned > before


# Messages as gateways write them.


def attributes(**texts):
    """As Envoy sends them with `request_attributes`."""
    message = ProcessingRequest()
    for name, text in texts.items():
        fields = message.attributes["envoy.filters.http.ext_proc"].fields
        fields[f"request.{name}"].string_value = text
    return message.SerializeToString()


ATTRIBUTES = attributes(path="/v1/chat/completions", host="llm.example.com")
HINT = gw.subset(gw.strings("10.0.0.7:8000", "10.0.0.8:8000"))
USUAL = {
    "request headers": gw.request_headers(BROWSER, modes=gw.protocol()),
    "request headers that end it": gw.request_headers(BROWSER, end=True),
    "headers in value": gw.request_headers(BROWSER, in_value=True),
    "a header without a value": gw.request_headers(BROWSER | {"x-empty": ""}),
    "no headers": gw.request_headers({}),
    "attributes": gw.request_headers(BROWSER) + ATTRIBUTES,
    "subset hint": gw.request_headers(BROWSER, modes=gw.protocol(), hint=HINT),
    "request body": gw.request_body(b"x" * 8_000),
    "short request body": gw.request_body(b"x" * 60, end=False),
    "large request body": gw.request_body(b"x" * 3_000_000, end=False),
    "end of a request body": gw.request_body(b""),
    "empty request body": gw.request_body(b"", end=False),
    "request body with a hint": gw.request_body(b"x" * 200, hint=HINT),
    "request trailers": gw.request_trailers(),
    "response headers": gw.response_headers(200, content_type="text/event-stream"),
    "response headers and modes": gw.response_headers(200, modes=gw.protocol(), by="10.0.0.7:80"),
    "response body": gw.response_body(b"data: 1\n\n", end=False),
    "62 KB of a response body": gw.response_body(b"x" * 62_000, end=False),
    "end of a response body": gw.response_body(b""),
    "response trailers": gw.response_trailers(),
    "trailers with fields": ProcessingRequest(
        response_trailers=HttpTrailers(
            trailers=HeaderMap(headers=[HeaderValue(key="a", value="b")])
        )
    ).SerializeToString(),
    "observability": gw.request_headers(BROWSER) + b"\x50\x01",
    "unknown field behind": gw.request_body(b"x") + b"\xc2\x3e\x03abc",
}


@pytest.mark.parametrize("message", USUAL.values(), ids=USUAL)
def test_what_gateways_usually_send_is_scanned(message):
    """And read as protobuf reads it, the first time and when it comes again."""
    decoder = Decoder()
    assert check(decoder, message)
    assert check(decoder, message)
    assert decoder.paths() == {"scan": 2, "protobuf": 0}


UNUSUAL = {
    "nothing": (b"", Unscanned.FIRST_FIELD),
    "modes first": (
        bytes(v3.ProcessingRequest(protocol_config=gw.protocol())) + gw.request_body(b"x"),
        Unscanned.FIRST_FIELD,
    ),
    "the phase twice": (gw.request_body(b"x") + gw.request_body(b"y"), Unscanned.BODY),
    "two phases": (gw.request_headers() + gw.request_body(b"y"), Unscanned.HEADERS),
    "a field of a newer body": (b"\x22\x06\x0a\x02ab\x18\x01", Unscanned.BODY),
    "the end before the body": (b"\x22\x06\x10\x01\x0a\x02ab", Unscanned.BODY),
    "an end that is false": (b"\x22\x06\x0a\x02ab\x10\x00", Unscanned.BODY),
    "a body twice": (b"\x22\x08\x0a\x02ab\x0a\x02cd", Unscanned.BODY),
    "a body in a group": (b"\x23\x0a\x01a\x24", Unscanned.FIRST_FIELD),
    "a header without anything": (b"\x12\x04\x0a\x02\x0a\x00", Unscanned.HEADERS),
    "a name that leads out": (b"\x12\x07\x0a\x05\x0a\x03\x0a\x02a", Unscanned.HEADERS),
    "a header with both values": (
        ProcessingRequest(
            request_headers=HttpHeaders(
                headers=HeaderMap(headers=[HeaderValue(key="a", value="b", raw_value=b"c")])
            )
        ).SerializeToString(),
        Unscanned.HEADERS,
    ),
    "a value that is not UTF-8": (
        ProcessingRequest(
            request_headers=HttpHeaders(
                headers=HeaderMap(headers=[HeaderValue(key="a", raw_value=b"caf\xe9")])
            )
        ).SerializeToString(),
        Unscanned.HEADERS,
    ),
    "a name that is not ASCII": (gw.request_headers({"İ": "x"}), Unscanned.HEADERS),
    "a value text that is not UTF-8": (
        b"\x12\x08\x0a\x06\x0a\x04\x0a\x00\x12\x01\xff",
        Unscanned.HEADERS,
    ),
    "a length that leads out": (b"\x22\x02\x0a\x05abcde", Unscanned.BODY),
    "a phase that leads out": (
        b"\x12\x40" + gw.request_headers({"a": "b"}, end=True)[2:],
        Unscanned.HEADERS,
    ),
    "headers that lead out": (b"\x12\x04\x0a\x06\x0a\x04\x0a\x00\x1a\x00", Unscanned.HEADERS),
    "more headers than are read": (
        gw.request_headers({f"x-{number}": "y" for number in range(HEADERS_MAX + 1)}),
        Unscanned.HEADERS,
    ),
    "more headers than fit beside a body": (
        gw.request_headers({"x-long": "1" * BESIDE_BODY_BYTES_MAX}),
        Unscanned.HEADERS,
    ),
    "an attribute that is cut": (
        gw.request_headers(BROWSER) + ATTRIBUTES[:-1],
        Unscanned.HEADERS,
    ),
    "more beside a body than is read": (
        gw.request_body(b"x", hint=gw.subset(gw.string("1" * (BESIDE_BODY_BYTES_MAX + 1)))),
        Unscanned.BODY,
    ),
}


@pytest.mark.parametrize(("message", "reason"), UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_unusual_is_left_to_protobuf(message, reason):
    """Which reads or refuses it; the part is told in which it is."""
    decoder = Decoder()
    assert not check(decoder, message)
    assert decoder.first_reason is reason
    assert decoder.fallbacks[reason] == 1
    assert decoder.paths() == {"scan": 0, "protobuf": 1}


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
async def test_every_gateway_of_the_field_is_scanned(path, monkeypatch):
    """All that its transcript says, in all of its streams."""
    decoders = set()
    scan = Decoder.decode

    def compared(decoder, message):
        decoders.add(decoder)
        assert outcome(lambda _: scan(decoder, message), message) == outcome(decode, message)
        return decode(message)

    monkeypatch.setattr(Decoder, "decode", compared)
    await play(load(path), "grpcio")
    (decoder,) = decoders
    assert decoder.scanned > 0
    assert decoder.paths()["protobuf"] == 0, decoder.fallbacks


# Messages of any kind.

texts = st.text("aZ-é:", max_size=6) | st.sampled_from(["x" * 127, "y" * 128, "z" * 200])
raws = st.binary(max_size=4) | texts.map(str.encode)
header_maps = st.builds(
    HeaderMap,
    headers=st.lists(
        st.builds(HeaderValue, key=texts, raw_value=raws)
        | st.builds(HeaderValue, key=texts, value=texts)
        | st.builds(HeaderValue, key=texts, value=texts, raw_value=raws),
        max_size=6,
    ),
)
phases = st.one_of(
    st.fixed_dictionaries({name: st.builds(HttpHeaders, headers=header_maps, end_of_stream=ends)})
    for name in ("request_headers", "response_headers")
    for ends in (st.just(False), st.just(True))
) | st.one_of(
    *(
        st.fixed_dictionaries({name: st.builds(HttpBody, body=raws, end_of_stream=st.booleans())})
        for name in ("request_body", "response_body")
    ),
    *(
        st.fixed_dictionaries({name: st.builds(HttpTrailers, trailers=header_maps)})
        for name in ("request_trailers", "response_trailers")
    ),
)
modes = st.builds(
    ProtocolConfiguration,
    request_body_mode=st.integers(-1, 6),
    response_body_mode=st.integers(0, 200),
    send_body_without_waiting_for_header_response=st.booleans(),
)
beside = st.lists(
    st.sampled_from(
        [
            b"",
            ATTRIBUTES,
            bytes(v3.ProcessingRequest(metadata_context=HINT)),
            bytes(v3.ProcessingRequest(metadata_context=gw.served("10.0.0.7:80"))),
            b"\x50\x01",
            b"\xc2\x3e\x03abc",
        ]
    )
    | modes.map(lambda one: ProcessingRequest(protocol_config=one).SerializeToString()),
    max_size=3,
).map(b"".join)
messages = st.builds(
    lambda phase, rest: ProcessingRequest(**phase).SerializeToString() + rest, phases, beside
)


@given(st.lists(messages, max_size=4))
def test_generated_messages_are_read_alike(several):
    """By one decoder that remembers what it read, and whatever is beside the phase."""
    decoder = Decoder()
    for message in several:
        check(decoder, message)


@given(st.lists(messages, min_size=1, max_size=2), st.data())
def test_generated_messages_are_read_alike_by_the_other_codec(several, data):
    """As envoy-data-plane writes what it reads, if it reads it."""
    decoder = Decoder()
    for message in several:
        try:
            check(decoder, bytes(v3.ProcessingRequest.parse(message)))
        except UnicodeDecodeError:
            continue


@given(messages | st.binary(max_size=12), st.binary(max_size=6), st.data())
def test_mutated_messages_are_read_alike(message, inserted, data):
    """Cut, with bytes in between, followed by another one or by itself."""
    at = data.draw(st.integers(0, len(message)))
    decoder = Decoder()
    for one in (message[:at], message[at:], message[:at] + inserted + message[at:], message * 2):
        check(decoder, one)


def test_every_change_of_one_byte_is_read_alike():
    """Each byte of a message with each value: keys, lengths, types and texts."""
    decoder = Decoder()
    scanned = changed = 0
    fields = {":path": "/v1", "X-a": "b", "y" * 70: "z" * 70}
    for message in (
        gw.request_headers(fields, end=True, modes=gw.protocol()),
        gw.response_headers(200, by="10.0.0.7:80", end=True),
        gw.request_body(b"x" * 5),
        gw.response_body(b"x" * 130),
        gw.request_trailers(),
    ):
        for at in range(len(message)):
            for byte in range(256):
                changed += 1
                scanned += check(decoder, message[:at] + bytes((byte,)) + message[at + 1 :])
    assert 0.3 < scanned / changed < 0.99


def test_20_000_messages_put_together_from_pieces_are_read_alike():
    """Fields cut, doubled, exchanged, of other types and in groups, with lengths spelt long."""
    random = Random(SEED)
    decoder = Decoder()
    pieces = [message[start : start + size] for message in USUAL.values() for start, size in (
        (0, 2), (0, 4), (2, 2), (2, 20), (len(message) // 2, 30), (len(message) - 4, 4), (0, 900),
    )] + [b"\x0a", b"\x12\x00", b"\x1a\x80\x00", b"\x22\x80\x80\x00", b"\x0b", b"\x0c", b"\x7f",
          b"\x12\x06\x0a\x04\x0a\x02\x0a\x00", b"\x10\x01", b"\x18\x01", b"\xff" * 5, b"\x00"]  # fmt: skip
    originals = [message for message in USUAL.values() if len(message) < 20_000]
    scanned = 0
    for _ in range(20_000):
        message = bytearray(random.choice(originals))
        for _ in range(random.randint(1, 3)):
            at = random.randrange(min(len(message), 40) + 1)
            cut = random.choice((0, 0, 1, 2, len(message)))
            message[at : at + cut] = random.choice(pieces)
        scanned += check(decoder, bytes(message))
    assert 100 < scanned < 19_900


def test_a_group_that_is_nested_too_deep_is_left_to_protobuf():
    """What follows a phase is judged under the same limit as in the whole message."""
    decoder = Decoder()
    refused = 0
    for depth in range(80, 120):
        nested = b"\xc3\x3e" * depth + b"\xc4\x3e" * depth
        for message in (gw.request_body(b"x") + nested, nested + gw.request_body(b"x")):
            check(decoder, message)
            refused += isinstance(outcome(decode, message), str)
    assert refused > 0


# What it costs and keeps.


def test_the_messages_that_dominate_are_never_given_to_protobuf(monkeypatch):
    """Only what follows a phase is, and that not when it is the modes that came before."""
    decoder = Decoder()
    headers = gw.request_headers(BROWSER, modes=gw.protocol())
    decoder.decode(headers)
    given = []
    monkeypatch.setattr(wire, "decode", given.append)
    monkeypatch.setattr(wire, "_beside", lambda *beside: given.append(beside))

    for message in (
        headers,
        gw.request_body(b"x" * 8_000),
        gw.response_headers(200),
        gw.response_body(b"x" * 62_000, end=False),
        gw.response_body(b""),
    ):
        decoder.decode(message)

    assert given == []


def test_what_is_kept_is_bounded_and_holds_no_credentials():
    """Paths and names that never come again push out others, and no more are kept for it."""
    decoder = Decoder()
    for number in range(3 * HEADERS_KEPT_MAX):
        fields = {":path": f"/{number}", f"x-{number}": "1", "authorization": f"secret-{number}"}
        check(decoder, gw.request_headers(fields | {"user-agent": "u" * 400}))
        check(decoder, gw.request_headers(modes=gw.protocol(int(number % 5), number)))
        # Every turn another beginning.
        check(decoder, gw.request_headers({":method": "POST", "accept": f"*/{number}"} | fields))
        check(decoder, gw.request_headers({":method": "POST", "accept": f"*/{number}"} | fields))
    kept = [value for value in vars(decoder).values() if isinstance(value, dict | deque)]
    assert max(map(len, kept)) <= HEADERS_KEPT_MAX
    assert sum(map(len, kept)) > 64
    assert "secret" not in repr(kept)
    assert "u" * 400 not in repr(kept)


@given(
    st.lists(
        st.lists(
            st.sampled_from([(":method", "POST"), ("accept", "*/*"), ("via", "a"), ("x-id", "7")]),
            max_size=6,
        ),
        max_size=9,
    )
)
def test_messages_that_begin_alike_are_read_alike(messages):
    """Whatever came before, repeated names included: also where a message is the beginning of another."""
    decoder = Decoder()
    for pairs in messages:
        headers = HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in pairs])
        message = ProcessingRequest(request_headers=HttpHeaders(headers=headers))
        assert check(decoder, message.SerializeToString()) or not pairs


def test_a_known_beginning_does_not_let_in_more_headers():
    """The headers of the beginning count against the most that a message may have."""
    decoder = Decoder()
    begun = [HeaderValue(key="accept", raw_value=b"*/*"), HeaderValue(key="via", raw_value=b"a")]
    for more in (1, 1, HEADERS_MAX - 2, HEADERS_MAX - 1):
        others = [HeaderValue(key=f"x-{at}", raw_value=b"1") for at in range(more)]
        message = ProcessingRequest(
            request_headers=HttpHeaders(headers=HeaderMap(headers=[*begun, *others]))
        )
        assert check(decoder, message.SerializeToString()) == (more + 2 <= HEADERS_MAX)
    assert decoder._openings


def test_headers_that_were_kept_are_still_exact():
    """Another value of the same name, or the same with one letter in capitals."""
    decoder = Decoder()
    for value in ("curl/8", "Curl/8", "curl/8", "curl/9"):
        for name in ("user-agent", "User-Agent"):
            event = decoder.decode(gw.request_headers({name: value}))
            assert event == RequestHeaders({"user-agent": value}, False)


def test_modes_that_were_kept_are_still_exact():
    """An empty configuration is not the absence of one, and an unknown mode is still told."""
    decoder = Decoder()
    empty = gw.request_headers() + b"\x5a\x00"
    for _ in range(2):
        assert decoder.decode(empty).modes == BodyModes(BodyMode.NONE, BodyMode.NONE)
        assert decoder.decode(gw.request_headers()).modes is None
        unknown = gw.request_headers(modes=gw.protocol(7, 0))
        assert decoder.decode(unknown).modes == BodyModes(BodyMode.UNKNOWN, BodyMode.NONE, 7)


def test_which_path_is_taken_is_reported_once():
    """When a message is scanned for the first time, and when one is not."""
    decoder = Decoder()
    assert decoder.report() is None
    for _ in range(2):
        decoder.decode(gw.request_body(b"x"))
    assert decoder.report() == "ext_proc messages are read by the fast reader"
    assert decoder.report() is None
    for _ in range(2):
        decoder.decode(gw.request_body(b"x") * 2)
    assert decoder.report() == "an ext_proc message is left to protobuf because its body is unusual"
    decoder.decode(gw.request_headers({"é": "x"}))
    assert decoder.report() is None
    assert decoder.fallbacks[Unscanned.HEADERS] == 1


def test_a_body_that_came_whole_is_bytes():
    """Whatever its size, because it is read as it is."""
    message = bytearray(gw.request_body(b"x" * 70_000))
    event = Decoder().decode(bytes(message))
    assert event == RequestBody(b"x" * 70_000, True)
    assert type(event.body) is bytes


@pytest.mark.parametrize("size", [1, VIEWED_BYTES_MIN - 1, VIEWED_BYTES_MIN, 70_000])
def test_a_long_piece_of_a_body_is_no_copy(size):
    """It is a view of its message. Short pieces are copied, and so are pieces of a response and pieces
    beside which the message holds more, because a view would keep that in memory."""
    piece = b"x" * size
    event = Decoder().decode(gw.request_body(piece, end=False))
    assert event == RequestBody(piece, False)
    assert type(event.body) is (bytes if size < VIEWED_BYTES_MIN else memoryview)
    hinted = gw.request_body(piece, end=False, hint=HINT)
    for message in (hinted, gw.response_body(piece, end=False)):
        assert type(Decoder().decode(message).body) is bytes
