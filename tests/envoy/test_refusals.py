"""What the picker refuses reaches the client as the picker said it."""

import io
from hashlib import sha256

import pytest

from epp.core.protocol.messages import DROP_REASON_HEADER
from epp.core.protocol.session import SessionSettings
from epp.flags.values import BodyMode

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
WHOLE_BODY_MODES = [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED]
LIMIT_BYTES = 100_000


async def refused(wired, body):
    """Status, headers and the error object; no pod has seen anything, no lease is left."""
    async with wired.client.post(PATH, data=body) as response:
        document = await response.json()
        assert response.content_type == "application/json"
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert all(pod.received == [] for pod in wired.pods)
        assert wired.picker.open_leases == 0
        return response.status, response.headers, document["error"]


@pytest.mark.parametrize("mode", WHOLE_BODY_MODES)
@pytest.mark.parametrize("body", [b"no JSON", b'{"model":"m"', b'{"prompt":"\\ud800"}', b"[]"])
async def test_a_body_that_cannot_be_read_is_400(mode, body, wire):
    """The error object says what is wrong, in the shape of the OpenAI API."""
    wired = await wire(request_body_mode=mode)
    status, _, error = await refused(wired, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("mode", WHOLE_BODY_MODES)
async def test_a_body_over_the_limit_is_413(mode, wire):
    """The limit is inclusive, and the message names it."""
    wired = await wire(
        settings=SessionSettings(request_body_bytes_max=LIMIT_BYTES), request_body_mode=mode
    )
    head, tail = b'{"model":"m","prompt":"', b'"}'
    fits = head + b"p" * (LIMIT_BYTES - len(head) - len(tail)) + tail
    for beyond in (fits + b" ", fits * 50):
        status, _, error = await refused(wired, io.BytesIO(beyond))
        assert status == 413
        assert str(LIMIT_BYTES) in error["message"]
    async with wired.client.post(PATH, data=fits) as response:
        assert response.status == 200


@pytest.mark.parametrize("mode", BodyMode)
async def test_no_endpoints_is_503(mode, wire):
    """In every mode, with the reason in a header for whoever reads logs."""
    wired = await wire(request_body_mode=mode)
    wired.picker.serve([])
    status, headers, error = await refused(wired, b'{"model":"m","prompt":"p"}')
    assert status == 503
    assert headers[DROP_REASON_HEADER] == error["code"] == "rejected-no-endpoints"
    async with wired.client.get("/v1/models") as response:
        assert response.status == 503


async def test_a_saturated_pool_sheds_what_may_be_shed_with_429(wire):
    """A negative priority is told to come back; any other is served."""
    settings = SessionSettings(priorities={"batch": -1})
    wired = await wire(settings=settings)
    wired.picker.saturate()
    body = b'{"model":"m","prompt":"p"}'
    headers = {"x-llm-d-inference-objective": "batch"}
    async with wired.client.post(PATH, data=body, headers=headers) as response:
        assert response.status == 429
        assert response.headers["retry-after"] == "1"
        assert response.headers[DROP_REASON_HEADER] == "rejected-saturated"
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    async with wired.client.post(PATH, data=body) as response:
        assert response.status == 200


ODD_BODIES = {
    "/v1/chat/completions": b'{"model":"m","messages":[{"role":"user","content":{"a":1}}]}',
    "/v1/responses": b'{"model":"m","prompt":{"id":"template","version":"2"}}',
    "/v1/completions": b'{"model":"m"}',
}


@pytest.mark.parametrize("mode", WHOLE_BODY_MODES)
@pytest.mark.parametrize("path", ODD_BODIES)
async def test_a_body_that_is_not_understood_reaches_an_endpoint_as_it_is(mode, path, wire):
    """The engine judges it."""
    wired = await wire(request_body_mode=mode)
    async with wired.client.post(path, data=ODD_BODIES[path]) as response:
        assert response.status == 200
        await response.read()
    (received,) = [one for pod in wired.pods for one in pod.received]
    assert received.body_sha256 == sha256(ODD_BODIES[path]).hexdigest()
