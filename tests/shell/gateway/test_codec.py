"""Every message both ways against a codec that is not ours (envoy-data-plane)."""

import json
import math

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue
from envoy_data_plane.envoy.config.core.v3 import HeaderValueOptionHeaderAppendAction as Append
from envoy_data_plane.envoy.service.ext_proc import v3
from envoy_data_plane.google.protobuf import NullValue, Struct, Value

from epp.core.protocol.messages import (
    BodyMode,
    BodyModes,
    Destination,
    ImmediateAnswer,
    RequestBody,
    RequestBodyAnswer,
    RequestBodyChunk,
    RequestHeaders,
    RequestHeadersAnswer,
    RequestTrailers,
    RequestTrailersAnswer,
    ResponseBody,
    ResponseBodyAnswer,
    ResponseBodyChunk,
    ResponseHeaders,
    ResponseHeadersAnswer,
    ResponseTrailers,
    ResponseTrailersAnswer,
)
from epp.core.types import Refusal, RefusalReason
from epp.shell.gateway.codec import (
    BESIDE_BODY_BYTES_MAX,
    HEADERS_MAX,
    SUBSET_ENTRIES_MAX,
    MalformedMessageError,
    decode,
    encode,
)
from tests import gateway as gw

ADDRESS = "10.0.0.7:8000"


def answered(answer):
    """The answer as the other codec reads it."""
    return v3.ProcessingResponse.parse(encode(answer))


def decoded_headers(*fields):
    message = v3.ProcessingRequest(
        request_headers=v3.HttpHeaders(headers=HeaderMap(headers=list(fields)))
    )
    return decode(bytes(message)).headers


# What gateways send.


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (gw.request_body(b"\x00\xff", end=False), RequestBody(b"\x00\xff", False)),
        (gw.request_body(b"", end=True), RequestBody(b"", True)),
        (gw.request_trailers(), RequestTrailers()),
        (gw.response_body(b"data", end=False), ResponseBody(b"data", False)),
        (gw.response_body(b"", end=True), ResponseBody(b"", True)),
        (gw.response_trailers(), ResponseTrailers()),
        (gw.request_headers({":path": "/"}), RequestHeaders({":path": "/"}, False)),
        (gw.request_headers({":path": "/"}, end=True), RequestHeaders({":path": "/"}, True)),
        (gw.response_headers(503), ResponseHeaders({":status": "503"}, False)),
        (gw.response_headers(200, end=True), ResponseHeaders({":status": "200"}, True)),
    ],
)
def test_every_phase_is_read(message, event):
    """The event says what the message says, and carries nothing that the message does not."""
    assert decode(message) == event


def test_header_values_are_read_from_both_fields():
    """Envoy fills `raw_value`, other gateways `value`; the raw one counts if both are there."""
    assert decoded_headers(
        HeaderValue(key="a", raw_value=b"raw"),
        HeaderValue(key="b", value="plain"),
        HeaderValue(key="c", raw_value=b"raw", value="plain"),
        HeaderValue(key="d"),
    ) == {"a": "raw", "b": "plain", "c": "raw", "d": ""}


def test_header_names_are_lower_case():
    """However the gateway writes them."""
    assert decoded_headers(HeaderValue(key="X-Request-ID", raw_value=b"AbC")) == {
        "x-request-id": "AbC"
    }


def test_header_bytes_that_are_not_utf_8_do_not_end_the_request():
    """HTTP allows any byte from 0x80; what is not UTF-8 is replaced, the rest stays."""
    (value,) = decoded_headers(HeaderValue(key="x", raw_value=b"caf\xe9 \xff!")).values()
    assert value.startswith("caf")
    assert value.endswith("!")
    value.encode()  # no lone surrogates: it can be logged and sent


@pytest.mark.parametrize("mode", [mode for mode in BodyMode if mode is not BodyMode.UNKNOWN])
def test_the_announced_body_modes_are_read(mode):
    """Both directions, in the first message of either."""
    announced = v3.ProtocolConfiguration(request_body_mode=int(mode), response_body_mode=int(mode))
    expected = BodyModes(mode, mode)
    assert decode(gw.request_headers(modes=announced)).modes == expected
    assert decode(gw.response_headers(modes=announced)).modes == expected


def test_an_empty_protocol_configuration_is_not_its_absence():
    """All its fields are 0, which is NONE: only absence means that nothing was announced."""
    empty = ProcessingRequest()
    empty.request_headers.SetInParent()
    empty.protocol_config.SetInParent()
    assert decode(empty.SerializeToString()).modes == BodyModes(BodyMode.NONE, BodyMode.NONE)
    assert decode(gw.request_headers()).modes is None


