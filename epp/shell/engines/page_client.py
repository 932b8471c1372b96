"""A small, fast and strict HTTP client that fetches one page repeatedly over one kept-alive
connection.

A general HTTP client is too slow: a thousand endpoints at 0.5 s are 2,000 pages a second, and
aiohttp uses 40 to 70 % of a core only to fetch them. `bench/scrape.py` measures this client
together with parsing.
"""

import asyncio
import re
import ssl
from typing import Final, Literal, cast
from urllib.parse import quote

from epp.core.address import address_of
from epp.core.types import Endpoint, MetricsTarget, Seconds
from epp.shell.engines.loop_share import Account

HEAD_BYTES_MAX: Final = 16 * 1024
"""Maximum number of bytes of an HTTP answer's status and headers, and of its trailers."""
PIECES_MAX: Final = 2_048
"""Maximum number of pieces in which an HTTP answer may arrive: 3 MB in usual network packets."""
CHUNKS_MAX: Final = 4_096
"""Maximum number of chunks in a chunked HTTP answer."""
PIECE_S: Final = 10e-6
"""Time in seconds that the event loop is assumed to need to deliver one received piece; the
receiver cannot measure it.
"""
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?")
_OTHER_HEADERS: Final = (
    rb"(?:(?i:(?!content-|transfer-encoding|connection)|(?=content-type:))[^\r\n:]+:[^\r\n]*\r\n)*+"
)
_USUAL_HEAD: Final = re.compile(
    rb"HTTP/1\.1 200 [^\r\n]*\r\n%b(?i:content-length): ([0-9]{1,12})\r\n%b\r\n"
    % (_OTHER_HEADERS, _OTHER_HEADERS)
)
"""Regular expression for the beginning of almost every HTTP answer with a page. Matching it is five
times as fast as `ResponseReader._read_head`, which returns the same result and handles all other
answers.
"""
_LENGTH: Final = re.compile(rb"[0-9]{1,12}")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")
_CHUNK_LINE_BYTES_MAX: Final = 256
_PATH_SAFE: Final = "/%?&=:@!$'()*+,;~-._"


class BadResponseError(Exception):
    """Raised if an HTTP answer is not a page. The message continues a sentence that begins with the
    URL.
    """

    def __init__(self, kind: Literal["status", "page"], what: str, status: int = 0) -> None:
        super().__init__(what)
        self.kind: Literal["status", "page"] = kind
        self.status = status
        """HTTP status of the answer if the status is the problem, else 0."""


class StaleConnectionError(ConnectionError):
    """Raised if a connection closed before the first byte of the answer. If it was a kept-alive
    connection, the request is repeated.
    """


