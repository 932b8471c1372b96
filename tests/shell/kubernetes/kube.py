"""Shared parts of the Kubernetes tests: short times, a client, waiting for a condition."""

import asyncio
import contextlib

from epp.shell.kubernetes.client import Credentials, KubeClient
from epp.shell.kubernetes.list_watch import Timing

FAST = Timing(
    page_objects=3,
    list_interval_s_min=0.05,
    watch_s=(5.0, 6.0),
    silence_s_max=0.6,
    reconnect_s=(0.001, 0.01),
    backoff_s=(0.01, 0.05),
    healthy_s=0.2,
    refused_s=0.1,
    retry_after_s_max=0.05,
)
"""Short delays for the fake server, which sends bookmarks every 0.05 s.

A watch is silent after 0.6 s without data. The periodic list never occurs in a test.
"""
WAIT_S = 20.0


async def eventually(condition, what="the condition"):
    """Wait until `condition()` is true.

    Raise an AssertionError that names `what` if it is still false after `WAIT_S`.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not come about in {WAIT_S:g} s") from None


@contextlib.asynccontextmanager
async def connected(server, folder, **arguments):
    """Yield a client of `server`, configured by a kubeconfig in `folder`."""
    credentials = Credentials({"KUBECONFIG": str(server.kubeconfig(folder))})
    async with KubeClient(credentials, timeout_s=0.6, **arguments) as client:
        yield client


@contextlib.asynccontextmanager
async def running(coroutine):
    """Run `coroutine` as a task beside the test; yield the task and cancel it at the end."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
