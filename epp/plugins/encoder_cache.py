"""The index of media items that endpoints have encoded, and the scorer that reads it.

An engine caches the encoding of an image and reuses it for any prompt. The index remembers which
items were sent to which endpoint, because engines do not report it.

Source: llm-d/llm-d-router, `requestcontrol/dataproducer/multimodal` and
`scheduling/scorer/mmcacheaffinity`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta, field

from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Candidates,
    Floats,
    IndexMeasures,
    InferenceRequest,
    Parameters,
    Seconds,
)

ITEM_MIB: Final = 2
"""Assumed size in MiB of one image, audio or video in an engine's encoder cache."""
CACHE_MIB: Final = 4_096
ENTRIES_MAX: Final = 131_072
"""Maximum number of (media item, endpoint) pairs that the index stores, about 25 MB."""
_KEY_BYTES_MAX: Final = 16
_ENTRY_BYTES: Final = 192
"""Memory in bytes of one (media item, endpoint) pair in the index, on CPython 3.11."""

_Mebibytes = Annotated[int, Meta(ge=1, le=262_144)]


class EncoderCacheSettings(Parameters, frozen=True):
    """`mm-embeddings-cache-producer`: images, audio and video that were sent to each endpoint, by
    content.

    The index stores for each endpoint as many items as fit into its engine's encoder cache:
    `cacheSizeInMBPerServer` divided by 2 MiB for each item. The index drops the least recently sent
    item of an endpoint first. The index stores at most 131,072 items for all endpoints together;
    above that, it drops the oldest sixteenth of the items of the endpoint with the most.
    """

    type_name: ClassVar[str] = "mm-embeddings-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(
        caches_media=True, shares=True, measures=True, warns=True
    )

    cache_size_in_mb_per_server: _Mebibytes | None = field(
        default=None, name="cacheSizeInMBPerServer"
    )
    """Size of an endpoint's encoder cache in MiB; 4,096 if not given."""
    cache_size_in_mb: _Mebibytes | None = field(default=None, name="cacheSizeInMB")
    """Alternative name of `cacheSizeInMBPerServer`, from a sample of llm-d-router;
    `cacheSizeInMBPerServer` takes precedence.
    """

    @property
    def items_max(self) -> int:
        """Return the maximum number of media items that the index stores for one endpoint."""
        size = self.cache_size_in_mb_per_server or self.cache_size_in_mb or CACHE_MIB
        return max(1, size // ITEM_MIB)

    def warnings(self) -> list[str]:
        """Return a sentence about a parameter that is used under another name; the caller adds the
        plugin's place in the document.
        """
        if self.cache_size_in_mb is None:
            return []
        return ["cacheSizeInMB is read as cacheSizeInMBPerServer; use cacheSizeInMBPerServer"]

    def open(self) -> AffinityIndex:
        """Return a new, empty index with these settings."""
        return EncoderCache(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to a running index, and return True; return False if the index has
        another class.
        """
        return isinstance(index, EncoderCache) and index.configure(self)


class EncoderCache:
    """An `AffinityIndex` of media items sent to endpoints, counted in distinct items of a
    request.
    """

    def __init__(self, settings: EncoderCacheSettings) -> None:
        self._slots: dict[int, OrderedDict[bytes, Seconds]] = {}
        """Time at which each media item was last sent to each slot, by slot, then by item, least
        recent first.
        """
        self._entries = 0
        self._lookups = {"full": 0, "partial": 0, "none": 0}
        self.configure(settings)

    def configure(self, settings: EncoderCacheSettings) -> bool:
        """Apply `settings` to this index, drop items beyond the new limits, and return True."""
        self._items_max = settings.items_max
        for items in self._slots.values():
            self._fit(items)
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the number of distinct media items of `request` that were sent to each slot
        before. Count the look-up if the request has any.
        """
        wanted = request.media_items()
        matched = np.zeros(slots, dtype=np.int64)
        if not wanted:
            return Affinity(matched, 0)
        for slot, items in self._slots.items():
            if slot < slots:
                matched[slot] = sum(item in items for item in wanted)
        best = int(matched.max(initial=0))
        self._lookups["full" if best == len(wanted) else "partial" if best else "none"] += 1
        return Affinity(matched, len(wanted))

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Record that the media items of `request` were sent to `slot`.

        Return the items that were new there, with the time, for `retract`; None if none was new.
        """
        new = tuple(item for item in request.media_items() if self._note(slot, item, now))
        self._bound()
        return (new, now) if new else None

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo `record` of a request: drop the items that it sent first to `slot`, unless they were
        sent there again since.
        """
        if recorded is None or slot not in self._slots:
            return
        new, sent_at = recorded
        items = self._slots[slot]
        for item in new:
            if items.get(item) == sent_at:
                del items[item]
                self._entries -= 1

    def forget(self, slot: int) -> None:
        """Drop all media items of `slot`, because its endpoint left or restarted."""
        self._entries -= len(self._slots.pop(slot, ()))

    def expire(self, now: Seconds) -> None:
        """Do nothing, because the media items of this index do not expire."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Do nothing, because engines report the size of their KV cache, not of their encoder
        cache.
        """

    def measures(self) -> IndexMeasures:
        """Return the number of entries (an item at an endpoint), the memory and the look-ups of
        this index.
        """
        return IndexMeasures(
            entries=self._entries,
            memory_bytes=self._entries * _ENTRY_BYTES,
            lookups=dict(self._lookups),
        )

    signature: ClassVar[str] = "media"
    """Text that names the kind of keys that this index shares with peers, for `SharedIndex`."""

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """Return the media items of `request` as keys that peers record."""
        return request.media_items()

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """Record that a peer sent the media items `keys` to `slot` at time `stamp`. Keys that are
        empty or longer than 16 bytes are ignored.
        """
        for item in keys:
            if 0 < len(item) <= _KEY_BYTES_MAX:
                self._note(slot, item, min(stamp, now))
        self._bound()

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Yield every media item of every slot, as (slot, time sent, keys), least recently sent
        first.
        """
        found = [
            (sent_at, slot, item)
            for slot, items in self._slots.items()
            for item, sent_at in items.items()
        ]
        for sent_at, slot, item in sorted(found):
            yield slot, sent_at, (item,)

    def _note(self, slot: int, item: bytes, sent_at: Seconds) -> bool:
        """Record that the media item `item` was sent to `slot`. Return True if it was new there."""
        items = self._slots.setdefault(slot, OrderedDict())
        before = items.get(item)
        if before is None:
            self._entries += 1
        items[item] = sent_at if before is None else max(before, sent_at)
        # A peer's record arrives some milliseconds late; it is placed among the most recent.
        items.move_to_end(item)
        self._fit(items)
        return before is None

    def _fit(self, items: OrderedDict[bytes, Seconds]) -> None:
        while len(items) > self._items_max:
            items.popitem(last=False)
            self._entries -= 1

    def _bound(self) -> None:
        while self._entries > ENTRIES_MAX:
            largest = max(self._slots.values(), key=len)
            for _ in range(max(1, len(largest) // 16)):
                largest.popitem(last=False)
                self._entries -= 1


class EncoderCacheAffinity(Parameters, frozen=True):
    """`mm-embeddings-cache-scorer`: the share of the request's media items that were sent to an
    endpoint before.

    Media items are the distinct images, audio and video of a request. The score is 0 for all
    endpoints if the request has no media item.
    """

    type_name: ClassVar[str] = "mm-embeddings-cache-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("media",), reads_index=True)
    producer_type: ClassVar[str] = EncoderCacheSettings.type_name

    producer_name: str = ""
    """Name of the `mm-embeddings-cache-producer` to read; empty for the first one that is declared.
    """

    @property
    def producer(self) -> str | None:
        return self.producer_name or self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        known = candidates.affinity(self.producer_name or self.producer_type)
        return known.matched / max(1, known.total)
