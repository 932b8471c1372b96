"""What the picker and its worker process tell each other: msgpack behind four bytes of length."""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from epp.core.types import ApiKind

LENGTH_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 48 * 1024 * 1024
"""The longest body that is asked for is far shorter, and so is what it becomes."""


class Begin(Struct, frozen=True, tag=True, array_like=True):
    """The first one: `LocalTokenizers` as JSON, and the model whose tokenizer others have."""

    settings: bytes
    model_name: str


class Load(Struct, frozen=True, tag=True, array_like=True):
    """Make the tokenizer of `model` ready."""

    model: str


class Job(Struct, frozen=True, tag=True, array_like=True):
    """Asks which tokens the prompts of `body` become."""

    model: str
    api: ApiKind
    body: bytes


class Ready(Struct, frozen=True, tag=True, array_like=True):
    """Answers `Begin`: the models that have a tokenizer, as far as it is known by name."""

    models: tuple[str, ...]


class Cannot(Struct, frozen=True, tag=True, array_like=True):
    """Answers `Begin`: why there will be no tokens; nor after a start anew."""

    sentence: str


class Loaded(Struct, frozen=True, tag=True, array_like=True):
    """Answers `Load`."""

    model: str
    problem: str
    """"" if there is none."""
    library: str = ""
    cut: bool = False
    """At special tokens, so that parts are kept."""
    template: bool = False
    seconds: float = 0.0


class Done(Struct, frozen=True, tag=True, array_like=True):
    """Answers `Job`: ids of each prompt, or the `TokensResult` that says why not."""

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
    """Raises `ValueError` for a frame that is too long."""
    length = int.from_bytes(head, "little")
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame has {length} bytes, expected at most {FRAME_BYTES_MAX}")
    return length


def to_worker(frame: bytes) -> ToWorker:
    """Raises `msgspec.DecodeError`."""
    message: ToWorker = _to_worker(frame)
    return message


def from_worker(frame: bytes) -> FromWorker:
    """Raises `msgspec.DecodeError`."""
    message: FromWorker = _from_worker(frame)
    return message
