"""The line of one request in Homing's capture format, and the keyed hashes that replace
confidential values in it.

See docs/capture-format.md. A capture shows the times and sizes of requests, and which prompts begin
alike.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from msgspec import Meta, Struct, field

from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds

FORMAT_NAME: Final = "homing-capture"
VERSION: Final = 1
SALT_BYTES_MIN: Final = 16
"""Minimum size of a salt in bytes, which makes trying all salts infeasible."""
SALT_BYTES_MAX: Final = 64
"""Maximum size of a salt in bytes, which is the longest key of BLAKE2b."""
AES_KEY_BYTES: Final = 16
NAMES_MAX: Final = 1_024
"""Maximum number of names whose hashes are cached. Models come with each request, sessions with
each turn.
"""

Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
"""Number of tokens of a prompt, 1 to 10 million; another value is an error."""
TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=10_000_000)]
"""Number of tokens of an answer, or of a prompt by its token ids, 0 to 10 million. It is 0, for
example, for the answer of a refused request, or if the token ids are unknown.
"""
BlockId: TypeAlias = Annotated[int, Meta(ge=0)]
"""Identifier of a block or an answer, an unsigned number of 64 bits."""
_Positive: TypeAlias = Annotated[int, Meta(ge=1)]
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Duration: TypeAlias = Annotated[float, Meta(ge=0)]


class CaptureHeader(Struct, kw_only=True, omit_defaults=True):
    """The first line of a file in the capture format."""

    format: str
    version: int
    block_tokens: _Positive = 64
    """Number of tokens in each block of `CaptureLine.blocks`."""
    source: str = ""
    """Free text that says what was captured or converted."""


class CaptureLine(Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request in the capture format. Unknown members are skipped, so that the format can grow."""

    time_s: Seconds
    prompt_tokens: Tokens
    output_tokens: TokenCount
    output_tokens_max: _Positive | None = None
    blocks: bytes = b""
    """Hash of each block of the first prompt, eight bytes each, little-endian; base64 in the file."""
    parts: tuple[tuple[BlockId, _Positive], ...] = ()
    """Consecutive parts of the prompt as (id, tokens), instead of `blocks`. Their lengths may
    differ.
    """
    answer: BlockId | None = None
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    session: str = ""
    turn: _Count = 0
    priority: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Request headers that plugins read, by name. Live captures have only those of the SLO."""
    after: _Count | None = None
    think_s: _Duration = 0.0
    first_token_s: _Duration | None = None
    """Measured time in seconds from the arrival to the first token; replays do not use it."""
    end_s: _Duration | None = None
    cached_tokens: _Count | None = None
    status: int | None = None
    endpoint: str = ""
    estimated: bool = False
    """True if `output_tokens` is an estimate, because neither the engine nor another source counted
    the tokens.
    """
    request: _Count | None = None
    """Number of the request in the events of a live capture, or None for another source."""
    more: tuple[bytes, ...] = ()
    """Block hashes of the second and further prompts of the request, each like `blocks`."""
    token_blocks: tuple[bytes, ...] = ()
    """Block hashes of each prompt over the engine's token ids, each like `blocks`."""
    known_tokens: TokenCount = 0
    """Number of prompt tokens counted by token ids, if it differs from `prompt_tokens`; 0 if
    unknown or equal.
    """
    media: bytes = b""
    """Hash of eight bytes of each distinct image, audio or video, if plugins use them."""


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Return the unsigned 64-bit ids `blocks` as bytes, in the form of `CaptureLine.blocks`."""
    return _swapped(array("Q", blocks))


def packed_chain(chain: bytes) -> bytes:
    """Return a chain of hashes converted from native byte order to that of `CaptureLine.blocks`, or
    back.
    """
    return chain if sys.byteorder == "little" else _swapped(array("Q", chain))


def _swapped(words: "array[int]") -> bytes:
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class Salt:
    """A secret salt, with the keyed hashes that replace block ids and names, so that they cannot be
    guessed.
    """

    __slots__ = ("_encrypt", "_key", "_names")

    def __init__(self, key: bytes) -> None:
        """Create a salt from `key`, a secret of up to 64 bytes. Without the key, nobody can tell
        which value a hash stands for.
        """
        self._key = key
        self._names: dict[str, str] = {"": ""}
        """Cache of keyed hashes: the hash of each recently hashed name, by name."""
        drawn = hashlib.blake2b(b"", digest_size=AES_KEY_BYTES, key=key, person=b"homing blocks")
        # ECB maps equal blocks to equal ids, as intended.
        self._encrypt = Cipher(AES(drawn.digest()), ECB()).encryptor().update  # noqa: S305

    def block(self, block: int) -> int:
        """Return the keyed hash of one block id; both are unsigned numbers of 64 bits."""
        return int.from_bytes(self.blocks(block.to_bytes(HASH_BYTES, "little")), "little")

    def blocks(self, packed: bytes) -> bytes:
        """Return the keyed hash of each block id in `packed`; both have the form of
        `CaptureLine.blocks`.

        The hash is AES-128 of the id and eight zero bytes, cut to eight bytes. A chain of 2,048 ids
        takes one call; a separate hash for each id would take a hundred times as long.
        """
        if not packed:
            return b""
        wide = np.zeros((len(packed) // HASH_BYTES, 2), dtype="<u8")
        wide[:, 0] = np.frombuffer(packed, dtype="<u8")
        hashed = np.frombuffer(self._encrypt(wide.tobytes()), dtype="<u8")
        return hashed[::2].tobytes()

    def name(self, name: str) -> str:
        """Return the keyed hash of a name: 16 hexadecimal digits of BLAKE2b, or "" for the name ""."""
        known = self._names.get(name)
        if known is None:
            text = name.encode("utf-8", "surrogatepass")
            known = hashlib.blake2b(text, digest_size=8, key=self._key).hexdigest()
            if len(self._names) >= NAMES_MAX:
                self._names = {"": ""}
            self._names[name] = known
        return known

    @property
    def identity(self) -> str:
        """Return 16 hexadecimal digits that identify the salt. They are equal for all captures with
        the same salt, and do not reveal it.
        """
        digest = hashlib.blake2b(b"", digest_size=8, key=self._key, person=b"homing salt")
        return digest.hexdigest()

    def secret(self) -> int:
        """Return a 64-bit number that can be computed only with the salt, by which sessions are
        sampled.
        """
        digest = hashlib.blake2b(b"", digest_size=8, key=self._key, person=b"homing share")
        return int.from_bytes(digest.digest(), "little")