@pytest.mark.parametrize(
    ("request_mode", "response_mode", "expected"),
    [
        (7, 0, BodyModes(BodyMode.UNKNOWN, BodyMode.NONE, 7)),
        (4, 9, BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.UNKNOWN, 9)),
        (-1, 1, BodyModes(BodyMode.UNKNOWN, BodyMode.STREAMED, -1)),
    ],
)
def test_the_number_of_an_unknown_body_mode_is_told(request_mode, response_mode, expected):
    """A newer gateway may announce what this picker does not know."""
    message = ProcessingRequest()
    message.request_headers.SetInParent()
    message.protocol_config.request_body_mode = request_mode
    message.protocol_config.response_body_mode = response_mode
    assert decode(message.SerializeToString()).modes == expected


@pytest.mark.parametrize("count", [SUBSET_ENTRIES_MAX, SUBSET_ENTRIES_MAX + 1])
def test_a_subset_hint_with_more_entries_than_any_pool_allows_nobody(count):
    """As a list and as one string."""
    many = [f"10.0.{number // 250}.{number % 250}:80" for number in range(count)]
    expected = tuple(many) if count == SUBSET_ENTRIES_MAX else ()
    for value in (gw.strings(*many), gw.string(",".join(many))):
        assert decode(gw.request_headers(hint=gw.subset(value))).subset == expected
    assert decode(gw.request_headers(hint=gw.subset(gw.string("1" * 700_000)))).subset == ()


def test_what_is_beside_a_body_is_bounded():
    """A body may be as long as the server takes it; headers and metadata are looked at one by one."""
    long = b"x" * (2 * BESIDE_BODY_BYTES_MAX)
    assert decode(gw.request_body(long)).body == long
    assert decode(gw.response_body(long)).body == long
    hint = gw.subset(gw.string("1" * (BESIDE_BODY_BYTES_MAX + 1)))
    for message in (
        gw.request_headers(hint=hint),
        gw.request_body(b"", hint=hint),
        gw.request_body(long, hint=hint),
        gw.request_headers(gw.COMPLETIONS | {"x-long": "1" * (BESIDE_BODY_BYTES_MAX + 1)}),
        b"\x22" + b"\xff" * (BESIDE_BODY_BYTES_MAX + 1),
    ):
        with pytest.raises(MalformedMessageError, match="beside its body"):
            decode(message)


def test_more_headers_than_a_gateway_passes_are_refused():
    """Each would be decoded on its own."""
    fields = {f"x-{number}": "" for number in range(HEADERS_MAX)}
    assert len(decode(gw.request_headers(fields)).headers) == HEADERS_MAX
    with pytest.raises(MalformedMessageError, match="headers"):
        decode(gw.request_headers(fields | {"x-one-more": ""}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (gw.strings(ADDRESS, "10.0.0.8:8000"), (ADDRESS, "10.0.0.8:8000")),
        (gw.string(f"{ADDRESS},10.0.0.8:8000"), (ADDRESS, "10.0.0.8:8000")),
        (gw.string(f" {ADDRESS} , ,10.0.0.8,"), (ADDRESS, "10.0.0.8")),
        (gw.strings("[fd00::8]:8000", "fd00::9"), ("[fd00::8]:8000", "fd00::9")),
        (gw.string("[fd00::8]:8000,fd00::9"), ("[fd00::8]:8000", "fd00::9")),
        (gw.strings(), ()),
        (gw.strings("", " "), ()),
        (gw.string(""), ()),
        (Value(), ()),
        (Value(null_value=NullValue.NULL_VALUE), ()),
        (Value(number_value=math.pi), ()),
        (Value(bool_value=True), ()),
        (Value(struct_value=Struct(fields={"a": gw.string(ADDRESS)})), ()),
        (Value(list_value=gw.ListValue(values=[gw.string(ADDRESS), Value(number_value=1)])), ()),
    ],
)
def test_a_subset_hint_is_a_list_or_a_string_and_anything_else_allows_nobody(value, expected):
    """In each message of the request phase."""
    hint = gw.subset(value)
    trailers = v3.ProcessingRequest(request_trailers=v3.HttpTrailers(), metadata_context=hint)
    for message in (
        gw.request_headers(hint=hint),
        gw.request_body(b"", hint=hint),
        bytes(trailers),
    ):
        assert decode(message).subset == expected


