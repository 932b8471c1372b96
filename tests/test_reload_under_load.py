"""A ConfigMap is changed under the full load of a gateway, as the kubelet changes it."""

import asyncio
import time

import grpc
import grpc.aio
import pytest
from aiohttp import ClientSession
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from tests import gateway as gw
from tests.app.test_wiring import PREFIX_FIRST, QUEUE_FIRST
from tests.envoy.process import running_epp
from tests.envoy.rig import until
from tests.envoy.upstream import running_pods
from tests.streams import PROCESS, TIMEOUT_S, channel_to

REQUESTS_PER_S = 200
LASTS_S = 10
SWAP_AFTER_S = 3
APPLIED_WITHIN_S = 3.0
"""What operators are promised: a second of polling, and time to spare."""
HEADERS = gw.request_headers(modes=gw.protocol())
BODY = gw.request_body(gw.prompt("once upon a time " * 100))
DONE = gw.response_headers(end=True)


class Mounted:
    """A directory as the kubelet mounts a ConfigMap: the file is a link through `..data`."""

    def __init__(self, directory, text):
        self._directory = directory
        self._version = 0
        self.file = directory / "config.yaml"
        directory.mkdir()
        self.write(text)
        self.file.symlink_to("..data/config.yaml")

    def write(self, text):
        """A directory beside the last one, then one rename of the link to it."""
        self._version += 1
        data = self._directory / f"..2026_11_21_{self._version}"
        data.mkdir()
        (data / "config.yaml").write_text(text)
        (self._directory / "..data_tmp").symlink_to(data.name)
        (self._directory / "..data_tmp").replace(self._directory / "..data")


class Load:
    """Requests at a steady rate whatever the answers do; each is a stream, told to its end."""

    def __init__(self, channels):
        self._channels = channels
        self.failures = []
        self.decided = []
        """(when it was asked, when it was answered, destination)"""

    async def run(self):
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as requests:
            for number in range(REQUESTS_PER_S * LASTS_S):
                due_s = started_s + number / REQUESTS_PER_S - time.monotonic()
                if due_s > 0:
                    await asyncio.sleep(due_s)
                requests.create_task(self.request(number))

    async def request(self, number=0):
        call = self._channels[number % len(self._channels)].stream_stream(PROCESS)(
            timeout=TIMEOUT_S
        )
        asked_s = time.monotonic()
        try:
            await call.write(HEADERS)
            await call.write(BODY)
            head = ProcessingResponse.FromString(await call.read())
            self.decided.append((asked_s, time.monotonic(), destination(head)))
            ProcessingResponse.FromString(await call.read())
            await call.write(DONE)
            await call.read()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        except (grpc.aio.AioRpcError, AssertionError, TypeError) as error:
            self.failures.append(repr(error))


def destination(head):
    mutation = head.request_headers.response.header_mutation.set_headers
    (found,) = [
        option.header.raw_value.decode()
        for option in mutation
        if option.header.key == "x-gateway-destination-endpoint"
    ]
    return found


@pytest.mark.timeout(60)
async def test_weights_change_under_load_without_a_lost_request(tmp_path):
    """New weights within 3 s, no error, no reset, and the index knows what it knew before."""
    mounted = Mounted(tmp_path / "mounted", PREFIX_FIRST)
    flags = (
        f"--config-file={mounted.file}",
        "--secure-serving=false",
        # On a machine that is busy with other tests no scrape may decide.
        "--metrics-staleness-threshold=60s",
    )
    async with (
        running_pods(2) as (holder, idle),
        running_epp(tmp_path, (holder, idle), *flags) as epp,
        channel_to(epp.address, use_local_subchannel_pool=1) as first,
        channel_to(epp.address, use_local_subchannel_pool=1) as second,
        ClientSession(f"http://127.0.0.1:{epp.metrics_port}") as pages,
    ):

        async def page(name):
            async with pages.get(f"/debug/{name}?format=json") as response:
                return await response.json()

        async def waiting():
            endpoints = (await page("endpoints"))["endpoints"]
            return [at["waiting"] for at in endpoints if at["state"] == "ready"]

        # One endpoint has the prompt, the other one the shorter queue: the weights decide.
        idle.waiting_requests = 10
        await until(lambda: _equal(waiting(), [0, 10]), "both to be scraped")
        load = Load((first, second))
        await load.request()
        holder.waiting_requests, idle.waiting_requests = 10, 0
        await until(lambda: _equal(waiting(), [10, 0]), "the queues to be seen")

        running = asyncio.create_task(load.run())
        await asyncio.sleep(SWAP_AFTER_S)
        swapped_s = time.monotonic()
        mounted.write(QUEUE_FIRST)
        await running

        assert load.failures == []
        assert len(load.decided) == 1 + REQUESTS_PER_S * LASTS_S
        before = {at for _, answered_s, at in load.decided if answered_s <= swapped_s}
        assert before == {holder.address}
        anew_s = min(answered_s for _, answered_s, at in load.decided if at == idle.address)
        assert anew_s - swapped_s <= APPLIED_WITHIN_S
        after = {at for asked_s, _, at in load.decided if asked_s > anew_s}
        assert after == {idle.address}, "from then on every decision is made with the new weights"
        print(f"first decision with the new weights after {anew_s - swapped_s:.2f} s")

        assert (await page("config"))["generation"] == 2
        last = (await page("decisions"))["decisions"][0]
        scores = {score["endpoint"]: score["parts"] for score in last["scores"]}
        assert scores[holder.name]["prefix-cache-scorer"] == 1.0, "the index was kept"


async def _equal(found, expected):
    return await found == expected
