"""What to give up as the process comes near its memory limit, and when to take it back. Pure.

First the prefix indexes shrink, step by step: a forgotten prefix costs an engine some computing.
Then long bodies pass without being held and read: they are routed by load alone. Being killed would
cost every request that is open, and all of the indexes. Each has a mark where it begins and a lower
one where it ends, so that it does not begin and end with each look.
"""

from typing import Final

INDEX_SHRINKS_FROM: Final = 0.8
INDEX_GROWS_BELOW: Final = 0.7
BODIES_PASS_FROM: Final = 0.9
BODIES_READ_BELOW: Final = 0.85
INDEX_STEP: Final = 0.125
INDEX_SHARE_MIN: Final = 0.125
LONG_BODY_BYTES: Final = 64 * 1024
"""From here on a body passes. Most chats are shorter, and cost little."""


class MemoryPressure:
    """`look` at what the process holds now and then; the rest says what to do about it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: Final = limit_bytes
        self.index_share = 1.0
        """Of what the indexes may take without pressure."""
        self.bodies_pass = False

    def __repr__(self) -> str:
        return f"<MemoryPressure [level {self.level}, indexes at {self.index_share:g}]>"

    @property
    def level(self) -> int:
        """0: none; 1: the indexes take less than they may; 2: long bodies pass too."""
        return 2 if self.bodies_pass else int(self.index_share < 1.0)

    def look(self, resident_bytes: int) -> bool:
        """The process holds `resident_bytes`; True: something changed."""
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
