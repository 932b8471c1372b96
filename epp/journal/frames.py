"""The format of a journal's files, which docs/capture-format.md describes.

A file consists of members of gzip. They contain frames: a length in four bytes, little-endian, and
the content, whose first byte is the kind. Decisions, refusals, endpoints that served instead of the
chosen one, and ends of requests are packed as in memory (`decision_record`). All other records are
maps of MessagePack, whose member `event` names the type.
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
"""Maximum size of a frame in bytes.

A longer frame is never written; a file that contains one is broken.
"""
RECORD: Final = b"j"
ENDED: Final = b"e"
"""Kinds of frames besides those of `decision_record`: a record as a MessagePack map, and the end of
a request.

The kind is a frame's first byte.
"""
PACKED: Final = frozenset({DECIDED, REFUSED, SERVED, ENDED})
SEGMENT_NAME: Final = {
    level: re.compile(
        rf"{level.value}-(\d{{8}}T\d{{6}}-[0-9a-f]{{8}})-(\d{{6}})\.{re.escape(ENDING)}", re.ASCII
    )
    for level in Level
}
"""Regular expressions for the names of journal files, by level.

Their groups are the origin and the number of the segment.
"""
LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<cq")
_GZIP_FORMAT: Final = 31
"""Value of zlib's parameter `wbits` for the gzip format with the largest window."""
_PACKING_LEVEL: Final = 1
"""Level of gzip compression.

Level 6 makes files a ninth smaller and takes nearly three times as long.
"""
LONG_FRAME_BYTES: Final = 8 * 1024
"""Mean length of frames in bytes above which only Huffman coding is used.

The window of 32 KB holds too few longer frames to find repetitions. Most of a long frame is hashes.
"""
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Record).decode


def segment_file(level: Level, origin: str, number: int) -> str:
    """Return the name of a journal file; `origin` is like "20260131T235959-0123abcd"."""
    return f"{level.value}-{origin}-{number:06d}.{ENDING}"


def frame_of(record: Record) -> bytes:
    """Return the frame of `record`, which must not be a packed decision, refusal or end."""
    return RECORD + _pack(record)


def record_of_frame(frame: bytes) -> Record:
    """Return the record in a frame that `frame_of` made.

    Raises `msgspec.DecodeError` for any other frame.
    """
    if frame[:1] != RECORD:
        raise msgspec.DecodeError(f"Invalid kind of frame {frame[:1]!r}")
    record: Record = _unpack(memoryview(frame)[1:])
    return record


def ended_frame(number: int, head: bytes) -> bytes:
    """Return a frame with the new head of the record of decision `number`, whose request ended."""
    return _NUMBER.pack(ENDED, number) + head


def ended_of(frame: bytes) -> tuple[int, bytes]:
    """Return the number of the decision and the new head of its record, from a frame that
    `ended_frame` made.
    """
    return _NUMBER.unpack_from(frame)[1], frame[_NUMBER.size :]


def framed(frame: bytes) -> bytes:
    """Return the bytes of a frame in a file: its length, then its content."""
    return LENGTH.pack(len(frame)) + frame


def packed_frames(frames: bytes, count: int) -> bytes:
    """Return `frames`, the bytes of `count` complete frames, compressed into one gzip member."""
    long = len(frames) > LONG_FRAME_BYTES * count
    strategy = zlib.Z_HUFFMAN_ONLY if long else zlib.Z_DEFAULT_STRATEGY
    packer = zlib.compressobj(
        _PACKING_LEVEL, zlib.DEFLATED, _GZIP_FORMAT, zlib.DEF_MEM_LEVEL, strategy
    )
    return packer.compress(frames) + packer.flush()
