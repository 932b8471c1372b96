"""A limit of the memory that all streams together use for bodies that are not answered yet.

A limit of a single body does not limit many clients: 66 clients with 31 MB each held 2 GB. Each
stream therefore takes the bytes that it stores from one budget, and returns them when the gateway
has accepted the answer or the stream has ended. If the budget is used up, a new body is refused,
and stored bodies are not affected. An eighth of the budget is reserved for streams that store
little, so that a few large bodies cannot block many small ones.
"""

from typing import Final

PIECE_BYTES: Final = 96
"""Bytes of memory that a stored piece of a request body uses besides its content: an object and its
place in a list.
"""


SMALL_BYTES: Final = 262_144
"""Maximum number of bytes that one stream may store and still use the whole budget, its reserve
included. Most prompts are shorter.
"""
RESERVED_SHARE: Final = 8
"""Divisor of the budget that gives the part reserved for streams with at most `SMALL_BYTES`."""


class BodyBudget:
    """A budget for the bytes of request bodies that all streams together store."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget [{self.held_bytes} of {self.bytes_max} bytes held]>"

    def take(self, count_bytes: int, holding_bytes: int = 0) -> bool:
        """Count `count_bytes` more against the budget, for a stream that already stores
        `holding_bytes`.

        Return False, and count nothing, if that would exceed the budget, or its part without the
        reserve for a stream that would store more than `SMALL_BYTES`.
        """
        most = self.bytes_max
        if holding_bytes + count_bytes > SMALL_BYTES:
            most -= most // RESERVED_SHARE
        if self.held_bytes + count_bytes > most:
            return False
        self.held_bytes += count_bytes
        return True

    def give_back(self, count_bytes: int) -> None:
        """Subtract `count_bytes`, which `take` counted before, from the used part of the budget."""
        assert count_bytes <= self.held_bytes, f"{count_bytes} of {self.held_bytes} given back"
        self.held_bytes -= count_bytes
