"""The picker alone decides where a request goes, within what the gateway allows."""

import base64
import time
from collections import Counter

import pytest
from google.protobuf.struct_pb2 import Value

from epp.core.decision.inputs import PageScraped
from epp.core.protocol.messages import DESTINATION_HEADER, DROP_REASON_HEADER
from epp.core.types import EndpointMetrics
from epp.flags.values import BodyMode
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.picker import running_picker
from tests.envoy.rig import http_client, http_filters, refusing_port, running_envoy, until
from tests.envoy.upstream import running_pods

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p"}'
REQUESTS = 8


def hint_from_header(document):
    """Turn the request header x-test-subset, a serialised protobuf Value, into a subset hint."""
    rule = {
        "header": "x-test-subset",
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "PROTOBUF_VALUE",
            "encode": "BASE64",
        },
        "remove": True,
    }
    config = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [rule],
    }
    http_filters(document).insert(
        0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": config}
    )


def keep_client_headers(document):
    filters = http_filters(document)
    filters[:] = [f for f in filters if f["name"] != "envoy.filters.http.header_mutation"]


def subset_header(hint):
    """`hint`: a list, a string, a number or None, as a gateway might send it."""
    value = Value()
    match hint:
        case None:
            value.null_value = 0
        case str():
            value.string_value = hint
        case int():
            value.number_value = hint
        case list():
            value.list_value.extend(hint)
            value.list_value.SetInParent()
    return {"x-test-subset": base64.b64encode(value.SerializeToString()).decode()}


async def who_serves(client, headers, *, method="POST"):
    """Status -> count, and name of the pod -> count, of some requests one after another."""
    statuses, pods = Counter(), Counter()
    data = BODY if method == "POST" else None
    for _ in range(REQUESTS):
        async with client.request(method, "/v1/models", data=data, headers=headers) as response:
            statuses[response.status] += 1
            pods[(await response.json()).get("pod")] += 1
    return statuses, pods


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_only_endpoints_of_the_subset_serve(mode, method, wire):
    """As a list or as a comma-separated string, with a body or without."""
    wired = await wire(pods=4, edit=hint_from_header, request_body_mode=mode)
    allowed = wired.pods[1:3]
    addresses = [pod.address for pod in allowed]
    half = {pod.name: REQUESTS // 2 for pod in allowed}
    for hint in (addresses, ", ".join(addresses)):
        statuses, pods = await who_serves(wired.client, subset_header(hint), method=method)
        assert statuses == {200: REQUESTS}
        assert pods == half


async def test_a_bare_address_allows_every_port_of_it(wire):
    """All test pods share one address, so all of them serve."""
    wired = await wire(pods=4, edit=hint_from_header)
    statuses, pods = await who_serves(wired.client, subset_header(["127.0.0.1"]))
    assert statuses == {200: REQUESTS}
    assert pods == {pod.name: REQUESTS // 4 for pod in wired.pods}


@pytest.mark.parametrize(
    "hint", [[], "", ["10.9.9.9:80"], ["127.0.0.1:1"], [7], 7, None, ["nonsense"]], ids=repr
)
async def test_a_subset_that_allows_nobody_never_means_everybody(hint, wire):
    """Empty, unknown or malformed: 503, and no pod sees the request."""
    wired = await wire(pods=2, edit=hint_from_header)
    async with wired.client.post(PATH, data=BODY, headers=subset_header(hint)) as response:
        assert response.status == 503
        assert response.headers[DROP_REASON_HEADER] == "rejected-no-endpoints"
        assert "error" in await response.json()
    assert [pod.received for pod in wired.pods] == [[], []]


@pytest.mark.parametrize("edit", [None, keep_client_headers])
@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED, BodyMode.NONE])
async def test_a_destination_that_the_client_names_is_ignored(edit, mode, opened, wire):
    """Also behind an Envoy that lets the header through to the picker."""
    (victim,) = await opened.enter_async_context(running_pods(1))
    wired = await wire(edit=edit, request_body_mode=mode)
    for method in ("GET", "POST"):
        statuses, _ = await who_serves(
            wired.client, {DESTINATION_HEADER: victim.address}, method=method
        )
        assert statuses == {200: REQUESTS}
    assert victim.received == []
    assert {r.headers[DESTINATION_HEADER] for r in wired.pod.received} == {wired.pod.address}


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
async def test_an_endpoint_that_refuses_connections_is_set_aside(mode, opened, wire):
    """Two refusals in a row cost two requests, the rest is served; a good scrape ends it, and the
    third sends it away, however well its page looks.
    """
    port = await opened.enter_async_context(refusing_port())
    wired = await wire(pods=3, response_body_mode=mode)
    refusing = f"127.0.0.1:{port}"
    wired.picker.serve_addresses(
        {"refusing": refusing} | {pod.name: pod.address for pod in wired.pods}
    )
    pool = wired.picker.scheduler.pool

    async def statuses_of(count):
        statuses = []
        for _ in range(count):
            async with wired.client.post(PATH, data=BODY) as response:
                statuses.append(response.status)
        # What Envoy reported last has reached the picker.
        await until(lambda: not wired.picker.open_leases, "all leases to be released")
        return statuses

    assert (await statuses_of(20)).count(503) == 2
    assert pool.set_aside_count() == 1
    assert (await statuses_of(20)).count(503) == 0
    pool_slot = pool.slot_at(refusing)
    wired.picker.scheduler.take(PageScraped(pool_slot, EndpointMetrics()), time.monotonic())
    assert pool.set_aside_count() == 0
    assert (await statuses_of(20)).count(503) == 1
    assert list(wired.picker.scheduler.outliers.ejection.away) == [pool_slot]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED])
async def test_a_refused_connection_is_not_taken_for_load(mode, opened, wire):
    """Both are a 503 to the client; only the pod's own says that it is full."""
    port = await opened.enter_async_context(refusing_port())
    wired = await wire(pods=1, response_body_mode=mode)
    wired.picker.serve_addresses({"refusing": f"127.0.0.1:{port}", "full": wired.pod.address})
    for _ in range(2):
        async with wired.client.post(PATH, data=BODY, headers={"x-test-status": "503"}) as response:
            assert response.status == 503
    await until(lambda: not wired.picker.open_leases, "all leases to be released")
    assert [outcome.by_gateway for outcome in wired.picker.witness.outcomes] == [True, False]
    assert wired.picker.scheduler.pool.columns.saturated[:2].tolist() == [False, True]


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plaintext"])
async def test_envoy_reaches_the_picker_with_and_without_tls(tls, opened, tmp_path):
    """A self-signed certificate is enough, and the health check passes too."""
    (pod,) = await opened.enter_async_context(running_pods(1))
    picker = await opened.enter_async_context(running_picker([pod], tls=tls))
    options = BootstrapOptions(picker_address=picker.address, plaintext=not tls)
    envoy = await opened.enter_async_context(running_envoy(options, tmp_path))
    client = await opened.enter_async_context(http_client(envoy))
    statuses, _ = await who_serves(client, {})
    assert statuses == {200: REQUESTS}
    assert await envoy.counter("cluster.ext_proc.health_check.success") >= 1
    assert (await envoy.counter("cluster.ext_proc.ssl.handshake") > 0) is tls