class ResponseReader:
    """A parser of one HTTP/1 answer, without I/O.

    It supports a status line, Content-Length, chunked bodies and bodies up to the end of the
    connection. Anything else raises `BadResponseError`, including any status but 200 and too many
    pieces or chunks.
    """

    def __init__(self, page_bytes_max: int) -> None:
        self._page_bytes_max = page_bytes_max
        self._wire = bytearray()
        self._pieces = 0
        self._at = 0
        """Position of the unprocessed data in the answer: the body, or the next chunk."""
        self._headers_read = False
        self._length: int | None = None
        self._chunks: list[bytes] | None = None
        self.body: bytes | None = None
        """Body of the answer (the page) once it is complete, else None."""
        self.keep_alive = True

    @property
    def started(self) -> bool:
        return bool(self._wire)

    def feed(self, data: bytes) -> None:
        """Add received data to the answer; `body` is set when the answer is complete. Raises
        `BadResponseError`.
        """
        if not self._wire and self._is_usual(data):
            return
        self._pieces += 1
        if self._pieces > PIECES_MAX:
            raise BadResponseError("page", f"arrived in more than {PIECES_MAX} pieces")
        seen_bytes = len(self._wire)
        self._wire += data
        if not self._headers_read:
            # The empty line may have begun in the previous data.
            self._read_head(max(0, seen_bytes - 3))
        if len(self._wire) - (0 if self._headers_read else HEAD_BYTES_MAX) > (
            self._page_bytes_max + HEAD_BYTES_MAX
        ):
            raise self._too_large()
        if not self._headers_read:
            return
        if self._chunks is not None:
            self._read_chunks(self._chunks)
        elif self._length is not None and len(self._wire) >= self._at + self._length:
            with memoryview(self._wire) as wire:  # this avoids a second copy
                body = bytes(wire[self._at : self._at + self._length])
            self._finish(body, self._length)

    def _is_usual(self, data: bytes) -> bool:
        """Return True if `data` is a complete HTTP answer of the usual kind, which is then
        parsed.
        """
        head = _USUAL_HEAD.match(data, 0, HEAD_BYTES_MAX)
        if head is None:
            return False
        if len(data) != head.end() + int(head[1]) or int(head[1]) > self._page_bytes_max:
            return False
        self.body = data[head.end() :]
        return True

    def end(self) -> None:
        """Process the end of the connection, which ends the body of an answer without a length.
        Raises `BadResponseError` for any other answer, because it is incomplete.
        """
        self.keep_alive = False
        if self._headers_read and self._length is None and self._chunks is None:
            self.body = bytes(self._wire[self._at :])
            return
        raise BadResponseError(
            "page", f"closed after {len(self._wire)} bytes, before the page ended"
        )

    def _finish(self, body: bytes, consumed_bytes: int) -> None:
        self.body = body
        # Unrequested data after the answer shows that the connection cannot be reused.
        if len(self._wire) > self._at + consumed_bytes:
            self.keep_alive = False

    def _too_large(self) -> BadResponseError:
        return BadResponseError("page", f"is larger than {self._page_bytes_max} bytes")

    def _read_head(self, start: int) -> None:
        end = self._wire.find(b"\r\n\r\n", start, HEAD_BYTES_MAX)
        if not self._wire.startswith(b"HTTP/1."[: len(self._wire)]):
            raise BadResponseError("page", "did not answer with HTTP/1")
        if end < 0:
            if len(self._wire) >= HEAD_BYTES_MAX:
                raise BadResponseError("page", f"sent more than {HEAD_BYTES_MAX} bytes of headers")
            return
        lines = bytes(self._wire[:end]).split(b"\r\n")
        self._headers_read = True
        self._at = end + 4
        status = _STATUS.fullmatch(lines[0])
        if status is None:
            raise BadResponseError("page", "did not answer with HTTP/1")
        if status[2] != b"200":
            told = status[2].decode()
            raise BadResponseError("status", f"answered {told}, expected 200", int(told))
        self.keep_alive = status[1] == b"1"
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            self._read_header(name.lower(), value.strip(b" \t"))
        if self._chunks is not None:
            self._length = None
        if self._length is not None and self._length > self._page_bytes_max:
            raise self._too_large()

    def _read_header(self, name: bytes, value: bytes) -> None:
        match name:
            case b"content-length":
                if not _LENGTH.fullmatch(value) or self._length not in (None, int(value)):
                    raise BadResponseError("page", "sent a Content-Length that is not one number")
                self._length = int(value)
            case b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise BadResponseError("page", "sent a Transfer-Encoding other than chunked")
                self._chunks = []
            case b"content-encoding":
                if value.lower() != b"identity":
                    raise BadResponseError(
                        "page", "sent a compressed page, which was not requested"
                    )
            case b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
            case _:
                pass

    def _read_chunks(self, chunks: list[bytes]) -> None:
        while True:
            line_end = self._wire.find(b"\r\n", self._at, self._at + _CHUNK_LINE_BYTES_MAX)
            if line_end < 0:
                if len(self._wire) - self._at >= _CHUNK_LINE_BYTES_MAX:
                    raise BadResponseError("page", "sent a malformed chunk")
                return
            size = _CHUNK_SIZE.fullmatch(bytes(self._wire[self._at : line_end]))
            if size is None:
                raise BadResponseError("page", "sent a malformed chunk")
            size_bytes = int(size[1], 16)
            if size_bytes == 0:
                # Trailers end with an empty line, like headers.
                end = self._wire.find(b"\r\n\r\n", line_end, line_end + HEAD_BYTES_MAX)
                if end >= 0:
                    self._finish(b"".join(chunks), end + 4 - self._at)
                elif len(self._wire) >= line_end + HEAD_BYTES_MAX:
                    raise BadResponseError(
                        "page", f"sent more than {HEAD_BYTES_MAX} bytes of trailers"
                    )
                return
            data_end = line_end + 2 + size_bytes
            if data_end > self._page_bytes_max + HEAD_BYTES_MAX:
                raise self._too_large()
            if len(self._wire) < data_end + 2:
                return
            if self._wire[data_end : data_end + 2] != b"\r\n":
                raise BadResponseError("page", "sent a malformed chunk")
            if len(chunks) == CHUNKS_MAX:
                raise BadResponseError("page", f"arrived in more than {CHUNKS_MAX} chunks")
            chunks.append(bytes(self._wire[line_end + 2 : data_end]))
            self._at = data_end + 2


