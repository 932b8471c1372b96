"""More than the picker or Envoy takes, and who may speak to the picker."""

import asyncio
import datetime as dt
from collections import Counter

import pytest

from bench.raw_http2 import RawConnection, header_block
from epp.shell.gateway.bootstrap import BootstrapOptions
from epp.shell.gateway.tls import self_signed
from tests.envoy.picker import running_picker
from tests.envoy.process import running_epp
from tests.envoy.rig import http_client, running_envoy, until
from tests.envoy.upstream import running_pods

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"p"}'


async def ask(client):
    async with client.post(PATH, data=BODY) as response:
        await response.read()
        return response.status, response.headers.get("x-llm-d-request-dropped-reason")


@pytest.fixture
def behind_envoy(opened, tmp_path):
    """A pod, the picker in this loop and an Envoy; no recorder whose own streams could break."""

    async def start(**options):
        (pod,) = await opened.enter_async_context(running_pods(1))
        picker = await opened.enter_async_context(running_picker([pod], **options))
        chosen = BootstrapOptions(picker_address=picker.address, plaintext=True)
        envoy = await opened.enter_async_context(running_envoy(chosen, tmp_path))
        return pod, picker, envoy, await opened.enter_async_context(http_client(envoy))

    return start


async def test_hundreds_of_requests_at_once_are_all_served(behind_envoy):
    """Each has a stream to the picker; none of them ends early."""
    _, picker, _, client = await behind_envoy()
    answers = Counter(await asyncio.gather(*(ask(client) for _ in range(400))))
    assert answers == {(200, None): 400}
    assert picker.witness.refusals == []


async def test_a_request_above_the_bound_is_told_so(behind_envoy):
    """503 with the reason, while the one before it is served to its end."""
    pod, picker, _, client = await behind_envoy(streams_max=1)
    first = asyncio.create_task(client.post(PATH, data=BODY, headers={"x-test-hold": "1"}))
    await until(lambda: pod.serving, "the pod to work on the first")
    assert await ask(client) == (503, "rejected-overloaded")
    pod.resume.set()
    response = await first
    await response.read()
    assert response.status == 200
    await until(lambda: not picker.server.open_streams, "the end of the first")
    assert (await ask(client))[0] == 200


async def test_a_client_that_resets_its_requests_loses_its_connection_alone(behind_envoy):
    """Envoy closes it; the picker's connection, which is Envoy's, is not cut, others are served."""
    _, picker, envoy, client = await behind_envoy()
    headers = header_block(method="GET", scheme="http", path="/v1/models", authority="gateway")
    hostile = await RawConnection.open(envoy.port, headers)
    try:
        answers = Counter()
        while not hostile.closed:
            hostile.open_and_reset(100)
            answers[await ask(client)] += 1
        assert set(answers) == {(200, None)}
    finally:
        await hostile.close()
    assert await envoy.counter("http.inference.downstream_rq_too_many_premature_resets") == 1
    assert picker.witness.connections_cut == 0


@pytest.fixture
def secured(opened, tmp_path):
    """`epp serve` that asks for certificates of one authority, and an Envoy with `options`."""

    async def start(**options):
        now = dt.datetime.now(dt.UTC)
        for name in ("picker", "gateway", "stranger"):
            pair, folder = self_signed(name, now), tmp_path / name
            folder.mkdir()
            (folder / "tls.crt").write_bytes(pair.certificate_chain)
            (folder / "tls.key").write_bytes(pair.private_key)
        pods = await opened.enter_async_context(running_pods(1))
        flags = (f"--cert-path={tmp_path}/picker", f"--client-ca-file={tmp_path}/gateway/tls.crt")
        epp = await opened.enter_async_context(running_epp(tmp_path, pods, *flags))
        paths = {name: str(tmp_path / path) for name, path in options.items() if "/" in path}
        chosen = BootstrapOptions(picker_address=epp.address, **(options | paths))
        envoy = await opened.enter_async_context(running_envoy(chosen, tmp_path))
        return await opened.enter_async_context(http_client(envoy))

    return start


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"client_cert_path": "gateway/"}, 200),
        (
            {
                "client_cert_path": "gateway/",
                "picker_ca_file": "picker/tls.crt",
                "picker_server_name": "localhost",
            },
            200,
        ),
        ({"client_cert_path": "gateway/", "picker_ca_file": "stranger/tls.crt"}, 500),
        (
            {
                "client_cert_path": "gateway/",
                "picker_ca_file": "picker/tls.crt",
                "picker_server_name": "elsewhere",
            },
            500,
        ),
        ({"client_cert_path": "stranger/"}, 500),
        ({}, 500),
    ],
    ids=["known", "both verified", "wrong authority", "wrong name", "unknown", "no certificate"],
)
async def test_only_who_shows_a_certificate_of_the_authority_is_answered(secured, options, status):
    """And Envoy speaks only to a picker that it can verify, where it was told how."""
    client = await secured(**options)
    assert (await ask(client))[0] == status
