"""Decoder of KV-cache event messages: msgpack from any engine and release.

The payload is `[time, [event, ...], rank]`. An event is an array, `["BlockStored", ...]`, in vLLM
before 0.24 and in SGLang, or since then a map with a member `type`. Members may be missing at the
end of an array and anywhere in a map; unknown members are skipped. A hash is an integer, signed or
not, or a digest, of which the last eight bytes count.

Nothing here raises because of an engine's data. Unreadable data becomes a `Fault` with its reason.
A fault also says whether its loss may leave a removed block recorded as cached.
"""

import re
import struct
import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw, Struct
from msgspec.msgpack import Decoder

PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024
BLOCKS_MAX: Final = 65_536
"""Maximum number of blocks of all events of one payload: 4 million tokens in blocks of 64."""
EVENTS_MAX: Final = 65_536
TIER_CHARACTERS_MAX: Final = 32
NAME_CHARACTERS_MAX: Final = 256
"""Maximum length in characters of names of adapters, salts, media and kinds of groups; a block with
a longer one is not stored.
"""
DEVICE: Final = "gpu"
"""Tier to which a block belongs if its event reports no tier."""
GROUP_MAX: Final = 255
_HASH_MASK: Final = 2**64 - 1


class Fault(StrEnum):
    """The reason why a KV-cache event or a whole payload could not be used."""

    TOO_LARGE = "too large"
    NOT_A_BATCH = "not a batch"
    """The payload is not msgpack, or does not consist of a time, a list of events and a rank."""
    TOO_MANY = "too many blocks"
    REMOVAL = "unreadable removal"
    """An event that removes blocks is unreadable, so that its blocks are still recorded as cached.
    """
    CLEARING = "unreadable clearing"
    STORE = "unreadable store"
    """An event that stores blocks is unreadable, or has an invalid hash, token id, size or group.
    """
    NOT_DENSE = "not dense"
    """An event has another number of tokens than its blocks hold, and belongs to the stream's first
    group, whose blocks count as depending on all earlier ones. Events of other groups may store
    only some of the blocks of their tokens.
    """
    TOO_MANY_GROUPS = "too many groups"
    """An event is of one group more than `GROUPS_MAX` of `mirror`."""
    UNKNOWN_TYPE = "unknown type"
    KEYS = "unknown keys"
    """An event stores blocks that depend on more than their tokens, in a way that is not readable.
    """

    @property
    def may_hide_a_removal(self) -> bool:
        """Return whether an event that was lost for this reason may have removed blocks that are
        still recorded as cached.
        """
        return self in _HIDES


_HIDES: Final = frozenset(
    {Fault.TOO_LARGE, Fault.NOT_A_BATCH, Fault.TOO_MANY, Fault.REMOVAL, Fault.CLEARING}
)


class BlockExtra(Struct, frozen=True, gc=False):
    """The properties of a block that affect its hash, apart from its tokens."""

    media: tuple[tuple[str, int], ...] = ()
    """Media that begin in the block, in order, as (identifier, position of the first token in the
    block).
    """
    salt: str = ""


class Stored(Struct, frozen=True, gc=False):
    """An event: the engine stored a run of consecutive blocks of one prompt."""

    hashes: list[int]
    """Hashes by which the engine names the blocks, 64 bits each."""
    parent: int | None = None
    """Engine's hash of the block before the first, or None if the run starts a prompt."""
    tokens: bytes = b""
    """Token ids of all blocks of the run, 4 little-endian bytes each; b"" if only hashes were
    reported.
    """
    block_tokens: int = 0
    tier: str = DEVICE
    """Name of the tier that has the blocks, in lower case."""
    adapter: str = ""
    extras: tuple[BlockExtra, ...] = ()
    """Properties of each block apart from its tokens; () if no block has any."""
    group: int = 0
    kind: str = ""
    """Kind of the group of a hybrid model; "" if not reported."""
    window: int = 0
    """Number of tokens that the group looks back; 0 if it looks back to the start or does not
    report it.
    """
    sparse: bool = False
    """True if the group keeps only some of the blocks. `tokens` is then empty, because the tokens
    reported would not belong to `hashes`.
    """
    local: bool = True
    """False if the blocks are in a store that endpoints share, from where any of them can load the
    blocks.
    """


