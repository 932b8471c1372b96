"""Connections that are read when their owner says so: real sockets, both ends in this process."""

import asyncio
import math
import socket
from contextlib import asynccontextmanager

from epp.core.kv_events.zmtp import SocketType, ZmtpConnection
from epp.shell.engines.gathered_reads import GatheredReads
from epp.shell.engines.zmtp_lines import FETCHED_BYTES_MAX, ZmtpLines
from tests.shell.engines.test_zmtp_lines import HELLO


def message(text):
    return bytes([0, len(text)]) + text


@asynccontextmanager
async def gathered(reads):
    """(lines that are ready and gathered, what they heard, the other end)."""
    heard = []
    ours, theirs = socket.socketpair()
    lines = ZmtpLines(ZmtpConnection(SocketType.SUB), heard.append)
    await asyncio.get_running_loop().create_connection(lambda: lines, sock=ours)
    theirs.sendall(HELLO)
    await lines.ready
    lines.gather(reads)
    try:
        yield lines, heard, theirs
    finally:
        lines.end()
        theirs.close()


async def test_what_has_come_is_heard_when_it_is_fetched_and_not_before():
    reads = GatheredReads(lambda: 0.0)
    async with gathered(reads) as (_, heard, theirs):
        theirs.sendall(message(b"one") + message(b"two"))
        await asyncio.sleep(0)
        assert heard == []
        assert reads.fetch(math.inf)
        assert heard == [(b"one",), (b"two",)]
        assert not reads.fetch(math.inf)


async def test_who_is_ahead_is_not_read_from():
    reads = GatheredReads(lambda: 0.0)
    async with gathered(reads) as (lines, heard, theirs):
        theirs.sendall(message(b"one"))
        lines.read(on=False)
        reads.fetch(math.inf)
        assert heard == []
        lines.read(on=True)
        reads.fetch(math.inf)
        assert heard == [(b"one",)]


async def test_an_end_is_noticed_and_nobody_reads_its_descriptor_any_more():
    """The next connection gets it."""
    reads = GatheredReads(lambda: 0.0)
    async with gathered(reads) as (lines, heard, theirs):
        theirs.sendall(message(b"last"))
        # What is closed with something unread is reset.
        theirs.recv(4_096)
        theirs.close()
        while not lines.closed.done():
            assert reads.fetch(math.inf)
        assert heard == [(b"last",)]
        assert lines.closed.result() == "closed the connection"
        assert len(reads) == 0


async def test_one_that_another_ends_meanwhile_is_not_read():
    """Both had something; whoever comes first ends the other."""
    reads = GatheredReads(lambda: 0.0)
    async with gathered(reads) as (one, _, first), gathered(reads) as (other, _, second):
        heard = []

        def ends(lines):
            return lambda got: (heard.append(got), lines.end())

        one._heard, other._heard = ends(other), ends(one)
        first.sendall(message(b"a"))
        second.sendall(message(b"b"))
        reads.fetch(math.inf)
        assert len(heard) == 1
        assert len(reads) == 1


async def test_a_connection_that_never_stops_talking_leaves_time_for_the_others():
    """One is read a turn where there is no more time, and each begins with another."""
    reads = GatheredReads(lambda: 1.0)
    async with (
        gathered(reads) as (_, one, first),
        gathered(reads) as (_, other, second),
    ):
        flood = message(b"x" * 200) * (2 * FETCHED_BYTES_MAX // 202)
        first.setblocking(False)
        sent = first.send(flood)
        second.sendall(message(b"b"))
        for _ in range(4):
            reads.fetch(0.0)
        assert other == [(b"b",)]
        assert sum(len(part) + 2 for (part,) in one) <= sent


async def test_nobody_is_gathered_whose_connection_closes():
    reads = GatheredReads(lambda: 0.0)
    async with gathered(reads) as (lines, _, _):
        lines.end()
        lines.gather(reads)
        assert len(reads) == 0
