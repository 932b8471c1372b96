"""Which endpoints have encoded an image before: the memory of it, and the scorer that reads it.

An engine that has encoded an image keeps what came of it and encodes it no second time, whatever the
prompt round it is. What was sent where is remembered here; engines do not tell it.
Source: llm-d/llm-d-router, `requestcontrol/dataproducer/multimodal` and `scheduling/scorer/mmcacheaffinity`.
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
"""What an engine is said to keep of one item."""
CACHE_MIB: Final = 4_096
ENTRIES_MAX: Final = 131_072
"""(item, endpoint) pairs, of all endpoints together, some 25 MB."""
_KEY_BYTES_MAX: Final = 16
_ENTRY_BYTES: Final = 192
"""Of one pair, CPython 3.11."""

_Mebibytes = Annotated[int, Meta(ge=1, le=262_144)]


class EncoderCacheSettings(Parameters, frozen=True):
    """`mm-embeddings-cache-producer`: images, audio and video that endpoints were sent, by content.

    Each endpoint has so many as its engine's encoder cache, `cacheSizeInMBPerServer` at 2 MiB each; the
    least recently sent goes first. Of all endpoints together there are 131,072 at most: above it who
    has most gives up its oldest.
    """

    type_name: ClassVar[str] = "mm-embeddings-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(shares=True, measures=True, warns=True)

    cache_size_in_mb_per_server: _Mebibytes | None = field(
        default=None, name="cacheSizeInMBPerServer"
    )
    """MiB of an endpoint's encoder cache; none: 4,096."""
    cache_size_in_mb: _Mebibytes | None = field(default=None, name="cacheSizeInMB")
    """As a sample of the field spells it; the other one goes before."""

    @property
    def items_max(self) -> int:
        """Of one endpoint."""
        size = self.cache_size_in_mb_per_server or self.cache_size_in_mb or CACHE_MIB
        return max(1, size // ITEM_MIB)

    def warnings(self) -> list[str]:
        """What is meant by another name, without the place."""
        if self.cache_size_in_mb is None:
            return []
        return ["cacheSizeInMB is taken for cacheSizeInMBPerServer, give that"]

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return EncoderCache(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply everything to a running index."""
        return isinstance(index, EncoderCache) and index.configure(self)


class EncoderCache:
    """`AffinityIndex`; the unit is one distinct item of the request."""

    def __init__(self, settings: EncoderCacheSettings) -> None:
        self._slots: dict[int, OrderedDict[bytes, Seconds]] = {}
        """Slot -> item -> when it was last sent there, the least recent first."""
        self._entries = 0
        self._lookups = {"full": 0, "partial": 0, "none": 0}
        self.configure(settings)

    def configure(self, settings: EncoderCacheSettings) -> bool:
        """Adopt `settings`; what is too much for them goes at once."""
        self._items_max = settings.items_max
        for items in self._slots.values():
            self._fit(items)
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """How many of the distinct items of `request` each slot was sent before."""
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
        """`slot` encodes what it has not; returns which of it was new there, or None."""
        new = tuple(item for item in request.media_items() if self._note(slot, item, now))
        self._bound()
        return (new, now) if new else None

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """What was new at `slot` is not there, unless it was sent there since."""
        if recorded is None or slot not in self._slots:
            return
        new, sent_at = recorded
        items = self._slots[slot]
        for item in new:
            if items.get(item) == sent_at:
                del items[item]
                self._entries -= 1

    def forget(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted."""
        self._entries -= len(self._slots.pop(slot, ()))

    def expire(self, now: Seconds) -> None:
        """Nothing here grows old."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """That is the size of another cache."""

    def measures(self) -> IndexMeasures:
        """An entry is an item at an endpoint; `MeasuresItself`."""
        return IndexMeasures(
            entries=self._entries,
            memory_bytes=self._entries * _ENTRY_BYTES,
            lookups=dict(self._lookups),
        )

    signature: ClassVar[str] = "media"
    """`SharedIndex`."""

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """The items of `request`."""
        return request.media_items()

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """A peer sent the items `keys` to `slot` at `stamp`."""
        for item in keys:
            if 0 < len(item) <= _KEY_BYTES_MAX:
                self._note(slot, item, min(stamp, now))
        self._bound()

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Every item of every slot."""
        found = [
            (sent_at, slot, item)
            for slot, items in self._slots.items()
            for item, sent_at in items.items()
        ]
        for sent_at, slot, item in sorted(found):
            yield slot, sent_at, (item,)

    def _note(self, slot: int, item: bytes, sent_at: Seconds) -> bool:
        """`slot` was sent `item`; whether it was new there."""
        items = self._slots.setdefault(slot, OrderedDict())
        before = items.get(item)
        if before is None:
            self._entries += 1
        items[item] = sent_at if before is None else max(before, sent_at)
        # What a peer tells is some milliseconds late, and takes its place among the last.
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
    """`mm-embeddings-cache-scorer`: the share of the request's distinct images, audio and video that an
    endpoint was sent before; 0 for all without any.
    """

    type_name: ClassVar[str] = "mm-embeddings-cache-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads=("media",), reads_index=True)
    producer_type: ClassVar[str] = EncoderCacheSettings.type_name

    producer_name: str = ""
    """Of the `mm-embeddings-cache-producer`; empty: the first."""

    @property
    def producer(self) -> str | None:
        return self.producer_name or self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        known = candidates.affinity(self.producer_name or self.producer_type)
        return known.matched / max(1, known.total)
