"""Encode a snapshot as one piece of bytes for a file or a broker, and decode it.

    magic "HMSN" | version u16 | unused u16 | created, Unix time in ms, i64 | SHA-256 of the rest |
    frames, each: length u32 | bytes

Numbers are little-endian. The checksum covers everything else, including the head.
"""

import asyncio
import hashlib
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from epp.core.peers.exchange import PeerExchange
from epp.core.peers.frames import FRAME_BYTES_MAX
from epp.core.types import Seconds

SNAPSHOT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of a snapshot in bytes, ten times the size of a snapshot with 1.7 million
entries.
"""
SNAPSHOT_AGE_S_MAX: Final[Seconds] = 3_600.0
"""Maximum age of a usable snapshot in seconds. By default indexes drop older entries, and each
entry has its own age.
"""
SKEW_S_MAX: Final[Seconds] = 60.0
"""Maximum difference between the clocks of two hosts in seconds. A snapshot whose creation time is
further in the future is rejected.
"""
PAUSE_SHARE: Final = 4.0
"""Pause after each frame of a snapshot that is read from the exchange, as a multiple of the time
that reading the frame took.
"""
_MAGIC: Final = b"HMSN"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sHHq")
_DIGEST_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")


class SnapshotError(ValueError):
    """Raised if a snapshot is invalid. The message is one sentence."""


def pack(frames: Sequence[bytes], created_s: Seconds) -> bytes:
    """Encode the `frames` of a snapshot that was created at the Unix time `created_s`."""
    head = _HEAD.pack(_MAGIC, _VERSION, 0, round(created_s * 1000))
    body = b"".join(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame))
    return b"".join((head, _digest(head, body), body))


def unpack(content: bytes, now_s: Seconds) -> tuple[list[bytes], Seconds]:
    """Decode a snapshot. Return its frames and its age in seconds at the Unix time `now_s`, which
    is 0 if its creation time is in the future. Raises `SnapshotError`.
    """
    body_at = _HEAD.size + _DIGEST_BYTES
    if len(content) < body_at or content[: len(_MAGIC)] != _MAGIC:
        raise SnapshotError("it is not a snapshot")
    head, body = content[: _HEAD.size], content[body_at:]
    _, version, _, created_ms = _HEAD.unpack(head)
    if version != _VERSION:
        raise SnapshotError(f"it has version {version}, expected {_VERSION}")
    if content[_HEAD.size : body_at] != _digest(head, body):
        raise SnapshotError("it does not match the checksum that it contains")
    age_s = now_s - created_ms / 1000
    if not -SKEW_S_MAX <= age_s <= SNAPSHOT_AGE_S_MAX:
        raise SnapshotError(
            f"it is {age_s:.0f} s old, expected {-SKEW_S_MAX:.0f} to {SNAPSHOT_AGE_S_MAX:.0f}"
        )
    return _frames(body), max(0.0, age_s)


def _frames(body: bytes) -> list[bytes]:
    frames: list[bytes] = []
    at = 0
    while at < len(body):
        start = at + _LENGTH.size
        if start > len(body):
            raise SnapshotError("it ends within a frame")
        at = start + _LENGTH.unpack_from(body, at)[0]
        if at > len(body) or at - start > FRAME_BYTES_MAX:
            raise SnapshotError("one of its frames is too long")
        frames.append(body[start:at])
    return frames


def _digest(head: bytes, body: bytes) -> bytes:
    made = hashlib.sha256(head)
    made.update(body)
    return made.digest()


async def gathered(exchange: PeerExchange, bytes_max: int = SNAPSHOT_BYTES_MAX) -> list[bytes]:
    """Return the frames of a snapshot of the shared state. If they exceed `bytes_max`, the first
    frames are left out.

    The event loop runs between two frames.
    """
    frames: deque[bytes] = deque()
    left = bytes_max - _HEAD.size - _DIGEST_BYTES
    made = exchange.snapshot(time.monotonic())
    while True:
        began_at_s = time.monotonic()
        frame = next(made, None)
        if frame is None:
            return list(frames)
        frames.append(frame)
        left -= _LENGTH.size + len(frame)
        while left < 0:
            left += _LENGTH.size + len(frames.popleft())
        await asyncio.sleep(PAUSE_SHARE * (time.monotonic() - began_at_s))


async def load(exchange: PeerExchange, content: bytes, now_s: Seconds) -> tuple[int, Seconds]:
    """Pass the frames of the encoded snapshot `content`, read at the Unix time `now_s`, to the
    exchange.

    Return the number of these frames and their age in seconds. Raises `SnapshotError` if the
    snapshot is invalid.
    """
    # Hashing and parsing some megabytes would block the event loop, so a thread does it.
    frames, age_s = await asyncio.to_thread(unpack, content, now_s)
    await feed(exchange, frames, age_s)
    return len(frames), age_s


async def feed(exchange: PeerExchange, frames: Sequence[bytes], age_s: Seconds) -> None:
    """Pass the snapshot's `frames` to the exchange, which applies each frame before it gets the
    next.
    """
    for frame in frames:
        exchange.receive_snapshot_frame(frame, time.monotonic(), age_s)
        await asyncio.sleep(0)
        while exchange.pending():
            exchange.apply(time.monotonic())
            await asyncio.sleep(0)