class Removed(Struct, frozen=True, gc=False):
    """An event: the engine removed blocks, or one copy of each."""

    hashes: list[int]
    tier: str = DEVICE
    group: int = 0
    copies_left: list[int] | None = None
    """Number of copies that are left of each block, or None if the engine does not count them."""
    local: bool = True


class Cleared(Struct, frozen=True, gc=False):
    """An event: the engine removed all blocks of the rank."""


Event: TypeAlias = Stored | Removed | Cleared


class Batch(Struct, frozen=True, kw_only=True):
    """The events of one payload, in the engine's order, and the faults of those that were
    unreadable.
    """

    events: tuple[Event, ...] = ()
    blocks: int = 0
    """Number of blocks that all events of the payload store or remove."""
    faults: tuple[Fault, ...] = ()
    at_s: float = 0.0
    """Time at which the engine sent the payload, by its own clock, in seconds since 1970; 0 if
    unknown.
    """
    rank: int = 0

    @property
    def broken(self) -> bool:
        """Return whether an unreadable event of this payload may have removed blocks that are still
        recorded as cached.
        """
        return any(fault.may_hide_a_removal for fault in self.faults)


# --- events in the form of engines ----------------------------------------------------------------

_Hash: TypeAlias = int | bytes


class _Stored(Struct, gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[int] | None = None
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(Struct, gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored", gc=False):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _StoredMap(_Stored, tag_field="type", tag="BlockStored", gc=False):
    locality: str | None = None
    cache_salt: str | None = None


class _RemovedMap(_Removed, tag_field="type", tag="BlockRemoved", gc=False):
    locality: str | None = None
    remaining_copy_counts: list[int] | None = None


class _ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


_Array: TypeAlias = _StoredArray | _RemovedArray | _ClearedArray
_Map: TypeAlias = _StoredMap | _RemovedMap | _ClearedMap


class _Envelope(Struct, array_like=True, gc=False):
    ts: float
    events: Raw
    rank: int | None = None


class _Arrays(Struct, array_like=True, gc=False):
    ts: float
    events: list[_Array]
    rank: int | None = None


class _Maps(Struct, array_like=True, gc=False):
    ts: float
    events: list[_Map]
    rank: int | None = None


_decode_envelope: Final = Decoder(_Envelope).decode
_decode_arrays: Final = Decoder(_Arrays).decode
_decode_maps: Final = Decoder(_Maps).decode
_decode_array: Final = Decoder(_Array).decode
_decode_map: Final = Decoder(_Map).decode
_decode_list: Final = Decoder(list[Raw]).decode

_UNREADABLE: Final = (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""Exceptions that decoding and converting an engine's data can raise, including those of deep
nesting.
"""

_FAULT_OF: Final = {
    "BlockStored": Fault.STORE,
    "BlockRemoved": Fault.REMOVAL,
    "AllBlocksCleared": Fault.CLEARING,
}

# First bytes of msgpack values.
_FIXMAP: Final = range(0x80, 0x90)
_MAPS: Final = (0xDE, 0xDF)
_ARRAY16: Final = 0xDC
_ARRAY32: Final = 0xDD
_NUMBER_BYTES: Final = {
    0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9,
}  # fmt: skip
"""Size in bytes of a msgpack number by its first byte; other first bytes are a number of one byte."""

# A full engine removes a block for each that it stores, one per event, and vLLM writes these
# removals first. Their hashes are cut out directly, in a tenth of the time of decoding them.
_BEFORE_HASH: Final = b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf"
_AFTER_HASH: Final = b"\xa6medium\xa3GPU\xa9group_idx\x00"
_usual_removals: Final = re.compile(
    b"(?s:(?:" + re.escape(_BEFORE_HASH) + b".{8}" + re.escape(_AFTER_HASH) + b")+)"
).match
_hashes_of: Final = struct.Struct(f">{len(_BEFORE_HASH)}xQ{len(_AFTER_HASH)}x").iter_unpack
_USUAL_REMOVAL: Final = _RemovedMap([], medium="GPU", group_idx=0)
_ARRAY32_HEAD: Final = bytes([_ARRAY32])
_ARRAY_OF_3: Final = b"\x93"
_SMALL_INTEGERS: Final = 0x80
"""Upper bound, exclusive, of the bytes that msgpack uses for one-byte integers."""


def rank_in(payload: bytes) -> int | None:
    """Return the data-parallel rank in `payload`, read from its last byte alone.

    Return None if the payload has no rank, or one from 128 to 255. Higher ranks are not read
    correctly, and no engine has them.
    """
    rank = payload[-1] if payload[:1] == _ARRAY_OF_3 else _SMALL_INTEGERS
    return rank if rank < _SMALL_INTEGERS else None


def read_payload(payload: bytes) -> Batch:
    """Return the events of `payload`, in order, and the faults of its unreadable parts. If the
    payload exceeds a limit or cannot be read at all, there are faults and no events.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        return Batch(faults=(Fault.TOO_LARGE,))
    try:
        at, _ = _first_of(payload, 0)
        at += _NUMBER_BYTES.get(payload[at], 1)
        start, count = _first_of(payload, at)
        first = payload[start if count else at]
    except (ValueError, IndexError):
        return Batch(faults=(Fault.NOT_A_BATCH,))
    if count > EVENTS_MAX:
        return Batch(faults=(Fault.TOO_MANY,))
    maps = first in _FIXMAP or first in _MAPS
    faults: list[Fault] = []
    removed: list[int] = []
    rest = payload
    usual = _usual_removals(payload, start) if maps else None
    if usual is not None:
        end = usual.end()
        removed = [block for (block,) in _hashes_of(payload[start:end])]
        left = (count - len(removed)).to_bytes(4, "big")
        rest = b"".join((payload[:at], _ARRAY32_HEAD, left, payload[end:]))
    envelope: _Maps | _Arrays | _Envelope
    # The type of each element is checked later, by its class.
    read: list[Any]
    try:
        envelope = _decode_maps(rest) if maps else _decode_arrays(rest)
        read = [*envelope.events]
    except _UNREADABLE:
        try:
            envelope = _decode_envelope(rest)
        except _UNREADABLE:
            return Batch(faults=(Fault.NOT_A_BATCH,))
        read = _one_by_one(envelope.events, faults)
    events, blocks = _known(read, removed, faults)
    if blocks > BLOCKS_MAX:
        return Batch(faults=(*faults, Fault.TOO_MANY))
    rank = envelope.rank
    return Batch(
        events=tuple(events),
        blocks=blocks,
        faults=tuple(faults),
        at_s=envelope.ts,
        rank=rank if rank is not None and 0 <= rank <= 0xFFFF else 0,
    )


def _known(read: list[Any], removed: list[int], faults: list[Fault]) -> tuple[list[Event], int]:
    """Return the events of a payload, and the number of their blocks: a removal of the hashes
    `removed` if there are any, then the events in `read`. Faults are added to `faults`.

    Consecutive removals that differ only in their hashes become one, so that `removed` may grow.
    """
    events: list[Event] = []
    run: Any = None
    if removed:
        run = _USUAL_REMOVAL
        events.append(Removed(removed))
    blocks = 0
    for each in read:
        if type(each) is type(run) and _goes_on(run, each):
            # Engines mostly write one removal per block, and removals are most of what they write.
            try:
                removed += _hashes(each.block_hashes)
            except _UNREADABLE:
                faults.append(Fault.REMOVAL)
            continue
        blocks += len(removed)
        run, removed = None, []
        found = _event(each)
        if isinstance(found, Fault):
            faults.append(found)
            continue
        events.append(found)
        if type(found) is Stored:
            blocks += len(found.hashes)
        elif type(found) is Removed:
            run, removed = each, found.hashes
    return events, blocks + len(removed)


def _goes_on(run: Any, other: Any) -> bool:
    """Return whether `other`, which has the class of `run`, is a removal that differs from `run`
    only in its hashes.
    """
    if not isinstance(run, _Removed):
        return False
    if other.medium != run.medium or other.group_idx != run.group_idx:
        return False
    return type(run) is _RemovedArray or (_plain(run) and _plain(other))


def _plain(read: Any) -> bool:
    return read.locality is None and read.remaining_copy_counts is None


def _first_of(payload: bytes, at: int) -> tuple[int, int]:
    """Return the position of the first item of the msgpack list at `at`, and the number of items.

    Raises `ValueError` if there is no list, and `IndexError` at the end of the payload.
    """
    head = payload[at]
    if head & 0xF0 == 0x90:
        return at + 1, head & 0x0F
    if head == _ARRAY16:
        return at + 3, int.from_bytes(payload[at + 1 : at + 3], "big")
    if head == _ARRAY32:
        return at + 5, int.from_bytes(payload[at + 1 : at + 5], "big")
    raise ValueError("expected a list")


def _one_by_one(raw: Raw, faults: list[Fault]) -> list[Any]:
    """Return the readable events of a payload that cannot be decoded as a whole. The fault of each
    other event is added to `faults`.
    """
    read: list[Any] = []
    try:
        pieces = _decode_list(raw)
    except _UNREADABLE:
        faults.append(Fault.NOT_A_BATCH)
        return read
    for piece in pieces:
        view = memoryview(piece)
        maps = view[0] in _FIXMAP or view[0] in _MAPS
        try:
            read.append(_decode_map(view) if maps else _decode_array(view))
        except _UNREADABLE:
            faults.append(_why(view))
    return read


def _why(event: memoryview) -> Fault:
    """Return the kind of fault of a KV-cache event that cannot be decoded, by its type; `REMOVAL`
    if its type is unreadable too.
    """
    try:
        found: Any = msgspec.msgpack.decode(event)
    except _UNREADABLE:
        return Fault.REMOVAL
    match found:
        case {"type": str(tag)} | [str(tag), *_]:
            return _FAULT_OF.get(tag, Fault.UNKNOWN_TYPE)
        case _:
            return Fault.REMOVAL


# --- events in our form ---------------------------------------------------------------------------


def _event(read: Any) -> Event | Fault:
    if isinstance(read, _Stored):
        try:
            return _stored(read)
        except _UNREADABLE:
            return Fault.STORE
    if isinstance(read, _Removed):
        try:
            return _removed(read)
        except _UNREADABLE:
            return Fault.REMOVAL
    return _CLEARED


def _stored(read: _Stored) -> Stored | Fault:
    hashes = _hashes(read.block_hashes)
    told_parent = read.parent_block_hash
    parent = None if told_parent is None else _hash(told_parent)
    block_tokens = read.block_size
    ids = read.token_ids or ()
    group = read.group_idx or 0
    if not (0 <= block_tokens <= BLOCKS_MAX and 0 <= group <= GROUP_MAX):
        return Fault.STORE
    sparse = bool(ids) and len(ids) != len(hashes) * block_tokens
    adapter = read.lora_name or ""
    if not adapter and read.lora_id is not None:
        # Old releases report only a number, which depends on the order of loading; vLLM counts from 1.
        if isinstance(read.lora_id, str):
            adapter = read.lora_id
        elif read.lora_id > 0:
            return Fault.KEYS
    extras: tuple[BlockExtra, ...] = ()
    if read.extra_keys is not None and any(read.extra_keys):
        known = _extras(read.extra_keys, adapter, block_tokens, starts=parent is None)
        if known is None or len(known) != len(hashes):
            return Fault.KEYS
        extras = known
    local, salt = True, ""
    if isinstance(read, _StoredMap):
        local = read.locality is None or read.locality.upper() != "REMOTE"
        salt = read.cache_salt or ""
    if salt and parent is None and hashes:
        first, *others = extras or (_NO_EXTRA,) * len(hashes)
        extras = (BlockExtra(first.media, salt), *others)
    tier = _tier(read.medium)
    kind = read.kv_cache_spec_kind or ""
    if tier is None or max(len(adapter), len(kind), len(salt)) > NAME_CHARACTERS_MAX:
        return Fault.KEYS
    return Stored(
        hashes,
        parent,
        b"" if sparse else _ids(ids),
        block_tokens,
        tier,
        adapter,
        extras,
        group,
        kind,
        max(0, read.kv_cache_spec_sliding_window or 0),
        sparse,
        local,
    )


def _removed(read: _Removed) -> Removed | Fault:
    tier = _tier(read.medium)
    group = read.group_idx or 0
    if tier is None or not 0 <= group <= GROUP_MAX:
        return Fault.REMOVAL
    copies, local = None, True
    if type(read) is _RemovedMap:
        local = read.locality is None or read.locality.upper() != "REMOTE"
        copies = read.remaining_copy_counts
        if copies is not None and len(copies) != len(read.block_hashes):
            return Fault.REMOVAL
    return Removed(_hashes(read.block_hashes), tier, group, copies, local)


def _hashes(told: list[_Hash]) -> list[int]:
    """Return the block hashes in `told` as integers from 0 to 2**64 - 1. Return `told` itself if it
    consists of such integers, as in nearly all cases.
    """
    numbers: Any = told
    try:
        as_they_are = min(numbers, default=0) >= 0
    except TypeError:
        # Some of the hashes are bytes.
        as_they_are = False
    return numbers if as_they_are else [_hash(each) for each in told]


def _hash(told: _Hash) -> int:
    """Return an engine's hash as its low 64 bits. Raises `ValueError` for a digest of another
    length than 8 to 64 bytes.
    """
    if isinstance(told, int):
        return told & _HASH_MASK
    if not 8 <= len(told) <= 64:
        raise ValueError(f"a digest has {len(told)} bytes, expected 8 to 64")
    return int.from_bytes(told[-8:], "big")


def _ids(told: Sequence[int]) -> bytes:
    """Return 4 little-endian bytes for each token id. Raises `OverflowError` for an invalid id."""
    words = array("I", told)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _tier(medium: str | None) -> str | None:
    """Return the tier that `medium` names, in lower case. It is the device for "" and None. Return
    None if the name is too long.
    """
    if medium == "GPU":
        return DEVICE
    if not medium:
        return DEVICE
    return medium.lower() if len(medium) <= TIER_CHARACTERS_MAX else None


def _extras(
    told: list[Any], adapter: str, block_tokens: int, *, starts: bool
) -> tuple[BlockExtra, ...] | None:
    """Return the properties of each block apart from its tokens, or None if their meaning is
    unknown.

    The extra keys of a block, which the engine sends, have no tags. The adapter's name comes first,
    then media as (identifier, offset from the start of the block). Then follow the salt, only in a
    first block, and the digest of embeddings, as bytes. Around release 0.18, media came as bare
    identifiers without their positions.
    """
    found: list[BlockExtra] = []
    for number, keys in enumerate(told):
        if keys is None:
            found.append(_NO_EXTRA)
            continue
        extra = _extra(keys, adapter, block_tokens, first=starts and number == 0)
        if extra is None:
            return None
        found.append(extra)
    return tuple(found)


def _extra(keys: Any, adapter: str, block_tokens: int, *, first: bool) -> BlockExtra | None:
    if not isinstance(keys, list):
        return None
    media: list[tuple[str, int]] = []
    salt = ""
    for at, key in enumerate(keys):
        if adapter and at == 0 and key == adapter:
            continue
        match key:
            case [str(identifier), int(offset)] if offset < block_tokens:
                if offset >= 0:
                    media.append((identifier, offset))
                elif first:
                    return None
            case str() if first and at == len(keys) - 1:
                salt = key
            case _:
                return None
    names = (salt, *(identifier for identifier, _ in media))
    if max(map(len, names)) > NAME_CHARACTERS_MAX:
        return None
    return BlockExtra(tuple(media), salt)


_NO_EXTRA: Final = BlockExtra()
_CLEARED: Final = Cleared()
