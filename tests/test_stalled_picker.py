"""A picker that gets no CPU for 250 of 350 ms: what its clients wait is in its own clocks."""

import asyncio
import json
import random
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress

import aiohttp
import grpc
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.shell.operators.live.live_view import Live
from epp.shell.process.loop_lag import BEAT_S
from tests import gateway as gw
from tests.envoy.rig import free_ports, start_process, until
from tests.streams import Call, channel_to
from tests.transports import TRANSPORTS

STOPPED_S = 0.25
RUNNING_S = 0.1
REQUESTS = 120
RATE = 40.0
"""Requests a second."""
SHARE = STOPPED_S / (STOPPED_S + RUNNING_S)
"""Of the time; who comes meanwhile waits half of `STOPPED_S` on average."""
ENDPOINT = {"name": "a", "address": "10.0.0.1", "port": 8000, "metrics": None}


class Picker:
    def __init__(self, process, grpc_port, metrics_port):
        self.process = process
        self.grpc_port = grpc_port
        self.metrics_port = metrics_port

    async def get(self, path):
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def ready(self):
        with suppress(aiohttp.ClientError):
            return (await self.get("/readyz"))[0] == 200
        return self.process.returncode is not None

    async def samples(self):
        """Values without labels, and those of buckets by their bound."""
        _, page = await self.get("/metrics")
        return {
            (sample.name, sample.labels.get("le")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    @asynccontextmanager
    async def stalled(self):
        """Inside it is stopped and goes on in turns."""

        async def stall():
            while True:
                self.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                self.process.send_signal(signal.SIGCONT)
                await asyncio.sleep(RUNNING_S)

        stalling = asyncio.create_task(stall())
        try:
            yield
        finally:
            stalling.cancel()
            await asyncio.gather(stalling, return_exceptions=True)
            self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def serving(folder, transport):
    grpc_port, health_port, metrics_port = free_ports(3)
    endpoints, log = folder / "endpoints.json", folder / "log"
    endpoints.write_text(json.dumps({"endpoints": [ENDPOINT]}))
    flags = (
        *(f"--endpoints-file={endpoints}", "--secure-serving=false", f"--transport={transport}"),
        *(f"--grpc-port={grpc_port}", f"--grpc-health-port={health_port}"),
        *(f"--metrics-port={metrics_port}", "--drain-grace=0s", "--drain-timeout=2s"),
    )
    process = await start_process(sys.executable, "-m", "epp", "serve", *flags, log=log)
    picker = Picker(process, grpc_port, metrics_port)
    try:
        await until(picker.ready, "the picker", 40)
        assert process.returncode is None, log.read_text()
        yield picker
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask(channel):
    """How long the destination took, as the gateway sees it."""
    call = Call(channel)
    began_s = time.monotonic()
    await call.exchange(gw.request_headers(), gw.request_body(gw.prompt()), answers=2)
    took_s = time.monotonic() - began_s
    await call.exchange(gw.response_headers(end=True), answers=1)
    assert await call.end() == grpc.StatusCode.OK
    return took_s


def grown(before, after, name, bound=None):
    return after[name, bound] - before[name, bound]


def mean_between(before, after, name):
    return grown(before, after, f"{name}_sum") / grown(before, after, f"{name}_count")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_clients_wait_for_a_stopped_picker_is_in_its_own_clocks(tmp_path, transport):
    """What the gateway measures has the way there and back in it besides, and its own delays."""
    dice = random.Random(1)
    async with (
        serving(tmp_path, transport) as picker,
        channel_to(f"127.0.0.1:{picker.grpc_port}") as channel,
    ):
        await ask(channel)
        before = await picker.samples()
        async with picker.stalled(), asyncio.TaskGroup() as tasks:
            asked = []
            for _ in range(REQUESTS):
                asked.append(tasks.create_task(ask(channel)))
                await asyncio.sleep(dice.expovariate(RATE))
        after = await picker.samples()
        _, page = await picker.get("/debug/live")
    waited_s = sum(task.result() for task in asked) / REQUESTS
    told_s = mean_between(before, after, "homing_request_processing_duration_seconds")
    assert told_s < 2 * waited_s
    assert told_s > mean_between(before, after, "homing_loop_lag_seconds") / 3

    lag, beats = "homing_loop_lag_seconds", grown(before, after, "homing_loop_lag_seconds_count")
    in_time = grown(before, after, f"{lag}_bucket", "0.02") / beats
    assert in_time < 1 - SHARE / 2, "most timers are late"
    assert mean_between(before, after, lag) > SHARE * STOPPED_S / 4
    cpu_s = grown(before, after, "homing_process_cpu_seconds_total")
    assert 0 < cpu_s < beats * BEAT_S, "a stopped process takes no CPU"
    assert after["homing_process_resident_memory_bytes", None] > 20_000_000

    process = msgspec.json.decode(page, type=Live).process
    assert process.lag_most_s > STOPPED_S / 2
    assert 0 < process.lag_mean_s < process.lag_most_s
    assert process.resident_bytes > 20_000_000
