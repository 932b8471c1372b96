"""The format of messages between peers: frames of records, each readable by itself.

A frame is `MAGIC`, one byte of `VERSION`, and a msgpack array (`Frame`). A frame refers to earlier
ones only by chains of which it contains the end (`core/peers/chain_book`). Endpoints and indexes
are identified by 64-bit hashes. Slots, names, prompts, session ids and clock times never leave a
process. Times are sent as ages.

A frame of another version is not read. Members that a later minor format appends are skipped.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from epp.core.flow.shares import CHARGES_MAX, TOTAL_MAX
from epp.core.types import Endpoint

MAGIC: Final = b"HMP"
VERSION: Final = 1
ORIGIN_BYTES: Final = 8
FRAME_BYTES_MAX: Final = 256 * 1024
"""Maximum size in bytes of a frame for peers. Decoding 256 KB takes well below a millisecond."""
RECORD_BYTES_MAX: Final = 128 * 1024
"""Maximum size in bytes of one record of a frame for peers. The sender shortens longer hash chains
(`CHAINS_BYTES_MAX` of `core/peers/exchange`).
"""
KEYS_MAX: Final = 256
"""Maximum number of keys of one index in one record for peers. If a request has more prompts, only
the first of them are shared.
"""
LOADS_MAX: Final = 4_096
"""Maximum number of endpoints whose load and tokens are in one frame for peers. These take 144 KB,
which leaves space for the other members.
"""

Key: TypeAlias = bytes | tuple[bytes, bytes]
"""A key of a shared index as it is sent: the whole key, or a pair of the last hash of a chain that
the receiver knows and the hashes that follow it.
"""

_HEAD: Final = MAGIC + bytes([VERSION])
_LENGTH: Final = struct.Struct("<I")
LOAD: Final = np.dtype([("endpoint", "<u8"), ("requests", "<u4"), ("prefill_tokens", "<f4")])
"""Format of the load that the sender has in flight at one endpoint: the endpoint's hash, and the
number of the sender's requests there and of their uncached tokens.
"""

TOKENS: Final = np.dtype(
    [
        ("endpoint", "<u8"),
        ("context_tokens", "<f4"),
        ("receiving_tokens", "<f4"),
        ("sending_tokens", "<f4"),
    ]
)
"""Format of the tokens of the sender's requests at one endpoint: the endpoint's hash, the requests'
prompt tokens, and the tokens whose KV blocks the endpoint still has to receive and to send for
them.
"""

CHARGE: Final = np.dtype([("flow", "<u8"), ("total", "<f8")])
"""Format of the total that the sender charged to one flow: a hash of the flow, and tokens or
requests.
"""


class Kind(IntEnum):
    """The purpose of a frame between peers."""

    LIVE = 0
    SNAPSHOT = 1
    """A frame with a part of all that the sender's shared indexes contain, without its load."""
    GOODBYE = 2


class Frame(Struct, array_like=True, frozen=True, gc=False):
    """A message from one picker to its peers."""

    origin: bytes
    """Random identifier of the process that sends the frame."""
    number: int
    """Number of the frame among the live frames of its origin, from 1; 0 for a frame of another
    kind.
    """
    kind: int
    uptime_s: float
    """Number of seconds for which the sender had been running when it sent the frame."""
    indexes: tuple[int, ...] = ()
    """Hash of the signature of each shared index of the sender, in the order of the keys in
    records.
    """
    records: bytes = b""
    """Encoded records, each as msgpack after its length in 4 bytes, little-endian."""
    load: bytes = b""
    """Load of the sender as an array of `LOAD`."""
    whole: bool = False
    """True if endpoints that are not in `load` count as having nothing of the sender in flight."""
    unread: tuple[bytes, ...] = ()
    """Origins of peers that sent a part of a chain unknown to the sender; these peers must send
    their chains whole.
    """
    wanted: tuple[tuple[bytes, int, int], ...] = ()
    """Frames that the sender missed and that the peer with that origin must send again, as (origin,
    first number, last number).
    """
    age_s: float = 0.0
    """Time in seconds since the frame was first sent. It is 0 if the frame is not a repeated one.
    """
    charges: bytes = b""
    """Totals that the sender charged to flows of its queue, as an array of `CHARGE`. If `whole`, the
    sender has charged no others.
    """
    waits: bool = False
    """True if requests wait in the queue of the sender."""
    tokens: bytes = b""
    """Tokens of the sender's requests as an array of `TOKENS`. If `whole`, its requests count as
    having no others.
    """


