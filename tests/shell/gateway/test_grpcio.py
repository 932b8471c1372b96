"""What only grpcio needs; what it has in common with others is in `test_transports_agree`."""

import asyncio
import ctypes
import subprocess
import sys

import grpc.aio
import pytest

from epp.shell.gateway.grpcio import _GrpcioWire
from tests.streams import TIMEOUT_S


class Reading:
    """A context whose messages come when we say so, and how its reads ended."""

    def __init__(self):
        self.messages = asyncio.Queue()
        self.asked = asyncio.Event()
        self.ended = []

    async def read(self):
        self.asked.set()
        try:
            message = await self.messages.get()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append(message)
        return message


async def test_a_read_goes_on_to_its_end_when_its_stream_is_cancelled():
    """Or grpcio would never free what it has allocated for it."""
    context, reads = Reading(), set()
    wire = _GrpcioWire(context, asyncio.current_task(), reads, 0.0)
    waiting = asyncio.create_task(wire.read())
    await asyncio.wait_for(context.asked.wait(), TIMEOUT_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (reading,) = reads
    context.messages.put_nowait(grpc.aio.EOF)
    await asyncio.wait_for(asyncio.wait({reading}), TIMEOUT_S)
    assert context.ended == [grpc.aio.EOF]
    assert not reads


_LEFT_PER_STREAM = """
import asyncio, ctypes, gc, sys
import grpc.aio
from epp.shell.gateway.grpcio import GrpcioServer
from tests.transports import carried

STREAMS = 2_000
waits = sys.argv[1] == "True"
SIZES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in SIZES]

class Echo:
    ended = None
    def __init__(self, wire): self.wire = wire
    def receive(self, message): return (message,)
    def half_close(self): return ()
    def sent(self):
        # It comes when the next message is waited for.
        if waits: self.wire.push(b"waiting")
    def closed(self, status): ended.append(status)

ended = []
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

async def served(port):
    asked = await asyncio.create_subprocess_exec(sys.executable, "-c", ASK, str(port), str(waits))
    assert await asked.wait() == 0
    while len(ended) % STREAMS:
        await asyncio.sleep(0.01)
    gc.collect()
    return mallinfo().uordblks

async def main():
    server = GrpcioServer({"/a.S/M": lambda peer, wire: Echo(wire)}, receive_bytes_max=10_000)
    async with carried(server) as port:
        await served(port)
        before = await served(port)
        print((await served(port) - before) / STREAMS)

ASK = '''
import asyncio, sys
import grpc.aio

WAITS = sys.argv[2] == "True"

async def main():
    async with grpc.aio.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
        ask = channel.stream_stream("/a.S/M")
        async def one():
            call = ask()
            await call.write(b"x")
            await call.read()
            if WAITS:
                await call.read()
            call.cancel()
        for _ in range(100):
            await asyncio.gather(*(one() for _ in range(20)))

asyncio.run(main())
'''
asyncio.run(main())
"""


@pytest.mark.parametrize("waits", [True, False], ids=["at a read", "at any time"])
def test_streams_that_are_reset_leave_nothing_behind(waits):
    """Of the allocator's blocks; a read or write that is lost would leave 100 bytes or more."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("only glibc from 2.33 on tells what is allocated")
    told = subprocess.run(
        [sys.executable, "-c", _LEFT_PER_STREAM, str(waits)],
        capture_output=True,
        check=True,
        text=True,
        timeout=55,
    )
    assert float(told.stdout) < 50
