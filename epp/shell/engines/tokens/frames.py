"""Messages between the picker and its tokenizer process: msgpack after a length of four bytes."""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from epp.core.types import ApiKind

LENGTH_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 48 * 1024 * 1024
"""Maximum size in bytes of a message to or from the tokenizer process. The longest accepted body
and its token ids are far smaller.
"""


class Begin(Struct, frozen=True, tag=True, array_like=True):
    """The first message to the tokenizer process: `LocalTokenizers` as JSON, and the model whose
    tokenizer is used for models without one.
    """

    settings: bytes
    model_name: str


class Load(Struct, frozen=True, tag=True, array_like=True):
    """A request to the tokenizer process to load the tokenizer of `model`."""

    model: str


class Job(Struct, frozen=True, tag=True, array_like=True):
    """A request to the tokenizer process for the token ids of the prompts in `body`."""

    model: str
    api: ApiKind
    body: bytes


class Ready(Struct, frozen=True, tag=True, array_like=True):
    """The tokenizer process's answer to `Begin`: the names of the models for which it found
    tokenizer files.
    """

    models: tuple[str, ...]


class Cannot(Struct, frozen=True, tag=True, array_like=True):
    """The tokenizer process's answer to `Begin` if it can never return tokens, even after a
    restart.
    """

    sentence: str


class Loaded(Struct, frozen=True, tag=True, array_like=True):
    """The tokenizer process's answer to `Load`, which says whether the tokenizer can be used."""

    model: str
    problem: str
    """Reason why the tokenizer cannot be used, or "" if it was loaded."""
    library: str = ""
    cut: bool = False
    """True if texts are split at special tokens, so that a longer prompt reuses the cached token
    ids of its first parts.
    """
    template: bool = False
    seconds: float = 0.0


class Done(Struct, frozen=True, tag=True, array_like=True):
    """The tokenizer process's answer to `Job`: the token ids of each prompt, or the `TokensResult`
    that says why there are none.
    """

    ids: tuple[bytes, ...]
    result: str
    parts_known: int
    parts_new: int
    kept_bytes: int


ToWorker: TypeAlias = Begin | Load | Job
FromWorker: TypeAlias = Ready | Cannot | Loaded | Done

_encode = msgspec.msgpack.Encoder().encode
_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def framed(message: ToWorker | FromWorker) -> bytes:
    encoded = _encode(message)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def length_of(head: bytes) -> int:
    """Return the length in bytes that the head of a message states. Raises `ValueError` if it is
    too long.
    """
    length = int.from_bytes(head, "little")
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame has {length} bytes, expected at most {FRAME_BYTES_MAX}")
    return length


def to_worker(frame: bytes) -> ToWorker:
    """Decode a message that the picker sent to the tokenizer process. Raises
    `msgspec.DecodeError`.
    """
    message: ToWorker = _to_worker(frame)
    return message


def from_worker(frame: bytes) -> FromWorker:
    """Decode a message that the tokenizer process sent to the picker. Raises
    `msgspec.DecodeError`.
    """
    message: FromWorker = _from_worker(frame)
    return message
