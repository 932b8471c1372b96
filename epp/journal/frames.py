"""The format of a journal's files; docs/capture-format.md describes it.

A file consists of members of gzip. They contain frames: a length in four bytes, little-endian, and
the content, whose first byte is the kind. Decisions, refusals and ends of requests are packed as in
memory (`decision_record`). All other records are maps of MessagePack, whose member `event` names
the type.
"""

import re
import struct
import zlib
from typing import Final

import msgspec

from epp.core.journal.events import Level
from epp.journal.decision_record import DECIDED, REFUSED, SERVED
from epp.journal.records import Record

ENDING: Final = "journal.gz"
FRAME_BYTES_MAX: Final = 16 * 2**20
"""Maximum size of a frame; longer ones are not written, and are not read."""
RECORD: Final = b"j"
ENDED: Final = b"e"
"""Kinds of frames beside the packed ones."""
PACKED: Final = frozenset({DECIDED, REFUSED, SERVED, ENDED})
SEGMENT_NAME: Final = {
    level: re.compile(
        rf"{level.value}-(\d{{8}}T\d{{6}}-[0-9a-f]{{8}})-(\d{{6}})\.{re.escape(ENDING)}", re.ASCII
    )
    for level in Level
}
"""Patterns of file names, whose groups are origin and number."""
LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<cq")
_GZIP_FORMAT: Final = 31
"""Value of zlib's `wbits` for the gzip format with the widest window."""
_PACKING_LEVEL: Final = 1
"""Compression level of gzip; level 6 saves a ninth and takes nearly three times as long."""
LONG_FRAME_BYTES: Final = 8 * 1024
"""Mean length of frames from which only Huffman coding is used.

The window of 32 KB holds too few longer frames to find repetitions. Most of a long frame is hashes.
"""
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Record).decode


def segment_file(level: Level, origin: str, number: int) -> str:
    """Return the name of a file; `origin` is like "20260131T235959-0123abcd"."""
    return f"{level.value}-{origin}-{number:06d}.{ENDING}"


def frame_of(record: Record) -> bytes:
    """Return the frame of a record that is not packed."""
    return RECORD + _pack(record)


def record_of_frame(frame: bytes) -> Record:
    """Return the argument of `frame_of`. Raises `msgspec.DecodeError` for other frames."""
    if frame[:1] != RECORD:
        raise msgspec.DecodeError(f"Invalid kind of frame {frame[:1]!r}")
    record: Record = _unpack(memoryview(frame)[1:])
    return record


def ended_frame(number: int, head: bytes) -> bytes:
    """Return a frame that replaces the head of decision `number`, whose request ended."""
    return _NUMBER.pack(ENDED, number) + head


def ended_of(frame: bytes) -> tuple[int, bytes]:
    """Return the arguments of `ended_frame`."""
    return _NUMBER.unpack_from(frame)[1], frame[_NUMBER.size :]


def framed(frame: bytes) -> bytes:
    """Return the frame with its length."""
    return LENGTH.pack(len(frame)) + frame


def packed_frames(frames: bytes, count: int) -> bytes:
    """Compress `count` complete frames into a member of gzip."""
    long = len(frames) > LONG_FRAME_BYTES * count
    strategy = zlib.Z_HUFFMAN_ONLY if long else zlib.Z_DEFAULT_STRATEGY
    packer = zlib.compressobj(
        _PACKING_LEVEL, zlib.DEFLATED, _GZIP_FORMAT, zlib.DEF_MEM_LEVEL, strategy
    )
    return packer.compress(frames) + packer.flush()
