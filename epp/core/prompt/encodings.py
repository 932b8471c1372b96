"""Streaming decoders for request bodies that have a `content-encoding`.

The picker decodes a body only to read the prompt; the endpoint gets the original bytes. A client
chooses how much a compressed body holds, so every step is bounded: `EncodedBody.work` decodes for one
turn of the event loop, the output has a limit, and `held_bytes` tells what the decoder allocates.

References: RFC 1952 (gzip), RFC 1950 and 1951 (deflate), RFC 7932 (brotli), RFC 8878 and 9659 (zstd).
"""

import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import import_module
from typing import Any, Final, Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CONTENT_ENCODING: Final = "content-encoding"

TURN_BYTES_MAX: Final = 512 * 1024
"""Number of decoded bytes of a request body from which on a turn of the event loop decodes no more:
about 2 ms at 250 MB/s, the speed of the slowest decoder.
"""
CALL_BYTES_MAX: Final = 64 * 1024
"""Number of decoded bytes from which on one call of a decoding library returns. The call may return
a little more: brotli returns up to 96 KiB.
"""
CALL_BYTES_COUNTED_MIN: Final = 32 * 1024
"""Number of bytes that each call of a decoding library adds at least to the count of bytes decoded
in this turn of the event loop, even if the call returns fewer.
"""
INPUT_BYTES_MAX: Final = 16 * 1024
"""Maximum number of encoded bytes passed to one call of a decoding library, because hostile input
may be slow and decode to nothing.
"""
FRAMES_MAX: Final = 1_024
"""Maximum number of gzip members or zstd frames in one request body. Each costs a decoder of its
own.
"""
ZSTD_WINDOW_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum window size in bytes of zstd, as RFC 9659 sets it for this content encoding."""
READ_BYTES_FREE: Final = 512 * 1024
READ_BYTES_PER_ENCODED_BYTE: Final = 20
"""Maximum ratio of decoded to encoded bytes of a body whose decoded size is above
`READ_BYTES_FREE`. A body above it is not read. Reading takes up to 43 ms a megabyte, so a client
must send bytes to cause it.
"""


class Unparsed(StrEnum):
    """The reason why a request with a content encoding is placed without knowledge of its prompt."""

    UNKNOWN = "encoding-unknown"
    STACKED = "encoding-stacked"
    CORRUPT = "encoding-corrupt"
    WINDOW = "encoding-too-large-window"
    RATIO = "encoding-ratio"


class _UnreadableError(Exception):
    """An error of a request body that cannot be decoded. `reason` says why."""

    def __init__(self, reason: Unparsed = Unparsed.CORRUPT) -> None:
        super().__init__(reason.value)
        self.reason = reason


class _Decoder(Protocol):
    """A streaming decoder of one content encoding."""

    memory_bytes: int
    """Upper bound of the bytes of memory that the decoder itself allocates."""
    frames: int
    pending: bool
    """True if `decode` may have more output, so that it must be called again with empty input."""

    @property
    def complete(self) -> bool:
        """Return whether the encoded data so far may be a whole body."""
        ...

    def decode(self, data: bytes) -> tuple[bytes, int]:
        """Return decoded bytes, and the number of bytes at the end of `data` that must be passed
        again.

        Raises `_UnreadableError`, and the errors of the library.
        """
        ...


_ZLIB_BYTES: Final = 48 * 1024
"""Memory in bytes of zlib's window of 32 KiB and of its tables."""
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS


