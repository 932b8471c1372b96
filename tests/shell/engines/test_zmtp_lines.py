import asyncio

from epp.core.kv_events.zmtp import SocketType, ZmtpConnection
from epp.shell.engines import zmtp_lines
from epp.shell.engines.zmtp_lines import ZmtpLines
from tests.shell.engines.kv_event_pod import GREETING

READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
HELLO = GREETING + bytes([4, len(READY)]) + READY
PING = b"\x04PING\x00\x00" + bytes(16)


class Unread(asyncio.Transport):
    """To a peer that reads nothing."""

    def __init__(self):
        super().__init__()
        self.written = 0
        self.closing = False

    def is_closing(self):
        return self.closing

    def write(self, data):
        self.written += len(data)

    def get_write_buffer_size(self):
        return self.written

    def abort(self):
        self.closing = True


def lines_to(transport, heard):
    lines = ZmtpLines(ZmtpConnection(SocketType.SUB), heard.append)
    lines.connection_made(transport)
    return lines


async def test_messages_are_told_once_both_have_said_who_they_are():
    heard = []
    lines = lines_to(Unread(), heard)
    lines.data_received(HELLO[:70])
    assert not lines.is_ready
    lines.data_received(HELLO[70:] + b"\x00\x02ab")
    assert lines.is_ready
    assert heard == [(b"ab",)]


async def test_who_asks_for_answers_and_reads_none_is_closed(monkeypatch):
    """What waits to be read is bounded."""
    monkeypatch.setattr(zmtp_lines, "UNSENT_BYTES_MAX", 4_096)
    transport = Unread()
    lines = lines_to(transport, [])
    lines.data_received(HELLO)
    while not transport.closing:
        lines.data_received((bytes([4, len(PING)]) + PING) * 8)
    assert lines.closed.result() == "does not read what it is sent"
    assert transport.written < 2 * 4_096
    lines.data_received(bytes([4, len(PING)]) + PING)
    assert transport.written < 2 * 4_096, "it is over"
