"""A limit of the memory that all streams together use for bodies that are not answered yet.

A limit of a single body does not limit many clients: 66 clients with 31 MB each held 2 GB. Each
stream therefore takes what it stores from one budget. It returns it when the gateway has accepted
the answer or the stream has ended. If the budget is used up, a new body is refused, and stored
bodies are not affected. An eighth of the budget is reserved for streams that store little, so that
a few large bodies cannot block many small ones.
"""

from typing import Final

PIECE_BYTES: Final = 96
"""Memory that a stored piece of a body uses besides its bytes: an object and its place in a list.
"""


SMALL_BYTES: Final = 262_144
"""Size up to which a stream may use the whole budget; most prompts are shorter."""
RESERVED_SHARE: Final = 8
"""Divisor of the budget that is reserved for such streams."""


class BodyBudget:
    """A budget for the stored bytes of request bodies."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget [{self.held_bytes} of {self.bytes_max} bytes held]>"

    def take(self, count_bytes: int, holding_bytes: int = 0) -> bool:
        """Take `count_bytes` more for a stream that holds `holding_bytes` already.

        Return False, and take nothing, if there is no room.
        """
        most = self.bytes_max
        if holding_bytes + count_bytes > SMALL_BYTES:
            most -= most // RESERVED_SHARE
        if self.held_bytes + count_bytes > most:
            return False
        self.held_bytes += count_bytes
        return True

    def give_back(self, count_bytes: int) -> None:
        """Return `count_bytes` that were taken before."""
        assert count_bytes <= self.held_bytes, f"{count_bytes} of {self.held_bytes} given back"
        self.held_bytes -= count_bytes
