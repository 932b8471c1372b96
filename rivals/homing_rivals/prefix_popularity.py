"""An index of how many recent requests have the same beginning, at lengths that double."""

from collections import Counter, deque
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Affinity, AffinityIndex, InferenceRequest, Parameters, Seconds

_LEVELS_MAX: Final = 12
"""Number of examined lengths of a prompt's head: the shortest, twice that, up to 2,048
times that.
"""


class PrefixPopularitySettings(Parameters, frozen=True):
    """`prefix-popularity-producer`: an index of the length from which on a prompt's head is no
    longer common to many requests.

    matched = number of blocks of the shortest head of the prompt that is not popular, where the
    examined lengths start at `blocks_min`, double, and end with all full blocks of the prompt, at
    most 2,048 times `blocks_min`. A head is not popular if at most the share `share_max` of the
    last `requests_max` requests began with it, or at most `requests_min` of them. The number of
    matched blocks is the same for all endpoints. If every examined head is popular, it is the
    length of the longest examined head. Only the first prompt of a request counts.
    """

    type_name: ClassVar[str] = "prefix-popularity-producer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=16, le=4_096)] = 64
    blocks_min: Annotated[int, Meta(ge=1, le=64)] = 4
    requests_max: Annotated[int, Meta(ge=16, le=65_536)] = 1_024
    requests_min: Annotated[int, Meta(ge=1)] = 64
    """Maximum number of requests with the same head for which the head never counts as popular, as
    in one conversation among few.
    """
    share_max: Annotated[float, Meta(gt=0, le=1)] = 0.25

    def open(self) -> AffinityIndex:
        """Return a new, empty index of the popularity of prompts' heads, with these settings as its
        parameters.
        """
        return PrefixPopularity(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Return True if the running index `index` already has these settings. Return False
        otherwise; a new index must then replace it, which loses the counts of the last requests.
        """
        return isinstance(index, PrefixPopularity) and index.settings == self


class PrefixPopularity:
    """An `AffinityIndex` of the popularity of prompts' heads, whose match is the same for all
    endpoints.
    """

    def __init__(self, settings: PrefixPopularitySettings) -> None:
        self.settings: Final = settings
        self._counts: Counter[bytes] = Counter()
        self._last: deque[tuple[bytes, ...]] = deque()
        self._blocks_max = settings.blocks_min << (_LEVELS_MAX - 1)

    def __len__(self) -> int:
        return len(self._counts)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return, as the match of each slot, the number of blocks of the prompt's shortest head
        that is not popular; that of its longest examined head if all are popular.
        """
        chain = self._chain(request)
        total = len(chain) // contract.HASH_BYTES
        settings = self.settings
        popular = max(settings.share_max * len(self._last), settings.requests_min)
        blocks = 0
        for blocks in self._lengths(total):
            if self._counts[_head(chain, blocks)] <= popular:
                break
        return Affinity(np.full(slots, blocks, dtype=np.int64), total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """Count one more request for each examined head of its prompt, and stop counting the oldest
        request beyond `requests_max`.
        """
        chain = self._chain(request)
        total = len(chain) // contract.HASH_BYTES
        heads = tuple(_head(chain, each) for each in self._lengths(total))
        self._last.append(heads)
        self._counts.update(heads)
        if len(self._last) > self.settings.requests_max:
            for head in self._last.popleft():
                self._counts[head] -= 1
                if not self._counts[head]:
                    del self._counts[head]

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo nothing: a request whose routing is undone was made all the same, so it still
        counts.

        If it is recorded again, which is rare, its heads count twice.
        """

    def forget(self, slot: int) -> None:
        """Drop nothing for an endpoint that left, because the index stores nothing about endpoints."""

    def expire(self, now: Seconds) -> None:
        """Drop nothing with time: the oldest request is dropped when a new one is counted."""

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Ignore the size of an engine's cache, because the index does not depend on it."""

    def _lengths(self, total: int) -> list[int]:
        """Return the number of blocks of each examined head of a prompt with `total` full blocks,
        the shortest first.
        """
        least = self.settings.blocks_min
        lengths = [least << level for level in range(_LEVELS_MAX) if least << level < total]
        return [*lengths, min(total, self._blocks_max)] if total else []

    def _chain(self, request: InferenceRequest) -> bytes:
        block_bytes = self.settings.block_tokens * contract.BYTES_PER_TOKEN
        chains = request.chains_of(block_bytes, self._blocks_max)
        return chains[0] if chains else b""


def _head(chain: bytes, blocks: int) -> bytes:
    """Return the chained hash of the last of `blocks` blocks, which identifies the head up to
    there.
    """
    return chain[(blocks - 1) * contract.HASH_BYTES : blocks * contract.HASH_BYTES]
