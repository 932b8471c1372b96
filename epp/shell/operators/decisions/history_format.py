"""Format of the files of `--decisions-dir`, with the same bytes that memory stores.

A file consists of members of gzip. They contain frames: a length in four bytes, little-endian, and
the content, whose first byte is the kind. Each file can be read without earlier ones, because it
starts with the head and with all settings and states that its decisions may refer to.
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
"""Maximum size of a frame; states of a pool of ten thousand are smaller."""

HEAD: Final = b"h"
SETTING: Final = b"c"
STATES: Final = b"t"
APPLIED: Final = b"a"
REFUSED_DOCUMENT: Final = b"x"
ENDED: Final = b"e"
LOST: Final = b"l"
"""Kinds of frames beside those of records (`decision_record`)."""

_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<cq")
_GZIP_FORMAT: Final = 31
_PACKING_LEVEL: Final = 1
"""Compression level of gzip; level 6 saves a ninth and takes nearly three times as long."""
_pack: Final = msgspec.msgpack.Encoder().encode


class Head(Struct, frozen=True, kw_only=True):
    """The first frame of a file."""

    format: str = FORMAT
    version: int = VERSION
    origin: str
    """Identifier of the process."""
    picker: str
    """Name of the pod, or "" if there is none."""
    began_s: float
    """Unix time that is not after any record of the file."""


class ToldSetting(Struct, frozen=True, kw_only=True):
    """A configuration that decided, with the number that decisions refer to."""

    number: int
    generation: int
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...]
    costs: tuple["ToldPlugin | None", ...] = ()
    """Scorers that can list the parts of their cost, with None for others."""


class ToldPlugin(Struct, frozen=True):
    """A plugin that can be created again from its type and packed parameters."""

    type_name: str
    parameters: bytes


class ToldStates(Struct, frozen=True, kw_only=True):
    """The states of all endpoints that are not simply ready, with the number that decisions refer
    to.
    """

    number: int
    at_s: float
    states: dict[str, EndpointState]


class ToldRefused(Struct, frozen=True, kw_only=True):
    """A document that was rejected."""

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
    """Return `plugin` in a form that can be stored, or None if a parameter cannot be encoded."""
    try:
        return ToldPlugin(type_name, msgspec.msgpack.encode(plugin, enc_hook=_spelt))
    except (TypeError, NotImplementedError):
        return None


def _spelt(value: object) -> str:
    """Return a parameter in the spelling of configurations."""
    if isinstance(value, Duration):
        return f"{float(value):.9f}s"
    raise NotImplementedError


def frame_of(kind: bytes, told: Told) -> bytes:
    """Return a frame that is not a record."""
    return kind + _pack(told)


def told_of(frame: bytes) -> Told:
    """Return the value that was passed to `frame_of`.

    Raises `msgspec.DecodeError`, or `KeyError` for an unknown kind.
    """
    told: Told = _KINDS[frame[:1]].decode(memoryview(frame)[1:])
    return told


def ended_frame(number: int, head: bytes) -> bytes:
    """Return a frame that replaces the head of decision `number`, whose request ended."""
    return _NUMBER.pack(ENDED, number) + head


def ended_of(frame: bytes) -> tuple[int, bytes]:
    """Return the arguments of `ended_frame`."""
    return _NUMBER.unpack_from(frame)[1], frame[_NUMBER.size :]


def framed(frame: bytes) -> bytes:
    """Return the frame with its length."""
    return _LENGTH.pack(len(frame)) + frame


def packed_frames(frames: bytes) -> bytes:
    """Compress complete frames into a member of gzip."""
    packer = zlib.compressobj(_PACKING_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
    return packer.compress(frames) + packer.flush()


def length_of(head: bytes) -> int:
    """Return the length of the frame after these `LENGTH_BYTES`."""
    length: int = _LENGTH.unpack(head)[0]
    return length


LENGTH_BYTES: Final = _LENGTH.size
