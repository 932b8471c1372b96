"""What replicas know each other by: one secret in a file, and the keys that follow from it.

All replicas have the same secret and so the same pair of CURVE keys. Whoever does not know it
cannot speak to a replica, nor read what replicas say, nor pass for one.
"""

import hashlib
from pathlib import Path
from typing import Final

import zmq
from msgspec import Struct
from zmq.utils import z85

from epp.shell.starting import StartError

SECRET_BYTES_MIN: Final = 32
"""As `openssl rand -base64 32` and more; what can be guessed is no secret."""
FILE_BYTES_MAX: Final = 65_536
_PURPOSE: Final = b"homing-peer-1"
"""Of the hash; another purpose of the same secret gives other keys."""


class CurveKeys(Struct, frozen=True):
    """A key pair of CurveZMQ (https://rfc.zeromq.org/spec/26), in Z85, as ZeroMQ takes it."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "<CurveKeys>"


def read_secret(path: str, flag: str) -> bytes:
    """The content of `path` that `flag` names, without white space round it. `StartError`."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StartError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise StartError(f"{flag} {path} is larger than {FILE_BYTES_MAX} bytes")
    return content.strip()


def peer_keys(path: str) -> CurveKeys:
    """The keys that follow from the secret in the file `path`. Raises `StartError`."""
    content = read_secret(path, "--peer-secret-file")
    if len(content) < SECRET_BYTES_MIN:
        raise StartError(
            f"--peer-secret-file {path} has {len(content)} bytes, expected at least "
            f"{SECRET_BYTES_MIN}"
        )
    return keys_of(content)


def keys_of(secret: bytes) -> CurveKeys:
    """Any 32 bytes are a secret key of Curve25519, which clamps them."""
    drawn = hashlib.blake2b(secret, digest_size=32, person=_PURPOSE).digest()
    key = z85.encode(drawn)
    return CurveKeys(public=zmq.curve_public(key), secret=key)
