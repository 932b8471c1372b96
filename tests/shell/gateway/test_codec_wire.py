"""Body pieces and kept header answers, byte for byte; all messages are in `test_codec.py`."""

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    ProcessingResponse,
    StreamedBodyResponse,
)

from epp.core.protocol.messages import (
    Destination,
    RequestBodyChunk,
    RequestHeadersAnswer,
    ResponseBodyChunk,
)
from epp.shell.gateway.codec import encode


@pytest.mark.parametrize("size_bytes", [0, 1, 100, 127, 128, 8_000, 16_384, 62_000])
@pytest.mark.parametrize("end_of_stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "phase"), [(RequestBodyChunk, "request_body"), (ResponseBodyChunk, "response_body")]
)
def test_a_piece_of_a_body_is_written_as_protobuf_writes_it(kind, phase, end_of_stream, size_bytes):
    """Byte for byte, whatever its length and whatever holds it."""
    body = b"x" * size_bytes
    chunk = BodyResponse(
        response=CommonResponse(
            body_mutation=BodyMutation(
                streamed_response=StreamedBodyResponse(body=body, end_of_stream=end_of_stream)
            )
        )
    )
    expected = ProcessingResponse(**{phase: chunk}).SerializeToString()

    assert encode(kind(body, end_of_stream)) == expected
    assert encode(kind(memoryview(body), end_of_stream)) == expected


def test_answers_to_different_destinations_are_not_confused():
    """The header answer depends on endpoints, headers set and headers removed."""
    answers = [
        encode(RequestHeadersAnswer(Destination(endpoints, set_headers, remove_headers)))
        for _ in range(2)
        for endpoints in (("10.0.0.1:80",), ("10.0.0.2:80",), ("10.0.0.1:80", "10.0.0.2:80"))
        for set_headers in ((), (("x-request-id", "one"),), (("x-request-id", "two"),))
        for remove_headers in ((), ("x-prefiller-host-port",))
    ]

    assert answers[:18] == answers[18:]
    assert len(set(answers)) == 18
