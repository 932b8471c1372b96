"""Pickers and pods that go away, asked to or not, and what that costs their clients."""

import asyncio
import hashlib
import io
import time
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import pytest

from epp.flags.values import BodyMode
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.picker import running_picker
from tests.envoy.process import running_epp
from tests.envoy.rig import RawConnection, ext_proc, http_client, running_envoy, until
from tests.envoy.upstream import running_pods, sse_event, sse_stream

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
EVENTS = 40
HALF = b"".join(map(sse_event, range(EVENTS // 2)))
REST = sse_stream(EVENTS)[len(HALF) :]


def body(prompt="p"):
    return b'{"model":"m","prompt":"%b","stream":true}' % prompt.encode()


@pytest.fixture
def behind_envoy(opened, tmp_path, transport):
    """Start pods, `epp serve` as a process and an Envoy with the given options."""

    async def start(*flags, pods=1, edit=None, plaintext=True, **options):
        served = await opened.enter_async_context(running_pods(pods))
        flags = (f"--secure-serving={str(not plaintext).lower()}", *flags)
        flags = (f"--transport={transport}", *flags)
        epp = await opened.enter_async_context(running_epp(tmp_path, served, *flags))
        chosen = BootstrapOptions(picker_address=epp.address, plaintext=plaintext, **options)
        envoy = await opened.enter_async_context(running_envoy(chosen, tmp_path, edit))
        client = http_client(envoy)
        return served, epp, await opened.enter_async_context(client)

    return start


async def read_half(client):
    """Ask for a stream and read its first half; the pod waits before the second."""
    headers = {"x-test-events": str(EVENTS), "x-test-pause-after": str(EVENTS // 2)}
    response = await client.post(PATH, data=body(), headers=headers)
    assert await response.content.readexactly(len(HALF)) == HALF
    return response


async def read_rest(response):
    """The second half, or None if it was cut."""
    try:
        return await response.content.read()
    except aiohttp.ClientPayloadError:
        return None
    finally:
        response.close()


async def half_read(client, count):
    return await asyncio.gather(*(read_half(client) for _ in range(count)))


async def rest_of(responses):
    return Counter(await asyncio.gather(*map(read_rest, responses)))


async def status_of(client, prompt="p"):
    async with client.post(PATH, data=body(prompt)) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("drain", range(3))
async def test_responses_that_bypass_the_picker_outlive_it(drain, behind_envoy):
    """NONE: on SIGTERM the picker is gone with 0 while 100 clients read on, to the last byte."""
    (pod,), epp, client = await behind_envoy("--drain-grace", "200ms", "--drain-timeout", "20s")
    responses = await half_read(client, 100)
    epp.terminate()
    assert await epp.exit_code() == 0
    pod.resume.set()
    assert await rest_of(responses) == {REST: 100}


@pytest.mark.parametrize("drain", range(3))
async def test_responses_through_the_picker_are_served_to_their_end(drain, behind_envoy):
    """Full duplex: on SIGTERM the picker stays until 100 clients have the last byte, then is gone
    with 0."""
    (pod,), epp, client = await behind_envoy(
        *("--drain-grace", "200ms", "--drain-timeout", "20s"),
        response_body_mode=BodyMode.FULL_DUPLEX_STREAMED,
    )
    responses = await half_read(client, 100)
    epp.terminate()

    async def not_ready():
        return not await epp.is_ready()

    await until(not_ready, "the drain")
    # Whoever still comes is served, also after the grace.
    grace_ends_s = time.monotonic() + 0.3
    while time.monotonic() < grace_ends_s:
        assert await status_of(client) == 200
    pod.resume.set()
    assert await rest_of(responses) == {REST: 100}
    assert await epp.exit_code() == 0


@pytest.fixture
def unrecorded(opened, tmp_path):
    """A pod, the picker in this loop and an Envoy; no recorder whose own streams could break."""

    async def start(**options):
        (pod,) = await opened.enter_async_context(running_pods(1))
        picker = await opened.enter_async_context(running_picker([pod]))
        chosen = BootstrapOptions(picker_address=picker.address, plaintext=True, **options)
        envoy = await opened.enter_async_context(running_envoy(chosen, tmp_path))
        return pod, picker, envoy

    return start


async def test_a_body_on_its_way_through_a_draining_picker_arrives(unrecorded, opened):
    """A pod that reads slowly holds up the 8 MB that the picker passes back: the drain waits."""
    pod, picker, envoy = await unrecorded()
    client = await opened.enter_async_context(http_client(envoy))
    sent = body("p" * 8_000_000)
    note, open_at_drain = picker.witness.decided, []

    def drain():
        picker.server.end_bypassed()
        open_at_drain.append(picker.server.open_streams)

    def decided(exchange):
        note(exchange)
        # In the next turn of the loop all of the body is with the transport, and little of it is out.
        asyncio.get_running_loop().call_soon(drain)

    picker.witness.decided = decided

    async def send():
        headers = {"x-test-hold-body": "1"}
        async with client.post(PATH, data=io.BytesIO(sent), headers=headers) as response:
            await response.read()
            return response.status

    sending = asyncio.create_task(send())
    await until(lambda: pod.serving and open_at_drain, "the pod to have the headers")
    assert open_at_drain == [1]
    pod.resume.set()
    assert await asyncio.wait_for(sending, 10) == 200
    assert pod.received[0].body_sha256 == hashlib.sha256(sent).hexdigest()
    await until(lambda: not picker.server.open_streams, "the stream to end")


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.NONE])
async def test_a_body_that_comes_after_the_drain_arrives(mode, unrecorded):
    """The destination is known since the headers: Envoy sends the rest on without the picker."""
    pod, picker, envoy = await unrecorded(request_body_mode=mode)
    sent = body("p" * 500_000)
    async with RawConnection.open(envoy.port) as connection:
        await connection.send_head("POST", PATH, content_length=len(sent))
        await connection.send(sent[:100_000])
        await until(lambda: picker.witness.decisions, "the request to be routed")
        picker.server.end_bypassed()
        await until(lambda: not picker.server.open_streams, "the stream to end")
        await connection.send(sent[100_000:])
        assert (await connection.read_head())[0] == 200
    assert pod.received[0].body_sha256 == hashlib.sha256(sent).hexdigest()


async def test_a_draining_picker_is_not_ready_but_still_serves(behind_envoy):
    """For the grace period gateways that have not noticed yet lose nothing."""
    _, epp, client = await behind_envoy("--drain-grace", "20s", "--drain-timeout", "20s")
    assert await status_of(client) == 200
    epp.terminate()

    async def not_ready():
        return not await epp.is_ready()

    await until(not_ready, "readiness to end")
    assert await status_of(client) == 200
    epp.terminate()
    assert await epp.exit_code() == 0


@asynccontextmanager
async def forwarding(targets):
    """A port whose new connections go to the first of `targets`, as a Service sends them to whoever
    is ready; those that are open stay where they are."""
    carrying = set()

    async def carry(reader, writer):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", targets[0])

        async def copy(source, sink):
            while chunk := await source.read(65_536):
                sink.write(chunk)
                await sink.drain()
            sink.close()

        carrying.add(asyncio.current_task())
        try:
            await asyncio.gather(
                copy(reader, other_writer), copy(other_reader, writer), return_exceptions=True
            )
        finally:
            writer.close()
            other_writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


class ClosedLoop:
    """So many clients, each of which asks again as soon as it has its answer."""

    def __init__(self, client, pods, clients=16):
        self.statuses = Counter()
        self._client = client
        self._pods = pods
        self._stop = False
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self):
        while not self._stop:
            self.statuses[await status_of(self._client)] += 1
            for pod in self._pods:
                pod.received.clear()
            # Two to three hundred requests a second in all.
            await asyncio.sleep(0.05)

    async def more(self, count):
        wanted = self.statuses.total() + count
        await until(lambda: self.statuses.total() >= wanted, f"{count} more requests")

    async def end(self):
        self._stop = True
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("way", ["clings to its connection", "asks for health"])
async def test_a_drain_refuses_nobody(way, transport, opened, tmp_path):
    """At hundreds of requests a second through two pickers, one of which goes: none fails, whether
    the gateway learns it by a GOAWAY alone or by a health check."""
    pods = await opened.enter_async_context(running_pods(2))
    pickers = []
    for name in ("leaving", "staying"):
        (tmp_path / name).mkdir()
        flags = ("--secure-serving=false", "--drain-grace=500ms", "--drain-timeout=20s")
        if way.startswith("clings"):
            # On grpcio connections come of age after 2 s.
            flags = (*flags[:2], "--drain-timeout=5s")
        running = running_epp(tmp_path / name, pods, f"--transport={transport}", *flags)
        pickers.append(await opened.enter_async_context(running))
    leaving, staying = pickers
    targets = [leaving.port, staying.port]
    port = await opened.enter_async_context(forwarding(targets))

    def edit(document):
        (found,) = (c for c in document["static_resources"]["clusters"] if c["name"] == "ext_proc")
        if way.startswith("clings"):
            del found["health_checks"]
            return
        places = found["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = {"address": "127.0.0.1", "port_value": staying.port}
        places.append({"endpoint": {"address": {"socket_address": address}}})

    address = f"127.0.0.1:{port}" if way.startswith("clings") else leaving.address
    options = BootstrapOptions(picker_address=address, plaintext=True)
    envoy = await opened.enter_async_context(running_envoy(options, tmp_path, edit))
    traffic = ClosedLoop(await opened.enter_async_context(http_client(envoy)), pods)
    await traffic.more(200)
    targets.remove(leaving.port)
    leaving.terminate()
    assert await leaving.exit_code() == 0
    await traffic.more(200)
    await traffic.end()
    assert set(traffic.statuses) == {200}


def end_at_response_headers(document):
    ext_proc(document)["processing_mode"]["response_trailer_mode"] = "SKIP"


SAVED_BY_ENVOY = [
    # request mode, response mode, fail open, edit: streams that survive of 10 under way, and of 5
    # whose response has not begun
    (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE, False, None, 0, 0),
    (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE, True, None, 0, 0),
    (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE, False, end_at_response_headers, 10, 0),
    (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED, True, None, 0, 0),
    (BodyMode.BUFFERED, BodyMode.NONE, False, None, 0, 0),
    (BodyMode.BUFFERED, BodyMode.NONE, True, None, 10, 5),
    (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED, True, None, 0, 5),
    (BodyMode.STREAMED, BodyMode.STREAMED, True, None, 10, 5),
]


@pytest.mark.parametrize(
    ("request_mode", "response_mode", "fail_open", "edit", "under_way", "not_begun"),
    SAVED_BY_ENVOY,
)
async def test_a_killed_picker_costs_what_envoy_cannot_save(
    request_mode, response_mode, fail_open, edit, under_way, not_begun, behind_envoy
):
    """Envoy 1.40 ends a request whose ext_proc stream breaks, unless it fails open and neither the
    request nor the response under way is full duplex; a stream that has ended cannot break."""
    (pod,), epp, client = await behind_envoy(
        request_body_mode=request_mode,
        response_body_mode=response_mode,
        fail_open=fail_open,
        edit=edit,
    )
    responses = await half_read(client, 10)
    headers = {"x-test-hold": "1"}
    held = [asyncio.create_task(hold(client, headers)) for _ in range(5)]
    await until(lambda: pod.serving == 15, "the pod to work on all of them")
    await epp.kill()
    await until(lambda: pod.serving == under_way + not_begun, "Envoy to notice")
    pod.resume.set()
    assert await rest_of(responses) == Counter({REST: under_way, None: 10 - under_way})
    assert Counter(await asyncio.gather(*held)) == Counter({200: not_begun, 500: 5 - not_begun})


async def hold(client, headers):
    async with client.post(PATH, data=body(), headers=headers) as response:
        await response.read()
        return response.status


async def test_a_restarted_picker_is_found_again(behind_envoy):
    """While it is down a request fails at once; when it is back requests are served."""
    _, epp, client = await behind_envoy()
    assert await status_of(client) == 200
    await epp.kill()
    assert await status_of(client) in (500, 503)
    await epp.start("--secure-serving=false")

    async def served():
        return await status_of(client) == 200

    await until(served, "a request to be served again")


@pytest.mark.parametrize("plaintext", [True, False], ids=["plaintext", "tls"])
async def test_two_pods_die_and_come_back(plaintext, behind_envoy):
    """A few requests fail, then the other two pods serve everything; once they are back the two
    get work again."""
    pods, _, client = await behind_envoy(pods=4, plaintext=plaintext)
    numbers = iter(range(100_000))

    async def ask():
        return await status_of(client, f"prompt number {next(numbers)}")

    async def asked_of_each(which):
        before = [len(pod.received) for pod in which]

        async def each():
            assert await ask() == 200
            return all(len(p.received) > b for p, b in zip(which, before, strict=True))

        await until(each, "each of the pods to be asked")

    await asked_of_each(pods)
    dying = pods[:2]
    for pod in dying:
        await pod.stop()
    failed = 0

    async def twenty_served():
        nonlocal failed
        statuses = Counter([await ask() for _ in range(20)])
        failed += statuses[503]
        return statuses[200] == 20

    await until(twenty_served, "twenty requests in a row to be served")
    # Two failures in a row set a pod aside; what was under way may add to them.
    assert failed <= 8
    for pod in dying:
        await pod.start()
    await asked_of_each(pods)
