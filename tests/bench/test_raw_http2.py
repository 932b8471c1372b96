"""The HTTP/2 client of the benchmarks: which of its streams count as lost."""

import asyncio

from bench.raw_http2 import (
    CANCEL,
    DATA,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    RawConnection,
    frame,
)

CODE = CANCEL.to_bytes(4, "big")
ANSWERED = frame(DATA, 0, 1, b"answer")
ENDED = frame(HEADERS, END_STREAM, 1)
RESET = frame(RST_STREAM, 0, 1, CODE)


async def lost_after(*frames):
    """Return whether the client's first stream is lost when the server sends `frames` and closes."""

    async def serve(reader, writer):
        await reader.readexactly(len(PREFACE))
        writer.write(b"".join(frames))
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await RawConnection.open(server.sockets[0].getsockname()[1])
        try:
            while not connection.closed:
                await connection.changed()
            return bool(connection.lost([1]))
        finally:
            await connection.close()


async def test_a_stream_is_served_by_data_and_an_end():
    assert not await lost_after(ANSWERED, ENDED)
    assert await lost_after(ANSWERED)
    assert await lost_after(ENDED)


async def test_a_stream_that_was_reset_after_its_first_data_is_lost():
    assert await lost_after(ANSWERED, RESET)


async def test_a_reset_after_the_end_of_a_stream_loses_nothing():
    """By NO_ERROR or another code, a server says that it reads no more of the request."""
    assert not await lost_after(ANSWERED, ENDED, RESET)
