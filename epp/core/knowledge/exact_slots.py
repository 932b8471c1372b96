"""The state of endpoints and their ranks in the exact prefix index, apart from the rows."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from epp.core.knowledge.index import Held
from epp.core.kv_events.mirror import Mirror
from epp.core.kv_events.stream import StreamState
from epp.core.types import Seconds

SOUGHT_MAX: Final = 256
"""Maximum number of prompts per endpoint that were requested before the engine had cached them."""
COUNTS: Final = frozenset({StreamState.REPLAYING, StreamState.LIVE})
"""States in which the blocks that a stream reported count."""


class Place:
    """The rows of one mirror, which share its bit."""

    __slots__ = ("bit", "mirror", "mirror_numbers", "mirror_rows", "number", "rank", "slot")

    def __init__(self, number: int, slot: int, rank: int, mirror: Mirror) -> None:
        self.number = number
        self.bit = 1 << number
        self.slot = slot
        """Slot of the endpoint; -1 if the place is forgotten."""
        self.rank = rank
        self.mirror = mirror
        self.mirror_rows, self.mirror_numbers = 0, 0
        """Sizes of the mirror when they were last counted."""


class RankState:
    """The state of one rank's stream."""

    __slots__ = ("complete", "counting", "place", "state")

    def __init__(self) -> None:
        self.place: Place | None = None
        self.state = StreamState.NONE
        self.complete = False
        self.counting = True

    @property
    def is_gone(self) -> bool:
        """Return whether the rank has no stream and no blocks."""
        silent = self.place is None or not len(self.place.mirror)
        return self.state is StreamState.NONE and silent

    @property
    def told_all(self) -> bool:
        """Return whether all blocks that the rank has cached are known."""
        place = self.place
        counts = self.complete and self.state in COUNTS
        return counts and place is not None and not place.mirror.cut


class SlotState:
    """The state of one endpoint, apart from its rows."""

    __slots__ = ("awaited", "blocks_total", "overdue", "placed", "ranks", "sought")

    def __init__(self) -> None:
        self.ranks = [RankState()]
        """States of the ranks; at least one, and usually only one."""
        self.awaited: deque[tuple[Seconds, int]] = deque()
        """Awaited decisions as (time, key that the engine will report), oldest first."""
        self.overdue = False
        """True if an event was awaited for `LATE_S_MAX` and neither it nor a later one came."""
        self.blocks_total = 0
        """Number of blocks of all ranks; 0 if the engine does not report it."""
        self.sought: dict[int, Held] = {}
        """Answers that are updated until the engine has the whole prompt, by the prompt's last key."""
        self.placed: dict[int, int] = {}
        """Number of each rank in the index of decisions for ranks; it stays valid as long as this
        object.
        """

    @property
    def told_all(self) -> bool:
        """Return whether all blocks that each rank has cached are known."""
        return all(rank.told_all for rank in self.ranks)

    def seek(self, key: int, held: Held) -> Held:
        """Update `held` from now on, or return the earlier answer for the prompt that ends with
        `key`.
        """
        sought = self.sought
        known = sought.get(key)
        if known is not None:
            known.blocks = max(known.blocks, held.blocks)
            return known
        if len(sought) >= SOUGHT_MAX:
            sought.pop(next(iter(sought))).void = True
        sought[key] = held
        return held

    def found(self, keys: Iterable[int]) -> None:
        """Record that the engine has `keys` cached from now on."""
        for key in self.sought.keys() & keys:
            held = self.sought.pop(key)
            held.blocks = held.total

    def seek_no_more(self) -> None:
        """Invalidate the answers, because the engine's events so far are no longer valid."""
        for held in self.sought.values():
            held.void = True
        self.sought.clear()

    @property
    def places(self) -> list[Place]:
        """Return the places of the ranks that have one."""
        return [rank.place for rank in self.ranks if rank.place is not None]

    @property
    def engine_block_tokens(self) -> int:
        """Return the largest number of tokens in a block of the engine; 0 if it reported none."""
        return max(place.mirror.engine_block_tokens for place in self.places)