@pytest.mark.parametrize(
    "hint",
    [
        None,
        gw.metadata("envoy.lb", "x-gateway-destination-endpoint-subset", gw.string(ADDRESS)),
        gw.metadata("envoy.lb.subset_hint", "another-key", gw.string(ADDRESS)),
    ],
    ids=["no metadata", "another namespace", "another key"],
)
def test_without_a_subset_hint_nothing_is_said_of_a_subset(hint):
    """Absence is not an empty hint."""
    assert decode(gw.request_headers(hint=hint)).subset is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (gw.string(ADDRESS), ADDRESS),
        (gw.string("[fd00::8]:8000"), "[fd00::8]:8000"),
        (gw.string(f"10.0.0.1:1, {ADDRESS}"), ADDRESS),
        (gw.strings("10.0.0.1:1", ADDRESS), ADDRESS),
        (gw.strings(), ""),
        (gw.string(""), ""),
        (Value(number_value=8000), ""),
    ],
)
def test_the_served_endpoint_is_the_last_that_was_tried(value, expected):
    """As a string or as a list; what is no address is nothing."""
    message = v3.ProcessingRequest(
        response_headers=v3.HttpHeaders(headers=gw.headers({":status": "200"})),
        metadata_context=gw.metadata("envoy.lb", "x-gateway-destination-endpoint-served", value),
    )
    assert decode(bytes(message)).served == expected


@pytest.mark.parametrize(
    "context",
    [
        None,
        gw.metadata("envoy.lb", "another-key", gw.string(ADDRESS)),
        gw.metadata("another", "x-gateway-destination-endpoint-served", gw.string(ADDRESS)),
    ],
)
def test_a_gateway_may_not_tell_who_served(context):
    """Then it is empty."""
    message = v3.ProcessingRequest(
        response_headers=v3.HttpHeaders(headers=HeaderMap()), metadata_context=context
    )
    assert decode(bytes(message)).served == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "no known phase"),
        (bytes(v3.ProcessingRequest(protocol_config=gw.protocol())), "no known phase"),
        (b"\xff", "not an ext_proc ProcessingRequest"),
        (b"GET / HTTP/1.1\r\n\r\n", "not an ext_proc ProcessingRequest"),
        (gw.request_headers()[:-1], "not an ext_proc ProcessingRequest"),
        (gw.request_body(b"x" * 100)[:50], "not an ext_proc ProcessingRequest"),
    ],
)
def test_what_is_no_message_is_told_in_one_sentence(message, said):
    """No protobuf exception escapes."""
    with pytest.raises(MalformedMessageError, match=said):
        decode(message)


def test_fields_of_a_newer_gateway_are_passed_over():
    """Unknown field 1000, length-delimited, behind a good message."""
    unknown = b"\xc2\x3e\x03abc"
    assert decode(gw.request_body(b"x") + unknown) == RequestBody(b"x", True)


# What gateways are answered.


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (RequestHeadersAnswer(), "request_headers"),
        (RequestBodyAnswer(), "request_body"),
        (RequestTrailersAnswer(), "request_trailers"),
        (ResponseHeadersAnswer(), "response_headers"),
        (ResponseBodyAnswer(), "response_body"),
        (ResponseTrailersAnswer(), "response_trailers"),
    ],
)
def test_an_answer_that_changes_nothing_is_of_its_phase_and_empty(answer, kind):
    """Envoy matches answers to what it waits for by their kind."""
    told = answered(answer)
    assert gw.kind(told) == kind
    changed = getattr(told, kind)
    assert getattr(changed, "response", None) is None
    assert getattr(changed, "header_mutation", None) is None
    assert not told.dynamic_metadata


@pytest.mark.parametrize("kind", ["request_headers", "request_body"])
@pytest.mark.parametrize(
    ("endpoints", "target"),
    [
        ((ADDRESS,), ADDRESS),
        (("[fd00::8]:8000",), "[fd00::8]:8000"),
        ((ADDRESS, "[fd00::8]:8000"), f"{ADDRESS},[fd00::8]:8000"),
    ],
)
def test_the_destination_is_the_same_in_header_and_metadata(kind, endpoints, target):
    """One address, or several separated by commas, first choice first."""
    made = {"request_headers": RequestHeadersAnswer, "request_body": RequestBodyAnswer}[kind]
    told = answered(made(Destination(endpoints)))
    assert gw.kind(told) == kind
    assert gw.destination(told) == target


def test_headers_are_replaced_and_never_appended_to():
    """A client's value must not survive beside ours; the value is in `raw_value` alone."""
    destination = Destination(
        (ADDRESS,),
        set_headers=(("x-request-id", "id"), ("content-length", "12")),
        remove_headers=("x-prefiller-host-port",),
    )
    told = answered(RequestHeadersAnswer(destination))
    assert gw.set_headers(told) == {
        "x-gateway-destination-endpoint": ADDRESS,
        "x-request-id": "id",
        "content-length": "12",
    }
    assert gw.removed_headers(told) == {"x-prefiller-host-port"}
    actions = {option.append_action for option in gw.common(told).header_mutation.set_headers}
    assert actions == {Append.OVERWRITE_IF_EXISTS_OR_ADD}


