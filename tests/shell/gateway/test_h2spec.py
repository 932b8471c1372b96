"""h2spec's 145 cases against the default transport: each passes, or it stands here why not.

A case that begins to fail fails the test, and so does one that begins to pass: then its row goes.
"""

import asyncio
import os
import re
from contextlib import asynccontextmanager, suppress

import pytest

from tests.go_program import GoProgramError
from tests.shell.gateway.h2spec import H2SPEC
from tests.shell.gateway.test_http2 import PATH, Service
from tests.transports import carried

CASES = 145

_IGNORED = (
    "the engine keeps no record of streams that are closed and ignores what still comes for them, "
    "which RFC 9113 (5.1) leaves to it; the bytes are acknowledged"
)
_PRIORITY = "RFC 9113 (5.3.2) has done away with priorities, and the engine ignores their frames"

EXPLAINED = {
    "http2/5.1/8": _IGNORED,
    "http2/5.1/9": _IGNORED,
    "http2/5.1/11": _IGNORED,
    "http2/5.1/12": _IGNORED,
    "http2/5.1.1/2": _IGNORED + "; a stream that was skipped counts as closed",
    "http2/5.3.1/2": _PRIORITY,
    "http2/6.3/1": _PRIORITY,
    "http2/6.9.1/3": (
        "the engine answers a window above 2^31-1 of a stream with FLOW_CONTROL_ERROR for the whole "
        "connection, and h2spec wants it for the stream; a gateway that does this is broken"
    ),
}

TOGETHER_S = 0.02
"""What a client sends within this time comes in one piece: many cases send on behind a request
without waiting, and would otherwise depend on whether its answer is faster."""

_SUITES = {"Generic": "generic", "Hypertext": "http2", "HPACK": "hpack"}


@asynccontextmanager
async def together(port):
    """A port from which all goes on to `port`, a little later."""
    relays = set()

    async def on(reader, writer, wait_s):
        with suppress(OSError):
            while data := await reader.read(1 << 20):
                writer.write(data)
                await writer.drain()
                # Here what comes next is collected by the reader.
                await asyncio.sleep(wait_s)

    async def relay(reader, writer):
        served, serving = await asyncio.open_connection("127.0.0.1", port)
        ways = [asyncio.create_task(on(reader, serving, TOGETHER_S))]
        ways.append(asyncio.create_task(on(served, writer, 0.0)))
        try:
            # Whoever closes, closes for both.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (serving, writer):
                end.close()
            await asyncio.gather(
                *ways, serving.wait_closed(), writer.wait_closed(), return_exceptions=True
            )

    def accepted(reader, writer):
        relays.add(asyncio.get_running_loop().create_task(relay(reader, writer)))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for running in relays:
            running.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


def outcomes(told):
    """Case -> whether it passed, from what h2spec prints before its list of failures."""
    found, suite, section = {}, "", ""
    for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", told)):
        if line.startswith("Failures"):
            break
        first = line.split(" ", 1)[0].rstrip(":")
        suite = _SUITES.get(first, suite)
        heading = re.match(r"\s+(\d+(?:\.\d+)*)\. ", line)
        if heading:
            section = heading[1]
        for sign, number in re.findall(r"([✔×]) (\d+): ", line):
            found[f"{suite}/{section}/{number}"] = sign == "✔"
    return found


async def test_every_case_passes_or_is_explained():
    """With a client that is a gateway in nothing but HTTP/2."""
    try:
        command = H2SPEC.find(os.environ)
    except GoProgramError as error:
        pytest.skip(str(error))
    async with carried(Service().transport()) as port, together(port) as before:
        process = await asyncio.create_subprocess_exec(
            *(command, "-h", "127.0.0.1", "-p", str(before), "-P", PATH, "-o", "2"),
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await asyncio.wait_for(process.communicate(), 55)
    passed = outcomes(told.decode(errors="replace"))
    assert len(passed) == CASES, told.decode(errors="replace")
    assert {case for case, went_well in passed.items() if not went_well} == set(EXPLAINED)


def test_h2spec_that_is_not_there_is_a_sentence(tmp_path):
    """Which says how to have it."""
    with pytest.raises(GoProgramError, match="run `make h2spec`"):
        H2SPEC.find({"XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(GoProgramError, match="is no program"):
        H2SPEC.find({"H2SPEC": str(tmp_path / "nothing")})
    with pytest.raises(GoProgramError, match="no go on PATH"):
        H2SPEC.build({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})
