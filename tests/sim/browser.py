"""Pages in a real browser: headless Chromium, spoken to through its debugging port."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from itertools import count

import pytest
from aiohttp import ClientSession

STARTS_IN_S = 30.0
PHONE = (390, 844)
DESKTOP = (1280, 900)


def chromium():
    """Return the command of Chromium, or skip the test and say what is missing."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no chromium on PATH; the Debian package chromium has it")
    return found


class Browser:
    """One tab, which `browser` opens."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = count(1)

    async def call(self, method, **parameters):
        """Send a command of the debugging protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=STARTS_IN_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def show(self, path, size=DESKTOP, scheme="light"):
        """Open a file or a URL as a screen of `size` with that colour scheme shows it."""
        width, height = size
        # A phone lays out as the page's viewport says, and has no scroll bars beside the page.
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        url = path if isinstance(path, str) else path.resolve().as_uri()
        await self.call("Page.navigate", url=url)
        await self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done()"
            " : window.addEventListener('load', () => done()))"
        )

    async def evaluate(self, expression):
        """Return the value of a JavaScript expression; wait for it if it is a promise."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@contextlib.asynccontextmanager
async def browser():
    """Yield the tab of a new Chromium, which ends with the context."""
    with tempfile.TemporaryDirectory(prefix="homing-browser-", ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update",
            "--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"HOME": home}, start_new_session=True,
        )  # fmt: skip
        try:
            port = await asyncio.wait_for(_port(process.stderr), STARTS_IN_S)
            drained = asyncio.create_task(process.stderr.read())
            async with ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with client.ws_connect(address, max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            # With all that it has started, which would outlive it for a moment.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await drained


async def _port(errors):
    """Return the debugging port, which Chromium prints on standard error."""
    while line := await errors.readline():
        _, found, address = line.decode().partition("DevTools listening on ws://")
        if found:
            return int(address.split("/")[0].rpartition(":")[2])
    raise AssertionError("Chromium ended before it listened")
