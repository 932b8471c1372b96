"""Transport the messages of one ZMTP connection over TCP, whichever side opened it."""

import asyncio
import os
from collections.abc import Callable
from typing import Final, TypeAlias, cast

from epp.core.kv_events.zmtp import Message, ZmtpConnection, ZmtpError
from epp.shell.engines.gathered_reads import GatheredReads

UNSENT_BYTES_MAX: Final = 64 * 1024
"""Maximum number of unsent bytes of a ZMTP connection before it is closed; the picker sends less
than a kilobyte.
"""

FETCHED_BYTES_MAX: Final = 64 * 1024
"""Maximum number of bytes that are read at once from a ZMTP connection in `GatheredReads`."""

Heard: TypeAlias = Callable[[Message], None]


class ZmtpLines(asyncio.Protocol):
    """An asyncio protocol for one ZMTP connection. It calls `heard` with each message, and `made`
    once it has a transport.
    """

    def __init__(
        self,
        connection: ZmtpConnection,
        heard: Heard,
        made: Callable[["ZmtpLines"], None] = lambda _: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.zmtp = connection
        self.ready: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        """Future with the reason in words why the ZMTP connection ended."""
        self.transport: asyncio.Transport | None = None
        self._heard = heard
        self._made = made
        self._paused = False
        self._reads: GatheredReads | None = None
        self._descriptor = -1

    @property
    def is_ready(self) -> bool:
        """True if the ZMTP handshake is complete and the connection has not ended."""
        return self.ready.done() and not self.closed.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop has the interface without the base class.
        self.transport = cast("asyncio.Transport", transport)
        self._made(self)
        self.flush()

    def gather(self, reads: GatheredReads) -> None:
        """Read this connection only through `reads` from now on, together with others."""
        transport = self.transport
        if transport is None or transport.is_closing() or self._reads is not None:
            return
        transport.pause_reading()
        self._reads = reads
        self._descriptor = transport.get_extra_info("socket").fileno()
        reads.add(self._descriptor, self._fetch)

    def _fetch(self) -> None:
        if self._paused or self._reads is None:
            return
        try:
            data = os.read(self._descriptor, FETCHED_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.end("lost the connection")
            return
        if data:
            self.data_received(data)
        else:
            self.end("closed the connection")

    def data_received(self, data: bytes) -> None:
        try:
            messages = self.zmtp.feed(data)
        except ZmtpError as error:
            self.end(str(error))
            return
        self.flush()
        if self.zmtp.ready and not self.ready.done():
            self.ready.set_result(None)
        for message in messages:
            self._heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("closed the connection" if exc is None else "lost the connection")

    def flush(self) -> None:
        """Send the queued data of the ZMTP connection. End the connection if more than
        `UNSENT_BYTES_MAX` bytes remain unsent.
        """
        if self.transport is None or self.transport.is_closing():
            return
        data = self.zmtp.to_send()
        if not data:
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.end("does not read what it is sent")

    def read(self, *, on: bool) -> None:
        """Resume (`on` True) or pause reading from the ZMTP connection."""
        if on is not self._paused or self.transport is None or self.transport.is_closing():
            return
        self._paused = not on
        if self._reads is not None:
            return
        if on:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def end(self, why: str = "is no longer used") -> None:
        """Close the ZMTP connection for the reason `why`; only the first reason is recorded."""
        if self._reads is not None:
            self._reads.remove(self._descriptor)
            self._reads = None
        if not self.closed.done():
            self.closed.set_result(why)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(why))
            # A task that waits for it may have ended.
            self.ready.exception()
        if self.transport is not None:
            self.transport.abort()