@pytest.mark.parametrize("made", [RequestHeadersAnswer, RequestBodyAnswer])
def test_a_header_of_one_request_alone_stands_beside_those_of_all(made):
    """Each value its own, of whatever length, though all else is written once."""
    for value in ("one", "two", "ü" * 100, "", "\x01"):
        destination = Destination(
            (ADDRESS,), (("x-a", "b"),), ("x-prefiller-host-port",), ("traceparent", value)
        )
        told = answered(made(destination))
        wanted = {"x-gateway-destination-endpoint": ADDRESS, "x-a": "b", "traceparent": value}
        assert gw.set_headers(told) == wanted
        assert gw.removed_headers(told) == {"x-prefiller-host-port"}
        assert gw.destination(told) == ADDRESS


def test_a_buffered_body_is_replaced_as_a_whole():
    """Byte for byte; without a new body none is mentioned."""
    destination = Destination((ADDRESS,))
    body = bytes(range(256))
    told = answered(RequestBodyAnswer(destination, body))
    assert gw.common(told).body_mutation.body == body
    assert gw.destination(told) == ADDRESS
    assert gw.common(answered(RequestBodyAnswer(destination))).body_mutation is None


@pytest.mark.parametrize(("body", "last"), [(b"\x00\xff", False), (b"x", True), (b"", True)])
@pytest.mark.parametrize(
    ("made", "kind"),
    [(RequestBodyChunk, "request_body"), (ResponseBodyChunk, "response_body")],
)
def test_full_duplex_chunks_are_streamed_responses(made, kind, body, last):
    """With their bytes and their end, and no other change."""
    told = answered(made(body, last))
    assert gw.kind(told) == kind
    assert gw.streamed([told]) == (body, [last])
    assert gw.common(told).header_mutation is None


def test_response_headers_carry_what_plugins_set():
    """For instance the session token."""
    told = answered(ResponseHeadersAnswer((("x-session-token", "abc"),)))
    assert gw.kind(told) == "response_headers"
    assert gw.set_headers(told) == {"x-session-token": "abc"}


@pytest.mark.parametrize("without_body", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 36, 127, 128, 255, 256, 300, 20_000])
def test_a_header_alone_has_its_value_whatever_its_length(length, without_body):
    """What is round it is kept by length, and nothing of one value is left in the next."""
    for letter in "ab":
        value = letter * length
        told = answered(ResponseHeadersAnswer((("x-request-id", value),), without_body))
        assert gw.set_headers(told) == {"x-request-id": value}
        assert (told.mode_override is not None) == without_body
        two = answered(ResponseHeadersAnswer((("x-request-id", value), ("x-b", "c")), without_body))
        assert gw.set_headers(two) == {"x-request-id": value, "x-b": "c"}


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (RefusalReason.BAD_REQUEST, 400, "invalid_request_error"),
        (RefusalReason.BODY_TOO_LARGE, 413, "invalid_request_error"),
        (RefusalReason.SATURATED, 429, "rate_limit_error"),
        (RefusalReason.NO_ENDPOINTS, 503, "service_unavailable"),
        (RefusalReason.OVERLOADED, 503, "service_unavailable"),
        (RefusalReason.SHUTTING_DOWN, 503, "service_unavailable"),
    ],
)
def test_each_refusal_is_an_openai_error_object(reason, status, kind):
    """Clients of the API understand it as they understand the model server's own."""
    refusal = Refusal(reason=reason, status=status, message='says "no" — plainly')
    told = answered(ImmediateAnswer(refusal, (("content-type", "application/json"),)))
    assert gw.kind(told) == "immediate_response"
    assert json.loads(told.immediate_response.body) == {
        "error": {
            "message": 'says "no" — plainly',
            "type": kind,
            "param": None,
            "code": reason.value,
        }
    }
    assert told.immediate_response.status.code == status
    assert told.immediate_response.details == reason.value
    assert gw.set_headers(told) == {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("param", "shown"),
    [("model", "model"), ("$.messages[0].content", "messages[0].content"), (None, None)],
)
def test_the_member_at_fault_is_named_as_the_api_names_it(param, shown):
    """Without the root of the path."""
    refusal = Refusal(reason=RefusalReason.BAD_REQUEST, status=400, message="no", param=param)
    _, error = gw.refusal(answered(ImmediateAnswer(refusal, ())))
    assert error["param"] == shown


def test_a_header_value_from_a_client_is_sent_back_whatever_it_holds():
    """Lone surrogates stand for the client's bytes; anything else is UTF-8."""
    told = answered(ResponseHeadersAnswer((("x", "caf\udce9 é"),)))
    ((option),) = gw.common(told).header_mutation.set_headers
    assert option.header.raw_value == b"caf\xe9 " + "é".encode()
