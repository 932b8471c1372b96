"""One request in Homing's capture format, and the hashes that stand for what is not told.

See docs/capture-format.md. A capture tells who asked when, how much, and which prompts begin alike.
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
"""Nobody tries so many keys."""
SALT_BYTES_MAX: Final = 64
"""The longest key that BLAKE2b takes."""
AES_KEY_BYTES: Final = 16
NAMES_MAX: Final = 1_024
"""Whose hashes are kept: models come with each request, and sessions with each of their turns."""

Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
"""Length of a prompt; more is taken for a mistake."""
TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=10_000_000)]
"""A length as traces have it: 0 where a request failed or was not counted."""
BlockId: TypeAlias = Annotated[int, Meta(ge=0)]
"""Of 64 bits, unsigned."""
_Positive: TypeAlias = Annotated[int, Meta(ge=1)]
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Duration: TypeAlias = Annotated[float, Meta(ge=0)]


class CaptureHeader(Struct, kw_only=True, omit_defaults=True):
    """The first line."""

    format: str
    version: int
    block_tokens: _Positive = 64
    """Of the blocks in `blocks`."""
    source: str = ""
    """Free text: what was captured or converted."""


class CaptureLine(Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request. Unknown members are skipped, so that a version may grow."""

    time_s: Seconds
    prompt_tokens: Tokens
    output_tokens: TokenCount
    output_tokens_max: _Positive | None = None
    blocks: bytes = b""
    """Eight bytes, little-endian, for each block; base64 in the file."""
    parts: tuple[tuple[BlockId, _Positive], ...] = ()
    """Instead of `blocks`: (id, tokens) of stretches of different lengths."""
    answer: BlockId | None = None
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    session: str = ""
    turn: _Count = 0
    priority: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """By name: those that plugins go by. Live captures have none."""
    after: _Count | None = None
    think_s: _Duration = 0.0
    first_token_s: _Duration | None = None
    """Measured, from the arrival; nothing is replayed from these."""
    end_s: _Duration | None = None
    cached_tokens: _Count | None = None
    status: int | None = None
    endpoint: str = ""
    estimated: bool = False
    """`output_tokens` is a guess: nobody counted them."""
    request: _Count | None = None
    """Its number in the events of a live capture."""
    more: tuple[bytes, ...] = ()
    """As `blocks`, of the second prompt on, where a body has several."""
    token_blocks: tuple[bytes, ...] = ()
    """As `blocks`, of each prompt, over the token ids that the engine reads."""
    known_tokens: TokenCount = 0
    """As `prompt_tokens`, by the token ids, where these are another number; 0: they are not known."""
    media: bytes = b""
    """Eight bytes for each distinct image, audio or video, where plugins go by them."""


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Unsigned 64-bit ids as `CaptureLine.blocks` holds them."""
    return _swapped(array("Q", blocks))


def packed_chain(chain: bytes) -> bytes:
    """A chain of hashes in native byte order as `CaptureLine.blocks` holds it, and back."""
    return chain if sys.byteorder == "little" else _swapped(array("Q", chain))


def _swapped(words: "array[int]") -> bytes:
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class Salt:
    """Keyed hashes instead of what could be guessed and looked up: ids of blocks, names."""

    __slots__ = ("_encrypt", "_key", "_names")

    def __init__(self, key: bytes) -> None:
        """`key` is a secret of up to 64 bytes; lost, it makes the ids meaningless for good."""
        self._key = key
        self._names: dict[str, str] = {"": ""}
        """That were hashed lately, with their hashes."""
        drawn = hashlib.blake2b(b"", digest_size=AES_KEY_BYTES, key=key, person=b"homing blocks")
        # ECB leaves equal blocks equal, and that is what ids are for.
        self._encrypt = Cipher(AES(drawn.digest()), ECB()).encryptor().update  # noqa: S305

    def block(self, block: int) -> int:
        """64 bits, unsigned, for as many: as of `blocks`."""
        return int.from_bytes(self.blocks(block.to_bytes(HASH_BYTES, "little")), "little")

    def blocks(self, packed: bytes) -> bytes:
        """A keyed hash for each id in `packed`, as `CaptureLine.blocks` holds them.

        AES-128 of the id and eight zero bytes, cut to eight: a chain of 2,048 takes a call, where a
        hash for each of its ids takes a hundred times as long.
        """
        if not packed:
            return b""
        wide = np.zeros((len(packed) // HASH_BYTES, 2), dtype="<u8")
        wide[:, 0] = np.frombuffer(packed, dtype="<u8")
        hashed = np.frombuffer(self._encrypt(wide.tobytes()), dtype="<u8")
        return hashed[::2].tobytes()

    def name(self, name: str) -> str:
        """16 hexadecimal digits, of BLAKE2b; "" stays ""."""
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
        """16 hexadecimal digits that captures under the same salt share, and no others."""
        digest = hashlib.blake2b(b"", digest_size=8, key=self._key, person=b"homing salt")
        return digest.hexdigest()

    def secret(self) -> int:
        """64 bits that only who has the salt can know."""
        digest = hashlib.blake2b(b"", digest_size=8, key=self._key, person=b"homing share")
        return int.from_bytes(digest.digest(), "little")