class Connection(asyncio.Protocol):
    """An asyncio protocol for one connection to an endpoint, which passes the data of one HTTP
    answer at a time to a parser.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self.transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._answered: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop has the interface without the base class.
        self.transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes, reader: ResponseReader, timeout_s: Seconds) -> bytes:
        """Send `request` and return the body of the answer, or raise the reason of the failure."""
        assert self.transport is not None
        loop = asyncio.get_running_loop()
        self._reader = reader
        self._answered = loop.create_future()
        # This takes a tenth of the time of `asyncio.timeout`.
        expiry = loop.call_later(timeout_s, self._expire)
        try:
            self.transport.write(request)
            return await self._answered
        finally:
            expiry.cancel()
            # Otherwise a page of megabytes would stay in memory until the next request.
            self._reader = self._answered = None

    def _expire(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(TimeoutError())

    def data_received(self, data: bytes) -> None:
        self._account.charge(PIECE_S)
        with self._account:
            self._take(data)

    def _take(self, data: bytes) -> None:
        reader, answered = self._reader, self._answered
        if reader is None or answered is None or answered.done():
            self.abort()  # unrequested data
            return
        try:
            reader.feed(data)
        except BadResponseError as bad:
            answered.set_exception(bad)
            self.abort()
        else:
            if reader.body is not None:
                answered.set_result(reader.body)
                if not reader.keep_alive:
                    self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        reader, answered = self._reader, self._answered
        if reader is None or answered is None or answered.done():
            return
        if not reader.started:
            answered.set_exception(StaleConnectionError("closed without an answer"))
        elif exc is not None:
            answered.set_exception(exc)
        else:
            try:
                reader.end()
            except BadResponseError as bad:
                answered.set_exception(bad)
            else:
                assert reader.body is not None
                answered.set_result(reader.body)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None


class PageClient:
    """A client that fetches one page of one endpoint, one fetch at a time. The caller must close
    it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        target: MetricsTarget,
        *,
        page_bytes_max: int,
        tls: ssl.SSLContext | None,
        account: Account,
    ) -> None:
        """Create the client for the page that `target` names. `account` is charged with the loop
        time of receiving the page.
        """
        self._account = account
        authority = address_of(endpoint.host, target.port)
        path = quote(target.path, safe=_PATH_SAFE)
        self.url = f"{target.scheme}://{authority}{path}"
        self._host = endpoint.host
        self._port = target.port
        self._tls = tls if target.scheme == "https" else None
        self._page_bytes_max = page_bytes_max
        self._request = (
            f"GET {path} HTTP/1.1\r\nHost: {authority}\r\n"
            "User-Agent: homing\r\nAccept: text/plain;version=0.0.4\r\n\r\n"
        ).encode("ascii")
        self._connection: Connection | None = None

    async def fetch(self, timeout_s: Seconds) -> bytes:
        """Fetch and return the page. Raises `BadResponseError` for an invalid answer,
        `TimeoutError` after `timeout_s` seconds on one connection, and another `OSError` if the
        connection fails. An error or cancellation closes the connection. If a kept-alive connection
        has closed meanwhile, the request is repeated once on a new one.
        """
        connection = self._connection
        if connection is not None and connection.transport is not None:
            try:
                return await self._exchange(connection, timeout_s)
            except StaleConnectionError:
                pass  # an idle connection may close at any time, which is not a failure
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._account), self._host, self._port, ssl=self._tls
            )
            self._connection = connection
            return await self._exchange(connection, timeout_s)

    async def _exchange(self, connection: Connection, timeout_s: Seconds) -> bytes:
        reader = ResponseReader(self._page_bytes_max)
        try:
            return await connection.ask(self._request, reader, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the client's connection to the endpoint if there is one."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
