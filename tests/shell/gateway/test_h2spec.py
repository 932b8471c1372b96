"""h2spec's 145 cases against both transports: each passes, or it stands here why not.

A case that begins to fail fails the test, and so does one that begins to pass: then its row goes.
What grpcio does with HTTP/2 is gRPC's core and nothing of ours: what fails there is told, not mended.
"""

import asyncio
import os
import re
from contextlib import asynccontextmanager, suppress

import pytest

from tests.go_program import GoProgramError
from tests.shell.gateway.h2spec import H2SPEC
from tests.shell.gateway.test_http2 import PATH, Service
from tests.transports import carried, transport_of

CASES = 145

_IGNORED = (
    "the engine keeps no record of streams that are closed and ignores what still comes for them, "
    "which RFC 9113 (5.1) leaves to it; the bytes are acknowledged"
)
_PRIORITY = "RFC 9113 (5.3.2) has done away with priorities, and the engine ignores their frames"

NGH2 = {
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

GRPCIO = {
    "h2spec's request is no call of gRPC, and the core resets its stream, where h2spec wants headers or "
    "data of an answer": """
        generic/2/2 generic/2/3 generic/3.2/1 generic/3.2/3 generic/3.3/1 generic/3.3/2 generic/3.3/3
        generic/3.3/4 generic/3.3/5 generic/3.9/2 generic/3.10/1 generic/3.10/2 generic/4/1
        generic/5/1 generic/5/2 generic/5/3 generic/5/4 generic/5/5 generic/5/6 generic/5/7 generic/5/8
        generic/5/9 generic/5/10 generic/5/11 generic/5/12 generic/5/13 generic/5/14 generic/5/15
        http2/6.10/1
        """,
    "the answer to it has no data whose flow h2spec could look at": """
        http2/6.5.3/1 http2/6.9.1/1 http2/6.9.2/1 http2/6.9.2/2
        """,
    "the core widens the window of the connection first, where h2spec wants the next frame to be of "
    "the stream; bytes of streams that are over are acknowledged so too": """
        generic/3.1/1 generic/3.1/2 generic/3.1/3 generic/4/3 generic/4/4 http2/4.2/1 http2/5.1/5
        http2/6.1/2 http2/6.1/3 http2/8.1.2.6/1 http2/8.1.2.6/2
        """,
    "frames of streams that are idle, over or nobody's are ignored, and so is what they hold; where "
    "h2spec wants an error of the connection it goes on for everybody else": """
        generic/2/5 http2/5.1/1 http2/5.1/2 http2/5.1/3 http2/5.1/6 http2/5.1/8 http2/5.1/9 http2/5.1/11
        http2/5.1/12 http2/5.1/13 http2/5.1.1/1 http2/5.1.1/2 http2/6.1/1 http2/6.2/3 http2/6.2/4
        http2/6.4/1 http2/6.4/2 http2/6.8/1 http2/8.2/1
        """,
    "the core has no priorities (RFC 9113, 5.3.2) and ignores their frames": """
        http2/5.3.1/1 http2/5.3.1/2 http2/6.3/1 http2/6.3/2
        """,
    "headers that HTTP forbids are dropped, or answered by an error of gRPC in headers (415, "
    "UNIMPLEMENTED), where h2spec wants the stream reset": """
        http2/8.1.2/1 http2/8.1.2.1/1 http2/8.1.2.1/2 http2/8.1.2.1/4 http2/8.1.2.2/1 http2/8.1.2.2/2
        http2/8.1.2.3/1 http2/8.1.2.3/2 http2/8.1.2.3/3 http2/8.1.2.3/4 http2/8.1.2.3/5
        http2/8.1.2.3/6 http2/8.1.2.3/7
        """,
    "a string of Huffman's code with too much padding ends its stream, not the connection": """
        hpack/5.2/1
        """,
    "a window above 2^31-1 is taken as it is; the core never has as much to send": """
        http2/6.9.1/2 http2/6.9.1/3
        """,
    "a ping of a wrong length or stream is answered": "http2/5.4.1/1 http2/6.7/3",
    "a ping with an unknown flag or the reserved bit closes the connection; no gateway sends one": "http2/4.1/2 http2/4.1/3",
    "each of its streams is reset at once, so that there are never too many": "http2/5.1.2/1",
}
"""Reason -> cases."""

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


async def cases_of(transport, patience_s):
    """Case -> whether it passed, of a client that is a gateway in nothing but HTTP/2.

    Skips where there is no h2spec. `patience_s` is whole seconds for each case.
    """
    try:
        command = H2SPEC.find(os.environ)
    except GoProgramError as error:
        pytest.skip(str(error))
    async with carried(transport) as port, together(port) as before:
        process = await asyncio.create_subprocess_exec(
            *(command, "-h", "127.0.0.1", "-p", str(before), "-P", PATH, "-o", str(patience_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await process.communicate()
    passed = outcomes(told.decode(errors="replace"))
    assert len(passed) == CASES, told.decode(errors="replace")
    return passed


def failed(passed):
    return {case for case, went_well in passed.items() if not went_well}


async def test_every_case_passes_or_is_explained():
    assert failed(await cases_of(Service().transport(), 2)) == set(NGH2)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_every_case_passes_or_is_explained_on_grpcio():
    """Three minutes: much of what it ignores, h2spec waits for."""
    transport = transport_of("grpcio", {PATH: Service().open})
    explained = {case for cases in GRPCIO.values() for case in cases.split()}
    assert failed(await cases_of(transport, 2)) == explained


def test_h2spec_that_is_not_there_is_a_sentence(tmp_path):
    """Which says how to have it."""
    with pytest.raises(GoProgramError, match="run `make h2spec`"):
        H2SPEC.find({"XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(GoProgramError, match="is no program"):
        H2SPEC.find({"H2SPEC": str(tmp_path / "nothing")})
    with pytest.raises(GoProgramError, match="no go on PATH"):
        H2SPEC.build({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})
