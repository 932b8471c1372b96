"""The state that the exact prefix index stores of each endpoint and of its ranks, apart from the
rows.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from epp.core.knowledge.index import Held
from epp.core.kv_events.mirror import Mirror
from epp.core.kv_events.stream import StreamState
from epp.core.types import Seconds

TRACKED_MAX: Final = 256
"""Maximum number of results of `ExactIndex.held` per endpoint that are updated when the engine
reports more of a prompt.
"""
COUNTS: Final = frozenset({StreamState.REPLAYING, StreamState.LIVE})
"""States of an event stream in which the blocks that it reported count in a match."""


class Place:
    """The place of one engine rank in the rows of the exact prefix index: a number, and the bit
    with that number.
    """

    __slots__ = ("bit", "mirror", "mirror_numbers", "mirror_rows", "number", "rank", "slot")

    def __init__(self, number: int, slot: int, rank: int, mirror: Mirror) -> None:
        self.number = number
        self.bit = 1 << number
        self.slot = slot
        """Slot of the endpoint of this rank; -1 once its blocks are dropped, for example because
        the endpoint left.
        """
        self.rank = rank
        self.mirror = mirror
        self.mirror_rows, self.mirror_numbers = 0, 0
        """Sizes of this rank's mirror when the index last added them to its totals."""


class RankState:
    """The state of the KV event stream of one data-parallel rank."""

    __slots__ = ("complete", "counting", "place", "state")

    def __init__(self) -> None:
        self.place: Place | None = None
        self.state = StreamState.NONE
        self.complete = False
        self.counting = True

    @property
    def is_gone(self) -> bool:
        """Return whether the rank has neither a source of events nor reported blocks, so that it
        may be dropped.
        """
        silent = self.place is None or not len(self.place.mirror)
        return self.state is StreamState.NONE and silent

    @property
    def reported_all(self) -> bool:
        """Return whether the index knows all blocks that the rank has cached."""
        place = self.place
        counts = self.complete and self.state in COUNTS
        return counts and place is not None and not place.mirror.cut


class SlotState:
    """The state of one endpoint in the exact index, apart from its rows of cached keys."""

    __slots__ = ("awaited", "blocks_total", "overdue", "placed", "ranks", "tracked")

    def __init__(self) -> None:
        self.ranks = [RankState()]
        """State of each data-parallel rank by its number; at least one, and usually only one."""
        self.awaited: deque[tuple[Seconds, int]] = deque()
        """Decisions whose KV-cache events are awaited, as (time, block key that the engine will
        report), oldest first.
        """
        self.overdue = False
        """True if the index waited for a KV-cache event for `LATE_S_MAX`, and neither that event
        nor a later one came.
        """
        self.blocks_total = 0
        """Number of blocks in the KV caches of all ranks; 0 if the engine does not report it."""
        self.tracked: dict[int, Held] = {}
        """Results of `ExactIndex.held` that are updated until the engine reports the whole prompt,
        by the last block key of the prompt.
        """
        self.placed: dict[int, int] = {}
        """Internal number of each rank in the index of decisions for ranks, by rank. It is valid as
        long as this object.
        """

    @property
    def reported_all(self) -> bool:
        """Return whether the index knows all blocks that each rank of the endpoint has cached."""
        return all(rank.reported_all for rank in self.ranks)

    def track(self, key: int, held: Held) -> Held:
        """Keep `held`, the reported part of a prompt, up to date from now on and return it. If the
        prompt that ends with `key` already has such an object, return that one. Above
        `TRACKED_MAX`, the oldest such object becomes void.
        """
        tracked = self.tracked
        known = tracked.get(key)
        if known is not None:
            known.blocks = max(known.blocks, held.blocks)
            return known
        if len(tracked) >= TRACKED_MAX:
            tracked.pop(next(iter(tracked))).void = True
        tracked[key] = held
        return held

    def complete_tracked(self, keys: Iterable[int]) -> None:
        """Mark the prompts whose last block key is among `keys` as wholly reported, in the results
        that are kept up to date.
        """
        for key in self.tracked.keys() & keys:
            held = self.tracked.pop(key)
            held.blocks = held.total

    def void_tracked(self) -> None:
        """Mark all results that are kept up to date as void, because the engine's events so far are
        no longer valid.
        """
        for held in self.tracked.values():
            held.void = True
        self.tracked.clear()

    @property
    def places(self) -> list[Place]:
        """Return the places of those ranks of the endpoint that have a mirror of their cached
        blocks.
        """
        return [rank.place for rank in self.ranks if rank.place is not None]

    @property
    def engine_block_tokens(self) -> int:
        """Return the number of tokens in the largest block of any rank of the engine; 0 if none is
        reported.
        """
        return max(place.mirror.engine_block_tokens for place in self.places)
