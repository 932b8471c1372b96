"""How many of the last requests begin alike, at lengths that double."""

from collections import Counter, deque
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    BYTES_PER_TOKEN,
    HASH_BYTES,
    Abilities,
    Affinity,
    AffinityIndex,
    InferenceRequest,
    Parameters,
    Seconds,
)

_LEVELS_MAX: Final = 12
"""Lengths that are looked at: the shortest, twice that, up to 2,048 times."""


class PrefixPopularitySettings(Parameters, frozen=True):
    """`prefix-popularity-producer`: how long a head must be to be no longer everybody's.

    matched = blocks of the shortest head, of `blocks_min` doubled again and again, that at most
    `share_max` of the last `requests_max` requests began with, or at most `requests_min` of them;
    the same number for all endpoints. A prompt that is shorter is taken as a whole.
    """

    type_name: ClassVar[str] = "prefix-popularity-producer"
    abilities: ClassVar[Abilities] = Abilities(counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=16, le=4_096)] = 64
    blocks_min: Annotated[int, Meta(ge=1, le=64)] = 4
    requests_max: Annotated[int, Meta(ge=16, le=65_536)] = 1_024
    requests_min: Annotated[int, Meta(ge=1)] = 64
    """So many do not make a head popular: one conversation among few is not everybody's."""
    share_max: Annotated[float, Meta(gt=0, le=1)] = 0.25

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return PrefixPopularity(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """The last requests are few: the index starts anew unless nothing changed."""
        return isinstance(index, PrefixPopularity) and index.settings == self


class PrefixPopularity:
    """`AffinityIndex`; knows nothing of endpoints."""

    def __init__(self, settings: PrefixPopularitySettings) -> None:
        self.settings: Final = settings
        self._counts: Counter[bytes] = Counter()
        self._last: deque[tuple[bytes, ...]] = deque()
        self._blocks_max = settings.blocks_min << (_LEVELS_MAX - 1)

    def __len__(self) -> int:
        return len(self._counts)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """The length of the head to go by, for each slot."""
        chain = self._chain(request)
        total = len(chain) // HASH_BYTES
        settings = self.settings
        popular = max(settings.share_max * len(self._last), settings.requests_min)
        blocks = 0
        for blocks in self._lengths(total):
            if self._counts[_head(chain, blocks)] <= popular:
                break
        return Affinity(np.full(slots, blocks, dtype=np.int64), total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """One more request that begins like this."""
        chain = self._chain(request)
        heads = tuple(_head(chain, each) for each in self._lengths(len(chain) // HASH_BYTES))
        self._last.append(heads)
        self._counts.update(heads)
        if len(self._last) > self.settings.requests_max:
            for head in self._last.popleft():
                self._counts[head] -= 1
                if not self._counts[head]:
                    del self._counts[head]

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """It was asked for, wherever it went; recorded again it counts twice, which is rare."""

    def forget(self, slot: int) -> None:
        """Nothing is known of endpoints."""

    def expire(self, now: Seconds) -> None:
        """What is old is what many requests lie behind."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The size of an engine's cache does not matter here."""

    def _lengths(self, total: int) -> list[int]:
        """Blocks of each head of a prompt of `total` full blocks, the shortest first."""
        least = self.settings.blocks_min
        lengths = [least << level for level in range(_LEVELS_MAX) if least << level < total]
        return [*lengths, min(total, self._blocks_max)] if total else []

    def _chain(self, request: InferenceRequest) -> bytes:
        chains = request.chains_of(self.settings.block_tokens * BYTES_PER_TOKEN, self._blocks_max)
        return chains[0] if chains else b""


def _head(chain: bytes, blocks: int) -> bytes:
    """A block's hash stands for all before it."""
    return chain[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]
