"""Messages between the picker and its worker process: msgpack after a length of four bytes."""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from epp.core.types import ApiKind

LENGTH_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 48 * 1024 * 1024
"""Maximum size of a message; the longest accepted body and its ids are far smaller."""


class Begin(Struct, frozen=True, tag=True, array_like=True):
    """The first message: `LocalTokenizers` as JSON, and the model whose tokenizer others use."""

    settings: bytes
    model_name: str


class Load(Struct, frozen=True, tag=True, array_like=True):
    """A request to load the tokenizer of `model`."""

    model: str


class Job(Struct, frozen=True, tag=True, array_like=True):
    """A request for the tokens of the prompts in `body`."""

    model: str
    api: ApiKind
    body: bytes


class Ready(Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Begin`: the models that have a tokenizer, as far as known by name."""

    models: tuple[str, ...]


class Cannot(Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Begin` if no tokens will be available, even after a restart."""

    sentence: str


class Loaded(Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Load`."""

    model: str
    problem: str
    """Reason why the tokenizer cannot be used, or ""."""
    library: str = ""
    cut: bool = False
    """True if texts are split at special tokens, so that parts are cached."""
    template: bool = False
    seconds: float = 0.0


class Done(Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Job`: ids of each prompt, or the `TokensResult` with the reason."""

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
    """Return the length of a frame. Raises `ValueError` if it is too long."""
    length = int.from_bytes(head, "little")
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame has {length} bytes, expected at most {FRAME_BYTES_MAX}")
    return length


def to_worker(frame: bytes) -> ToWorker:
    """Decode a message to the worker. Raises `msgspec.DecodeError`."""
    message: ToWorker = _to_worker(frame)
    return message


def from_worker(frame: bytes) -> FromWorker:
    """Decode a message from the worker. Raises `msgspec.DecodeError`."""
    message: FromWorker = _from_worker(frame)
    return message