class _Zlib:
    """A streaming decoder of gzip with any number of members, or of one deflate stream."""

    memory_bytes = _ZLIB_BYTES

    def __init__(self, *, gzip: bool) -> None:
        self.frames = 0
        self.pending = False
        self._gzip = gzip
        self._stream: Any = None

    @property
    def complete(self) -> bool:
        return self._stream is None and self.frames > 0

    def decode(self, data: bytes) -> tuple[bytes, int]:
        if self._stream is None:
            if self.frames:
                # Zeros may follow a gzip member as padding.
                data = data.lstrip(b"\0") if self._gzip else data
                if data and not self._gzip:
                    raise _UnreadableError
            if not data:
                self.pending = False
                return b"", 0
            self._stream = zlib.decompressobj(self._window_bits(data[0]))
            self.frames += 1
        decoded = self._stream.decompress(data, CALL_BYTES_MAX)
        if self._stream.eof:
            left = len(self._stream.unused_data)
            self._stream = None
            self.pending = False
        else:
            left = len(self._stream.unconsumed_tail)
            self.pending = len(decoded) == CALL_BYTES_MAX and not left
        return decoded, left

    def _window_bits(self, first: int) -> int:
        if self._gzip:
            return _GZIP_BITS
        # Clients send deflate with and without zlib's header. The header's low four bits are 8; a
        # raw stream would begin so only with an empty stored block whose padding is not zero.
        return zlib.MAX_WBITS if first & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS


_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SKIPPABLE: Final = 0x184D2A50
"""Magic number of a zstd frame that is skipped; its low four bits may have any value."""
_ZSTD_SKIPPABLE_HEAD_BYTES: Final = 8
_ZSTD_BLOCK_BYTES_MAX: Final = 128 * 1024
_ZSTD_CONTEXT_BYTES: Final = 160 * 1024
_ZSTD_OPTIONS: Final[Mapping[int, int]] = {
    zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BYTES_MAX.bit_length() - 1
}


class _Zstd:
    """A streaming decoder of any number of zstd frames and skippable frames."""

    def __init__(self) -> None:
        self.frames = 0
        self.memory_bytes = 0
        self.pending = False
        self._stream: Any = None
        self._head = b""
        """Beginning of a zstd frame whose header is not complete yet."""
        self._skip_bytes = 0

    @property
    def complete(self) -> bool:
        return self._stream is None and self.frames > 0 and not (self._head or self._skip_bytes)

    def decode(self, data: bytes) -> tuple[bytes, int]:
        given = len(data)
        data = self._head + data
        self._head = b""
        self.pending = False
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            return b"", self._left(data[skipped:], given)
        if self._stream is None:
            if len(data) < _ZSTD_SKIPPABLE_HEAD_BYTES:
                self._head = data
                return b"", 0
            if int.from_bytes(data[:4], "little") & ~0xF == _ZSTD_SKIPPABLE:
                self.frames += 1
                self._skip_bytes = int.from_bytes(data[4:_ZSTD_SKIPPABLE_HEAD_BYTES], "little")
                return b"", self._left(data[_ZSTD_SKIPPABLE_HEAD_BYTES:], given)
            window_bytes = _zstd_window_bytes(data)
            if window_bytes is None:
                self._head = data
                return b"", 0
            if window_bytes > ZSTD_WINDOW_BYTES_MAX:
                raise _UnreadableError(Unparsed.WINDOW)
            blocks_bytes = 2 * min(window_bytes, _ZSTD_BLOCK_BYTES_MAX)
            self.memory_bytes = _ZSTD_CONTEXT_BYTES + window_bytes + blocks_bytes
            self.frames += 1
            self._stream = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
        decoded = self._stream.decompress(data, CALL_BYTES_MAX)
        if not self._stream.eof:
            self.pending = not self._stream.needs_input
            return decoded, 0
        rest = self._stream.unused_data
        self._stream = None
        return decoded, self._left(rest, given)

    def _left(self, rest: bytes, given: int) -> int:
        """Return how many of the last `given` bytes were not used if `rest` is unused.

        If `rest` is longer, because the library kept bytes of earlier calls, it begins the next
        call and the result is 0.
        """
        if len(rest) <= given:
            return len(rest)
        self._head = rest
        self.pending = True
        return 0