class Record(Struct, array_like=True, frozen=True, gc=False):
    """A decision of the sender: `age_ms` milliseconds before the frame, a request was sent to
    `endpoint`. In a snapshot, it is an entry of a shared index, which another picker may have
    decided.
    """

    endpoint: int
    age_ms: int
    keys: tuple[tuple[Key, ...], ...]
    """Keys of the request for each shared index, in the order of the frame's `indexes`."""


class OtherVersionError(ValueError):
    """An error: the frame of a peer has a version that this picker does not read."""


class UnreadableMessageError(ValueError):
    """An error: a message of a peer, or a record in it, cannot be decoded or is too long."""


_frame_decoder: Final = msgspec.msgpack.Decoder(Frame)
_record_decoder: Final = msgspec.msgpack.Decoder(Record)
_encoder: Final = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """Return `frame` encoded as bytes, with the magic and the version."""
    return _HEAD + _encoder.encode(frame)


def decode(message: bytes) -> Frame:
    """Return the frame in `message`; its records stay encoded. Raises `OtherVersionError` or
    `UnreadableMessageError`.
    """
    if len(message) > FRAME_BYTES_MAX or not message.startswith(MAGIC):
        raise UnreadableMessageError
    if not message.startswith(_HEAD):
        raise OtherVersionError
    try:
        frame = _frame_decoder.decode(memoryview(message)[len(_HEAD) :])
    except msgspec.MsgspecError as error:
        raise UnreadableMessageError from error
    if len(frame.origin) != ORIGIN_BYTES or len(frame.load) > LOADS_MAX * LOAD.itemsize:
        raise UnreadableMessageError
    if len(frame.charges) > CHARGES_MAX * CHARGE.itemsize:
        raise UnreadableMessageError
    if len(frame.tokens) > LOADS_MAX * TOKENS.itemsize:
        raise UnreadableMessageError
    return frame


def encode_record(record: Record) -> bytes:
    """Return `record` encoded as bytes, after its length."""
    encoded = _encoder.encode(record)
    return _LENGTH.pack(len(encoded)) + encoded


def records_of(blob: bytes) -> Iterator[Record]:
    """Yield each record in `blob`, decoded one by one. Raises `UnreadableMessageError` at the first
    unreadable one.
    """
    view = memoryview(blob)
    at = 0
    while at < len(blob):
        start = at + _LENGTH.size
        if start > len(blob):
            raise UnreadableMessageError
        (length,) = _LENGTH.unpack_from(blob, at)
        at = start + length
        if length > RECORD_BYTES_MAX or at > len(blob):
            raise UnreadableMessageError
        try:
            yield _record_decoder.decode(view[start:at])
        except msgspec.MsgspecError as error:
            raise UnreadableMessageError from error


def loads_of(blob: bytes) -> "npt.NDArray[np.void]":
    """Return the loads in `blob` as an array of `LOAD`; an incomplete last entry is ignored."""
    whole = len(blob) // LOAD.itemsize
    return np.frombuffer(blob, dtype=LOAD, count=whole)


def tokens_of(blob: bytes) -> "npt.NDArray[np.void]":
    """Return the tokens in `blob` as an array of `TOKENS`; an incomplete last entry is ignored."""
    return np.frombuffer(blob, dtype=TOKENS, count=len(blob) // TOKENS.itemsize)


def charges_of(blob: bytes) -> dict[int, float]:
    """Return the totals in `blob`, an array of `CHARGE`, by hash of the flow. An incomplete last
    entry and impossible totals are ignored.
    """
    found = np.frombuffer(blob, dtype=CHARGE, count=len(blob) // CHARGE.itemsize)
    possible = (found["total"] >= 0.0) & (found["total"] <= TOTAL_MAX)
    return dict(
        zip(found["flow"][possible].tolist(), found["total"][possible].tolist(), strict=True)
    )


def charges_bytes(totals: Sequence[tuple[int, float]]) -> bytes:
    """Return `totals` of flows as an array of `CHARGE`."""
    return np.array(totals, dtype=CHARGE).tobytes()


def endpoint_hash(endpoint: Endpoint) -> int:
    """Return a 64-bit hash of `endpoint` and its incarnation, which is the same at every picker."""
    text = f"{endpoint.endpoint_id}\0{endpoint.incarnation}"
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def index_hashes(signatures: Iterable[str]) -> tuple[int, ...]:
    """Return a 64-bit hash of each index signature. Two equal signatures have different hashes, by
    their order.
    """
    found: list[int] = []
    seen: dict[str, int] = {}
    for signature in signatures:
        nth = seen[signature] = seen.get(signature, 0) + 1
        found.append(xxhash.xxh3_64_intdigest(f"{nth}:{signature}".encode()))
    return tuple(found)
