"""Every proof of a fault of make chaos: it passes with the fault, and fails without it."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from bench.chaos.effects import (
    OF_POD,
    LeavingPicker,
    PartedPickers,
    RisingCounter,
    SilentServer,
)
from bench.chaos.pods import Fault, FaultyPod
from bench.effect import ClosedPort, NoEffectError, StoppedProcess

OF_PODS = [fault for fault in Fault if fault is not Fault.NONE]


@contextlib.asynccontextmanager
async def served(application):
    """Serve `application` on loopback and yield its port."""
    server = TestServer(application)
    await server.start_server()
    try:
        yield server.port
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def faulty_pod():
    """A pod with a running engine; yields its port."""
    faulty = FaultyPod(port=0)
    async with served(faulty.application()) as port:
        running = asyncio.create_task(faulty.pod.run())
        try:
            yield port
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def process():
    """A process that waits for its end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE
    )
    try:
        yield child.pid
    finally:
        child.kill()
        await child.wait()


async def inject(port, fault):
    async with ClientSession() as session, session.post(f"http://127.0.0.1:{port}/fault/{fault}"):
        pass


def test_every_fault_of_a_pod_has_a_proof():
    """A fault that is added without a proof fails here."""
    assert set(OF_POD) == set(OF_PODS)


@pytest.mark.parametrize("fault", OF_PODS)
async def test_a_fault_of_a_pod_is_seen_at_the_pod(fault):
    async with faulty_pod() as port:
        effect = OF_POD[fault](port)
        await effect.before()
        await inject(port, fault)
        await effect.during()


@pytest.mark.parametrize("fault", OF_PODS)
async def test_a_pod_without_the_fault_is_no_proof(fault):
    async with faulty_pod() as port:
        effect = OF_POD[fault](port)
        await effect.before()
        with pytest.raises(NoEffectError, match="the fault did not take effect"):
            await effect.during()


async def test_a_slow_pod_whose_page_is_true_does_not_lie():
    """The proof of a lying page is more than that of a slow pod."""
    async with faulty_pod() as port:
        effect = OF_POD[Fault.LIES](port)
        await effect.before()
        await inject(port, Fault.SLOW)
        with pytest.raises(NoEffectError, match="running requests on the page"):
            await effect.during()


async def test_a_process_that_was_stopped_is_told_from_one_that_runs():
    async with process() as pid:
        effect = StoppedProcess(pid)
        await effect.before()
        with pytest.raises(NoEffectError, match="SIGSTOP"):
            await effect.during()
        os.kill(pid, signal.SIGSTOP)
        await effect.during()


async def test_a_port_that_still_accepts_is_not_closed():
    async with served(web.Application()) as port:
        effect = ClosedPort("server", port, s_max=0.2)
        await effect.before()
        with pytest.raises(NoEffectError, match="a connection is accepted"):
            await effect.during()
    await effect.during()


class Pages:
    """A picker's metrics and readiness pages, with values that a test sets."""

    def __init__(self):
        self.status = 200
        self.step = 1
        """Each read of the metrics page adds so much to its counters."""
        self._count = 0

    def application(self):
        application = web.Application()
        application.add_routes([web.get("/readyz", self.ready), web.get("/metrics", self.metrics)])
        return application

    async def ready(self, _):
        return web.Response(status=self.status)

    async def metrics(self, _):
        self._count += self.step
        return web.Response(
            text="# TYPE homing_peer_bytes counter\n"
            f'homing_peer_bytes_total{{direction="received"}} {self._count}\n'
            f'homing_peer_bytes_total{{direction="sent"}} 7\n'
            "# TYPE homing_capture_write_errors counter\n"
            f"homing_capture_write_errors_total {self._count}\n"
        )


async def test_a_picker_that_stays_ready_does_not_leave():
    pages = Pages()
    async with served(pages.application()) as port:
        effect = LeavingPicker(f"http://127.0.0.1:{port}", s_max=0.2)
        await effect.before()
        with pytest.raises(NoEffectError, match="reports that it is ready"):
            await effect.during()
        pages.status = 503
        await effect.during()
    await effect.during()


async def test_pickers_that_still_hear_each_other_are_not_parted():
    pages = Pages()
    async with served(pages.application()) as port:
        effect = PartedPickers([f"http://127.0.0.1:{port}"], quiet_s=0.05)
        await effect.before()
        with pytest.raises(NoEffectError, match="1 bytes received"):
            await effect.during()
        pages.step = 0
        await effect.during()


async def test_a_counter_that_stays_is_no_proof():
    pages = Pages()
    async with served(pages.application()) as port:
        url = f"http://127.0.0.1:{port}"
        effect = RisingCounter("disk", [url], "homing_capture_write_errors_total", s_max=0.2)
        await effect.before()
        await effect.during()
        pages.step = 0
        await effect.before()
        with pytest.raises(NoEffectError, match="stays at"):
            await effect.during()


async def test_a_server_that_answers_is_not_silent():
    answers = asyncio.Event()
    answers.set()

    async def collect(_):
        await answers.wait()
        return web.Response()

    application = web.Application()
    application.add_routes([web.post("/v1/traces", collect)])
    async with served(application) as port:
        effect = SilentServer(f"http://127.0.0.1:{port}/v1/traces", s_max=0.2)
        await effect.before()
        with pytest.raises(NoEffectError, match="an answer within"):
            await effect.during()
        answers.clear()
        await effect.during()
        answers.set()
