"""Files of `--decisions-dir`: what is kept of decisions, in the very bytes that memory keeps.

A file is gzip, member after member. In it stand frames: their length in four bytes, little-endian, and
so many bytes, of which the first says what it is. Each file can be read without those before it: it
begins with the head and with all settings and states that its decisions may name.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from epp.core.duration import Duration
from epp.shell.operators.decisions.configuration_changes import Applied, RefusedDocument
from epp.shell.operators.decisions.endpoint_states import EndpointState

FORMAT: Final = "homing-decisions"
VERSION: Final = 1
KIND: Final = "decisions"
ENDING: Final = "bin.gz"
FRAME_BYTES_MAX: Final = 4 * 2**20
"""States of a pool of ten thousand take less."""

HEAD: Final = b"h"
SETTING: Final = b"c"
STATES: Final = b"t"
APPLIED: Final = b"a"
REFUSED_DOCUMENT: Final = b"x"
ENDED: Final = b"e"
LOST: Final = b"l"
"""Kinds of frames, besides those of records (`decision_record`)."""

_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<cq")
_GZIP_FORMAT: Final = 31
_PACKING_LEVEL: Final = 1
"""Of gzip: 6 gains a ninth, and takes nearly three times as long."""
_pack: Final = msgspec.msgpack.Encoder().encode


class Head(Struct, frozen=True, kw_only=True):
    """The first frame of a file."""

    format: str = FORMAT
    version: int = VERSION
    origin: str
    """Names the process."""
    picker: str
    """The name of the pod; "" where there is none."""
    began_s: float
    """By the clock of the day: nothing in the file is older."""


class ToldSetting(Struct, frozen=True, kw_only=True):
    """A configuration that decided, under a number that decisions name."""

    number: int
    generation: int
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...]
    costs: tuple["ToldPlugin | None", ...] = ()
    """Those of the scorers that can say what their cost is made of, None in the place of others."""


class ToldPlugin(Struct, frozen=True):
    """A plugin, to be made again: its type and, packed, its parameters."""

    type_name: str
    parameters: bytes


class ToldStates(Struct, frozen=True, kw_only=True):
    """States of all endpoints that are not simply ready, under a number that decisions name."""

    number: int
    at_s: float
    states: dict[str, EndpointState]


class ToldRefused(Struct, frozen=True, kw_only=True):
    """A document that did not come into force."""

    document: RefusedDocument


Told = Head | ToldSetting | ToldStates | Applied | ToldRefused | int
_KINDS: Final[Mapping[bytes, msgspec.msgpack.Decoder[Any]]] = {
    HEAD: msgspec.msgpack.Decoder(Head),
    SETTING: msgspec.msgpack.Decoder(ToldSetting),
    STATES: msgspec.msgpack.Decoder(ToldStates),
    APPLIED: msgspec.msgpack.Decoder(Applied),
    REFUSED_DOCUMENT: msgspec.msgpack.Decoder(ToldRefused),
    LOST: msgspec.msgpack.Decoder(int),
}


def told_plugin(type_name: str, plugin: object) -> ToldPlugin | None:
    """`plugin` as it can be kept; None: it has a parameter that cannot."""
    try:
        return ToldPlugin(type_name, msgspec.msgpack.encode(plugin, enc_hook=_spelt))
    except (TypeError, NotImplementedError):
        return None


def _spelt(value: object) -> str:
    """A parameter as configurations spell it."""
    if isinstance(value, Duration):
        return f"{float(value):.9f}s"
    raise NotImplementedError


def frame_of(kind: bytes, told: Told) -> bytes:
    """A frame that is no record."""
    return kind + _pack(told)


def told_of(frame: bytes) -> Told:
    """What `frame_of` was given. Raises `msgspec.DecodeError`, and `KeyError` for another kind."""
    told: Told = _KINDS[frame[:1]].decode(memoryview(frame)[1:])
    return told


def ended_frame(number: int, head: bytes) -> bytes:
    """The request of the decision `number` ended: its record begins with `head` from now on."""
    return _NUMBER.pack(ENDED, number) + head


def ended_of(frame: bytes) -> tuple[int, bytes]:
    """What `ended_frame` was given."""
    return _NUMBER.unpack_from(frame)[1], frame[_NUMBER.size :]


def framed(frame: bytes) -> bytes:
    """As it stands in the file."""
    return _LENGTH.pack(len(frame)) + frame


def packed_frames(frames: bytes) -> bytes:
    """Whole frames as a member of gzip."""
    packer = zlib.compressobj(_PACKING_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
    return packer.compress(frames) + packer.flush()


def length_of(head: bytes) -> int:
    """Of the frame that follows these `LENGTH_BYTES`."""
    length: int = _LENGTH.unpack(head)[0]
    return length


LENGTH_BYTES: Final = _LENGTH.size