def _zstd_window_bytes(frame: bytes) -> int | None:
    """Return the window size in bytes of a zstd frame that begins with at least 8 bytes (RFC 8878,
    3.1.1.1).

    Return None if the header needs more bytes. Raises `_UnreadableError` if this is no zstd frame.
    """
    if int.from_bytes(frame[:4], "little") != _ZSTD_MAGIC:
        raise _UnreadableError
    descriptor = frame[4]
    if not descriptor & 0x20:
        # The window has an exponent and a mantissa.
        base = 1 << (10 + (frame[5] >> 3))
        return base + base // 8 * (frame[5] & 7)
    # A single segment: the window is as large as the content.
    start = 5 + (0, 1, 2, 4)[descriptor & 3]
    size = (1, 2, 4, 8)[descriptor >> 6]
    if len(frame) < start + size:
        return None
    return int.from_bytes(frame[start : start + size], "little") + (256 if size == 2 else 0)


_BROTLI_BYTES: Final = 256 * 1024
"""Memory in bytes of brotli's state and tables, without the window."""
_BROTLI_LARGE_WINDOW: Final = 0x11
"""Low seven bits of the first byte of a brotli stream with a window that RFC 7932 does not allow."""


class _Brotli:
    """A streaming decoder of one brotli stream."""

    def __init__(self, library: Any) -> None:
        self.frames = 1
        self.memory_bytes = 0
        self.pending = False
        self.complete = False
        self._stream = library.Decompressor()
        self._error: type[Exception] = library.error

    def decode(self, data: bytes) -> tuple[bytes, int]:
        if data and self.complete:
            raise _UnreadableError
        if data and not self.memory_bytes:
            self.memory_bytes = _BROTLI_BYTES + _brotli_window_bytes(data[0])
        try:
            decoded: bytes = self._stream.process(data, output_buffer_limit=CALL_BYTES_MAX)
        except self._error as error:
            raise _UnreadableError from error
        self.complete = self._stream.is_finished()
        # The library also accepts input while it still has output.
        full = len(decoded) >= CALL_BYTES_MAX or not self._stream.can_accept_more_data()
        self.pending = full and not self.complete and bool(data or decoded)
        return decoded, 0


def _brotli_window_bytes(first: int) -> int:
    """Return the window size in bytes of a brotli stream whose first byte is `first` (RFC 7932,
    9.1). Raises `_UnreadableError` for a window that is not allowed.
    """
    if not first & 1:
        return 1 << 16
    if first & 0x7F == _BROTLI_LARGE_WINDOW:
        raise _UnreadableError(Unparsed.WINDOW)
    high, low = first >> 1 & 7, first >> 4 & 7
    bits = 17 + high if high else 8 + low if low else 17
    return 1 << bits


def _brotli() -> _Decoder:
    """Return a brotli decoder. Raises `ImportError` if the extra `brotli` is not installed."""
    return _Brotli(import_module("brotli"))


_DECODERS: Final[Mapping[str, Callable[[], _Decoder]]] = {
    "gzip": lambda: _Zlib(gzip=True),
    "x-gzip": lambda: _Zlib(gzip=True),
    "deflate": lambda: _Zlib(gzip=False),
    "zstd": _Zstd,
    "br": _brotli,
}
_ENCODED: Final = (b"\x1f\x8b", _ZSTD_MAGIC.to_bytes(4, "little"))
"""First bytes of gzip and of zstd data, by which a body that was encoded twice is recognised. JSON
begins with neither.
"""


