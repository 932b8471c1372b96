"""A small HTTP/2 client that opens extended CONNECT streams (RFC 8441).

No other client here can open them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
)
from h2.settings import SettingCodes

READ_BYTES = 65_536
WAIT_S = 10.0
TEXT = 0x81
"""First byte of a WebSocket frame: final, and text (RFC 6455 section 5.2)."""
MASKED = 0x80
FRAME_BYTES_MAX = 125


class Http2Client:
    """One connection with prior knowledge, without TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._http2.initiate_connection()
        self.settings: dict[int, int] | None = None
        self.statuses: dict[int, str] = {}
        self.data: dict[int, bytes] = {}

    @property
    def takes_extended_connect(self) -> bool:
        """Return True if the server announced SETTINGS_ENABLE_CONNECT_PROTOCOL."""
        return (self.settings or {}).get(SettingCodes.ENABLE_CONNECT_PROTOCOL) == 1

    async def open(self, headers: Sequence[tuple[str, str]]) -> int:
        """Send the headers of a new stream and leave it open; return its number."""
        stream = self._http2.get_next_available_stream_id()
        self._http2.send_headers(stream, list(headers))
        await self._flush()
        return stream

    async def send_text(self, stream: int, text: str) -> None:
        """Send one WebSocket message, masked with zeros."""
        payload = text.encode()
        assert len(payload) <= FRAME_BYTES_MAX
        self._http2.send_data(stream, bytes([TEXT, MASKED | len(payload)]) + bytes(4) + payload)
        await self._flush()

    async def received_text(self, stream: int) -> str:
        """Return the next WebSocket message of the server, which is short and not masked."""

        def whole() -> bool:
            data = self.data.get(stream, b"")
            return len(data) >= 2 and len(data) >= 2 + data[1]

        await self.until(whole)
        data = self.data[stream]
        end = 2 + data[1]
        assert data[0] == TEXT
        self.data[stream] = data[end:]
        return data[2:end].decode()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read what the server sends until `condition` holds."""
        async with asyncio.timeout(WAIT_S):
            await self._flush()
            while not condition():
                data = await self._reader.read(READ_BYTES)
                assert data, "the server closed the connection"
                for event in self._http2.receive_data(data):
                    self._note(event)
                await self._flush()

    def _note(self, event: Event) -> None:
        match event:
            case RemoteSettingsChanged():
                changed = {code: one.new_value for code, one in event.changed_settings.items()}
                self.settings = (self.settings or {}) | changed
            case ResponseReceived():
                self.statuses[event.stream_id] = dict(event.headers)[":status"]
            case DataReceived():
                before = self.data.get(event.stream_id, b"")
                self.data[event.stream_id] = before + event.data
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    async def _flush(self) -> None:
        self._writer.write(self._http2.data_to_send())
        await self._writer.drain()


@asynccontextmanager
async def http2_client(port: int) -> AsyncIterator[Http2Client]:
    """Yield a client of `port` on loopback that has received the server's settings."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Http2Client(reader, writer)
    try:
        await client.until(lambda: client.settings is not None)
        yield client
    finally:
        writer.close()
