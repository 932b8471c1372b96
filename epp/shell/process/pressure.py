"""Decide what to give up when the process approaches its memory limit.

First the prefix indexes shrink step by step; a forgotten prefix makes an engine compute it again.
Then long bodies pass without being buffered and read, and are routed by load alone. Exceeding the
limit would fail every open request and lose all indexes. Each measure starts at one threshold and
ends at a lower one, so that it does not alternate. This module performs no I/O.
"""

from typing import Final

INDEX_SHRINKS_FROM: Final = 0.8
INDEX_GROWS_BELOW: Final = 0.7
BODIES_PASS_FROM: Final = 0.9
BODIES_READ_BELOW: Final = 0.85
INDEX_STEP: Final = 0.125
INDEX_SHARE_MIN: Final = 0.125
LONG_BODY_BYTES: Final = 64 * 1024
"""Size in bytes from which a request body passes unread under memory pressure; most chats are
shorter and use little memory.
"""


class MemoryPressure:
    """The state of memory pressure, with the measures that are in force. Call `look` periodically
    with the resident memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: Final = limit_bytes
        self.index_share = 1.0
        """Share of their normal memory that the prefix indexes may use, from `INDEX_SHARE_MIN` to
        1.
        """
        self.bodies_pass = False

    def __repr__(self) -> str:
        return f"<MemoryPressure [level {self.level}, indexes at {self.index_share:g}]>"

    @property
    def level(self) -> int:
        """Level of memory pressure: 0 for none, 1 if the indexes are reduced, 2 if long bodies pass
        unread as well.
        """
        return 2 if self.bodies_pass else int(self.index_share < 1.0)

    def look(self, resident_bytes: int) -> bool:
        """Update the measures against memory pressure for `resident_bytes`, the index share by at
        most one step. Return True if any of them changed.
        """
        before = self.index_share, self.bodies_pass
        used = resident_bytes / self.limit_bytes
        if used > INDEX_SHRINKS_FROM:
            self.index_share = max(INDEX_SHARE_MIN, self.index_share - INDEX_STEP)
        elif used < INDEX_GROWS_BELOW:
            self.index_share = min(1.0, self.index_share + INDEX_STEP)
        if used > BODIES_PASS_FROM:
            self.bodies_pass = True
        elif used < BODIES_READ_BELOW:
            self.bodies_pass = False
        return before != (self.index_share, self.bodies_pass)