class EncodedBody:
    """A request body with a content encoding, which receives chunks and decodes them in bounded
    turns of the event loop.
    """

    __slots__ = (
        "_at", "_bytes_max", "_decoded", "_decoder", "_input", "decoded_bytes", "encoded_bytes",
        "problem", "too_large",
    )  # fmt: skip

    def __init__(self, encoding: str, bytes_max: int) -> None:
        """Create an empty body. `encoding` is the value of `content-encoding`; `bytes_max` is the
        maximum size of the decoded body.
        """
        self._bytes_max = bytes_max
        self._input: deque[bytes] = deque()
        self._at = 0
        """Number of bytes of the first chunk in `_input` that were already passed to the decoder.
        """
        self._decoded: list[bytes] = []
        self.encoded_bytes = 0
        self.decoded_bytes = 0
        self.too_large = False
        """True if the decoded body is larger than `bytes_max`."""
        self.problem: Unparsed | None = None
        """Reason why the body cannot be read, or None if there is none so far."""
        self._decoder: _Decoder | None = None
        names = [name for name in map(str.strip, encoding.lower().split(",")) if name]
        names = [name for name in names if name != "identity"]
        if len(names) > 1:
            self.problem = Unparsed.STACKED
        elif names:
            self._decoder = _new_decoder(names[0])
            self.problem = None if self._decoder else Unparsed.UNKNOWN

    def __repr__(self) -> str:
        return f"<EncodedBody [{self.encoded_bytes} bytes became {self.decoded_bytes}]>"

    @property
    def unfinished(self) -> bool:
        """Return whether `work` can decode more of the data received so far."""
        decoder = self._decoder
        return decoder is not None and (bool(self._input) or decoder.pending)

    @property
    def held_bytes(self) -> int:
        """Return the memory in bytes of the decoder and of the decoded data."""
        return self.decoded_bytes + (self._decoder.memory_bytes if self._decoder else 0)

    def feed(self, chunk: bytes) -> None:
        """Store the next chunk of the encoded body, which `work` decodes later."""
        self.encoded_bytes += len(chunk)
        if chunk and self._decoder is not None:
            self._input.append(chunk)

    def work(self) -> None:
        """Decode received data for one turn of the event loop. No input raises an error; it sets
        `problem` or `too_large`.
        """
        left_bytes = TURN_BYTES_MAX
        try:
            while left_bytes > 0 and self._decoder is not None and self.unfinished:
                left_bytes -= max(CALL_BYTES_COUNTED_MIN, self._step(self._decoder))
        except _UnreadableError as error:
            self._stop(error.reason)
        except (zlib.error, zstd.ZstdError):
            self._stop(Unparsed.CORRUPT)

    def _step(self, decoder: _Decoder) -> int:
        """Call the decoder once with the next input; return the number of decoded bytes. Set
        `too_large` above `bytes_max`, and raise `_UnreadableError` above `FRAMES_MAX` frames.
        """
        data = b""
        if self._input and not decoder.pending:
            data = self._input[0][self._at : self._at + INPUT_BYTES_MAX]
        decoded, unused = decoder.decode(data)
        self._at += len(data) - unused
        if self._input and self._at == len(self._input[0]):
            self._input.popleft()
            self._at = 0
        self.decoded_bytes += len(decoded)
        if self.decoded_bytes > self._bytes_max:
            self.too_large = True
            self._release()
        elif decoder.frames > FRAMES_MAX:
            raise _UnreadableError
        elif decoded:
            self._decoded.append(decoded)
        return len(decoded)

    def finish(self) -> bytes | None:
        """Return the decoded body. Call this once all of it was received and `unfinished` is False.

        Return None if the body cannot be read; `problem` then holds the reason.
        """
        if self._decoder is not None and not self._decoder.complete:
            self._stop(Unparsed.CORRUPT)
        readable_bytes = max(READ_BYTES_FREE, READ_BYTES_PER_ENCODED_BYTE * self.encoded_bytes)
        if self.decoded_bytes > readable_bytes:
            self._stop(Unparsed.RATIO)
        if self.problem is not None:
            return None
        body = self._decoded[0] if len(self._decoded) == 1 else b"".join(self._decoded)
        if body.startswith(_ENCODED):
            self._stop(Unparsed.STACKED)
            return None
        self._release()
        return body

    def _stop(self, reason: Unparsed) -> None:
        self.problem = reason
        self.decoded_bytes = 0
        self._release()

    def _release(self) -> None:
        self._decoder = None
        self._input.clear()
        self._decoded.clear()


def _new_decoder(name: str) -> _Decoder | None:
    """Return a new decoder for the content encoding `name`, or None if the encoding is unknown or
    its library is not installed.
    """
    new = _DECODERS.get(name)
    try:
        return None if new is None else new()
    except ImportError:
        return None


def is_identity(encoding: str) -> bool:
    """Return whether a value of `content-encoding` means that the body is not encoded."""
    return not encoding.lower().replace(",", " ").replace("identity", " ").strip()
