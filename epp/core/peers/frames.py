"""The format in which peers talk: frames of records, each frame readable by itself.

A frame is `MAGIC`, one byte of `VERSION`, and a msgpack array (`Frame`). Nothing in it refers to an
earlier frame, but for chains of which only the end is told (`core/peers/chain_book`). Endpoints and
indexes go by 64-bit hashes of what they are; slots and names never leave a process, nor do prompts,
session ids or clocks: times are told as ages.

Another version is not read. Members that a later minor format appends are skipped.
"""

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from epp.core.types import Endpoint

MAGIC: Final = b"HMP"
VERSION: Final = 1
ORIGIN_BYTES: Final = 8
FRAME_BYTES_MAX: Final = 256 * 1024
"""A longer one is not read: to decode 256 KB takes well below a millisecond."""
RECORD_BYTES_MAX: Final = 128 * 1024
"""Of a longer chain the end is not told: a million tokens in blocks of 64."""
KEYS_MAX: Final = 256
"""Of one record and index; a batch of more prompts tells the first of them."""
LOADS_MAX: Final = 8_192
"""Endpoints in one frame."""

Key: TypeAlias = bytes | tuple[bytes, bytes]
"""A whole key, or the hash at which a chain that was told before ends, and what follows."""

_HEAD: Final = MAGIC + bytes([VERSION])
_LENGTH: Final = struct.Struct("<I")
LOAD: Final = np.dtype([("endpoint", "<u8"), ("requests", "<u4"), ("prefill_tokens", "<f4")])
"""What the sender has in flight at one endpoint."""


class Kind(IntEnum):
    """What a frame is for."""

    LIVE = 0
    SNAPSHOT = 1
    """Part of all that the sender knows; its load is not told."""
    GOODBYE = 2


class Frame(Struct, array_like=True, frozen=True, gc=False):
    """One message to all peers."""

    origin: bytes
    """Which process it is from: random."""
    number: int
    """Counts the live frames of the origin from 1."""
    kind: int
    uptime_s: float
    """How long the origin has run."""
    indexes: tuple[int, ...] = ()
    """Hash of the signature of each shared index, in the order of the keys in records."""
    records: bytes = b""
    """Each a msgpack `Record` after its length, 4 bytes, little-endian."""
    load: bytes = b""
    """An array of `LOAD`."""
    whole: bool = False
    """The origin has nothing in flight at any other endpoint."""
    unread: tuple[bytes, ...] = ()
    """Origins whose chains referred to what is not known here: they shall tell them whole."""
    wanted: tuple[tuple[bytes, int, int], ...] = ()
    """Frames that were missed and shall be told again: their origin, the first number and the last."""
    age_s: float = 0.0
    """Of a frame that is told again: since when it was told first."""


class Record(Struct, array_like=True, frozen=True, gc=False):
    """A request went to an endpoint."""

    endpoint: int
    age_ms: int
    keys: tuple[tuple[Key, ...], ...]
    """An entry an index of the frame."""


class OtherVersionError(ValueError):
    """The frame is of a version that is not spoken here."""


class UnreadableError(ValueError):
    """It is no frame, or too long to be looked at."""


_frame_decoder: Final = msgspec.msgpack.Decoder(Frame)
_record_decoder: Final = msgspec.msgpack.Decoder(Record)
_encoder: Final = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """`frame` as bytes."""
    return _HEAD + _encoder.encode(frame)


def decode(message: bytes) -> Frame:
    """The frame in `message`; its records are not looked at. Raises one of the errors above."""
    if len(message) > FRAME_BYTES_MAX or not message.startswith(MAGIC):
        raise UnreadableError
    if not message.startswith(_HEAD):
        raise OtherVersionError
    try:
        frame = _frame_decoder.decode(memoryview(message)[len(_HEAD) :])
    except msgspec.MsgspecError as error:
        raise UnreadableError from error
    if len(frame.origin) != ORIGIN_BYTES or len(frame.load) > LOADS_MAX * LOAD.itemsize:
        raise UnreadableError
    return frame


def encode_record(record: Record) -> bytes:
    """`record` with its length."""
    encoded = _encoder.encode(record)
    return _LENGTH.pack(len(encoded)) + encoded


def records_of(blob: bytes) -> Iterator[Record]:
    """The records in `blob`, decoded one by one; ends with `UnreadableError` where it cannot go on."""
    view = memoryview(blob)
    at = 0
    while at < len(blob):
        start = at + _LENGTH.size
        if start > len(blob):
            raise UnreadableError
        (length,) = _LENGTH.unpack_from(blob, at)
        at = start + length
        if length > RECORD_BYTES_MAX or at > len(blob):
            raise UnreadableError
        try:
            yield _record_decoder.decode(view[start:at])
        except msgspec.MsgspecError as error:
            raise UnreadableError from error


def loads_of(blob: bytes) -> "npt.NDArray[np.void]":
    """The loads in `blob`, an array of `LOAD`; what is left over is not looked at."""
    whole = len(blob) // LOAD.itemsize
    return np.frombuffer(blob, dtype=LOAD, count=whole)


def endpoint_hash(endpoint: Endpoint) -> int:
    """64 bits that stand for one incarnation of `endpoint` at every picker."""
    text = f"{endpoint.endpoint_id}\0{endpoint.incarnation}"
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def index_hashes(signatures: Iterable[str]) -> tuple[int, ...]:
    """64 bits for each index; of two alike the second is told from the first."""
    found: list[int] = []
    seen: dict[str, int] = {}
    for signature in signatures:
        nth = seen[signature] = seen.get(signature, 0) + 1
        found.append(xxhash.xxh3_64_intdigest(f"{nth}:{signature}".encode()))
    return tuple(found)
